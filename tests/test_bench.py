"""Synthetic pairs have the true shapes; bench runs every method and adds up."""

import argparse
import json
import xml.etree.ElementTree as ET
from unittest import mock

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma4

from mlx_lm_mtp import MTPError, MTPStats, bench, mtp_generate_step, synthetic
from mlx_lm_mtp import measure as measuring
from mlx_lm_mtp.__main__ import main
from mlx_lm_mtp.bench import run, text
from mlx_lm_mtp.bench.dial import Dial, dialled_step
from mlx_lm_mtp.bench.methods import Cell, plain, with_drafts
from mlx_lm_mtp.bench.summary import (
    HEAD,
    against_best,
    cells_of,
    summarise,
    table,
)
from mlx_lm_mtp.bench.text import Generation, Text
from mlx_lm_mtp.demo import ASSISTANT
from mlx_lm_mtp.depth import Pinned, best_depth
from mlx_lm_mtp.doctor import examine
from mlx_lm_mtp.measure import Costs, measure, predicted, prefill, shares
from mlx_lm_mtp.pair import check_pair, model_file
from mlx_lm_mtp.prompts import KINDS, make_prompt, random_prompt
from mlx_lm_mtp.residual import make_rule
from mlx_lm_mtp.rounds import Draft
from mlx_lm_mtp.stats import merged
from mlx_lm_mtp.subject import add_pair_arguments, open_subject
from mlx_lm_mtp.synthetic import SIZES, configs, make_pair
from mlx_lm_mtp.target import Target

# Billions of parameters that Google states; without per-layer embeddings for E2B, E4B.
BILLIONS = {"e2b": 2.3, "e4b": 4.5, "12b": 12, "26b-a4b": 25.2, "31b": 30.7}
MILLIONS = {"e2b": 78, "e4b": 78.5, "12b": 423, "26b-a4b": 420, "31b": 470}
SMALL = ("--synthetic", "e2b", "--bits", "16", "--shrink", "64", "--max-tokens", "6")


def size_of(model):
    parameters = tree_flatten(model.parameters())
    left_out = ("embed_tokens_per_layer", "token_ordering")
    return sum(v.size for k, v in parameters if not any(n in k for n in left_out))


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_those_that_are_published(size):
    text, config = configs(size)
    args = {"text_config": text, "vocab_size": text["vocab_size"]}
    target = gemma4.Model(gemma4.ModelArgs.from_dict(args))
    ours = model_file()
    drafter = ours.Model(ours.ModelArgs.from_dict(config))
    assert size_of(target) / 1e9 == pytest.approx(BILLIONS[size], rel=0.04)
    assert size_of(drafter) / 1e6 == pytest.approx(MILLIONS[size], rel=0.01)
    check_pair(drafter, Target(target))


@pytest.mark.parametrize("size", SIZES)
def test_a_quantised_pair_generates(size):
    target, drafter = make_pair(size, bits=4, shrink=64)
    types = {value.dtype for _, value in tree_flatten(target.parameters())}
    assert types == {mx.uint32, mx.bfloat16}
    logits = target(mx.arange(9)[None])
    assert logits.dtype == mx.bfloat16 and mx.isfinite(logits).all()
    assert 0.3 < logits.std().item() < 3
    steps = mtp_generate_step(mx.arange(9), target, drafter, max_tokens=5)
    assert len(list(steps)) == 5


def test_weights_are_reproducible_and_spread():
    one, two, other = (make_pair("e4b", 8, shrink=64, seed=s)[0] for s in (1, 1, 2))
    ids = mx.arange(9)[None]
    assert mx.array_equal(one(ids), two(ids))
    assert not mx.array_equal(one(ids), other(ids))
    words = one.language_model.model.embed_tokens.weight
    ones = sum(((words >> bit) & 1).astype(mx.float32).mean() for bit in range(32))
    assert ones.item() == pytest.approx(16, abs=0.1)


def test_building_holds_no_weight_twice():
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pair = make_pair("26b-a4b", bits=4, drafter_bits=4, shrink=8)
    built = mx.get_active_memory() - before
    largest = max(v.nbytes for m in pair for _, v in tree_flatten(m.parameters()))
    assert mx.get_peak_memory() - before < built + 4 * largest


@pytest.mark.parametrize("bits", [4, 16])
def test_large_tables_are_drawn_by_parts(bits, monkeypatch):
    monkeypatch.setattr(synthetic, "PART", 1000)
    target, _ = make_pair("e2b", bits, shrink=64)
    table = target.language_model.model.embed_tokens.weight.astype(mx.float32)
    assert len({tuple(row) for row in table[:, :6].tolist()}) > 0.99 * len(table)


def test_no_such_size_or_bits():
    with pytest.raises(MTPError, match="'7b'"):
        make_pair("7b")
    with pytest.raises(MTPError, match="--bits is 5"):
        make_pair("e2b", bits=5)


def dial(pair, acceptance, drafts, tokens=400, stats=None):
    """The places of a text that were drafted, and those where a draft fell."""
    stats = stats or MTPStats()
    read = prefill(pair[0], mx.arange(8))
    mx.random.seed(0)
    steps = dialled_step(
        read.last,
        *pair,
        acceptance=acceptance,
        seed=0,
        depth=Pinned(drafts),
        max_tokens=tokens,
        sampler=None,
        prompt_cache=read.copies(),
        stats=stats,
    )
    flags = [from_draft for _, _, from_draft in steps]
    assert len(flags) == tokens
    stood, fell, run = set(), set(), 0
    for place, from_draft in enumerate(flags):
        if from_draft:
            stood.add(place)
        elif 0 < place < tokens - 9 and run < drafts:
            fell.add(place)
        run = run + 1 if from_draft else 0
    return stood, fell


@pytest.fixture(scope="module")
def small():
    return make_pair("e2b", 16, shrink=64)


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_the_dial_at_its_ends(small, acceptance):
    stats = MTPStats()
    dial(small, acceptance, 3, 41, stats)
    assert stats.tokens_per_forward == (4 if acceptance else 1)
    assert set(stats.acceptance) == {acceptance}


def test_the_dial_keeps_its_share_at_every_position(small):
    stats = MTPStats()
    dial(small, 0.7, 4, 400, stats)
    for share, seen in zip(
        shares(stats), [stats.rounds, *stats.accepted], strict=False
    ):
        assert abs(share - 0.7) < 5 * (0.21 / seen) ** 0.5


def test_the_same_places_are_hard_for_every_number_of_drafts(small):
    texts = {num: dial(small, 0.7, num, 200) for num in (1, 3, 8)}
    for stood, fell in texts.values():
        assert stood and fell
        assert not any(fell & others for others, _ in texts.values())


def test_rows_of_a_batch_are_dealt_different_cards():
    rule = Dial(make_rule(None, None, 5), 0.5)
    draft = Draft(mx.zeros((4, 8), mx.uint32))
    seen = [rule.judge(draft, mx.zeros((4, 9, 5))).verdict.accepted for _ in range(20)]
    assert len({tuple(row) for row in mx.stack(seen, axis=1).tolist()}) == 4


@given(st.lists(st.integers(1, 9), min_size=1), st.integers(1, 12))
def test_whole_rounds_are_timed_but_those_that_waited(sizes, size):
    """A round's time is the one that its own tokens are divided by."""
    clock, waited, begin = [0.0], set(), [True]

    def steps():
        for i, count in enumerate(sizes):
            waited.update([i] if begin[0] else [])
            begin[0] = False
            clock[0] += 2.0**i
            yield from ((i, None, j < count - 1) for j in range(count))

    written = Text(Generation(Cell("code", 0, 0.0), plain(), 0), steps())
    with mock.patch.object(text.time, "perf_counter", lambda: clock[0]):
        while not written.done:
            begin[0] = True
            written.go_on(size, ())
    timed = [i for i in range(len(sizes)) if i not in waited]
    assert written.out.seconds == sum(2.0**i for i in timed)
    assert written.out.tokens == sum(sizes[i] for i in timed)
    assert written.out.rounds == len(timed)


def test_a_small_memory_has_methods_take_turns_in_groups(capsys, monkeypatch):
    """Each group has a plain text of its own, and everything is measured."""
    monkeypatch.setattr(run, "room", lambda: 0)
    less = ("--contexts", "0", "--temps", "0", "--num-draft-tokens", "1", "2", "3")
    output = ("--runs", "2", "--json", "--time-limit", "20")
    assert main(["bench", *SMALL, *less, *output]) == 0
    found = lines(capsys)
    names = [s["method"] for s in found if s["event"] == "generation"]
    assert names.count("plain") == 6 and names.count("K = 3") == 2
    summaries = {s["method"]: s for s in found if s["event"] == "summary"}
    assert len(summaries) == 4 and all(s["ratio"] > 0 for s in summaries.values())


def test_every_run_shuffles_the_deck_again(capsys, monkeypatch):
    seeds, honest = set(), run.dialled_step

    def seen(*args, seed, **options):
        seeds.add(seed)
        return honest(*args, seed=seed, **options)

    monkeypatch.setattr(run, "dialled_step", seen)
    less = ("--contexts", "0", "--temps", "0", "--num-draft-tokens", "1")
    output = ("--acceptance", "0.5", "--runs", "3", "--json", "--time-limit", "20")
    assert main(["bench", *SMALL, *less, *output]) == 0
    assert seeds == {0, 1, 2}


def test_the_best_number_is_chosen_by_the_other_runs():
    one, two, free = with_drafts(1), with_drafts(2), with_drafts(None)
    ratios = [{one: 1.0, two: 2.0, free: 2.0}] * 3 + [{one: 9.0, two: 1.0, free: 3.0}]
    # The fourth run alone would choose one draft.
    assert against_best(ratios) == {one: 0.5, two: 1.0, free: 1.0}
    assert against_best(ratios[3:])[free] == pytest.approx(1 / 3)
    assert against_best([{free: 1.0}]) == {}


def test_a_copy_of_prefilled_caches_decodes_as_the_whole_prompt(small):
    prompt = random_prompt(4096, 50)
    read = prefill(small[0], prompt)
    whole = [token for token, _ in generate_step(prompt, small[0], max_tokens=8)]
    for _ in range(2):
        steps = generate_step(
            read.last, small[0], max_tokens=8, prompt_cache=read.copies()
        )
        assert [token for token, _ in steps] == whole


def test_every_call_is_timed(small):
    costs = measure(*small, mx.arange(40), seconds=0.1)
    assert list(costs.verify) == list(range(1, 10))
    assert list(costs.draft) == list(range(1, 9))
    times = [costs.plain, costs.host, *costs.verify.values(), *costs.draft.values()]
    assert min(times) > 0 and costs.context == 40
    assert costs.round(0) == costs.plain
    assert costs.round(3) == costs.verify[4] + costs.draft[3]


def test_a_slow_machine_times_one_call_of_each(small, monkeypatch):
    launched = []
    honest = measuring._launch
    monkeypatch.setattr(
        measuring, "_launch", lambda calls: launched.append(0) or honest(calls)
    )
    costs = measure(*small, mx.arange(40), seconds=0.0)
    assert len(costs.verify) == 9 and costs.verify[9] > 0
    # Two ends make a time, and one call is always ahead.
    assert len(launched) <= 3 * 18 + measuring.WARM + measuring.LEAST


times = st.floats(1e-4, 10)
some_costs = st.builds(
    Costs,
    context=st.integers(1, 99),
    plain=times,
    verify=st.fixed_dictionaries(dict.fromkeys(range(1, 10), times)),
    draft=st.fixed_dictionaries(dict.fromkeys(range(1, 9), times)),
    host=times,
)


@given(some_costs, st.lists(st.floats(0, 1), max_size=8))
def test_the_predicted_best_depth_is_the_best(costs, accepted):
    speeds = predicted(costs, accepted)
    assert list(speeds) == list(range(len(accepted) + 1))
    assert speeds[0] == pytest.approx(1 / costs.plain)
    for num, speed in speeds.items():
        tokens = 1 + sum(
            mx.prod(mx.array(accepted[:i])).item() for i in range(1, num + 1)
        )
        assert speed == pytest.approx(tokens / costs.round(num), rel=1e-5)
    assert speeds[best_depth(speeds)] == max(speeds.values())


rounds = st.lists(
    st.integers(0, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))
)


def counted(pairs):
    stats = MTPStats()
    for drafted, accepted in pairs:
        stats.add(drafted, accepted, accepted + 1)
    return stats


@given(rounds, rounds)
def test_merged_counts_are_those_of_all_rounds(one, other):
    assert merged([counted(one), counted(other)]) == counted(one + other)


@given(st.lists(st.integers(0, 4), min_size=1))
def test_shares_multiply_to_the_acceptance(accepted):
    stats = counted([(4, a) for a in accepted])
    for i, reached in enumerate(stats.acceptance):
        assert mx.prod(mx.array(shares(stats)[: i + 1])).item() == pytest.approx(
            reached
        )


def test_ratios_are_taken_within_a_run():
    cell, costs = Cell("code", 0, 0.0), Costs(9, 0.1, {2: 0.11}, {1: 0.01}, 0.01)
    speeds = {plain(): [10, 20, 40], with_drafts(1): [11, 40, 60]}
    found = [
        Generation(cell, method, run, tokens=2, rounds=1, seconds=2 / rate)
        for method, rates in speeds.items()
        for run, rate in enumerate(rates)
    ]
    for generation in found[3:]:
        generation.stats.add(1, 1, 2)
    first, second = summarise(cell, found, costs, {(cell, "plain"): 0.5})
    assert (first.rate, first.ratio, first.first) == (20, 1, 0.5)
    ratios = second.low, second.ratio, second.high
    assert ratios == pytest.approx((1.1, 1.5, 2.0))
    assert second.predicted == pytest.approx(2 / 0.12 * 0.1)
    assert second.bare == pytest.approx(2 / 40 / 0.12)


def test_a_text_of_one_token_has_no_speed():
    cell, costs = Cell("code", 0, 0.0), Costs(9, 0.1, {2: 0.11}, {1: 0.01}, 0.01)
    found = [Generation(cell, method, 0) for method in (plain(), with_drafts(1))]
    rows = summarise(cell, found, costs, {})
    assert [row.rate for row in rows] == [None, None]
    text = table([cells_of(row) for row in rows], markdown=True)
    assert {line.count("|") for line in text.splitlines()} == {len(HEAD) + 1}


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_command_on_a_synthetic_pair(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "SETTLE", 40)
    picture = tmp_path / "speed.svg"
    options = ("--contexts", "0", "70", "--temps", "1", "--acceptance", "0.5", "0.9")
    numbers = ("--num-draft-tokens", "0", "2", "adaptive", "--runs", "2")
    output = ("--json", "--svg", str(picture), "--time-limit", "60")
    assert main(["bench", *SMALL, *options, *numbers, *output]) == 0
    found = lines(capsys)
    events = [line["event"] for line in found]
    assert events.count("costs") == 2
    assert events.count("generation") == 4 * 4 * 2
    assert events.count("summary") == 4 * 4
    assert found[0]["pair"] == "synthetic E2B, bfloat16"
    summaries = [line for line in found if line["event"] == "summary"]
    assert {s["method"] for s in summaries} == {"plain", "K = 0", "K = 2", "adaptive"}
    assert all(s["ratio"] > 0 and s["peak"] > 0 for s in summaries)
    assert all(s["first"] > 0 for s in summaries if s["method"] in ("plain", "K = 0"))
    drawn = ET.fromstring(picture.read_text())
    assert len(drawn.findall(".//{*}circle")) == 4 * 2


def test_the_command_on_a_trained_pair(pair_e, capsys):
    options = ("--model", pair_e.target_path, "--mtp-assistant", pair_e.assistant_path)
    less = (
        "--kinds",
        "code",
        "--contexts",
        "0",
        "--temps",
        "0",
        "--runs",
        "1",
        "-m",
        "20",
    )
    numbers = ("--num-draft-tokens", "3", "--draft-model", pair_e.target_path)
    output = ("--markdown", "--time-limit", "40")
    assert main(["bench", *options, *less, *numbers, *output]) == 0
    out = capsys.readouterr().out
    assert "### code, short prompt, temperature 0" in out
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")]
    names = [row[0].strip("| ") for row in rows]
    assert names == ["", "---", "plain", "draft model", "K = 3"]
    assert all(float(row[2]) > 0 for row in rows[2:])


def test_an_interrupt_shows_what_there_is(capsys, monkeypatch):
    honest = Text.go_on

    def interrupted(self, size, ends):
        if self.out.run == 1:
            raise KeyboardInterrupt
        return honest(self, size, ends)

    monkeypatch.setattr(Text, "go_on", interrupted)
    less = ("--contexts", "0", "--temps", "0", "--num-draft-tokens", "1", "2")
    assert main(["bench", *SMALL, *less, "--time-limit", "20"]) == 130
    out = capsys.readouterr().out
    assert "random, short prompt, temperature 0:" in out
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["plain", "K", "K"]


def test_a_short_time_measures_less(capsys):
    less = ("--contexts", "0", "--num-draft-tokens", "1", "--time-limit", "1")
    assert main(["bench", *SMALL, *less, "--runs", "1000", "--json"]) == 0
    done = [line for line in lines(capsys) if line["event"] == "generation"]
    assert 2 <= len(done) < 2000


BAD = {
    "a pair and a synthetic one": (
        ["--model", "x", "--synthetic", "e2b"],
        "--synthetic",
    ),
    "half a pair": (["--model", "x"], "--mtp-assistant"),
    "the other half": (["--mtp-assistant", "x"], "--model"),
    "a dial on a real pair": (["--acceptance", "0.5"], "--acceptance"),
    "no runs": (["--runs", "0"], "--runs is 0"),
    "one token": (["--max-tokens", "1"], "--max-tokens is 1"),
    "no time": (["--time-limit", "0"], "--time-limit is 0"),
    "experts on a CPU": (
        ["--synthetic", "26b-a4b", "--bits", "16", "--shrink", "64"],
        "--bits 4 or 8",
    ),
    "an empty name": (["--model", "", "--mtp-assistant", ""], "is empty"),
    "cold": (["--temps", "-1"], "--temps has -1"),
    "no temperature": (["--temps", "nan"], "--temps has nan"),
    "no end": (["--time-limit", "nan"], "--time-limit is nan"),
    "less than no context": (["--contexts", "-5"], "--contexts is -5"),
    "a folder for the picture": (["--svg", "/tmp"], "/tmp is a folder"),
    "no folder for the picture": (["--svg", "/no/x.svg"], "no folder /no"),
    "a text for random weights": ([*SMALL, "--kinds", "code"], "'code'"),
    "no such draft model": (["--draft-model", "/no/x"], "cannot load the model /no/x"),
    "a drafter of ours": (["--draft-model", str(ASSISTANT)], "give it as --mtp-"),
    "no draft model": (["--draft-model", ""], "--draft-model is empty"),
    "no such kind": (["--kinds", "poem"], "'poem'"),
    "no such target": (["--model", "/no/x", "--mtp-assistant", "/no/y"], "/no/x"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_one_line(case, capsys):
    options, words = BAD[case]
    assert main(["bench", *options]) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and words in error


@pytest.mark.parametrize(
    "options", [["--num-draft-tokens", "9"], ["--acceptance", "2"]]
)
def test_numbers_out_of_range_are_refused_by_the_parser(options, capsys):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(options)
    assert options[1] in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_have_the_length_that_is_asked_for(pair_e, kind):
    request = make_prompt(pair_e.tokenizer, kind, 0)
    for context in (request.size + 1, 1000, 5000):
        prompt = make_prompt(pair_e.tokenizer, kind, context)
        assert prompt.size == pytest.approx(context, rel=0.05, abs=4)
        assert prompt.tolist()[-10:] == request.tolist()[-10:]
    assert make_prompt(pair_e.tokenizer, kind, 3).tolist() == request.tolist()


@pytest.mark.parametrize("synthetic", [True, False])
def test_the_drafter_is_quantised_on_request(synthetic, pair_e):
    options = ["--model", pair_e.target_path, "--mtp-assistant", pair_e.assistant_path]
    if synthetic:
        options = ["--synthetic", "31b", "--shrink", "64"]
    parser = argparse.ArgumentParser()
    add_pair_arguments(parser)
    subject = open_subject(parser.parse_args([*options, "--mtp-quantize", "8"]))
    assert examine.weights(subject.drafter)["types"][0] == "8-bit"
    prompt = subject.prompt(subject.kinds[0], 0)
    steps = mtp_generate_step(prompt, subject.model, subject.drafter, max_tokens=4)
    assert len(list(steps)) == 4

"""Our batch generator tells what mlx-lm's tells, and batch_generate gives the same."""

import subprocess
from dataclasses import dataclass
from itertools import chain

import mlx.core as mx
import numpy as np
import pytest
from conftest import PAIRS
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import batch_generate
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors, make_sampler
from serving import SCRIPTS
from tiny import plain

import mlx_lm_mtp
from mlx_lm_mtp import MTPError, MTPStats
from mlx_lm_mtp.batch import MTPBatchGenerator

TEXT = np.load(PAIRS / "prompts.npy").reshape(-1).tolist()


@dataclass(frozen=True)
class Asked:
    """One sequence to decode."""

    segments: tuple
    max_tokens: int
    stops: tuple = ()
    penalty: float = 0.0

    @property
    def prompt(self):
        return [*chain(*self.segments)]

    def processors(self):
        return make_logits_processors(repetition_penalty=self.penalty or None)

    def plain(self, model):
        return plain(
            model, self.prompt, self.max_tokens, logits_processors=self.processors()
        )


SEGMENTS = st.builds(
    lambda at, sizes: tuple(
        tuple(TEXT[at + sum(sizes[:i]) : at + sum(sizes[: i + 1])])
        for i in range(len(sizes))
    ),
    st.integers(0, len(TEXT) - 300),
    st.lists(st.integers(1, 60), min_size=1, max_size=3),
)
ASKED = st.builds(
    Asked,
    SEGMENTS,
    st.integers(1, 12),
    st.lists(st.sampled_from([(t,) for t in set(TEXT)]), max_size=40).map(tuple),
    st.sampled_from([0.0, 1.3]),
)


def insert(generator, asked, cache=None, held=(), **more):
    [uid] = generator.insert_segments(
        segments=[[list(s) for s in asked.segments]],
        max_tokens=[asked.max_tokens],
        caches=[cache],
        all_tokens=[list(held)],
        samplers=[greedy_sampler],
        logits_processors=[asked.processors()],
        stop_sequences=[StopSequences(asked.stops)],
        **more,
    )
    return uid


def run(generator, uids, model):
    """Everything that a generator tells of its sequences, in order, by sequence."""
    told = {uid: [] for uid in uids}
    going = set(uids)
    while going:
        progress, responses = generator.next()
        for r in responses:
            told[r.uid].append((r.token, r.finish_reason))
            if r.finish_reason:
                going.remove(r.uid)
                told[r.uid].append((list(r.all_tokens), continued(r, model)))
        for p in progress:
            told[p.uid].append((p.progress, p.end_of_segment, p.end_of_prompt))
            if p.end_of_segment and not p.end_of_prompt:
                told[p.uid].append(list(generator.extract_cache([p.uid])[p.uid][1]))
    return told


def continued(response, model):
    """What plain decoding makes of a cache."""
    return plain(model, [7, 11], 4, prompt_cache=response.prompt_cache)


@settings(max_examples=8)
@given(st.lists(ASKED, min_size=1, max_size=3), st.integers(0, 4), st.integers(20, 100))
def test_the_same_responses_progress_and_caches(pair_e, sequences, num, step):
    """Tokens, finish reasons, and prompt caches after."""
    options = {"prefill_step_size": step, "prefill_batch_size": 2}
    theirs = BatchGenerator(pair_e.model, **options)
    ours = MTPBatchGenerator(
        pair_e.model, pair_e.drafter, num_draft_tokens=num, **options
    )
    theirs, ours = (
        run(generator, [insert(generator, asked) for asked in sequences], pair_e.model)
        for generator in (theirs, ours)
    )
    assert ours == theirs


@settings(max_examples=5)
@given(ASKED, st.integers(1, 100))
def test_a_warm_turn_equals_a_cold_one(pair_e, asked, held):
    """Also what processors see: they are shown what the cache holds."""
    prompt = asked.prompt
    held = min(held, len(prompt))
    cache = make_prompt_cache(pair_e.model)
    plain(pair_e.model, prompt[:held], 0, prompt_cache=cache)
    rest = Asked((prompt[held:],), asked.max_tokens, (), asked.penalty)
    generator = MTPBatchGenerator(pair_e.model, pair_e.drafter)
    uid = insert(generator, rest, cache, prompt[:held])
    *_, (tokens, _) = run(generator, [uid], pair_e.model)[uid]
    assert tokens == prompt + asked.plain(pair_e.model)


def test_mistakes_are_told_and_queue_nothing(pair_e):
    generator = MTPBatchGenerator(pair_e.model, pair_e.drafter)
    for asked, words in [
        (Asked((), 5), "empty prompt"),
        (Asked(((1, 2),), 0), "max_tokens must be"),
    ]:
        with pytest.raises(ValueError, match=words):
            insert(generator, asked)
    with pytest.raises(MTPError, match="num_draft_tokens is -1"):
        insert(generator, Asked(((1, 2),), 5), num_draft_tokens=[-1])
    assert generator.next() == ([], [])


def test_batch_generate_takes_a_draft_model(pair, prompts):
    mlx_lm_mtp.enable()
    asked = [prompts[i][: 5 + 20 * i].tolist() for i in range(4)]
    options = {"max_tokens": [30, 5, 20, 1], "return_token_ids": True}
    wanted = batch_generate(pair.model, pair.tokenizer, asked, **options)
    stats = MTPStats()
    found = batch_generate(
        pair.model,
        pair.tokenizer,
        asked,
        draft_model=pair.drafter,
        num_draft_tokens=3,
        stats=stats,
        return_prompt_caches=True,
        **options,
    )
    assert (found.texts, found.token_ids) == (wanted.texts, wanted.token_ids)
    assert stats.tokens_per_forward > 1.3 and len(found.caches) == 4
    assert found.stats.generation_tokens == wanted.stats.generation_tokens


def test_batch_generate_tells_what_the_drafts_did(pair_e, capsys, caplog):
    mlx_lm_mtp.enable()
    model, tokenizer = pair_e.model, pair_e.tokenizer
    options = {"draft_model": pair_e.drafter, "verbose": True, "max_tokens": 20}
    batch_generate(model, tokenizer, [[1, 2]], num_draft_tokens=2, **options)
    assert "MTP: " in capsys.readouterr().out and not caplog.text
    batch_generate(model, tokenizer, [[1, 2]], **{**options, "max_tokens": 1})
    assert "was not used: the text ended before" in caplog.text


def test_batch_generate_raises_what_a_processor_raises(pair_e):
    def broken(history, logits):
        raise ZeroDivisionError("mine")

    mlx_lm_mtp.enable()
    options = {"logits_processors": [broken], "draft_model": pair_e.drafter}
    with pytest.raises(ZeroDivisionError, match="mine"):
        batch_generate(pair_e.model, pair_e.tokenizer, [[1, 2]], **options)


@pytest.mark.slow
def test_sampled_rows_follow_the_law_of_the_target(pair_e):
    """First and second tokens of many rows of one prompt, against plain sampling."""
    rows, prompt, sampler = 400, TEXT[:40], make_sampler(1.0)
    mx.random.seed(1)
    ours = MTPBatchGenerator(
        pair_e.model,
        pair_e.drafter,
        num_draft_tokens=2,
        sampler=sampler,
        max_tokens=2,
        prefill_batch_size=100,
        completion_batch_size=100,
    )
    theirs = BatchGenerator(
        pair_e.model,
        sampler=sampler,
        max_tokens=2,
        prefill_batch_size=100,
        completion_batch_size=100,
    )
    counts = [{}, {}]
    for generator, count in zip((ours, theirs), counts, strict=True):
        texts = dict.fromkeys(generator.insert([prompt] * rows), ())
        while responses := generator.next_generated():
            for r in responses:
                texts[r.uid] += (r.token,)
        for text in texts.values():
            count[text] = count.get(text, 0) + 1
    common = [t for t in counts[1] if counts[1][t] + counts[0].get(t, 0) >= 16]
    assert common
    for text in common:
        a, b = counts[0].get(text, 0), counts[1][text]
        assert abs(a - b) < 5 * (a + b) ** 0.5, (text, a, b)


def test_the_benchmark_decodes_several_sequences():
    folder = PAIRS / "e"
    found = subprocess.run(
        [
            *(SCRIPTS / "mlx_lm.benchmark", "--model", folder / "target"),
            *("--mtp-assistant", folder / "assistant"),
            *("-p", "20", "-g", "20", "-n", "1", "-b", "3"),
        ],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    *_, averages, mtp = found.stdout.splitlines()
    assert averages.startswith("Averages: prompt_tps=") and mtp.startswith("MTP: ")

"""Any row of any batch is that request alone, whoever joins and leaves."""

from dataclasses import dataclass
from functools import cache, partial

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import StopSequences, generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from test_generate import assert_cold
from tiny import make_target, plain

from mlx_lm_mtp import MTPError, MTPStats, mtp_generate_step
from mlx_lm_mtp.batch import MTPBatchGenerator

TOKENS = 24


class Counting:
    """A processor that keeps state: it bans what it counts to."""

    def __init__(self):
        self.calls = 0

    def __call__(self, history, logits):
        self.calls += 1
        return mx.where(mx.arange(logits.shape[-1]) == self.calls, -mx.inf, logits)


def opaque(logprobs):
    return mx.random.categorical(logprobs * 2)


# How a request wants its tokens; each gives (sampler, logits processors).
WISHES = {
    "greedy": lambda: (None, None),
    "penalty": lambda: (None, make_logits_processors(repetition_penalty=1.3)),
    "coupled": lambda: (make_sampler(0.8, top_p=0.95), None),
    "coin": lambda: (make_sampler(0.7, xtc_probability=0.5, xtc_threshold=0.1), None),
    "stateful": lambda: (make_sampler(0.5), [Counting()]),
    "opaque": lambda: (opaque, None),
}


@dataclass(frozen=True)
class Request:
    text: int  # which prompt
    size: int
    wish: str
    tokens: int  # max_tokens
    drafts: int | None
    joins: int  # after so many rounds
    leaves: int  # so many rounds later, if it is still there


requests = st.builds(
    Request,
    text=st.integers(0, 11),
    size=st.sampled_from([1, 2, 20, 63, 64, 65, 90]),
    wish=st.sampled_from([*WISHES, "greedy", "greedy"]),
    tokens=st.integers(1, TOKENS),
    drafts=st.sampled_from([None, None, 0, 1]),
    joins=st.integers(0, 12),
    leaves=st.sampled_from([3, 8, 99, 99]),
)


@pytest.fixture(scope="module")
def alone(pair, prompts):
    """What mlx-lm's plain decoding makes of a request."""

    @cache
    def tokens(text, size, wish):
        sampler, processors = WISHES[wish]()
        mx.random.seed(text)
        steps = generate_step(
            prompts[text][:size],
            pair.model,
            max_tokens=TOKENS,
            sampler=sampler,
            logits_processors=processors,
        )
        return [token for token, _ in steps]

    return tokens


class Show:
    """Drives a generator through joins and leaves, and collects what it says."""

    def __init__(self, pair, prompts, **options):
        self.prompts = prompts
        self.generator = MTPBatchGenerator(
            pair.model, pair.drafter, verification="coupled", **options
        )
        self.uids: dict[Request, int] = {}
        self.found: dict[int, list[int]] = {}
        self.stats: dict[int, MTPStats] = {}
        self.ended: dict[int, object] = {}

    def insert(self, request):
        sampler, processors = WISHES[request.wish]()
        stats = MTPStats()
        [uid] = self.generator.insert(
            [self.prompts[request.text][: request.size].tolist()],
            [request.tokens],
            samplers=[sampler],
            logits_processors=[processors],
            num_draft_tokens=[request.drafts],
            seeds=[request.text],
            stats=[stats],
        )
        self.uids[request], self.found[uid], self.stats[uid] = uid, [], stats
        return uid

    def step(self):
        told, responses = self.generator.next()
        for response in responses:
            assert response.uid not in self.ended, "a token after the last"
            self.found[response.uid].append(response.token)
            assert response.logprobs.ndim == 1
            if response.finish_reason:
                self.ended[response.uid] = response
        return bool(told or responses)

    def poison(self, uid):
        """Turn a row's K/V into NaN."""
        decoding = self.generator._generation_batch
        if uid in decoding.uids:
            place = decoding.uids.index(uid)
            buffers = decoding.live.buffers
            for entries in buffers.keys + buffers.values:
                entries[place] = mx.nan

    def remove(self, uid):
        self.poison(uid)
        self.generator.remove([uid])


def play(show, script):
    """Requests come and go as they say, until all is said."""
    waiting = sorted(set(script), key=lambda request: request.joins)
    leaving = {}
    rounds = 0
    while True:
        while waiting and waiting[0].joins <= rounds:
            request = waiting.pop(0)
            leaving[show.insert(request)] = rounds + request.leaves
        for uid in [uid for uid, when in leaving.items() if when == rounds]:
            show.remove(uid)
        if not show.step() and not waiting:
            return
        rounds += 1


@settings(max_examples=10)
@given(
    script=st.lists(requests, min_size=1, max_size=7),
    drafts=st.integers(0, 5),
    rows=st.sampled_from([2, 4, 8]),
)
def test_any_row_of_any_batch_is_that_request_alone(
    pair, prompts, alone, script, drafts, rows
):
    show = Show(
        pair,
        prompts,
        num_draft_tokens=drafts,
        completion_batch_size=rows,
        prefill_batch_size=2,
        prefill_step_size=32,
    )
    play(show, script)
    for request, uid in show.uids.items():
        wanted = alone(request.text, request.size, request.wish)[: request.tokens]
        found = show.found[uid]
        if request.leaves == 99:
            assert found == wanted, request
        assert found == wanted[: len(found)], request
        if uid in show.ended:
            response = show.ended[uid]
            prompt = prompts[request.text][: request.size].tolist()
            assert response.finish_reason == "length"
            assert response.all_tokens == prompt + found
            assert_cold(pair.model, response.prompt_cache, response.all_tokens)
    assert not len(show.generator._generation_batch)


@settings(max_examples=5)
@given(
    wishes=st.lists(st.sampled_from([*WISHES]), min_size=2, max_size=4),
    rounds=st.lists(st.integers(1, 5), min_size=2, max_size=3),
)
def test_caches_taken_at_any_moment_continue_cold(pair, prompts, wishes, rounds):
    show = Show(pair, prompts, prefill_step_size=30)
    asked = [
        Request(i, 40 + 11 * i, wish, 60, None, 0, 99) for i, wish in enumerate(wishes)
    ]
    for request in asked:
        show.insert(request)
    for count in rounds:
        for _ in range(count):
            show.step()
        taken = show.generator.extract_cache(list(show.uids.values()))
        for request, uid in show.uids.items():
            if uid in show.ended:
                continue
            caches, tokens = taken[uid]
            prompt = prompts[request.text][: request.size].tolist()
            if show.found[uid]:
                assert tokens == prompt + show.found[uid]
            else:
                assert tokens == prompt[: len(tokens)]
            if tokens:
                assert_cold(pair.model, caches, tokens)


def test_a_cache_goes_on_in_another_batch(pair, prompts, alone):
    show = Show(pair, prompts)
    first = Request(3, 63, "greedy", 10, None, 0, 99)
    play(show, [first, Request(4, 20, "greedy", 24, None, 0, 99)])
    response = show.ended[show.uids[first]]
    options = {"max_tokens": TOKENS - 11}
    again = MTPBatchGenerator(pair.model, pair.drafter, **options)
    wanted = alone(3, 63, "greedy")
    again.insert([wanted[10:11]], caches=[response.prompt_cache])
    found = []
    while responses := again.next_generated():
        found += [r.token for r in responses]
    assert found == wanted[11:]


def test_rows_keep_what_their_drafts_earn(pair, prompts):
    """Rounds in a batch accept what rounds alone accept."""
    sizes = [1, 20, 63, 90, 30, 64, 10, 75]
    show = Show(pair, prompts, num_draft_tokens=3, prefill_batch_size=8)
    asked = [Request(i, n, "greedy", 50, None, 0, 99) for i, n in enumerate(sizes)]
    play(show, asked)
    for request in asked:
        stats = MTPStats()
        prompt = prompts[request.text][: request.size]
        options = {"num_draft_tokens": 3, "max_tokens": 50, "stats": stats}
        found = [
            t
            for t, *_ in mtp_generate_step(prompt, pair.model, pair.drafter, **options)
        ]
        uid = show.uids[request]
        assert show.found[uid] == found
        # Only the last round, which the end cuts short, may draft another number.
        assert abs(show.stats[uid].rounds - stats.rounds) <= 1
        assert show.stats[uid].tokens == stats.tokens == 49


def test_a_pinned_number_is_what_each_row_drafts(pair, prompts):
    """Beside rows that draft more, fewer, or as many as pay."""
    numbers, stats = [0, 2, 5, None], [MTPStats() for _ in range(4)]
    generator = MTPBatchGenerator(pair.model, pair.drafter, prefill_batch_size=4)
    asked = [prompts[i][:40].tolist() for i in range(4)]
    generator.insert(asked, [40] * 4, num_draft_tokens=numbers, stats=stats)
    while generator.next_generated():
        pass
    for pinned, found in zip(numbers[:3], stats, strict=False):
        assert len(found.drafted) == pinned
        # Only the end of a text is drafted less.
        assert found.drafted[:1] == [found.rounds][:pinned]
        assert all(count >= found.rounds - pinned for count in found.drafted)
    generator.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"seeds": [1]},
        {"stats": [MTPStats()]},
        {"num_draft_tokens": [1, 2, 3]},
        {"num_draft_tokens": [1, -1]},
        {"caches": [None] * 3},
        {"max_tokens": [1]},
        {"seeds": [1, -1]},
        {"seeds": [1, "one"]},
    ],
    ids=str,
)
def test_what_is_refused_leaves_no_trace(pair, prompts, wrong):
    warm = make_sampler(1.0)
    generator = MTPBatchGenerator(pair.model, pair.drafter, sampler=warm)
    prompt = prompts[0][:9].tolist()
    with pytest.raises((ValueError, TypeError)):
        generator.insert([prompt, prompt], **wrong)
    assert generator.next() == ([], [])
    [uid] = generator.insert([prompt], [3])
    found = []
    while responses := generator.next_generated():
        found += [r.uid for r in responses]
    assert found == [uid] * 3


def test_stop_sequences_end_a_row_within_a_round(pair, prompts, alone):
    wanted = alone(5, 64, "greedy")
    stop = max(wanted.index(token) for token in wanted)  # the newest new token
    generator = MTPBatchGenerator(pair.model, pair.drafter, num_draft_tokens=5)
    prompt = prompts[5][:64].tolist()
    generator.insert(
        [prompt, prompt],
        stop_sequences=[StopSequences([[wanted[stop]]]), StopSequences()],
        max_tokens=[99, TOKENS],
    )
    found = {0: [], 1: []}
    while responses := generator.next_generated():
        for r in responses:
            found[r.uid].append(r.token)
            if r.uid == 0 and r.finish_reason:
                assert r.finish_reason == "stop"
                assert r.all_tokens == prompt + wanted[: stop + 1]
                assert_cold(pair.model, r.prompt_cache, r.all_tokens)
    assert found == {0: wanted[: stop + 1], 1: wanted}


def test_unseeded_rows_of_one_prompt_differ(pair, prompts):
    """And the generator's seed gives them again, if the number of drafts is pinned."""

    def texts():
        mx.random.seed(4)
        generator = MTPBatchGenerator(
            pair.model,
            pair.drafter,
            max_tokens=30,
            sampler=make_sampler(1.0),
            num_draft_tokens=3,
        )
        found = {uid: [] for uid in generator.insert([prompts[1][:30].tolist()] * 4)}
        while responses := generator.next_generated():
            for r in responses:
                found[r.uid].append(r.token)
        return [tuple(text) for text in found.values()]

    first = texts()
    assert len(set(first)) == 4
    assert texts() == first


def test_a_processor_that_fails_ends_its_row_alone(pair, prompts, alone):
    class Broken(Counting):
        def __call__(self, history, logits):
            if self.calls == 5:
                raise ZeroDivisionError("mine")
            self.calls += 1
            return logits

    generator = MTPBatchGenerator(pair.model, pair.drafter, max_tokens=TOKENS)
    prompt = prompts[2][:20].tolist()
    generator.insert([prompt] * 2, logits_processors=[[Broken()], None])
    found = {0: [], 1: []}
    errors = []
    while any(told := generator.next()):
        for r in told[1]:
            if r.error is not None:
                errors.append((r.uid, str(r.error), r.finish_reason))
                assert r.all_tokens == prompt + found[0]
                assert_cold(pair.model, r.prompt_cache, r.all_tokens)
            else:
                found[r.uid].append(r.token)
    wanted = alone(2, 20, "greedy")
    assert found == {0: wanted[:5], 1: wanted}
    assert errors == [(0, "mine", "error")]


class BrokenLaw:
    """A sampler object whose law fails at its third call."""

    def __init__(self):
        self.calls = 0

    def law(self, logprobs):
        self.calls += 1
        if self.calls > 2:
            raise ZeroDivisionError("mine")
        return logprobs

    def __call__(self, logprobs):
        return mx.random.categorical(self.law(logprobs))


def test_a_law_that_fails_ends_its_row_alone(pair, prompts, alone):
    generator = MTPBatchGenerator(pair.model, pair.drafter, max_tokens=TOKENS)
    prompt = prompts[2][:20].tolist()
    generator.insert([prompt] * 3, samplers=[None, BrokenLaw(), None])
    found, failed = {0: [], 1: [], 2: []}, []
    while any(told := generator.next()):
        for r in told[1]:
            if r.error is not None:
                failed.append((r.uid, str(r.error)))
                assert_cold(pair.model, r.prompt_cache, r.all_tokens)
            else:
                found[r.uid].append(r.token)
    assert failed == [(1, "mine")] and len(found[1]) < TOKENS
    assert found[0] == found[2] == alone(2, 20, "greedy")


def test_what_was_generated_comes_before_an_error(pair_e, prompts):
    generator = MTPBatchGenerator(pair_e.model, pair_e.drafter, max_tokens=TOKENS)
    prompt = prompts[2][:20].tolist()
    generator.insert([prompt] * 2, samplers=[None, BrokenLaw()])
    found, errors = [], 0
    while True:
        try:
            told = generator.next_generated()
        except ZeroDivisionError:
            errors += 1
            continue
        if not told:
            break
        found += [r.token for r in told if r.uid == 0]
    assert found == plain(pair_e.model, prompt, TOKENS) and errors == 1


def test_what_plain_batching_takes_is_taken(pair_e, prompts):
    """Tuples, numbers of numpy's, and empty lists for what is usual."""
    generator = MTPBatchGenerator(
        pair_e.model, pair_e.drafter, max_tokens=5, num_draft_tokens=3
    )
    prompt = tuple(prompts[2][:20].tolist())
    generator.insert([prompt, list(prompt)], [np.int64(9), 9], [], [])
    generator.insert([prompt], [])
    found = {}
    while told := generator.next_generated():
        for r in told:
            found.setdefault(r.uid, []).append(r.token)
    assert found[0] == found[1] and len(found[0]) == 9
    assert found[2] == found[0][:5]


def test_what_cannot_be_honoured_is_refused(pair_e, prompts):
    make = partial(MTPBatchGenerator, pair_e.model)
    with pytest.raises(MTPError, match="verification is 'blok'"):
        make(pair_e.drafter, verification="blok")
    with pytest.raises(MTPError, match="as load_assistant returns it"):
        make(lambda *args: None)
    with pytest.raises(MTPError, match="window 8"):
        foreign = make_prompt_cache(make_target())
        make(pair_e.drafter).insert([[1, 2]], caches=[foreign])

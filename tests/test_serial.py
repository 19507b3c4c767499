"""One sequence after another gives what mlx-lm's batch generator gives."""

from dataclasses import dataclass
from itertools import chain, pairwise

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors
from tiny import VOCAB, make_target, plain

from mlx_lm_mtp import MTPError, MTPStats
from mlx_lm_mtp.serial import SerialGenerator

TARGET = make_target("e", window=8)
TOKENS = st.integers(0, VOCAB - 1)


class Bigrams:
    """A drafter that proposes the token that followed this one before."""

    def __init__(self, texts):
        self.table = TARGET.model.embed_tokens.weight * TARGET.model.embed_scale
        self.next = {a: b for text in texts for a, b in pairwise(text)}

    def __call__(self, inputs_embeds, shared_kv, position):
        embedding, hidden = mx.split(inputs_embeds[0, 0], 2)
        token = mx.argmin(((self.table - embedding) ** 2).sum(-1)).item()
        logits = mx.where(mx.arange(VOCAB) == self.next.get(token, 0), 0.0, -mx.inf)
        return hidden[None, None], logits[None, None]


@dataclass
class Asked:
    """One sequence to decode."""

    segments: list
    max_tokens: int
    stops: list
    penalty: float = 0.0

    @property
    def prompt(self):
        return [*chain(*self.segments)]

    def plain(self):
        processors = make_logits_processors(repetition_penalty=self.penalty or None)
        return plain(TARGET, self.prompt, self.max_tokens, logits_processors=processors)


ASKED = st.builds(
    Asked,
    st.lists(st.lists(TOKENS, min_size=1, max_size=9), min_size=1, max_size=3),
    st.integers(1, 12),
    st.lists(st.lists(TOKENS, min_size=1, max_size=2), max_size=4),
    st.sampled_from([0.0, 1.3]),
)


def insert(generator, asked, cache=None, held=(), **more):
    (uid,) = generator.insert_segments(
        segments=[[list(s) for s in asked.segments]],
        max_tokens=[asked.max_tokens],
        caches=[cache],
        all_tokens=[list(held)],
        samplers=[greedy_sampler],
        logits_processors=[
            make_logits_processors(repetition_penalty=asked.penalty or None)
        ],
        stop_sequences=[StopSequences(asked.stops)],
        **more,
    )
    return uid


def ours(texts=(), **options):
    return SerialGenerator(TARGET, Bigrams(texts), **options)


def with_drafts(num=3):
    return {"num_draft_tokens": [num], "stats": [MTPStats()]}


def run(generator, uids):
    """Everything that a generator tells of its sequences, in order, by sequence."""
    told = {uid: [] for uid in uids}
    going = set(uids)
    while going:
        progress, responses = generator.next()
        for p in progress:
            told[p.uid].append((p.progress, p.end_of_segment, p.end_of_prompt))
            if p.end_of_segment and not p.end_of_prompt:
                cache, tokens = generator.extract_cache([p.uid])[p.uid]
                told[p.uid].append((list(tokens), continued(cache)))
        for r in responses:
            told[r.uid].append((r.token, r.finish_reason))
            if r.finish_reason:
                going.remove(r.uid)
                told[r.uid].append((list(r.all_tokens), continued(r.prompt_cache)))
    return told


def continued(cache):
    """What plain decoding makes of a cache."""
    return plain(TARGET, [7, 11], 4, prompt_cache=cache)


@settings(max_examples=15)
@given(st.lists(ASKED, min_size=1, max_size=3), st.integers(0, 4), st.integers(1, 9))
def test_the_same_responses_progress_and_caches(sequences, num, step):
    """Tokens, finish reasons, prompt caches at the segments' ends and after."""
    theirs = {}
    for asked in sequences:
        generator = BatchGenerator(TARGET, prefill_step_size=step)
        theirs[len(theirs)] = run(generator, [insert(generator, asked)]).popitem()[1]
    generator = ours([a.prompt + a.plain() for a in sequences], prefill_step_size=step)
    uids = [insert(generator, asked, **with_drafts(num)) for asked in sequences]
    assert run(generator, uids) == theirs
    assert generator.prompt_cache_nbytes == 0 and generator.next() == ([], [])


@settings(max_examples=10)
@given(ASKED, st.integers(0, 20), st.integers(0, 3))
def test_a_warm_turn_equals_a_cold_one(asked, held, num):
    """Also what processors see: they are shown what the cache holds."""
    prompt = asked.prompt
    held = min(held, len(prompt) - 1)
    cache = make_prompt_cache(TARGET)
    if held:
        plain(TARGET, prompt[:held], 0, prompt_cache=cache)
    rest = Asked([prompt[held:]], asked.max_tokens, [], asked.penalty)
    generator = ours([prompt + asked.plain()])
    uid = insert(generator, rest, cache, prompt[:held], **with_drafts(num))
    told = run(generator, [uid])[uid]
    assert [t[0] for t in told if t[1] in (None, "length")] == asked.plain()


def test_drafts_are_accepted_and_counted():
    asked = Asked([[3, 1, 4, 1, 5]], 40, [])
    generator, more = ours([asked.prompt + asked.plain()]), with_drafts()
    insert(generator, asked, **more)
    accepted = 0
    for _ in range(50):
        accepted += sum(r.from_draft for r in generator.next()[1])
    [stats] = more["stats"]
    assert 0 < accepted <= sum(stats.accepted) and stats.rounds > 0


def test_a_prompt_that_the_cache_holds_whole_is_read_again():
    """A window that is full cannot give back its last token."""
    asked = Asked([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]], 6, [])
    cache = make_prompt_cache(TARGET)
    plain(TARGET, asked.prompt, 0, prompt_cache=cache)
    generator = ours()
    uid = insert(generator, Asked([], 6, []), cache, asked.prompt, **with_drafts())
    assert run(generator, [uid])[uid][-1][0] == asked.prompt + asked.plain()


@pytest.mark.parametrize(
    "asked, words",
    [(Asked([], 5, []), "prompt is empty"), (Asked([[1]], 0, []), "max_tokens is 0")],
)
def test_a_mistake_is_told_in_its_turn(asked, words):
    generator = ours()
    uid = insert(generator, asked, **with_drafts())
    _, [response] = generator.next()
    assert response.uid == uid and isinstance(response.error, MTPError)
    assert words in str(response.error) and generator.next() == ([], [])


@pytest.mark.parametrize("calls", [1, 3])
def test_an_error_ends_its_sequence_alone(calls):
    """A processor raises; the sequence behind it is decoded as if nothing was."""

    def processor(tokens, logits, left=[calls]):  # noqa: B006
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("broken")
        return logits

    bad, good = Asked([[1, 2, 3]], 9, []), Asked([[4, 5], [6]], 5, [])
    generator = ours()
    generator.insert_segments(
        segments=[bad.segments],
        max_tokens=[9],
        caches=[None],
        all_tokens=[[]],
        samplers=[greedy_sampler],
        logits_processors=[[processor]],
        stop_sequences=[StopSequences([])],
        **with_drafts(),
    )
    uid = insert(generator, good, **with_drafts())
    responses = []
    while not responses or responses[-1].finish_reason is None:
        responses += [r for r in generator.next()[1] if r.uid != uid]
    assert str(responses[-1].error) == "broken"
    assert [r.token for r in responses[:-1]] == bad.plain()[:calls]
    assert run(generator, [uid])[uid][-1][0] == good.prompt + good.plain()


def test_removed_sequences_are_gone():
    sequences = [Asked([[i, i + 1]], 9, []) for i in range(4)]
    generator = ours()
    uids = [insert(generator, asked, **with_drafts()) for asked in sequences]
    for _ in range(4):
        generator.next()
    generator.remove([uids[0], uids[2], 99])  # one at work, one waiting, one unknown
    told = run(generator, [uids[1], uids[3]])
    for i in (1, 3):
        assert told[uids[i]][-1][0] == sequences[i].prompt + sequences[i].plain()
    insert(generator, sequences[0], **with_drafts())
    generator.close()
    assert generator.next() == ([], [])


def test_who_waits_is_told_so(monkeypatch):
    """Else their clients would hear nothing, and time out."""
    monkeypatch.setattr("mlx_lm_mtp.serial.PATIENCE", 0.0)
    generator = ours()
    first, second = (
        insert(generator, Asked([[1, 2, 3]], 3, []), **with_drafts()) for _ in "ab"
    )
    told = [p for _ in range(4) for p in generator.next()[0]]
    assert {p.progress for p in told if p.uid == second} == {(0, 3)}
    assert {p.progress for p in told if p.uid == first} == {(2, 3), (3, 3)}

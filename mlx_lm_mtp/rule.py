"""How drafts are drawn and judged: by comparing tokens, or by laws.

``Compare`` emits exactly what the target's own sampler draws at each position and
keeps a draft while it agrees: greedy decoding, seeded coupling, and whatever can only
be called. ``Residual`` accepts by the two laws and recovers from the residual.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional, cast

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from . import verify
from .law import (
    Law,
    LogitsProcessor,
    Sampler,
    is_greedy,
    is_mlx_lm,
    is_pure,
    law_of,
    normalise,
    process,
    process_rows,
    random_state,
    seed_of,
)
from .propose import Drawn
from .rounds import Draft, MTPError, Verdict

VERIFICATIONS = ("block", "token", "coupled")
DRAFT_HEAT = 0.9


@dataclass(frozen=True)
class Decision:
    """A verdict on the host."""

    tokens: list[int]  # accepted drafts, then the recovered or bonus token
    logprobs: mx.array  # [n, V], the target's own for each token
    error: Optional[Exception] = None  # raised after these tokens, by a processor


def make_rule(
    sampler: Optional[Sampler],
    processors: Optional[Sequence[LogitsProcessor]],
    vocab_size: int,
    verification: str = "block",
    draft_heat: float = DRAFT_HEAT,
) -> "Rule":
    """Choose the rule that is exact for a sampler and processors.

    Args:
        sampler: As for mlx-lm's ``generate_step``.
        processors: Likewise.
        vocab_size: V.
        verification: "block", "token" or "coupled".
        draft_heat: Temperature of the drafts relative to the target's. Any value
            keeps the target's law, it moves the acceptance only; 0 drafts greedily.

    Raises:
        MTPError: If the verification is not known, or the heat negative.
    """
    if draft_heat < 0:
        raise MTPError(f"draft_heat is {draft_heat}, it must be 0 or more")
    if verification not in VERIFICATIONS:
        raise MTPError(
            f"verification is {verification!r}, it must be one of "
            f"{', '.join(VERIFICATIONS)}"
        )
    processors = list(processors or ())
    law = None if sampler is None or is_greedy(sampler) else law_of(sampler)
    if law and verification != "coupled" and all(map(is_pure, processors)):
        return Residual(law, processors, vocab_size, verification, draft_heat)
    return Compare(sampler or greedy_sampler, processors, vocab_size)


class Rule:
    """What the rules share: the history that processors see.

    The history holds the prompt and everything emitted, so the seed token is its last.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], vocab_size: int) -> None:
        self.processors = processors
        self.pure = all(map(is_pure, processors))
        self.vocab_size = vocab_size
        self.history = mx.array([], mx.int32)
        self._path = self.history

    def extend(self, tokens: mx.array) -> None:
        """Add prompt tokens or emitted tokens [n] to the history."""
        self.history = self._after(self.history, tokens)

    def begin(self, num: int) -> None:
        """Start a round of ``num`` drafts."""
        self._path = self.history

    def draw(self, ids: Optional[mx.array], logits: mx.array) -> Drawn:
        """Draw one draft from the drafter's logits; see ``propose.Draw``."""
        raise NotImplementedError

    def judge(self, draft: Draft, logits: mx.array) -> Decision:
        """Judge a draft [1, K] by the target's logits [1, K + 1, V]."""
        raise NotImplementedError

    def _after(self, history: mx.array, tokens: mx.array) -> mx.array:
        if not self.processors:
            return history
        if not history.size:
            return tokens
        return mx.concatenate([history, tokens.astype(history.dtype)])

    def _processed(
        self, ids: Optional[mx.array], logits: mx.array, dense: bool
    ) -> tuple[Optional[mx.array], mx.array]:
        """A draft's logits as the target's will be processed, where that is pure."""
        processors = self.processors if self.pure else ()
        if ids is not None and (processors or dense):
            nothing = mx.full((logits.shape[0], self.vocab_size), -mx.inf, logits.dtype)
            logits, ids = mx.put_along_axis(nothing, ids, logits, axis=-1), None
        return ids, process(processors, self._path, logits)


class Compare(Rule):
    """Emit what the target's sampler draws; keep drafts while they agree.

    A sampler of mlx-lm's is called on the very random numbers that plain decoding
    would use at each position, so the text does not depend on the drafter. Its drafts
    share those numbers, so that they agree often. Where the sampler is opaque or a
    processor may keep state, rows are judged one by one: each is called once for each
    emitted token, in order.
    """

    def __init__(
        self, sampler: Sampler, processors: Sequence[LogitsProcessor], vocab_size: int
    ) -> None:
        super().__init__(processors, vocab_size)
        self.sampler = sampler
        greedy = is_greedy(sampler)
        self._random = None if greedy or not is_mlx_lm(sampler) else _RandomTape()
        self._walks = not (self.pure and (greedy or self._random))

    def begin(self, num: int) -> None:
        super().begin(num)
        if self._random:
            self._random.rewind()

    def draw(self, ids: Optional[mx.array], logits: mx.array) -> Drawn:
        ids, logits = self._processed(ids, logits, dense=self._random is not None)
        if self._random:
            token = self.sampler(normalise(logits))
        else:
            token = _pick(mx.argmax(logits, axis=-1), ids)
        self._path = self._after(self._path, token)
        return Drawn(token)

    def judge(self, draft: Draft, logits: mx.array) -> Decision:
        if self._random:
            self._random.rewind()
        if self._walks:
            return self._walk(draft, logits)
        logits = process_rows(self.processors, self.history, draft.tokens, logits)
        logprobs = normalise(logits)
        if self._random is None:
            verdict = verify.match(draft.tokens, self.sampler(logprobs))
            return _read(draft, verdict, logprobs)
        rows = []
        for i in range(logprobs.shape[1]):
            rows.append(self.sampler(logprobs[:, i]))
            self._random.mark()
        verdict = verify.match(draft.tokens, mx.stack(rows, axis=1))
        decision = _read(draft, verdict, logprobs, self._random.marks)
        self._random.cut(len(decision.tokens))
        return decision

    def _walk(self, draft: Draft, logits: mx.array) -> Decision:
        drafted = _numbers(draft.tokens[0])
        tokens: list[int] = []
        rows: list[mx.array] = []
        history = self.history
        error = None
        for i in range(logits.shape[1]):
            try:
                row = normalise(process(self.processors, history, logits[:, i]))
                tokens += _numbers(self.sampler(row))
            except Exception as e:
                # The tokens before it stand: the caller gets them first, then this.
                error = e
                break
            rows.append(row)
            if self._random:
                self._random.mark()
            if i == len(drafted) or tokens[i] != drafted[i]:
                break
            history = self._after(history, mx.array(tokens[-1:]))
        if self._random:
            self._random.cut(len(tokens))
        return Decision(tokens, mx.concatenate(rows or [logits[0, :0]]), error)


class Residual(Rule):
    """Block or token verification of drafts that were sampled from their own law."""

    def __init__(
        self,
        law: Law,
        processors: Sequence[LogitsProcessor],
        vocab_size: int,
        verification: str,
        draft_heat: float,
    ) -> None:
        super().__init__(processors, vocab_size)
        self._law = law
        self._draft_law = law.draft(draft_heat) if draft_heat else None
        self._verify = {"block": verify.block, "token": verify.token}[verification]
        # mlx-lm's generator seeds the run, so that its seed reproduces it.
        self._key = mx.random.randint(0, 2**31 - 1, (2,), mx.uint32)

    def begin(self, num: int) -> None:
        super().begin(num)
        keys = mx.random.split(self._key, 5)
        self._key, noise, self._uniform_key, self._gumbel_key, coin_key = keys
        self._noise = iter(mx.random.split(noise, max(num, 1)))
        # XTC's coin of a position is the same for draft and target.
        self._coins = mx.random.uniform(shape=(1, num + 1, 1), key=coin_key)
        self._drawn = 0

    def draw(self, ids: Optional[mx.array], logits: mx.array) -> Drawn:
        dense = self._draft_law is not None and not self._draft_law.on_candidates()
        ids, logits = self._processed(ids, logits, dense)
        if self._draft_law is None:
            token = _pick(mx.argmax(logits, axis=-1), ids)
            self._path = self._after(self._path, token)
            return Drawn(token)
        logprobs = self._draft_law(normalise(logits), self._coins[:, self._drawn])
        self._drawn += 1
        noise = mx.random.gumbel(logprobs.shape, key=next(self._noise))
        token = _pick(verify.draw(logprobs, noise), ids)
        self._path = self._after(self._path, token)
        return Drawn(token, logprobs, ids)

    def judge(self, draft: Draft, logits: mx.array) -> Decision:
        logits = process_rows(self.processors, self.history, draft.tokens, logits)
        logprobs = normalise(logits)
        batch, rows, vocab_size = logits.shape
        verdict = self._verify(
            draft.tokens,
            draft.law(vocab_size),
            self._law(logprobs, self._coins[:, :rows]),
            mx.random.uniform(shape=(batch, rows - 1), key=self._uniform_key),
            mx.random.gumbel((batch, vocab_size), key=self._gumbel_key),
        )
        return _read(draft, verdict, logprobs)


class _RandomTape:
    """The states that mlx-lm's generator passes through, one per emitted token."""

    def __init__(self) -> None:
        self._start = seed_of(random_state())
        self.marks: list[mx.array] = []

    def rewind(self) -> None:
        """Back to where plain decoding stands before the round's first token."""
        mx.random.seed(self._start)
        self.marks = []

    def mark(self) -> None:
        """Remember the state after one more token."""
        self.marks.append(random_state())

    def cut(self, tokens: int) -> None:
        """Go on from the state after so many tokens of this round."""
        if tokens:
            self._start = seed_of(self.marks[tokens - 1])
        self.rewind()


def _pick(index: mx.array, ids: Optional[mx.array]) -> mx.array:
    """Turn an index among candidates [B] into a token."""
    if ids is None:
        return index
    return mx.take_along_axis(ids, index[:, None], axis=-1).squeeze(-1)


def _read(
    draft: Draft,
    verdict: Verdict,
    logprobs: mx.array,
    others: Sequence[mx.array] = (),
) -> Decision:
    """The round's one host read."""
    mx.eval(draft.tokens, verdict.accepted, verdict.token, logprobs, *others)
    [accepted] = _numbers(verdict.accepted)
    tokens = _numbers(draft.tokens[0, :accepted]) + _numbers(verdict.token)
    return Decision(tokens, logprobs[0])


def _numbers(array: mx.array) -> list[int]:
    return cast(list[int], array.tolist())

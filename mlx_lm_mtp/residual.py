"""Accept sampled drafts by the two laws, and recover from the residual.

Also chooses between this rule and ``Compare``.
"""

from collections.abc import Sequence
from typing import Optional

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from . import verify
from .compare import Compare
from .law import (
    Law,
    LogitsProcessor,
    Sampler,
    check_filters,
    is_greedy,
    is_pure,
    law_of,
    normalise,
    process_rows,
)
from .propose import Drawn
from .rounds import Draft, MTPError
from .rule import Rule, Trial, pick

VERIFICATIONS = ("block", "token", "coupled")
DRAFT_HEAT = 0.9


def make_rule(
    sampler: Optional[Sampler],
    processors: Optional[Sequence[LogitsProcessor]],
    vocab_size: int,
    verification: str = "block",
    draft_heat: float = DRAFT_HEAT,
) -> Rule:
    """Choose the rule that is exact for a sampler and processors.

    Args:
        sampler: As for mlx-lm's ``generate_step``.
        processors: Likewise.
        vocab_size: V.
        verification: "block", "token" or "coupled".
        draft_heat: Temperature of the drafts relative to the target's. Any value
            keeps the target's law, it moves the acceptance only; 0 drafts greedily.

    Raises:
        MTPError: If the verification is not known, the heat negative, or a filter of
            the sampler's cannot be applied.
    """
    if draft_heat < 0:
        raise MTPError(f"draft_heat is {draft_heat}, it must be 0 or more")
    if verification not in VERIFICATIONS:
        raise MTPError(
            f"verification is {verification!r}, it must be one of "
            f"{', '.join(VERIFICATIONS)}"
        )
    check_filters(sampler, vocab_size)
    processors = list(processors or ())
    law = None if sampler is None or is_greedy(sampler) else law_of(sampler)
    if law and verification != "coupled" and all(map(is_pure, processors)):
        return Residual(law, processors, vocab_size, verification, draft_heat)
    return Compare(sampler or greedy_sampler, processors, vocab_size)


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
        self._key: Optional[mx.array] = None

    def seed(self, seed: int) -> None:
        self._key = _first_key(mx.random.split(mx.random.key(seed))[1])

    def begin(self, num: int) -> None:
        super().begin(num)
        if self._key is None:
            # mlx-lm's generator starts the run's own keys, so its seed reproduces it.
            self._key = _first_key()
        keys = mx.random.split(self._key, 5)
        self._key, noise, self._uniform_key, self._gumbel_key, coin_key = keys
        self._noise = iter(mx.random.split(noise, max(num, 1)))
        # XTC's coin of a position is the same for draft and target.
        self._coins = mx.random.uniform(shape=(1, num + 1, 1), key=coin_key)
        self._drawn = 0

    def draw(self, ids: Optional[mx.array], logits: mx.array) -> Drawn:
        law = self._draft_law
        dense = law is not None and not law.on_candidates()
        ids, logits = self._processed(ids, logits, dense)
        if law is None:
            drawn = Drawn(pick(mx.argmax(logits, axis=-1), ids))
        else:
            logprobs = law(normalise(logits), self._coins[:, self._drawn])
            noise = mx.random.gumbel(logprobs.shape, key=next(self._noise))
            drawn = Drawn(pick(verify.draw(logprobs, noise), ids), logprobs, ids)
        self._drawn += 1
        self._path = self._after(self._path, drawn.token)
        return drawn

    def judge(self, draft: Draft, logits: mx.array) -> Trial:
        logits = process_rows(self.processors, self.history, draft.tokens, logits)
        logprobs = normalise(logits)
        batch, rows, vocab_size = logits.shape
        # At least one, as no random numbers at all kill MLX's CUDA backend.
        shape = batch, max(draft.size, 1)
        verdict = self._verify(
            draft.tokens,
            draft.law(vocab_size),
            self._law(logprobs, self._coins[:, :rows]),
            mx.random.uniform(shape=shape, key=self._uniform_key),
            mx.random.gumbel((batch, vocab_size), key=self._gumbel_key),
        )
        return Trial(draft, logprobs, verdict)


def _first_key(key: Optional[mx.array] = None) -> mx.array:
    return mx.random.randint(0, 2**31 - 1, (2,), mx.uint32, key=key)

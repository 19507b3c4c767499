"""Seed to Draft: K drafter steps at one constant position."""

from collections.abc import Callable
from typing import NamedTuple, Optional

import mlx.core as mx

from .forward import Step
from .rounds import Draft, Seed


class Drawn(NamedTuple):
    """One drafted token and the law it was drawn from."""

    token: mx.array  # [B]
    logprobs: Optional[mx.array] = None  # [B, V] or [B, C] float32; None is one-hot
    ids: Optional[mx.array] = None  # [B, C]


# Candidate ids [B, C] or None, and their logits [B, C] or [B, V].
Draw = Callable[[Optional[mx.array], mx.array], Drawn]


def propose(step: Step, seed: Seed, num: int, draw: Draw) -> Draft:
    """Draft ``num`` tokens; nothing is evaluated.

    The result holds views of the target's K/V until it is evaluated.

    Args:
        step: The drafter on the K/V of everything before the seed token.
        seed: The last emitted token and the hidden state that predicted it.
        num: K, at least 1.
        draw: Draws a token from the drafter's logits.
    """
    token, hidden = seed.token, seed.hidden
    drawn: list[Drawn] = []
    for _ in range(num):
        hidden, ids, logits = step(token, hidden)
        drawn.append(draw(ids, logits))
        token = drawn[-1].token
    return joined(drawn)


def joined(drawn: list[Drawn]) -> Draft:
    """The draft of tokens drawn one after another."""
    return Draft(
        mx.stack([d.token for d in drawn], axis=1),
        _stack([d.logprobs for d in drawn]),
        _stack([d.ids for d in drawn]),
    )


def _stack(parts: list[Optional[mx.array]]) -> Optional[mx.array]:
    arrays = [part for part in parts if part is not None]
    return mx.stack(arrays, axis=1) if arrays else None

"""Seed to Draft: K drafter steps at one constant position."""

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import mlx.core as mx

from .rounds import Draft, Seed
from .target import Target


class Drawn(NamedTuple):
    """One drafted token and the law it was drawn from."""

    token: mx.array  # [B]
    logprobs: Optional[mx.array] = None  # [B, V] or [B, C] float32; None is one-hot
    ids: Optional[mx.array] = None  # [B, C]


# Candidate ids [B, C] or None, and their logits [B, C] or [B, V].
Draw = Callable[[Optional[mx.array], mx.array], Drawn]


def propose(
    drafter: Any,
    target: Target,
    seed: Seed,
    caches: list[Any],
    position: int,
    num: int,
    draw: Draw,
) -> Draft:
    """Draft ``num`` tokens; nothing is evaluated.

    The result holds views of the target's K/V until ``Draft.pending()`` is evaluated.

    Args:
        drafter: Called as ``drafter(inputs_embeds, shared_kv, position)``.
        target: The target.
        seed: The last emitted token and the hidden state that predicted it.
        caches: The target's caches, which hold everything before the seed token.
        position: RoPE position of every step; the seed token's own slot in
            transformers' reference.
        num: K, at least 1.
        draw: Draws a token from the drafter's logits.
    """
    shared_kv = target.shared_kv(caches)
    token, hidden = seed.token, seed.hidden
    drawn: list[Drawn] = []
    for _ in range(num):
        inputs = mx.concatenate([target.embed(token[:, None]), hidden], axis=-1)
        hidden, ids, logits = _step(drafter, inputs, shared_kv, position)
        drawn.append(draw(ids, logits))
        token = drawn[-1].token
    return Draft(
        mx.stack([d.token for d in drawn], axis=1),
        _stack([d.logprobs for d in drawn]),
        _stack([d.ids for d in drawn]),
    )


def _step(
    drafter: Any, inputs: mx.array, shared_kv: Any, position: int
) -> tuple[mx.array, Optional[mx.array], mx.array]:
    # A subclass or a wrapper that changes the call must not be passed by.
    if "candidates" not in vars(type(drafter)):
        hidden, logits = drafter(inputs, shared_kv, position)
        return hidden, None, logits[:, -1]
    hidden, h = drafter.step(inputs, shared_kv, position)
    ids, logits = drafter.candidates(h)
    return hidden, None if ids is None else ids[:, -1], logits[:, -1]


def _stack(parts: list[Optional[mx.array]]) -> Optional[mx.array]:
    arrays = [part for part in parts if part is not None]
    return mx.stack(arrays, axis=1) if arrays else None

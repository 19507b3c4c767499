"""Seed to Draft: K drafter steps at one constant position."""

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import mlx.core as mx

from .cache import Live, View
from .rounds import Draft, Seed
from .target import Target


class Drawn(NamedTuple):
    """One drafted token and the law it was drawn from."""

    token: mx.array  # [B]
    logprobs: Optional[mx.array] = None  # [B, V] or [B, C] float32; None is one-hot
    ids: Optional[mx.array] = None  # [B, C]


# Candidate ids [B, C] or None, and their logits [B, C] or [B, V].
Draw = Callable[[Optional[mx.array], mx.array], Drawn]


def is_lean(drafter: Any) -> bool:
    """Whether a drafter may be entered by ``step`` and ``candidates``.

    A subclass or a wrapper that changes the call must not be passed by: it is called
    as documented, on exactly the entries that hold a token.
    """
    return "candidates" in vars(type(drafter))


def propose(
    drafter: Any,
    target: Target,
    seed: Seed,
    live: Live,
    shift: int,
    num: int,
    draw: Draw,
) -> Draft:
    """Draft ``num`` tokens; nothing is evaluated.

    The result holds views of the target's K/V until it is evaluated.

    Args:
        drafter: Called as ``drafter(inputs_embeds, shared_kv, position)``.
        target: The target.
        seed: The last emitted token and the hidden state that predicted it.
        live: The target's K/V, which hold everything before the seed token.
        shift: Distance of the RoPE position of every step from the seed token's own
            slot, which is the position in transformers' reference.
        num: K, at least 1.
        draw: Draws a token from the drafter's logits.
    """
    views = target.views(live.layers)
    position = live.bounds[0] + shift if live.exact else live.offset + shift
    token, hidden = seed.token, seed.hidden
    drawn: list[Drawn] = []
    for _ in range(num):
        inputs = mx.concatenate([target.embed(token[:, None]), hidden], axis=-1)
        hidden, ids, logits = _step(drafter, inputs, views, position)
        drawn.append(draw(ids, logits))
        token = drawn[-1].token
    return Draft(
        mx.stack([d.token for d in drawn], axis=1),
        _stack([d.logprobs for d in drawn]),
        _stack([d.ids for d in drawn]),
    )


def _step(
    drafter: Any, inputs: mx.array, views: dict[str, View], position: int | mx.array
) -> tuple[mx.array, Optional[mx.array], mx.array]:
    shared_kv = {kind: (view.keys, view.values) for kind, view in views.items()}
    if not is_lean(drafter):
        hidden, logits = drafter(inputs, shared_kv, position)
        return hidden, None, logits[:, -1]
    masks = {kind: view.mask for kind, view in views.items()}
    hidden, h = drafter.step(inputs, shared_kv, position, masks)
    ids, logits = drafter.candidates(h)
    return hidden, None if ids is None else ids[:, -1], logits[:, -1]


def _stack(parts: list[Optional[mx.array]]) -> Optional[mx.array]:
    arrays = [part for part in parts if part is not None]
    return mx.stack(arrays, axis=1) if arrays else None

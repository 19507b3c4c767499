"""The two forwards of a round over live buffers: a drafter's step, and a verify.

Both are built on where rows end as an array, so before the host knows how many drafts
of the last round stand. (Compiling them was tried: replaying a compiled forward takes
the host as long as Python takes to build one.)
"""

from collections.abc import Callable
from typing import Any, Optional

import mlx.core as mx

from .live import Live
from .target import Target

# Token [B] and hidden state [B, 1, H] to the next hidden state [B, 1, H], candidate
# ids [B, C] or None, and their logits [B, C] or [B, V].
Step = Callable[[mx.array, mx.array], tuple[mx.array, Optional[mx.array], mx.array]]

# Drafts read two of the buffers that the target then writes. MLX copies a buffer that
# is being read; above this many bytes it is cheaper to let the drafts finish first.
COPIED = 32 << 20


def is_lean(drafter: Any) -> bool:
    """Whether a drafter may be entered by ``step`` and ``candidates``.

    A subclass or a wrapper that changes the call must not be passed by: it is called
    as documented, on exactly the entries that hold a token.
    """
    return "candidates" in vars(type(drafter))


def verify_forward(
    target: Target, live: Live, tokens: mx.array
) -> tuple[mx.array, mx.array]:
    """Read tokens [B, L] into the buffers.

    Returns:
        Hidden states [B, L, H] and logits [B, L, V]; nothing is evaluated.
    """
    live.reserve(tokens.shape[1])
    hidden = target.hidden(tokens, live.buffers.layers)
    return hidden, target.logits(hidden)


def draft_step(target: Target, drafter: Any, live: Live, shift: int) -> Step:
    """A drafter's step on what the buffers hold now.

    Args:
        target: The target.
        drafter: Called as ``drafter(inputs_embeds, shared_kv, position)``.
        live: The target's K/V, which hold everything before the seed token.
        shift: Distance of the RoPE position of every step from the seed token's own
            slot, which is the position in transformers' reference.
    """
    held, lean = live.buffers, is_lean(drafter)
    views = {kind: held.view(i) for kind, i in target.lenders().items()}
    shared_kv = {kind: (view.keys, view.values) for kind, view in views.items()}
    masks = {kind: view.mask for kind, view in views.items()}
    position = held.offset + shift

    def step(token: mx.array, hidden: mx.array) -> Any:
        inputs = mx.concatenate([target.embed(token[:, None]), hidden], axis=-1)
        if not lean:
            # Such a drafter knows no masks; it is asked once the host knows the end.
            assert held.exact is not None
            hidden, logits = drafter(inputs, shared_kv, held.exact + shift)
            return hidden, None, logits[:, -1]
        hidden, h = drafter.step(inputs, shared_kv, position, masks)
        ids, logits = drafter.candidates(h)
        return hidden, None if ids is None else ids[:, -1], logits[:, -1]

    return step


def launch(live: Live, drawn: list[mx.array], pending: list[mx.array]) -> None:
    """Have the device begin a round.

    Args:
        live: The target's K/V.
        drawn: What its drafts computed from them, nothing if there are no drafts.
        pending: All that it computes.
    """
    if drawn and live.largest > COPIED:
        mx.eval(drawn)
    mx.async_eval(pending)

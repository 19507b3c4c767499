"""The two forwards of a round over live buffers, compiled where that pays.

Building one forward takes Python a third of a plain step. A GPU can wait for it, so
there both are compiled, once for each shape: the ends of rows are arrays, and buffers
grow in steps. On the CPU every new shape would call a C++ compiler first.
"""

import weakref
from collections.abc import Callable
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn

from .buffers import Buffers
from .cache import Live
from .memory import kept
from .target import Target

SHAPES = 64  # more than so many are not kept compiled

# Token [B] and hidden state [B, 1, H] to the next hidden state [B, 1, H], candidate
# ids [B, C] or None, and their logits [B, C] or [B, V].
Step = Callable[[mx.array, mx.array], tuple[mx.array, Optional[mx.array], mx.array]]


def pays() -> bool:
    """Whether compiling does on this device."""
    return bool(mx.default_device() == mx.Device(mx.gpu))


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
    held = live.buffers
    if not pays() or (tokens.shape[1] == 1 and held.exact is not None):
        hidden = target.hidden(tokens, held.layers)
        return hidden, target.logits(hidden)
    hidden, logits, held.keys, held.values = kept(_Verifying, target.model)(
        [target.model],
        tokens,
        held.offset,
        mx.array(held.base, mx.int32),
        held.keys,
        held.values,
    )
    return hidden, logits


def draft_step(target: Target, drafter: Any, live: Live, shift: int) -> Step:
    """A drafter's step on what the buffers hold now.

    Args:
        target: The target.
        drafter: Called as ``drafter(inputs_embeds, shared_kv, position)``.
        live: The target's K/V, which hold everything before the seed token.
        shift: Distance of the RoPE position of every step from the seed token's own
            slot, which is the position in transformers' reference.
    """
    held, lenders = live.buffers, target.lenders()
    if not is_lean(drafter):
        assert held.exact is not None
        position = held.exact + shift
        views = {kind: held.valid(i) for kind, i in lenders.items()}
        shared_kv = {kind: (view.keys, view.values) for kind, view in views.items()}

        def call(token: mx.array, hidden: mx.array) -> Any:
            inputs = _inputs(target, token, hidden)
            hidden, logits = drafter(inputs, shared_kv, position)
            return hidden, None, logits[:, -1]

        return call
    views = {kind: held.view(i) for kind, i in lenders.items()}
    shared = (
        {kind: (view.keys, view.values) for kind, view in views.items()},
        held.offset + shift,
        {kind: view.mask for kind, view in views.items()},
    )
    if not pays():
        return lambda token, hidden: _step(
            target.model, drafter, token, hidden, *shared
        )
    step = kept(_Stepping, target.model, drafter)
    return lambda token, hidden: step([target.model, drafter], token, hidden, *shared)


def _inputs(target: Target, token: mx.array, hidden: mx.array) -> mx.array:
    return mx.concatenate([target.embed(token[:, None]), hidden], axis=-1)


def _step(
    model: nn.Module,
    drafter: Any,
    token: mx.array,
    hidden: mx.array,
    shared_kv: Any,
    position: mx.array,
    masks: Any,
) -> Any:
    inputs = _inputs(Target(model), token, hidden)
    hidden, h = drafter.step(inputs, shared_kv, position, masks)
    ids, logits = drafter.candidates(h)
    return hidden, None if ids is None else ids[:, -1], logits[:, -1]


def _verify(
    model: nn.Module,
    tokens: mx.array,
    offset: mx.array,
    base: mx.array,
    keys: list[mx.array],
    values: list[mx.array],
) -> Any:
    target = Target(model)
    held = Buffers(target.windows(), list(keys), list(values), offset, base)
    hidden = target.hidden(tokens, held.layers)
    return hidden, target.logits(hidden), held.keys, held.values


class _Compiled:
    """A function of models and arrays, compiled for the shapes that come up.

    The weights are inputs of what is compiled: it follows when they change.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Any = None
        self._shapes: set[tuple[Any, ...]] = set()

    def __call__(self, models: list[nn.Module], *args: Any) -> Any:
        shapes = tuple(array.shape for array in _arrays(args))
        if len(self._shapes) == SHAPES and shapes not in self._shapes:
            self._compiled = None
        if self._compiled is None:
            self._shapes.clear()
            alive = [weakref.ref(model) for model in models]
            self._compiled = mx.compile(
                lambda *args: self._function(*(ref() for ref in alive), *args),
                inputs=[model.state for model in models],
            )
        self._shapes.add(shapes)
        return self._compiled(*args)


def _arrays(tree: Any) -> Any:
    if isinstance(tree, mx.array):
        yield tree
    elif tree is not None:
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _arrays(part)


class _Verifying(_Compiled):
    def __init__(self) -> None:
        super().__init__(_verify)


class _Stepping(_Compiled):
    def __init__(self) -> None:
        super().__init__(_step)

"""The target's K/V while rounds run, and in mlx-lm's own caches at every stop.

mlx-lm's sliding-window cache copies its window at every write of several tokens, and
``trim_prompt_cache`` does nothing, without a word, once the window is full. During a
generation the K/V therefore live in linear buffers with room to spare (``Live``): a
round appends where its row ends, and what a rejection leaves behind lies past the end,
out of every query's sight. Where a row ends is known on the device, so that the next
round can be prepared before the host has read what became of this one. At every stop
the entries go back into mlx-lm's caches, exactly as many as were emitted.
"""

from typing import Any, NamedTuple, Optional

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from .rounds import MTPError

ROOM = 256  # slots that a buffer grows by, as mlx-lm's own do


def check(caches: list[Any], expected: list[Any]) -> None:
    """Refuse a prompt cache that cannot be kept exact.

    Args:
        caches: The caller's prompt cache.
        expected: A fresh cache of the same model.

    Raises:
        MTPError: If a cache is of another class or window, or lengths differ.
    """
    if len(caches) != len(expected):
        raise MTPError(
            f"the prompt cache has {len(caches)} layers, this model needs "
            f"{len(expected)}: make it with make_prompt_cache(model)"
        )
    for i, (cache, like) in enumerate(zip(caches, expected, strict=True)):
        if type(cache) is type(like) and _window(cache) == _window(like):
            continue
        hint = "make it with make_prompt_cache(model)"
        if isinstance(cache, QuantizedKVCache):
            hint = "MTP needs an unquantised cache, make it without kv_bits"
        raise MTPError(
            f"layer {i} of the prompt cache is a {_describe(cache)}, "
            f"this model needs a {_describe(like)}: {hint}"
        )
    lengths = sorted({cache.offset for cache in caches})
    if len(lengths) > 1:
        raise MTPError(
            f"the layers of the prompt cache hold {lengths[0]} to {lengths[-1]} "
            "tokens, all must hold the same: start from a fresh cache"
        )


def _window(cache: Any) -> Optional[tuple[int, int]]:
    if isinstance(cache, RotatingKVCache):
        return cache.max_size, cache.keep
    return None


def _describe(cache: Any) -> str:
    window = _window(cache)
    return type(cache).__name__ + (f" of window {window[0]}" if window else "")


def length(caches: list[Any]) -> int:
    """How many tokens every layer holds."""
    return min(cache.offset for cache in caches)


class View(NamedTuple):
    """What a drafter may attend to in one layer."""

    keys: mx.array  # [B, heads, entries, head size]
    values: mx.array
    mask: Optional[mx.array]  # [B, 1, 1, entries], None if all of them


class Live:
    """The K/V of all layers while rounds run; hand ``layers`` to the target.

    A *write* is one forward of the target. ``landed`` says how many of its tokens
    stand, once the host knows; until then the end of the row is known on the device
    (``offset``) and, on the host, to lie between two bounds.

    Args:
        caches: mlx-lm's caches, which hold at least one token. Their entries move
            here until ``give_back``.
    """

    def __init__(self, caches: list[Any]) -> None:
        self.known = length(caches)  # tokens held once all that landed is counted
        self.offset = mx.array([self.known], mx.int32)  # [B] the same, on the device
        self._kept = self.known  # what may be given back is at least this long
        self._writes: list[int] = []  # sizes of those that have not landed
        self._slots: dict[tuple[int, int], mx.array] = {}
        self.layers = [Layer(self, cache) for cache in caches]

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the most tokens that may be held, given what is known."""
        return self.known + len(self._writes), self.known + sum(self._writes)

    @property
    def exact(self) -> bool:
        """Whether the host knows how many tokens are held."""
        low, high = self.bounds
        return low == high

    def slots(self, base: int, size: int) -> mx.array:
        """Where a write goes in buffers that start at a position, [B, 1, L, 1].

        All layers of a write share it: each operation costs a kernel's launch.
        """
        if (base, size) not in self._slots:
            slots = self.offset[:, None] + mx.arange(-base, size - base)
            self._slots[base, size] = slots[:, None, :, None]
        return self._slots[base, size]

    def reserve(self, size: int) -> None:
        """Make room for a write of ``size`` tokens."""
        self._slots.clear()
        for layer in self.layers:
            layer.reserve(self.bounds[1] + size, self._kept)

    @property
    def largest(self) -> int:
        """Bytes of the largest buffer."""
        return max(layer.keys.nbytes for layer in self.layers)

    def wrote(self, size: int, accepted: Optional[mx.array]) -> None:
        """Count a write of a seed token and drafts.

        Args:
            size: 1 + K.
            accepted: [B] how many drafts stand, which need not be evaluated; None if
                only the host will know.
        """
        if accepted is not None:
            self.offset = self.offset + 1 + accepted.astype(mx.int32)
        self._writes.append(size)

    def landed(self, accepted: int) -> None:
        """Tell how many drafts of the earliest write stand."""
        self._writes.pop(0)
        self._kept, self.known = self.known, self.known + 1 + accepted
        if not self._writes:
            self.offset = mx.array([self.known], mx.int32)

    def snapshot(self) -> Any:
        """All that a write changes. While it is held, a write copies the buffers."""
        return self.offset, [vars(layer).copy() for layer in self.layers]

    def cancel(self, snapshot: Any) -> None:
        """Take back the latest write, which no device has begun."""
        self._writes.pop()
        self.offset, layers = snapshot
        for layer, state in zip(self.layers, layers, strict=True):
            vars(layer).update(state)

    def give_back(self, caches: list[Any], tokens: int) -> None:
        """Put the entries of the first ``tokens`` tokens back into mlx-lm's caches."""
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.give_back(cache, tokens)


class Layer:
    """One layer's buffer, which takes the place of a cache in the target's forward."""

    def __init__(self, live: Live, cache: Any) -> None:
        self._live = live
        self.window = cache.max_size if isinstance(cache, RotatingKVCache) else None
        keys, values = cache.keys, cache.values
        cache.keys = cache.values = None
        if self.window is not None:
            keys, values = map(cache._temporal_order, (keys, values))
            keys, values = keys[..., -self.window :, :], values[..., -self.window :, :]
        else:
            # What a trimmed cache left behind may be anything, even NaN.
            keys[..., cache.offset :, :] = 0
            values[..., cache.offset :, :] = 0
        self.keys, self.values = keys, values
        # The position of the first slot.
        self.base = 0 if self.window is None else cache.offset - keys.shape[2]

    @property
    def offset(self) -> mx.array:
        """Where the row ends [B], as mlx-lm's layers ask for it."""
        return self._live.offset

    def reserve(self, end: int, kept: int) -> None:
        """Make room up to position ``end``; entries that ``kept`` tokens need stay."""
        size = self.keys.shape[2]
        if end - self.base <= size:
            return
        drop = 0 if self.window is None else max(kept - self.window - self.base, 0)
        room = -(-(end - self.base - size) // ROOM) * ROOM
        self.keys = _moved(self.keys, drop, room)
        self.values = _moved(self.values, drop, room)
        self.base += drop

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Append keys and values [B, heads, L, head size] where the row ends."""
        size = keys.shape[2]
        if self._live.exact:
            start = self._live.bounds[0] - self.base
            self.keys[..., start : start + size, :] = keys
            self.values[..., start : start + size, :] = values
        else:
            slots = self._live.slots(self.base, size)
            self.keys = mx.put_along_axis(self.keys, slots, keys, axis=2)
            self.values = mx.put_along_axis(self.values, slots, values, axis=2)
        span = self._span(size)
        return self.keys[..., span, :], self.values[..., span, :]

    def make_mask(
        self, size: int, return_array: bool = False, window_size: Optional[int] = None
    ) -> Optional[mx.array]:
        """What each of the next ``size`` queries sees; [B, 1, L, entries]."""
        if size == 1 and self._live.exact:
            return None
        queries = self.offset[:, None] + mx.arange(size)
        return self._mask(queries, self._span(size))

    def view(self) -> View:
        """What a drafter sees: the newest ``window`` entries that hold a token."""
        span = self._span(0)
        mask = None
        if not self._live.exact:
            mask = self._mask(self.offset[:, None] - 1, span)
        return View(self.keys[..., span, :], self.values[..., span, :], mask)

    def give_back(self, cache: Any, tokens: int) -> None:
        """Fill one of mlx-lm's caches with the first ``tokens`` tokens."""
        cache.offset = tokens
        if self.window is None:
            cache.keys, cache.values = self.keys, self.values
            return
        end = tokens - self.base
        held = slice(max(end - self.window, 0), end)
        # Copies, as a view would keep the whole buffer.
        cache.keys = mx.contiguous(self.keys[..., held, :])
        cache.values = mx.contiguous(self.values[..., held, :])
        cache._idx = cache.keys.shape[2]

    def _span(self, size: int) -> slice:
        """Slots that ``size`` queries at the row's end may see; 0 for a drafter's."""
        low, high = self._live.bounds
        first = low if size else low - 1
        start = 0 if self.window is None else first - self.window + 1 - self.base
        return slice(max(start, 0), high + size - self.base)

    def _mask(self, last: mx.array, span: slice) -> mx.array:
        """The ``window`` newest slots up to a last position [B, L]."""
        last = last[:, None, :, None]
        positions = mx.arange(span.start, span.stop) + self.base
        seen = positions <= last
        return seen if self.window is None else seen & (positions > last - self.window)


def _moved(entries: mx.array, drop: int, room: int) -> mx.array:
    """Drop the first entries, and add room behind the last."""
    shape = list(entries.shape)
    shape[2] = room
    return mx.concatenate([entries[..., drop:, :], mx.zeros(shape, entries.dtype)], 2)

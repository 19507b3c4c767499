"""The target's K/V while rounds run, and in mlx-lm's own caches at every stop.

mlx-lm's sliding-window cache copies its window at every write of several tokens, and
``trim_prompt_cache`` does nothing, without a word, once the window is full. During a
generation the K/V therefore live in linear buffers with room to spare: a round appends
in place. At every stop the entries go back into mlx-lm's caches, exactly as many as
were emitted.
"""

from dataclasses import replace
from typing import Any, Optional

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from .buffers import Buffers, padded
from .rounds import MTPError


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


class Live:
    """The K/V while rounds run.

    A *write* is one forward of the target. ``landed`` says how many of its tokens
    stand, once the host knows; until then the end of the row is known on the device
    and, on the host, to lie between two bounds.

    Args:
        caches: mlx-lm's caches, which hold at least one token. Their entries move
            here until ``give_back``.
    """

    def __init__(self, caches: list[Any]) -> None:
        self.known = length(caches)  # tokens held once all that landed is counted
        self._kept = self.known  # what may be given back is at least this long
        self._writes: list[int] = []  # sizes of those that have not landed
        windows = tuple(
            cache.max_size if isinstance(cache, RotatingKVCache) else None
            for cache in caches
        )
        taken = [take(cache) for cache in caches]
        held = [keys.shape[2] for (keys, _), w in zip(taken, windows, strict=True) if w]
        self.buffers = Buffers(
            windows,
            [padded(keys) for keys, _ in taken],
            [padded(values) for _, values in taken],
            mx.array([self.known], mx.int32),
            self.known - held[0] if held else 0,
            self.known,
        )

    @property
    def _bounds(self) -> tuple[int, int]:
        """The least and the most tokens that may be held."""
        return self.known + len(self._writes), self.known + sum(self._writes)

    @property
    def largest(self) -> int:
        """Bytes of the largest buffer."""
        return max(keys.nbytes for keys in self.buffers.keys)

    def reserve(self, size: int) -> None:
        """Make room for a write of ``size`` tokens."""
        old, end = self.buffers, self._bounds[1] + size
        assert isinstance(old.base, int)
        window = max((w for w in old.windows if w), default=0)
        base = old.base
        if any(
            w and end - base > keys.shape[2]
            for w, keys in zip(old.windows, old.keys, strict=True)
        ):
            base = max(self._kept - window, base)

        def moved(entries: mx.array, w: Optional[int]) -> mx.array:
            drop, needed = (base - old.base, end - base) if w else (0, end)
            if needed <= entries.shape[2] and not drop:
                return entries
            return padded(entries[..., drop:, :], needed)

        low, high = self._bounds
        self.buffers = Buffers(
            old.windows,
            [moved(k, w) for k, w in zip(old.keys, old.windows, strict=True)],
            [moved(v, w) for v, w in zip(old.values, old.windows, strict=True)],
            old.offset,
            base,
            low if low == high else None,
        )

    def wrote(self, size: int, accepted: Optional[mx.array]) -> None:
        """Count a write of a seed token and drafts.

        Args:
            size: 1 + K.
            accepted: [B] how many drafts stand, which need not be evaluated; None if
                only the host will know.
        """
        if accepted is not None:
            self.buffers.offset = self.buffers.offset + 1 + accepted.astype(mx.int32)
        self._writes.append(size)
        self._mark()

    def landed(self, accepted: int) -> None:
        """Tell how many drafts of the earliest write stand."""
        self._writes.pop(0)
        self._kept, self.known = self.known, self.known + 1 + accepted
        if not self._writes:
            self.buffers.offset = mx.array([self.known], mx.int32)
        self._mark()

    def snapshot(self) -> Any:
        """All that a write changes. While it is held, a write copies the buffers."""
        old = self.buffers
        return replace(old, keys=old.keys[:], values=old.values[:])

    def cancel(self, snapshot: Any) -> None:
        """Take back the latest write, which no device has begun."""
        self._writes.pop()
        self.buffers = snapshot
        self._mark()

    def _mark(self) -> None:
        low, high = self._bounds
        self.buffers.exact = low if low == high else None
        self.buffers._slots.clear()

    def give_back(self, caches: list[Any], tokens: int) -> None:
        """Put the entries of the first ``tokens`` tokens back into mlx-lm's caches."""
        held = replace(self.buffers, exact=tokens)
        for i, cache in enumerate(caches):
            cache.offset = tokens
            if held.windows[i] is None:
                cache.keys, cache.values = held.keys[i], held.values[i]
                continue
            # Copies, as a view would keep the whole buffer.
            view = held.valid(i)
            cache.keys, cache.values = map(mx.contiguous, (view.keys, view.values))
            cache._idx = cache.keys.shape[2]


def take(cache: Any) -> tuple[mx.array, mx.array]:
    """Take the entries that hold tokens, in order, out of one of mlx-lm's caches."""
    keys, values = cache.keys, cache.values
    cache.keys = cache.values = None
    if isinstance(cache, RotatingKVCache):
        keys, values = map(cache._temporal_order, (keys, values))
        return keys[..., -cache.max_size :, :], values[..., -cache.max_size :, :]
    # What a trimmed cache left behind may be anything, even NaN.
    if cache.offset < keys.shape[2]:
        keys[..., cache.offset :, :] = 0
        values[..., cache.offset :, :] = 0
    return keys, values

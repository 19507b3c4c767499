"""K/V in linear buffers, as arrays: where tokens go and who sees them.

Where a row ends is an array, so that a forward can be built, and compiled, before the
host knows how many drafts of the last round stand. What a rejection leaves behind lies
past the end, out of every query's sight.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Optional

import mlx.core as mx

ROOM = 256  # buffers have a multiple of so many slots, so that few shapes occur


class View(NamedTuple):
    """What a drafter may attend to in one layer."""

    keys: mx.array  # [B, heads, slots, head size]
    values: mx.array
    mask: Optional[mx.array] = None  # [B, 1, 1, slots], None if all of them


@dataclass
class Buffers:
    """K/V of every layer in linear buffers, and where the rows end.

    ``layers`` take the place of caches in the target's forward.

    Attributes:
        windows: W of each layer, None where it sees everything.
        keys: For each layer [B, heads, slots, head size].
        values: Likewise.
        offset: [B] int32, how many tokens a row holds.
        base: The position of the first slot in layers with a window, one number or
            [B, 1, 1, 1]; 0 elsewhere.
        exact: How many tokens are held, if the host knows.
    """

    windows: tuple[Optional[int], ...]
    keys: list[mx.array]
    values: list[mx.array]
    offset: mx.array
    base: int | mx.array
    exact: Optional[int] = None
    _slots: dict[bool, mx.array] = field(default_factory=dict)

    @property
    def layers(self) -> list["Layer"]:
        """What the target's forward calls, one per layer."""
        return [Layer(self, i) for i in range(len(self.windows))]

    def slots(self, windowed: bool, size: int) -> mx.array:
        """Where the next ``size`` tokens go, [B, 1, L, 1]; made once for all layers."""
        if windowed not in self._slots:
            slots = (self.offset[:, None] + mx.arange(size))[:, None, :, None]
            self._slots[windowed] = slots - self.base if windowed else slots
        return self._slots[windowed]

    def seen(self, i: int, last: mx.array) -> mx.array:
        """The slots of a layer that hold the newest tokens up to a position.

        Args:
            i: The layer.
            last: Positions [B, L].

        Returns:
            Mask [B, 1, L, slots].
        """
        last = last[:, None, :, None]
        window, slots = self.windows[i], mx.arange(self.keys[i].shape[2])
        if window is None:
            return slots <= last
        positions = slots + self.base
        return (positions <= last) & (positions > last - window)

    def view(self, i: int) -> View:
        """What a drafter sees of a layer: the newest W entries that hold a token."""
        mask = self.seen(i, self.offset[:, None] - 1)
        return View(self.keys[i], self.values[i], mask)

    def valid(self, i: int) -> View:
        """The same as entries without a mask; the host must know their number."""
        span = self._newest(i, 0)
        return View(self.keys[i][..., span, :], self.values[i][..., span, :])

    def _newest(self, i: int, coming: int) -> slice:
        """Slots of the newest W tokens, once ``coming`` more are written."""
        assert self.exact is not None and isinstance(self.base, int)
        window, end = self.windows[i], self.exact + coming
        if window is None:
            return slice(0, end)
        return slice(max(end - window - self.base, 0), end - self.base)


@dataclass(frozen=True)
class Layer:
    """One layer of ``Buffers``, as mlx-lm's layers use a cache."""

    buffers: Buffers
    i: int

    @property
    def offset(self) -> mx.array:
        """Where the rows end [B]."""
        return self.buffers.offset

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Append keys and values [B, heads, L, head size] where the rows end."""
        held, i, size = self.buffers, self.i, keys.shape[2]
        if size == 1 and held.exact is not None:
            span = held._newest(i, 1)
            held.keys[i][..., span.stop - 1 : span.stop, :] = keys
            held.values[i][..., span.stop - 1 : span.stop, :] = values
            return held.keys[i][..., span, :], held.values[i][..., span, :]
        slots = held.slots(held.windows[i] is not None, size)
        held.keys[i] = mx.put_along_axis(held.keys[i], slots, keys, axis=2)
        held.values[i] = mx.put_along_axis(held.values[i], slots, values, axis=2)
        return held.keys[i], held.values[i]

    def make_mask(
        self, size: int, return_array: bool = False, window_size: Optional[int] = None
    ) -> Optional[mx.array]:
        """What each of the next ``size`` queries sees; None if all of what it gets."""
        if size == 1 and self.buffers.exact is not None:
            return None
        return self.buffers.seen(self.i, self.offset[:, None] + mx.arange(size))


def padded(entries: mx.array, slots: int = 0) -> mx.array:
    """Add empty slots, up to at least ``slots`` and a multiple of ``ROOM``."""
    held = entries.shape[2]
    more = -(-max(held, slots) // ROOM) * ROOM - held
    return mx.pad(entries, [(0, 0), (0, 0), (0, more), (0, 0)]) if more else entries

"""K/V in linear buffers, as arrays: where tokens go and who sees them.

Where a row ends is an array, so that a forward can be built before the host knows how
many drafts of the last round stand; the host knows bounds. What a rejection leaves
behind lies past the end, out of every query's sight.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Optional, Union

import mlx.core as mx

ROOM = 256  # buffers have a multiple of so many slots
GRAIN = 64  # and attention reads a multiple of so many, so that few shapes occur


class View(NamedTuple):
    """What a drafter may attend to in one layer."""

    keys: mx.array  # [B, heads, slots, head size]
    values: mx.array
    mask: Optional[mx.array] = None  # [B, 1, 1, slots], None if all of them


class Write(NamedTuple):
    """Where the next tokens go and which slots they may see, in layers of a window.

    Without a mask it is one token of a row whose end the host knows: it goes to the
    last slot of the span and sees all of it.
    """

    span: slice
    slots: Union[mx.array, slice]  # [B, 1, L, 1]
    mask: Optional[mx.array] = None  # [B, 1, L, slots of the span]


@dataclass(eq=False)
class Span:
    """What the host knows of a row.

    A *write* is one forward of the target. It has *landed* once the host has read how
    many of its tokens stand.

    Attributes:
        known: Tokens held once all that landed is counted.
        kept: What may still be asked for is at least this long.
        least: The least tokens that may be held: each write has a seed token.
        most: The most tokens that may be held.
        writes: Sizes of the writes that have not landed.
    """

    known: int
    kept: int
    writes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.least = self.most = self.known

    @property
    def exact(self) -> Optional[int]:
        """How many tokens are held, if the host knows."""
        return self.least if self.least == self.most else None

    def wrote(self, size: int) -> None:
        """Tell of a write."""
        self.writes.append(size)
        self.least += 1
        self.most += size

    def landed(self, accepted: int) -> None:
        """Tell how many drafts of the earliest write stand."""
        self.most -= self.writes.pop(0) - 1 - accepted
        self.least += accepted
        self.kept, self.known = self.known, self.known + 1 + accepted


@dataclass(eq=False)
class Buffers:
    """K/V of every layer in linear buffers, and where the rows end.

    ``layers`` take the place of caches in the target's forward.

    Attributes:
        windows: W of each layer, None where it sees everything.
        keys: For each layer [B, heads, slots, head size].
        values: Likewise.
        ends: [B] int32, how many tokens a row holds, where only the device knows.
        spans: What the host knows of that.
        bases: For each row the position of the first slot in layers with a window; 0
            elsewhere.
        end: Where the rows ended when a write began, a number if there is one row and
            the host knows: mlx-lm makes an array of it in every layer, and of an array
            a copy.
        writes: What a write does, for each window.
        room: Tokens that still fit in every row; there may be room for more.
    """

    windows: tuple[Optional[int], ...]
    keys: list[mx.array]
    values: list[mx.array]
    ends: mx.array
    spans: list[Span]
    bases: tuple[int, ...]
    end: Union[mx.array, int] = field(default=0, init=False)
    writes: dict[Optional[int], Write] = field(default_factory=dict, init=False)
    room: int = field(default=0, init=False)

    @property
    def layers(self) -> list["Layer"]:
        """What the target's forward calls, one per layer."""
        # Not kept, as each refers to these buffers: they would stay until a full gc.
        return [Layer(self, i, window) for i, window in enumerate(self.windows)]

    @cached_property
    def _slots(self) -> dict[Optional[int], int]:
        """The slots that every layer of a window has."""
        slots: dict[Optional[int], int] = {}
        for window, keys in zip(self.windows, self.keys, strict=True):
            slots[window] = min(keys.shape[2], slots.get(window, keys.shape[2]))
        return slots

    @property
    def known(self) -> bool:
        """Whether the host knows how many tokens each row holds."""
        return all(span.exact is not None for span in self.spans)

    @property
    def exact(self) -> Optional[int]:
        """How many tokens the row holds, if there is but one and the host knows."""
        return self.spans[0].exact if len(self.spans) == 1 else None

    @property
    def offset(self) -> mx.array:
        """[B] int32, how many tokens a row holds."""
        if self.known:
            return mx.array([span.least for span in self.spans], mx.int32)
        return self.ends

    @cached_property
    def _base(self) -> mx.array:
        return mx.array(self.bases, mx.int32).reshape(-1, 1, 1, 1)

    def fits(self, size: int) -> bool:
        """Whether there is room for a write of ``size`` tokens to each row."""
        if self.room < size:
            self.room = min(n - self._end(w) for w, n in self._slots.items())
        return self.room >= size

    def _end(self, window: Optional[int]) -> int:
        """The slots that rows may take in layers of a window."""
        return end_of(self.spans, self.bases if window else ())

    def begin(self, size: int) -> None:
        """Start a write of ``size`` tokens to each row, for which there is room."""
        exact = self.exact
        self.room -= size
        self.end = self.offset if exact is None else exact
        self.writes = {window: self._write(window, size) for window in self._slots}

    def _write(self, window: Optional[int], size: int) -> Write:
        """A write to all layers of a window."""
        span = self.span(window, size)
        if size == 1 and self.exact is not None:
            return Write(span, slice(span.stop - 1, span.stop))
        positions = self.offset[:, None] + mx.arange(size)
        slots = positions[:, None, :, None]
        slots = slots - self._base if window else slots
        return Write(span, slots, self.seen(window, positions, span))

    def span(self, window: Optional[int], coming: int) -> slice:
        """The slots of a layer that the next tokens may see.

        Args:
            window: The layer's.
            coming: How many tokens come, each of which also sees itself; 0 for a
                drafter, which sees what is there.
        """
        exact = self.exact
        if exact is not None and coming < 2:
            end = exact + coming - (self.bases[0] if window else 0)
            return slice(max(end - window, 0) if window else 0, end)
        start, end = 0, self._end(window) + coming
        if window:
            rows = zip(self.spans, self.bases, strict=True)
            oldest = min(span.least - base for span, base in rows) - window
            start = max(oldest + min(coming, 1), 0)
        slots = self._slots[window]
        return slice(start // GRAIN * GRAIN, min(-(-end // GRAIN) * GRAIN, slots))

    def seen(self, window: Optional[int], last: mx.array, span: slice) -> mx.array:
        """Which slots of a span hold the newest tokens up to a position.

        Args:
            window: The layer's.
            last: Positions [B, L].
            span: Slots.

        Returns:
            Mask [B, 1, L, slots].
        """
        last = last[:, None, :, None]
        slots = mx.arange(span.start, span.stop)
        if window is None:
            return slots <= last
        positions = slots + self._base
        return (positions <= last) & (positions > last - window)

    def view(self, i: int) -> View:
        """What a drafter sees of a layer: the newest W entries that hold a token."""
        window, mask = self.windows[i], None
        span = self.span(window, 0)
        if self.exact is None:
            mask = self.seen(window, self.offset[:, None] - 1, span)
        return View(self.keys[i][:, :, span], self.values[i][:, :, span], mask)


@dataclass(eq=False)
class Layer:
    """One layer of ``Buffers``, as mlx-lm's layers use a cache."""

    buffers: Buffers
    i: int
    window: Optional[int]

    @property
    def offset(self) -> Union[mx.array, int]:
        """Where the rows end."""
        return self.buffers.end

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Append keys and values [B, heads, L, head size] where the rows end."""
        held, i = self.buffers, self.i
        span, slots, _ = held.writes[self.window]
        if isinstance(slots, slice):
            held.keys[i][:, :, slots] = keys
            held.values[i][:, :, slots] = values
        else:
            held.keys[i] = mx.put_along_axis(held.keys[i], slots, keys, axis=2)
            held.values[i] = mx.put_along_axis(held.values[i], slots, values, axis=2)
        return held.keys[i][:, :, span], held.values[i][:, :, span]

    def make_mask(
        self, size: int, return_array: bool = False, window_size: Optional[int] = None
    ) -> Optional[mx.array]:
        """What each of the next ``size`` queries sees; None if all of what it gets."""
        return self.buffers.writes[self.window].mask


def end_of(spans: Sequence[Span], bases: Sequence[int] = ()) -> int:
    """The slots that rows may take, if their first slots are these positions or 0."""
    if not bases:
        return max(span.most for span in spans)
    return max(span.most - base for span, base in zip(spans, bases, strict=True))


def padded(entries: mx.array, slots: int = 0) -> mx.array:
    """Add empty slots, up to at least ``slots`` and a multiple of ``ROOM``."""
    held = entries.shape[2]
    more = -(-max(held, slots) // ROOM) * ROOM - held
    return mx.pad(entries, [(0, 0), (0, 0), (0, more), (0, 0)]) if more else entries

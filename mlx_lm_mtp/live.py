"""The target's K/V while rounds run: each row a prefix of its own length.

Rows share one buffer per layer, with room to spare. A row's tokens are written at its
own end, a rejection lowers that end and moves nothing. Rows join and leave between
rounds. At every stop a row's entries go back into mlx-lm's caches, exactly as many as
were emitted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Optional

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from .buffers import ROOM, Buffers, Span, end_of, padded
from .cache import length, put, take, window


class Live:
    """Rows of K/V while rounds run.

    Args:
        rows: For each row mlx-lm's caches of one sequence, which hold at least one
            token. Their entries move here.
    """

    def __init__(self, rows: Sequence[list[Any]] = ()) -> None:
        self._empty()
        self._join(*map(_taken, rows))

    def _empty(self) -> None:
        self.buffers = Buffers((), [], [], mx.zeros((0,), mx.int32), [], ())

    @property
    def spans(self) -> list[Span]:
        """What the host knows of each row."""
        return self.buffers.spans

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(x.nbytes for x in self.buffers.keys + self.buffers.values)

    @property
    def largest(self) -> int:
        """Bytes of the largest buffer."""
        return max(keys.nbytes for keys in self.buffers.keys)

    def extend(self, other: "Live") -> None:
        """Let the rows of another join, after those that are here."""
        self._join(other.buffers)

    def _join(self, *others: Buffers) -> None:
        """Add rows, all at once, as each time copies those that are here."""
        parts = [part for part in (self.buffers, *others) if part.spans]
        if not parts:
            return

        def joined(entries: Iterable[mx.array]) -> mx.array:
            rows = list(entries)
            slots = max(row.shape[2] for row in rows)
            return mx.concatenate([padded(row, slots) for row in rows])

        self.buffers = Buffers(
            parts[0].windows,
            list(map(joined, zip(*(part.keys for part in parts), strict=True))),
            list(map(joined, zip(*(part.values for part in parts), strict=True))),
            mx.concatenate([part.offset for part in parts]),
            list(chain.from_iterable(part.spans for part in parts)),
            tuple(chain.from_iterable(part.bases for part in parts)),
        )

    def filter(self, places: list[int]) -> None:
        """Keep the rows at these places; nothing of the others is left."""
        if not places:
            self._empty()
            return
        old, rows = self.buffers, mx.array(places)
        spans = [old.spans[place] for place in places]
        end = max(span.most for span in spans)

        def kept(entries: mx.array, w: Optional[int]) -> mx.array:
            slots = entries.shape[2] if w else -(-end // ROOM) * ROOM
            return entries[:, :, :slots][rows]

        self.buffers = Buffers(
            old.windows,
            [kept(k, w) for k, w in zip(old.keys, old.windows, strict=True)],
            [kept(v, w) for v, w in zip(old.values, old.windows, strict=True)],
            old.offset[rows],
            spans,
            tuple(old.bases[place] for place in places),
        )

    def reserve(self, size: int) -> None:
        """Make room for a write of ``size`` tokens at the end of every row."""
        if not self.buffers.fits(size):
            self._make_room(size)
        self.buffers.begin(size)

    def _make_room(self, size: int) -> None:
        """Drop what no window sees any more, and go to larger buffers if need be."""
        old = self.buffers
        widest = max((w for w in old.windows if w), default=0)
        rows = list(zip(old.spans, old.bases, strict=True))
        bases = tuple(max(span.kept - widest, base) for span, base in rows)
        drops = [new - base for new, base in zip(bases, old.bases, strict=True)]
        needed = end_of(old.spans, bases) + size
        end = end_of(old.spans) + size

        def moved(entries: mx.array, w: Optional[int]) -> mx.array:
            if w:
                return padded(_dropped(entries, drops), needed)
            return padded(entries, end)

        self.buffers = replace(
            old,
            keys=list(map(moved, old.keys, old.windows)),
            values=list(map(moved, old.values, old.windows)),
            bases=bases,
        )

    def wrote(self, size: int, accepted: Optional[mx.array]) -> None:
        """Count a write of a seed token and drafts in every row.

        Args:
            size: 1 + K.
            accepted: [B] how many drafts stand, which need not be evaluated; None if
                only the host will know.
        """
        held = self.buffers
        if accepted is not None and size > 1:
            held.ends = held.offset + 1 + accepted.astype(mx.int32)
        elif not held.known:
            held.ends = held.ends + 1
        for span in self.spans:
            span.wrote(size)

    def extract(self, place: int, tokens: int) -> list[Any]:
        """The first ``tokens`` tokens of a row, copied into mlx-lm's caches."""
        caches: list[Any] = []
        for i, w in enumerate(self.buffers.windows):
            cache = RotatingKVCache(w) if w else KVCache()
            put(cache, *self._copied(place, i, tokens), tokens)
            caches.append(cache)
        return caches

    def give_back(self, caches: list[Any], tokens: int) -> None:
        """Put the first ``tokens`` tokens of the only row back into mlx-lm's caches."""
        held = self.buffers
        for i, cache in enumerate(caches):
            if held.windows[i] is None:
                put(cache, held.keys[i], held.values[i], tokens)
            else:
                put(cache, *self._copied(0, i, tokens), tokens)

    def _copied(self, place: int, i: int, tokens: int) -> tuple[mx.array, mx.array]:
        """A row's entries in a layer. Copies, as a view would keep the whole buffer."""
        held, w = self.buffers, self.buffers.windows[i]
        base = held.bases[place] if w else 0
        start = max(tokens - w - base, 0) if w else 0
        row = slice(place, place + 1), slice(None), slice(start, tokens - base)
        return mx.contiguous(held.keys[i][row]), mx.contiguous(held.values[i][row])


def _taken(caches: list[Any]) -> Buffers:
    """One row; a window's entries are aligned to its newest token."""
    known, windows = length(caches), tuple(map(window, caches))
    taken = [take(cache) for cache in caches]
    held = [keys.shape[2] for (keys, _), w in zip(taken, windows, strict=True) if w]
    return Buffers(
        windows,
        [padded(keys) for keys, _ in taken],
        [padded(values) for _, values in taken],
        mx.array([known], mx.int32),
        [Span(known, known)],
        (known - held[0] if held else 0,),
    )


def _dropped(entries: mx.array, drops: list[int]) -> mx.array:
    """Entries [B, heads, slots, D] without the first of each row."""
    least = min(drops)
    entries = entries[:, :, least:] if least else entries
    if least == max(drops):
        return entries
    last = entries.shape[2] - 1
    rows = mx.array([drop - least for drop in drops]).reshape(-1, 1, 1)
    # What is repeated at the end holds no token.
    slots = mx.minimum(mx.arange(last + 1) + rows, last)
    return mx.take_along_axis(entries, slots[..., None], axis=2)

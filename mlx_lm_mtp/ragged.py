"""The K/V of several rows while rounds run, each row a prefix of its own length.

Rows share one buffer per layer. A row's tokens are written at its own end, a rejection
lowers that end and moves nothing, and what lies past it is in nobody's sight. Rows join
and leave between rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from .buffers import ROOM, Buffers, padded
from .cache import length, take


@dataclass(eq=False)
class Span:
    """What the host knows of a row.

    Attributes:
        known: Tokens held once all that landed is counted.
        kept: What may still be asked for is at least this long.
        base: The position of the row's first slot in layers with a window.
        writes: Sizes of the forwards that have not landed.
    """

    known: int
    kept: int
    base: int
    writes: list[int] = field(default_factory=list)

    @property
    def most(self) -> int:
        """The most tokens that may be held."""
        return self.known + sum(self.writes)

    def landed(self, accepted: int) -> None:
        """Tell how many drafts of the earliest write stand."""
        self.writes.pop(0)
        self.kept, self.known = self.known, self.known + 1 + accepted


class Ragged:
    """Rows of K/V; it takes the place of ``cache.Live`` for B rows.

    Args:
        rows: For each row mlx-lm's caches of one sequence, which hold at least one
            token. Their entries move here.
    """

    def __init__(self, rows: Sequence[list[Any]] = ()) -> None:
        self._empty()
        for caches in rows:
            self.extend(_one(caches))

    def _empty(self) -> None:
        self.spans: list[Span] = []
        nobody = mx.zeros((0,), mx.int32)
        self.buffers = Buffers((), [], [], nobody, nobody.reshape(-1, 1, 1, 1))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(entries.nbytes for entries in self._all())

    @property
    def largest(self) -> int:
        """Bytes of the largest buffer."""
        return max(keys.nbytes for keys in self.buffers.keys)

    def _all(self) -> list[mx.array]:
        return self.buffers.keys + self.buffers.values

    def extend(self, other: "Ragged") -> None:
        """Let the rows of another join, after those that are here."""
        if not self.spans or not other.spans:
            if other.spans:
                self.spans, self.buffers = list(other.spans), other.buffers
            return
        ours, theirs = self.buffers, other.buffers

        def both(a: mx.array, b: mx.array) -> mx.array:
            slots = max(a.shape[2], b.shape[2])
            return mx.concatenate([padded(a, slots), padded(b, slots)])

        self.spans += other.spans
        self._replace(
            [both(a, b) for a, b in zip(ours.keys, theirs.keys, strict=True)],
            [both(a, b) for a, b in zip(ours.values, theirs.values, strict=True)],
            mx.concatenate([ours.offset, theirs.offset]),
        )

    def filter(self, places: list[int]) -> None:
        """Keep the rows at these places; nothing of the others is left."""
        self.spans = [self.spans[place] for place in places]
        if not places:
            self._empty()
            return
        old, rows = self.buffers, mx.array(places)
        end = max(span.most for span in self.spans)

        def kept(entries: mx.array, window: Optional[int]) -> mx.array:
            slots = entries.shape[2] if window else -(-end // ROOM) * ROOM
            return entries[:, :, :slots][rows]

        self._replace(
            [kept(k, w) for k, w in zip(old.keys, old.windows, strict=True)],
            [kept(v, w) for v, w in zip(old.values, old.windows, strict=True)],
            old.offset[rows],
        )

    def reserve(self, size: int) -> None:
        """Make room for a write of ``size`` tokens at the end of every row."""
        old, spans = self.buffers, self.spans
        window = max((w for w in old.windows if w), default=0)
        needed = max(span.most - span.base for span in spans) + size
        drops = None
        if any(
            w and needed > keys.shape[2]
            for w, keys in zip(old.windows, old.keys, strict=True)
        ):
            bases = [max(span.kept - window, span.base) for span in spans]
            drops = [b - span.base for b, span in zip(bases, spans, strict=True)]
            for base, span in zip(bases, spans, strict=True):
                span.base = base
            needed = max(span.most - span.base for span in spans) + size
        end = max(span.most for span in spans) + size

        def moved(entries: mx.array, w: Optional[int]) -> mx.array:
            if not w:
                return padded(entries, end)
            return padded(_dropped(entries, drops) if drops else entries, needed)

        self._replace(
            [moved(k, w) for k, w in zip(old.keys, old.windows, strict=True)],
            [moved(v, w) for v, w in zip(old.values, old.windows, strict=True)],
            old.offset,
        )

    def wrote(self, size: int, accepted: Optional[mx.array]) -> None:
        """Count a write of a seed token and drafts in every row.

        Args:
            size: 1 + K.
            accepted: [B] how many drafts stand, which need not be evaluated; None if
                only the host will know.
        """
        if accepted is not None:
            self.buffers.offset = self.buffers.offset + 1 + accepted.astype(mx.int32)
        for span in self.spans:
            span.writes.append(size)
        self.buffers._slots.clear()

    def settle(self) -> None:
        """Take the ends of all rows from the host, if nothing is on its way."""
        if not any(span.writes for span in self.spans):
            known = [span.known for span in self.spans]
            self.buffers.offset = mx.array(known, mx.int32)
            self.buffers._slots.clear()

    def extract(self, place: int, tokens: int) -> list[Any]:
        """The first ``tokens`` tokens of a row, copied into mlx-lm's caches."""
        held = self.buffers
        row = slice(place, place + 1)
        caches: list[Any] = []
        for keys, values, window in zip(
            held.keys, held.values, held.windows, strict=True
        ):
            cache = RotatingKVCache(window) if window else KVCache()
            base = self.spans[place].base if window else 0
            start = max(tokens - window - base, 0) if window else 0
            span = slice(start, tokens - base)
            cache.keys = mx.contiguous(keys[row, :, span])
            cache.values = mx.contiguous(values[row, :, span])
            cache.offset = tokens
            if window:
                cache._idx = cache.keys.shape[2]
            caches.append(cache)
        return caches

    def _replace(
        self, keys: list[mx.array], values: list[mx.array], offset: mx.array
    ) -> None:
        bases = mx.array([span.base for span in self.spans], mx.int32)
        base = bases.reshape(-1, 1, 1, 1)
        self.buffers = Buffers(self.buffers.windows, keys, values, offset, base)


def _one(caches: list[Any]) -> Ragged:
    """One row; a window's entries are aligned to its newest token."""
    known = length(caches)
    windows = tuple(
        cache.max_size if isinstance(cache, RotatingKVCache) else None
        for cache in caches
    )
    taken = [take(cache) for cache in caches]
    held = [keys.shape[2] for (keys, _), w in zip(taken, windows, strict=True) if w]
    row = Ragged()
    row.spans = [Span(known, known, known - held[0] if held else 0)]
    row.buffers = Buffers(
        windows,
        [padded(keys) for keys, _ in taken],
        [padded(values) for _, values in taken],
        mx.array([known], mx.int32),
        mx.array([row.spans[0].base], mx.int32).reshape(-1, 1, 1, 1),
    )
    return row


def _dropped(entries: mx.array, drops: list[int]) -> mx.array:
    """Entries [B, heads, slots, D] without the first of each row, in the same slots."""
    last = entries.shape[2] - 1
    slots = mx.arange(last + 1) + mx.array(drops).reshape(-1, 1, 1)
    # What is repeated at the end holds no token.
    return mx.take_along_axis(entries, mx.minimum(slots, last)[..., None], axis=2)

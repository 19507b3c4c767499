"""Rows of K/V beside Python lists: what a query sees is the tail of its own row."""

import mlx.core as mx
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from mlx_lm.models.cache import KVCache, RotatingKVCache
from tiny import poison

from mlx_lm_mtp.live import Live

ROWS = precondition(lambda self: self.texts)


class LiveMachine(RuleBasedStateMachine):
    """Each entry is the serial number of its write, so a foreign or stale one shows."""

    @initialize(window=st.integers(1, 9))
    def start(self, window):
        self.windows = (window, None)
        self.rows = Live()
        self.texts: list[list[int]] = []
        self.flying: list[list[int]] = []  # per row, accepted drafts not yet landed
        self.written = 0

    def _new(self, count):
        self.written += count
        return list(range(self.written - count + 1, self.written + 1))

    @precondition(lambda self: len(self.texts) < 5)
    @rule(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=2))
    def join(self, sizes):
        arrivals = []
        for size in sizes:
            caches = [RotatingKVCache(self.windows[0]), KVCache()]
            text = self._new(size)
            entries = mx.array(text, mx.float32)[None, None, :, None]
            for cache in caches:
                cache.update_and_fetch(entries, entries)
            poison(caches)
            arrivals.append(caches)
            self.texts.append(text)
            self.flying.append([])
        self.rows.extend(Live(arrivals))

    @ROWS
    @rule(data=st.data())
    def leave(self, data):
        places = range(len(self.texts))
        keep = [i for i in places if data.draw(st.booleans(), label="stays")]
        for i in set(places) - set(keep):
            for entries in self.rows.buffers.keys + self.rows.buffers.values:
                entries[i] = mx.nan
        self.rows.filter(keep)
        self.texts = [self.texts[i] for i in keep]
        self.flying = [self.flying[i] for i in keep]

    @ROWS
    @rule(size=st.integers(1, 9), data=st.data())
    def write(self, size, data):
        """A seed token and drafts, of which some stand; the host learns it later."""
        count = len(self.texts)
        accepted = [data.draw(st.integers(0, size - 1)) for _ in range(count)]
        self.rows.reserve(size)
        new = [self._new(size) for _ in range(count)]
        entries = mx.array(new, mx.float32)[:, None, :, None]
        layers = self.rows.buffers.layers
        for layer, window in zip(layers, self.windows, strict=True):
            mask = layer.make_mask(size, window_size=window)
            seen, values = layer.update_and_fetch(entries, entries)
            assert mx.array_equal(seen, values)
            for b in range(count):
                for i in range(size):
                    text = self.texts[b] + new[b][: i + 1]
                    found = shown(seen[b, 0, :, 0], mask, b, i)
                    assert found == (text[-window:] if window else text)
        for b in range(count):
            self.texts[b] += new[b][: 1 + accepted[b]]
            self.flying[b].append(accepted[b])
        self.rows.wrote(size, mx.array(accepted))

    @ROWS
    @rule()
    def land(self):
        for span, flying in zip(self.rows.spans, self.flying, strict=True):
            if flying:
                span.landed(flying.pop(0))

    @ROWS
    @rule(data=st.data())
    def extract(self, data):
        """At any token since the round that landed last."""
        b = data.draw(st.integers(0, len(self.texts) - 1))
        span, text = self.rows.spans[b], self.texts[b]
        end = data.draw(st.integers(span.kept, span.known + bool(self.flying[b])))
        caches = self.rows.extract(b, end)
        assert [type(c) for c in caches] == [RotatingKVCache, KVCache]
        for cache, window in zip(caches, self.windows, strict=True):
            assert cache.offset == end
            held = text[max(end - window, 0) : end] if window else text[:end]
            assert cache.keys[0, 0, :, 0].tolist() == held
            assert cache.values[0, 0, :, 0].tolist() == held

    @invariant()
    def drafters_see_the_newest(self):
        for i, window in enumerate(getattr(self, "windows", ())):
            for b, text in enumerate(self.texts):
                view = self.rows.buffers.view(i)
                found = shown(view.keys[b, 0, :, 0], view.mask, b, 0)
                assert found == (text[-window:] if window else text)


def shown(entries, mask, b, i):
    if mask is None:  # of a row that is alone, and whose end the host knows
        return entries.tolist()
    rows = zip(entries.tolist(), mask[b, 0, i].tolist(), strict=True)
    return [entry for entry, seen in rows if seen]


TestLiveMachine = LiveMachine.TestCase


def test_rows_of_different_speed_stay_in_few_slots():
    """Two rows past the window: one keeps every draft, the other none."""
    window, size, texts = 8, 4, [[1], [2]]
    live, written = Live(), 2
    for text in texts:
        cache = RotatingKVCache(window)
        entries = mx.array(text, mx.float32)[None, None, :, None]
        cache.update_and_fetch(entries, entries)
        live.extend(Live([[cache]]))
    live.extend(Live())  # nobody joins
    slots = set()
    for _ in range(300):
        live.reserve(size)
        new = [[written + size * b + i for i in range(size)] for b in range(2)]
        written += 2 * size
        entries = mx.array(new, mx.float32)[:, None, :, None]
        live.buffers.layers[0].update_and_fetch(entries, entries)
        accepted = [size - 1, 0]
        live.wrote(size, mx.array(accepted))
        for text, mine, count, span in zip(
            texts, new, accepted, live.spans, strict=True
        ):
            text += mine[: 1 + count]
            span.landed(count)
        view = live.buffers.view(0)
        for b, text in enumerate(texts):
            assert shown(view.keys[b, 0, :, 0], view.mask, b, 0) == text[-window:]
        slots.add(view.keys.shape[2])
        assert live.nbytes <= 2 * 2 * 512 * 4
    assert max(slots) <= 512
    [cache] = live.extract(1, len(texts[1]))
    assert cache.keys[0, 0, :, 0].tolist() == texts[1][-window:]

"""mlx-lm's caches beside a Python list: what a query sees is the list's tail."""

import mlx.core as mx
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from tiny import make_target

from mlx_lm_mtp import MTPError
from mlx_lm_mtp.cache import check, keep, length, valid_kv


class CacheMachine(RuleBasedStateMachine):
    """Each entry is the serial number of its write, so a stale one shows."""

    @initialize(window=st.integers(1, 9))
    def start(self, window):
        self.window = window
        self.caches = [RotatingKVCache(window), KVCache()]
        self.tokens: list[int] = []
        self.written = 0
        self.last = 0

    def _write(self, count):
        new = list(range(self.written + 1, self.written + count + 1))
        self.written += count
        mask = self.caches[0].make_mask(count, window_size=self.window)
        entries = mx.array(new, mx.float32)[None, None, :, None]
        seen = [c.update_and_fetch(entries, entries)[0] for c in self.caches]
        self.tokens += new
        self.last = count
        self._check_queries(seen[0][0, 0, :, 0].tolist(), mask, count)

    def _check_queries(self, entries, mask, count):
        """Each new query sees exactly the window that ends with itself."""
        for i in range(count):
            end = len(self.tokens) - count + i + 1
            wanted = self.tokens[max(end - self.window, 0) : end]
            if mask is None:
                seen = entries
            elif isinstance(mask, str):
                seen = entries[: len(entries) - count + i + 1]
            else:
                row = mask.reshape(-1, len(entries))[i].tolist()
                seen = [e for e, visible in zip(entries, row, strict=True) if visible]
            assert sorted(seen) == wanted, (seen, wanted)

    @rule(count=st.integers(1, 12))
    def write(self, count):
        self._write(count)

    @precondition(lambda self: self.last)
    @rule(data=st.data())
    def keep(self, data):
        drop = data.draw(st.integers(0, self.last))
        self.tokens = self.tokens[: len(self.tokens) - drop]
        keep(self.caches, len(self.tokens))
        # What was dropped whole is as if it had not been written.
        self.last = 0 if drop == self.last else self.last - drop

    @precondition(lambda self: self.tokens)
    @rule()
    def save_and_load(self):
        self.caches = [type(c).from_state(c.state) for c in self.caches]

    @invariant()
    def the_drafter_sees_the_newest(self):
        if not getattr(self, "tokens", None):
            return
        assert length(self.caches) == len(self.tokens)
        for cache, window in zip(self.caches, (self.window, None), strict=True):
            keys, values = valid_kv(cache, window)
            wanted = self.tokens[-window:] if window else self.tokens
            found = sorted(keys[0, 0, :, 0].tolist())
            # Where a write was dropped whole, a full window lacks its oldest entry,
            # which no query sees any more.
            skip = 1 if self.last == 0 else 0
            assert found[skip:] == wanted[skip:], (found, wanted)
            assert values.shape == keys.shape


TestCacheMachine = CacheMachine.TestCase


def test_dropping_more_than_the_last_write_is_refused():
    cache = RotatingKVCache(4)
    entries = mx.zeros((1, 1, 6, 2))
    cache.update_and_fetch(entries, entries)
    cache.update_and_fetch(entries[:, :, :2], entries[:, :, :2])
    with pytest.raises(RuntimeError, match="cannot drop 5 of 8 tokens"):
        keep([cache], 3)


def test_foreign_caches_are_refused():
    fresh = make_prompt_cache(make_target())
    check(make_prompt_cache(make_target()), fresh)
    cases = {
        "has 2 layers": fresh[:2],
        "unquantised cache": [fresh[0], fresh[1], QuantizedKVCache(), *fresh[3:]],
        "is a KVCache, this model needs a RotatingKVCache of window 8": [
            KVCache(),
            *fresh[1:],
        ],
        "is a RotatingKVCache of window 9": [RotatingKVCache(9), *fresh[1:]],
    }
    for message, caches in cases.items():
        with pytest.raises(MTPError, match=message):
            check(caches, make_prompt_cache(make_target()))


def test_layers_that_disagree_are_refused():
    model = make_target()
    caches = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=caches)
    caches[2].trim(1)
    with pytest.raises(MTPError, match="hold 2 to 3 tokens"):
        check(caches, make_prompt_cache(model))


def test_kept_caches_survive_a_file(tmp_path):
    model = make_target()
    caches = make_prompt_cache(model)
    model(mx.array([list(range(20))]), cache=caches)
    keep(caches, 17)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    check(loaded, make_prompt_cache(model))
    token = mx.array([[5]])
    assert mx.array_equal(model(token, cache=loaded), model(token, cache=caches))

"""The K/V of rounds beside a Python list: what a query sees is the list's tail."""

import gc

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
from tiny import VOCAB, Lean, make_target, plain, poison

from mlx_lm_mtp import MTPError, mtp_generate_step
from mlx_lm_mtp.buffers import Buffers
from mlx_lm_mtp.cache import check, length
from mlx_lm_mtp.live import Live

LIVE = precondition(lambda self: self.live is not None)
STOCK = precondition(lambda self: self.live is None)


class CacheMachine(RuleBasedStateMachine):
    """Each entry is the serial number of its write, so a stale one shows."""

    @initialize(window=st.integers(1, 9), prompt=st.integers(1, 30))
    def start(self, window, prompt):
        self.window, self.windows = window, (window, None)
        self.caches = [RotatingKVCache(window), KVCache()]
        self.live = None
        self.tokens: list[int] = []
        self.written = 0
        self.flying: list[int] = []  # accepted drafts of writes that have not landed
        self.write_stock(prompt)

    def _entries(self, count):
        new = list(range(self.written + 1, self.written + count + 1))
        self.written += count
        return new, mx.array(new, mx.float32)[None, None, :, None]

    def _check(self, seen, mask, text, count, window):
        """Each new query sees exactly the window that ends with itself."""
        for i in range(count):
            end = len(text) - count + i + 1
            wanted = text[max(end - window, 0) if window else 0 : end]
            found = seen
            if isinstance(mask, str):
                found = seen[: len(seen) - count + i + 1]
            elif mask is not None:
                row = mask.reshape(-1, len(seen))[i].tolist()
                found = [e for e, shown in zip(seen, row, strict=True) if shown]
            assert sorted(found) == wanted, (found, wanted)

    @STOCK
    @rule(count=st.integers(1, 12))
    def write_stock(self, count):
        new, entries = self._entries(count)
        mask = self.caches[0].make_mask(count, window_size=self.window)
        seen = [c.update_and_fetch(entries, entries)[0] for c in self.caches]
        self.tokens += new
        found = seen[0][0, 0, :, 0].tolist()
        self._check(found, mask, self.tokens, count, self.window)

    @STOCK
    @rule()
    def save_and_load(self):
        self.caches = [type(c).from_state(c.state) for c in self.caches]

    @STOCK
    @rule()
    def go_live(self):
        poison(self.caches)
        self.live = Live([self.caches])
        assert self.caches[0].keys is None

    def _write(self, size):
        self.live.reserve(size)
        new, entries = self._entries(size)
        for layer, window in zip(self.live.buffers.layers, self.windows, strict=True):
            mask = layer.make_mask(size, window_size=window)
            seen, values = layer.update_and_fetch(entries, entries)
            assert mx.array_equal(seen, values)
            found = seen[0, 0, :, 0].tolist()
            self._check(found, mask, self.tokens + new, size, window)
        return new

    @LIVE
    @rule(size=st.integers(1, 9), data=st.data())
    def write(self, size, data):
        """A seed token and drafts, of which some stand; the host learns it later."""
        accepted = data.draw(st.integers(0, size - 1))
        self.tokens += self._write(size)[: 1 + accepted]
        self.live.wrote(size, mx.array([accepted]))
        self.flying.append(accepted)

    @precondition(lambda self: self.live is not None and self.flying)
    @rule()
    def land(self):
        self.live.spans[0].landed(self.flying.pop(0))

    @LIVE
    @precondition(lambda self: len(self.flying) < 2)
    @rule(data=st.data())
    def give_back(self, data):
        """At any token that was handed out, with one write still flying or none."""
        flying = 1 + self.flying[0] if self.flying else 0
        known = len(self.tokens) - flying
        least = max(known - 3, self.live.spans[0].kept, 1)
        held = data.draw(st.integers(least, known + (flying > 0)))
        self.tokens = self.tokens[:held]
        self.live.give_back(self.caches, held)
        self.live, self.flying = None, []
        poison(self.caches)
        assert {c.offset for c in self.caches} == {held} == {length(self.caches)}

    @invariant()
    def the_drafter_sees_the_newest(self):
        if getattr(self, "live", None) is None:
            return
        for i, window in enumerate(self.windows):
            view = self.live.buffers.view(i)
            entries = view.keys[0, 0, :, 0].tolist()
            known = self.live.buffers.exact is not None
            assert (view.mask is None) == known, "a foreign drafter knows no masks"
            if not known:
                row = view.mask.reshape(-1).tolist()
                entries = [e for e, shown in zip(entries, row, strict=True) if shown]
            assert entries == (self.tokens[-window:] if window else self.tokens)


TestCacheMachine = CacheMachine.TestCase


def test_buffers_do_not_grow_with_a_window():
    """Ten thousand rounds past the window in the same few slots."""
    cache = RotatingKVCache(8)
    entries = mx.zeros((1, 1, 4, 2))
    cache.update_and_fetch(entries, entries)
    live = Live([[cache]])
    sizes = set()
    for _ in range(10_000):
        live.reserve(4)
        live.buffers.layers[0].update_and_fetch(entries, entries)
        live.wrote(4, mx.array([1]))
        live.spans[0].landed(1)
        mx.eval(live.buffers.keys)
        sizes.add(live.buffers.keys[0].shape[2])
    assert sizes == {256}


def test_what_is_left_is_freed_at_once():
    """Old buffers do not wait for the garbage collector, which seldom comes."""

    def held():
        return sum(isinstance(found, Buffers) for found in gc.get_objects())

    model, prompt = make_target(), [n % VOCAB for n in range(240)]
    gc.collect()
    gc.disable()
    try:
        before = held()
        drafter = Lean(prompt + plain(model, prompt, 60), [0, 2, 1])
        steps = mtp_generate_step(
            mx.array(prompt), model, drafter, max_tokens=60, num_draft_tokens=2
        )
        for _ in steps:  # past the end of the first buffers
            assert held() <= before + 1
        assert held() == before
    finally:
        gc.enable()


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


def test_caches_given_back_survive_a_file(tmp_path):
    model = make_target()
    caches = make_prompt_cache(model)
    model(mx.array([list(range(20))]), cache=caches)
    Live([caches]).give_back(caches, 20)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    check(loaded, make_prompt_cache(model))
    token = mx.array([[5]])
    assert mx.array_equal(model(token, cache=loaded), model(token, cache=caches))

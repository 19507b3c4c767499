"""The law is what mlx-lm's own chain of processors and filters draws from."""

import functools
import importlib.util
import itertools
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import sample_utils
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_lm_mtp import law

VOCAB = 11
DTYPES = (mx.bfloat16, mx.float32)
FILTERS = {
    "top_p": st.sampled_from((0.0, 0.3, 0.9, 0.95, 1.0)),
    "min_p": st.sampled_from((0.0, 0.05, 0.4, 1.0)),
    "min_tokens_to_keep": st.sampled_from((1, 3, VOCAB)),
    "top_k": st.sampled_from((0, 1, 4, VOCAB - 1)),
}
flags = st.fixed_dictionaries(
    {"temp": st.sampled_from((1e-3, 0.3, 0.7, 1, 1.5, 1e3)), **FILTERS}
)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**32 - 1)
pytestmark = pytest.mark.usefixtures("eager")


def make_logits(seed, dtype, rows=4):
    """Normalised rows [1, rows, V] with ties and impossible tokens among them."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(scale=3, size=(1, rows, VOCAB)) * 2) / 2
    logits[rng.random(logits.shape) < rng.choice((0, 0.3))] = -np.inf
    logits[..., 0] = np.maximum(logits[..., 0], -1)
    return law.normalise(mx.array(logits).astype(dtype))


def fed(sampler, logprobs):
    """What mlx-lm's sampler feeds ``categorical`` for one row [1, V], as a law."""
    drawn = []
    with mock.patch.object(sample_utils, "categorical_sampling", drawn_into(drawn)):
        sampler(logprobs)
    logits = np.array(drawn[0].astype(mx.float32), np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def drawn_into(drawn):
    return lambda logits, temp: drawn.append(logits * (1.0 / temp))


def rows_fed(sampler, logprobs):
    return np.stack([fed(sampler, row[None]) for row in logprobs[0]], 1)


def probs(logprobs):
    return np.exp(np.array(logprobs, np.float64))


# The chain.


@given(flags, dtypes, seeds)
def test_the_law_is_what_the_chain_feeds(flags, dtype, seed):
    sampler, logprobs = make_sampler(**flags), make_logits(seed, dtype)
    ours = law.law_of(sampler)(logprobs)
    assert ours.dtype == mx.float32
    np.testing.assert_allclose(probs(ours), rows_fed(sampler, logprobs), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compiled", [False, True])
def test_every_combination_of_flags(dtype, compiled):
    logprobs = make_logits(7, dtype)
    on = {"top_p": 0.8, "min_p": 0.1, "min_tokens_to_keep": 3, "top_k": 4}
    for chosen in itertools.product((False, True), repeat=len(on)):
        sampler = make_sampler(0.6, **dict(itertools.compress(on.items(), chosen)))
        (mx.enable_compile if compiled else mx.disable_compile)()
        ours = probs(law.law_of(sampler)(logprobs))
        mx.disable_compile()
        np.testing.assert_allclose(ours, rows_fed(sampler, logprobs), atol=1e-6)


@given(flags, dtypes, seeds, st.sampled_from((0.5, 0.9, 1.2)))
def test_drafts_are_heated_after_the_same_filters(flags, dtype, seed, heat):
    logprobs = make_logits(seed, dtype)
    ours = law.law_of(make_sampler(**flags)).draft(heat)(logprobs)
    hotter = make_sampler(**{**flags, "temp": flags["temp"] * heat})
    np.testing.assert_allclose(probs(ours), rows_fed(hotter, logprobs), atol=1e-6)


@given(flags, dtypes, seeds)
def test_a_row_without_mass_stays_without(flags, dtype, seed):
    logprobs = make_logits(seed, dtype)
    logprobs[:, 1] = -mx.inf
    ours = law.law_of(make_sampler(**flags))(logprobs)
    assert not mx.isnan(ours).any().item()
    assert (ours[:, 1] == -mx.inf).all().item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_mlx_lm_draws_from_the_law(dtype):
    sampler = make_sampler(0.8, top_p=0.9, min_p=0.02, top_k=6)
    row = make_logits(2, dtype, rows=1)[0]
    mx.random.seed(0)
    drawn = np.array(sampler(mx.broadcast_to(row, (100_000, VOCAB))))
    expected = probs(law.law_of(sampler)(row))[0] * len(drawn)
    counts, kept = np.bincount(drawn, minlength=VOCAB), expected > 0
    assert counts[~kept].sum() == 0
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 30


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, VOCAB, 262_144])
def test_logprobs_are_mlx_lm_s_own(dtype, size):
    logits = (3 * mx.random.normal((1, size), key=mx.random.key(0))).astype(dtype)
    reported = logits - mx.logsumexp(logits, keepdims=True)
    assert mx.array_equal(law.normalise(logits), reported)


# XTC.

xtc = st.fixed_dictionaries(
    {
        "xtc_threshold": st.sampled_from((0.05, 0.1, 0.5)),
        "xtc_special_tokens": st.sampled_from(([], [0], [1, 4])),
    }
)


@given(flags, xtc, dtypes, seeds)
def test_xtc_is_one_of_two_laws_by_each_position_s_coin(flags, xtc, dtype, seed):
    logprobs = make_logits(seed, dtype)
    coins = mx.array([[[0.0], [0.29], [0.31], [0.99]]])
    sampler = make_sampler(**flags, **xtc, xtc_probability=0.3)
    ours = probs(law.law_of(sampler)(logprobs, coins))
    never = rows_fed(make_sampler(**flags), logprobs)
    always = rows_fed(make_sampler(**flags, **xtc, xtc_probability=1.0), logprobs)
    expected = np.where(np.array(coins) > 0.3, never, always)
    np.testing.assert_allclose(ours, expected, atol=1e-6)


# On candidates.


@given(flags, dtypes, seeds, st.integers(1, 6))
def test_candidates_have_the_law_of_the_whole(flags, dtype, seed, count):
    rng = np.random.default_rng(seed)
    ids = mx.array(rng.permutation(VOCAB)[:count])[None]
    some = mx.array(rng.permutation(16)[None, :count] * 0.4).astype(dtype)
    whole = mx.put_along_axis(mx.full((1, VOCAB), -mx.inf, dtype), ids, some, -1)
    ours = law.law_of(make_sampler(**flags))
    expected = mx.take_along_axis(ours(law.normalise(whole)), ids, -1)
    drafts = ours.draft(1.0)(law.normalise(some))
    np.testing.assert_allclose(probs(drafts), probs(expected), atol=1e-6)


def test_a_filter_that_mlx_lm_refuses_is_refused():
    logprobs = law.normalise(mx.zeros((1, VOCAB)))
    sampler = make_sampler(1.0, top_k=VOCAB)
    with pytest.raises(ValueError, match="top_k"):
        sampler(logprobs)
    with pytest.raises(ValueError, match="top_k"):
        law.law_of(sampler)(logprobs)


def test_xtc_needs_the_whole_vocabulary():
    assert law.law_of(make_sampler(1.0, top_k=3)).on_candidates()
    assert not law.law_of(make_sampler(1.0, xtc_probability=0.1)).on_candidates()


# What is recognised.


def look_alike():
    sampling_methods, temp = [], 1.0

    def sampler(logprobs):
        for method in sampling_methods:
            logprobs = method(logprobs)
        return sample_utils.categorical_sampling(logprobs, temp) * 0

    return sampler


def wrapped(inner):
    return functools.wraps(inner)(lambda logprobs: inner(logprobs))


def meddled():
    sampler = make_sampler(1.0, top_k=3)
    law._cells(sampler)["sampling_methods"].append(lambda x: x)
    return sampler


def copied():
    """mlx-lm's file loaded once more: what its names mean there, we cannot know."""
    spec = importlib.util.spec_from_file_location("copied", sample_utils.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Sampler:
    def __call__(self, logprobs):
        return mx.argmax(logprobs, axis=-1)


@pytest.mark.parametrize(
    "sampler",
    [
        look_alike(),
        wrapped(make_sampler(1.0)),
        functools.partial(make_sampler(1.0)),
        lambda logprobs: mx.argmax(logprobs, axis=-1),
        meddled(),
        copied().make_sampler(1.0),
        Sampler(),
        Sampler().__call__,
        sample_utils.greedy_sampler,
        mx.argmax,
    ],
)
def test_other_samplers_are_opaque(sampler):
    assert law.law_of(sampler) is None
    assert not law.is_mlx_lm(sampler)


@given(flags)
def test_make_sampler_is_recognised(flags):
    sampler = make_sampler(**flags)
    assert law.is_mlx_lm(sampler)
    assert law.is_greedy(make_sampler(**{**flags, "temp": 0}))
    assert not law.is_greedy(sampler)


def test_greedy_is_recognised():
    assert law.is_greedy(None)
    assert law.is_greedy(make_sampler())
    assert not law.is_greedy(lambda logprobs: mx.argmax(logprobs, axis=-1))


def test_nothing_is_known_of_an_mlx_lm_that_builds_objects(monkeypatch):
    monkeypatch.setattr(law, "_SAMPLER", None)
    assert law.law_of(Sampler()) is None


def test_a_sampler_may_offer_its_law():
    sampler = Sampler()
    sampler.law = lambda logprobs: 2 * logprobs
    logprobs = make_logits(0, mx.bfloat16)
    ours = law.law_of(sampler)(logprobs)
    expected = law.log_softmax(2 * logprobs)
    assert ours.dtype == mx.float32
    assert mx.array_equal(ours, expected)
    assert mx.array_equal(law.law_of(sampler).draft(0.5)(logprobs), expected)


def test_a_sampler_of_mlx_lm_s_that_tells_its_law_is_still_taken_apart():
    sampler, logprobs = make_sampler(0.8, top_k=3), make_logits(0, mx.float32)
    sampler.law = mock.Mock(side_effect=AssertionError)
    cold = law.law_of(make_sampler(0.4, top_k=3))(logprobs)
    assert mx.array_equal(law.law_of(sampler).draft(0.5)(logprobs), cold)


# Processors.

KNOWN = make_logits_processors({1: 2.0, 3: -1.0}, 1.3, 4, 0.5, 3, 0.25, 5)


def test_mlx_lm_s_processors_are_pure():
    assert len(KNOWN) == 4
    assert all(map(law.is_pure, KNOWN))


@pytest.mark.parametrize(
    "processor",
    [
        lambda tokens, logits: logits,
        wrapped(KNOWN[1]),
        functools.partial(KNOWN[1]),
        copied().make_repetition_penalty(1.1),
        Sampler(),
        Sampler().__call__,
    ],
)
def test_other_processors_may_keep_state(processor):
    assert not law.is_pure(processor)


@given(seeds, st.integers(0, 4), st.integers(1, 6))
def test_rows_are_processed_as_in_plain_decoding(seed, num, length):
    rng = np.random.default_rng(seed)
    path = rng.integers(VOCAB, size=length + num).tolist()
    logits = make_logits(seed, mx.float32, num + 1)
    history, drafts = mx.array(path[:length]), mx.array([path[length:]], mx.uint32)
    rows = law.process_rows(KNOWN, history, drafts, logits)
    for i in range(num + 1):
        row = make_logits(seed, mx.float32, num + 1)[:, i]
        for processor in KNOWN:
            row = processor(mx.array(path[: length + i]), row)
        assert mx.array_equal(rows[:, i], row)


def test_processors_leave_the_logits_they_are_given():
    logits = make_logits(0, mx.float32, 3)
    before = np.array(logits)
    law.process_rows(KNOWN, mx.array([1, 2]), mx.array([[3, 4]]), logits)
    np.testing.assert_array_equal(np.array(logits), before)

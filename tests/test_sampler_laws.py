"""What mlx-lm's filters and temperature do to a law, by their definitions.

Holds for mlx-lm as released and with our patches applied (``test_patches.py``).
"""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    apply_xtc,
    make_sampler,
)
from test_law import VOCAB, dtypes, fed, make_logits, seeds

pytestmark = pytest.mark.usefixtures("eager")
patched = pytest.mark.skipif(
    not hasattr(make_sampler(1.0), "law"), reason="for mlx-lm with our patches"
)
NONE = -np.inf


def rows(seed, dtype):
    """Log-probs [rows, V] with ties and impossible tokens, for MLX and exactly."""
    logprobs = make_logits(seed, dtype)[0]
    return logprobs, exact(logprobs)


def exact(logprobs):
    return np.array(logprobs.astype(mx.float32), np.float64)


def kept(before, filtered):
    """Which tokens a filter keeps: it changes none of them, and keeps some."""
    after = exact(filtered)
    kept = after > NONE
    assert (after == np.where(kept, before, NONE)).all()
    assert kept.any(-1).all()
    return kept


def best_are_kept(before, kept):
    """No token that goes is likelier than one that stays."""
    stays = np.where(kept, before, np.inf).min(-1)
    goes = np.where(kept, NONE, before).max(-1)
    return (goes <= stays).all()


# Each filter -------------------------------------------------------------------------


@given(seeds, dtypes, st.sampled_from((1e-6, 0.1, 0.5, 0.9, 0.999)))
def test_top_p_keeps_the_fewest_that_hold_the_mass(seed, dtype, top_p):
    logprobs, before = rows(seed, dtype)
    stay = kept(before, apply_top_p(logprobs, top_p))
    mass, last = np.exp(before), np.where(stay, before, np.inf).min(-1, keepdims=True)
    asked = top_p * mass.sum(-1)
    assert best_are_kept(before, stay)
    assert ((mass * stay).sum(-1) >= asked - 1e-5).all()
    # Without the least likely of them (and its ties) it would be too little.
    assert ((mass * (before > last)).sum(-1) < asked + 1e-5).all()


@given(seeds, dtypes, st.sampled_from((0.01, 0.3, 1.0)), st.integers(1, VOCAB))
def test_min_p_keeps_what_is_likely_beside_the_likeliest(seed, dtype, min_p, keep):
    logprobs, before = rows(seed, dtype)
    stay = kept(before, apply_min_p(logprobs, min_p, keep))
    least = before.max(-1, keepdims=True) + np.log(min_p)
    rounding = 0.05 if dtype == mx.bfloat16 else 1e-4
    assert stay[before > least + rounding].all()
    unlikely = (stay & (before < least - rounding)).any(-1)
    assert (stay.sum(-1)[unlikely] <= keep).all()
    possible = (before > NONE).sum(-1)
    assert (stay.sum(-1) >= np.minimum(keep, possible)).all()
    assert best_are_kept(before, stay)


@given(seeds, dtypes, st.integers(1, VOCAB - 1))
def test_top_k_keeps_k_of_the_best(seed, dtype, top_k):
    logprobs, before = rows(seed, dtype)
    stay = kept(before, apply_top_k(logprobs, top_k))
    possible = (before > NONE).sum(-1)
    assert (stay.sum(-1) == np.minimum(top_k, possible)).all()
    assert best_are_kept(before, stay)


specials = st.lists(st.integers(0, VOCAB - 1), max_size=3, unique=True)


@given(seeds, st.sampled_from((0.03, 0.1, 0.5)), specials)
def test_xtc_leaves_the_least_of_the_likely(seed, threshold, special):
    # In bfloat16 the softmax inside it makes ties.
    logprobs, before = rows(seed, mx.float32)
    mass = np.exp(before) / np.exp(before).sum(-1, keepdims=True)
    assume((np.abs(mass - threshold) > 0.01 * threshold).all())
    stay = kept(before, apply_xtc(logprobs, 1.0, threshold, special))
    likely = mass > threshold
    last = np.where(likely, before, np.inf).min(-1, keepdims=True)
    goes = likely & (before > last)
    goes[:, special] = False
    assert (stay == (before > NONE) & ~goes).all()
    untouched = apply_xtc(logprobs, 0.0, threshold, special)
    assert mx.array_equal(untouched, logprobs)


@pytest.mark.parametrize("probability", [0.2, 0.7])
def test_xtc_falls_on_as_many_calls_as_it_says(probability):
    logprobs = mx.log(mx.array([[0.6, 0.4]]))
    mx.random.seed(0)
    fell = [
        apply_xtc(logprobs, probability, 0.1, [])[0, 0].item() == NONE
        for _ in range(2000)
    ]
    assert abs(np.mean(fell) - probability) < 0.05


@patched
@given(seeds)
def test_xtc_has_a_coin_for_each_row(seed):
    mx.random.seed(seed)
    logprobs = mx.log(mx.array([[0.5, 0.3, 0.2]] * 2000))
    gone = exact(apply_xtc(logprobs, 0.3, 0.1, [])) == NONE
    assert abs(gone[:, 0].mean() - 0.3) < 0.06
    assert (gone[:, 0] == gone[:, 1]).all() and not gone[:, 2].any()


# Together ----------------------------------------------------------------------------

temperatures = st.sampled_from((0.3, 0.7, 1.0, 1.5))
chains = st.fixed_dictionaries(
    {
        "top_p": st.sampled_from((0.0, 0.5, 0.9)),
        "min_p": st.sampled_from((0.0, 0.05, 0.3)),
        "xtc_probability": st.sampled_from((0.0, 1.0)),
        "xtc_threshold": st.sampled_from((0.05, 0.2)),
        "top_k": st.sampled_from((0, 1, 4)),
    }
)


def specified(row, top_p, min_p, xtc_probability, xtc_threshold, top_k):
    """The tokens that stay of one row without ties, in mlx-lm's order of filters.

    Nothing is normalised between filters but inside XTC. A row that is too near to a
    decision for float32 is left out.
    """
    order, mass = np.argsort(-row), np.exp(row)
    stay = order[row[order] > NONE]
    if top_p:
        before = np.cumsum(mass[stay]) - mass[stay]
        assume((np.abs(before - top_p * mass.sum()) > 1e-4).all())
        stay = stay[before < top_p * mass.sum()]
    if min_p:
        assume((np.abs(mass[stay] - min_p * mass[stay[0]]) > 1e-4).all())
        stay = stay[mass[stay] >= min_p * mass[stay[0]]]
    if xtc_probability:
        share = mass[stay] / mass[stay].sum()
        assume((np.abs(share - xtc_threshold) > 1e-4).all())
        stay = stay[max((share > xtc_threshold).sum() - 1, 0) :]
    return stay[:top_k] if top_k else stay


@given(st.permutations(range(VOCAB)), chains, temperatures)
def test_filters_follow_each_other_and_the_temperature_ends(ranks, flags, temp):
    logits = mx.array([ranks], mx.float32) * 0.37
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    stay = specified(exact(logprobs)[0], **flags)
    law = np.zeros(VOCAB)
    law[stay] = np.exp(exact(logprobs)[0, stay] / temp)
    found = fed(make_sampler(temp, **flags), logprobs)[0]
    np.testing.assert_allclose(found, law / law.sum(), atol=1e-6)


@patched
@given(seeds, dtypes, temperatures, chains)
def test_a_sampler_draws_from_the_law_it_tells(seed, dtype, temp, flags):
    sampler, logprobs = make_sampler(temp, **flags), rows(seed, dtype)[0]
    mx.random.seed(seed)
    drawn = sampler(logprobs)
    mx.random.seed(seed)
    assert mx.array_equal(drawn, mx.random.categorical(sampler.law(logprobs)))


DRAWN = [
    {"temp": 0.6},
    {"temp": 1.0, "top_p": 0.8},
    {"temp": 1.0, "min_p": 0.1},
    {"temp": 1.0, "top_k": 3},
    {"temp": 1.4, "top_p": 0.9, "min_p": 0.02, "top_k": 5},
    {"temp": 1.0, "xtc_probability": 1.0},
]


@pytest.mark.parametrize("flags", DRAWN, ids=str)
def test_tokens_are_drawn_from_the_law(flags):
    """Chi-square of many draws of one row."""
    row = make_logits(5, mx.float32, rows=1)[0]
    expected = fed(make_sampler(**flags), row)[0] * 100_000
    mx.random.seed(1)
    drawn = make_sampler(**flags)(mx.broadcast_to(row, (100_000, VOCAB)))
    counts, possible = np.bincount(drawn, minlength=VOCAB), expected > 0
    assert counts[~possible].sum() == 0
    assert ((counts - expected)[possible] ** 2 / expected[possible]).sum() < 30

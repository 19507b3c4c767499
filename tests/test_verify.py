"""Verification keeps the law of the target: proved, then counted, edge by edge."""

import itertools
import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_sampler
from reference import MUTANTS, Outcome, World, expected_accepted, law_error
from strategies import KINDS, make_world, worlds

from mlx_lm_mtp import residual, verify
from mlx_lm_mtp.law import law_of, log_softmax, logsumexp, total
from mlx_lm_mtp.propose import Drawn
from mlx_lm_mtp.rounds import Draft

SPEC = {"token": reference.token, "block": reference.block}
SHIPPED = {"token": verify.token, "block": verify.block}
TERMS = {"token": verify.token_terms, "block": verify.block_terms}
SCANS = {"token": reference.first_failure, "block": reference.largest}
RULES = pytest.mark.parametrize("name", SPEC)
MANY = settings(max_examples=10 * settings().max_examples)
GEMMA = 262_144


def logs(probs):
    with np.errstate(divide="ignore"):
        return mx.array(np.log(probs).astype(np.float32))


def shipped(name):
    """The stops and next laws that the MLX code itself computes, as a rule."""

    def run(x, q, p):
        x, q, p = mx.array(x), logs(q), logs(p)
        terms = TERMS[name](x, q, p)
        ends = [mx.full((len(x),), i) for i in range(p.shape[1])]
        nexts = [log_softmax(verify.follow(i, terms, q, p)) for i in ends]
        stops = SCANS[name](np.array(terms.thresholds, np.float64))
        return Outcome(stops, np.exp(np.array(mx.stack(nexts, 1), np.float64)))

    return run


# The law, by enumeration over drafts, coins and residual draws.


@RULES
@MANY
@given(worlds())
def test_the_specification_keeps_the_law(name, world):
    assert law_error(world, SPEC[name]) < 1e-12


@RULES
@MANY
@given(worlds())
def test_the_code_keeps_the_law(name, world):
    assert law_error(world, shipped(name)) < 2e-6


@RULES
@given(worlds())
def test_the_code_accepts_as_the_specification(name, world):
    accepted = expected_accepted(world, shipped(name))
    assert accepted == pytest.approx(expected_accepted(world, SPEC[name]), abs=1e-5)


@given(worlds())
def test_comparing_keeps_the_law(world):
    assert law_error(world, reference.compare) < 1e-12


DENSE = [make_world(seed, 3, 3, "dense", "never") for seed in range(20)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_rule_is_caught(mutant):
    errors = [law_error(world, MUTANTS[mutant]) for world in DENSE]
    assert max(errors) > 1e-2, errors


@RULES
def test_taking_back_an_unlikely_draft_is_caught(name):
    picky = [replace(w, drop=[q < 0.25 for q in w.q]) for w in DENSE]
    errors = [law_error(world, SPEC[name]) for world in picky]
    assert max(errors) > 1e-1, errors


@RULES
def test_greedy_drafts_told_as_sampled_are_caught(name):
    greedy = [
        replace(w, q=[np.eye(3)[q.argmax(-1)] for q in w.q], told=w.q) for w in DENSE
    ]
    errors = [law_error(world, SPEC[name]) for world in greedy]
    assert max(errors) > 1e-1, errors


def coin_error(name, kind, patterns):
    """The error where a coin at each position picks one of two worlds, as XTC's does.

    Of the coins past the emitted tokens nothing may remain: those are thrown again.
    """
    both = [make_world(seed, 2, 3, kind, "never") for seed in (4, 5)]
    mixed = [(p + r) / 2 for p, r in zip(*(w.p for w in both), strict=True)]
    mixture, law = World(mixed, both[0].q, both[0].stop), 0
    for coins in patterns:
        p = [both[c].p[n] for n, c in enumerate(coins)]
        q = [both[c].q[n] for n, c in enumerate(coins[:-1])]
        world = World(p, q, mixture.stop)
        law = law + reference.emitted(world, SPEC[name], mixture) / len(patterns)
    return abs(law - reference.target_law(mixture)).sum() / 2


@RULES
@pytest.mark.parametrize("kind", KINDS)
def test_a_coin_for_each_position_keeps_the_law(name, kind):
    assert coin_error(name, kind, list(itertools.product((0, 1), repeat=4))) < 1e-12


@RULES
def test_a_coin_for_all_positions_is_caught(name):
    assert coin_error(name, "dense", [(0,) * 4, (1,) * 4]) > 1e-2


# How much is accepted.


@MANY
@given(worlds())
def test_block_never_accepts_less_than_token(world):
    token, block = (expected_accepted(world, r) for r in SPEC.values())
    assert block >= token - 1e-12


@given(worlds(kinds=("dense",)))
def test_both_accept_more_than_comparing(world):
    compare = expected_accepted(world, reference.compare)
    assert expected_accepted(world, reference.token) >= compare - 1e-12


@given(worlds(stops=("never",)))
def test_block_accepts_what_the_prefix_weights_say(world):
    paths = reference.paths(world)
    weights = reference.prefix_weights(reference.ratios(*paths[2:]))
    expected = paths.chances @ weights[:, 1:].sum(1)
    assert expected_accepted(world, reference.block) == pytest.approx(expected)


@given(worlds(kinds=("p one-hot", "q one-hot", "equal")))
def test_block_is_token_where_a_law_is_certain(world):
    token, block = (expected_accepted(world, r) for r in SPEC.values())
    assert block == pytest.approx(token, abs=1e-12)


@given(worlds())
def test_block_is_token_for_one_draft(world):
    world = World(world.p[:2], world.q[:1], world.stop[:1])
    token, block = (expected_accepted(world, r) for r in SPEC.values())
    assert block == pytest.approx(token, abs=1e-12)


def test_the_paper_s_example():
    p, q = np.array([[1, 2]]) / 3, np.array([[2, 1]]) / 3
    never = [np.zeros(1, bool), np.zeros(2, bool)]
    world = World([p, p[[0] * 2], p[[0] * 4]], [q, q[[0] * 2]], never)
    assert expected_accepted(world, reference.token) == pytest.approx(10 / 9)
    assert expected_accepted(world, reference.block) == pytest.approx(11 / 9)


def test_block_accepts_more_on_dense_laws():
    dense = [make_world(seed, 4, 4, "dense", "never") for seed in range(20)]
    token, block = ([expected_accepted(w, r) for w in dense] for r in SPEC.values())
    gains = np.subtract(block, token)
    assert (gains > 1e-3).mean() > 0.9, gains
    assert sum(block) > 1.03 * sum(token)


# The code on random numbers: what the terms say, for every row.


def judged(name, x, q, p, u, g):
    """The specification on given draws, and which rows no rounding could change."""
    weights = reference.prefix_weights(reference.ratios(x, q, p))
    if name == "token":
        h, weights = reference.token_thresholds(x, q, p), np.ones_like(weights)
        accepted = np.cumprod(u < h, 1).sum(1)
    else:
        h = reference.block_thresholds(x, q, p)
        accepted = ((u < h) * np.arange(1, h.shape[1] + 1)).max(1)
    left = np.concatenate([reference.residuals(weights, q, p), p[:, -1:]], 1)
    left = left[np.arange(len(x)), accepted]
    with np.errstate(divide="ignore"):
        least, noisy, most = (
            np.log(np.maximum(left + e, 0)) + g for e in (-1e-6, 0, 1e-6)
        )
    token = noisy.argmax(-1)
    winner = token[:, None] == np.arange(q.shape[-1])
    clear = (least - 1e-4).max(-1, where=winner, initial=-np.inf) > most.max(
        -1, where=~winner, initial=-np.inf
    )
    return accepted, token, clear & (abs(u - h).min(1) > 1e-5)


@RULES
@given(world=worlds(), seed=st.integers(0, 2**32 - 1))
def test_the_code_does_what_the_specification_says(name, world, seed):
    rng = np.random.default_rng(seed)
    _, _, x, q, p = reference.paths(world)
    row = rng.integers(len(x), size=2000)
    x, q, p = x[row], q[row], p[row]
    u, g = rng.random(x.shape), rng.gumbel(size=q[:, 0].shape)
    accepted, token, clear = judged(name, x, q, p, u, g)
    draws = (mx.array(a, mx.float32) for a in (u, g))
    verdict = SHIPPED[name](mx.array(x), logs(q), logs(p), *draws)
    assert clear.any()
    np.testing.assert_array_equal(np.array(verdict.accepted)[clear], accepted[clear])
    np.testing.assert_array_equal(np.array(verdict.token)[clear], token[clear])


# Edges.

ODD = (-math.inf, -3e38, -1e4, -200.0, -104.0, -88.0, -1e-7, 0.0, 0.0, 1.0, 20.0)


def odd_rows(rng, *shape):
    """Laws from logits of every size; at least one token is possible."""
    logits = rng.choice(ODD, size=shape)
    logits[..., 0] = np.where(np.isinf(logits).all(-1), 0.0, logits[..., 0])
    order = rng.permuted(np.broadcast_to(np.arange(shape[-1]), shape), axis=-1)
    return log_softmax(mx.array(np.take_along_axis(logits, order, -1), mx.float32))


def odd_draws(rng, rows, num, vocab):
    """Drafts, laws and random numbers with every hazard, many rows at once."""
    p, q = odd_rows(rng, rows, num + 1, vocab), odd_rows(rng, rows, num, vocab)
    same = mx.array(rng.random((rows, num, 1)) < 0.2)
    q = mx.where(same, p[:, :-1], q)
    drawn = verify.draw(q, mx.array(rng.gumbel(size=q.shape), mx.float32))
    other = mx.array(rng.integers(vocab, size=(rows, num)), mx.uint32)
    there = mx.take_along_axis(q, other[..., None], -1)[..., 0]
    certain = (there < -80) & (there > -math.inf)  # neither drawn nor forbidden
    x = mx.where(certain | mx.array(rng.random((rows, num)) < 0.8), drawn, other)
    u = np.where(rng.random((rows, num)) < 0.3, 0.0, rng.random((rows, num)))
    g = np.where(
        rng.random((rows, vocab)) < 0.1, -np.inf, rng.gumbel(size=(rows, vocab))
    )
    return x, q, p, mx.array(u, mx.float32), mx.array(g, mx.float32)


def impossible(x, p, accepted, token):
    """How many rows emit a token of probability zero, or as good as zero."""
    path = mx.take_along_axis(p[:, :-1], x[..., None], -1)[..., 0]
    accepts_it = (mx.arange(x.shape[1]) < accepted[:, None]) & (path <= -200)
    row = mx.take_along_axis(p, accepted[:, None, None], 1)[:, 0]
    follows = mx.take_along_axis(row, token[:, None], -1)[:, 0] <= -200
    return int((accepts_it.any(axis=1) | follows).sum())


odd_cases = given(
    seed=st.integers(0, 2**32 - 1), num=st.integers(1, 4), vocab=st.integers(1, 5)
)


@RULES
@odd_cases
def test_nothing_impossible_is_emitted(name, seed, num, vocab):
    x, q, p, u, g = odd_draws(np.random.default_rng(seed), 500, num, vocab)
    verdict = SHIPPED[name](x, q, p, u, g)
    assert 0 <= verdict.accepted.min().item() <= verdict.accepted.max().item() <= num
    assert impossible(x, p, verdict.accepted, verdict.token) == 0


@RULES
@odd_cases
def test_no_term_is_nan(name, seed, num, vocab):
    x, q, p, _, _ = odd_draws(np.random.default_rng(seed), 500, num, vocab)
    terms = TERMS[name](x, q, p)
    assert not mx.isnan(terms.prefix_logs).any().item()
    assert ((terms.thresholds >= 0) & (terms.thresholds <= 1)).all().item()
    for i in range(num + 1):
        following = verify.follow(mx.full((500,), i), terms, q, p)
        assert not mx.isnan(following).any().item()
        assert (following.max(-1) > -math.inf).all().item()


@RULES
def test_accepting_at_the_threshold_is_caught(name, monkeypatch):
    def lenient(*args):
        terms = TERMS[name](*args)  # u < h + 1e-30 is u <= h for a coin of zero
        return terms._replace(thresholds=terms.thresholds + 1e-30)

    monkeypatch.setattr(verify, f"{name}_terms", lenient)
    x, q, p, u, g = odd_draws(np.random.default_rng(0), 2000, 2, 4)
    verdict = SHIPPED[name](x, q, p, u, g)
    assert impossible(x, p, verdict.accepted, verdict.token) > 0


@RULES
@odd_cases
def test_rows_do_not_know_each_other(name, seed, num, vocab):
    rows = odd_draws(np.random.default_rng(seed), 4, num, vocab)
    together = SHIPPED[name](*rows)
    alone = [SHIPPED[name](*(a[i : i + 1] for a in rows)) for i in range(4)]
    assert together.accepted.tolist() == [v.accepted.item() for v in alone]
    assert together.token.tolist() == [v.token.item() for v in alone]


@RULES
@odd_cases
def test_padding_is_as_if_absent(name, seed, num, vocab):
    x, q, p, u, g = odd_draws(np.random.default_rng(seed), 50, num, vocab)
    u = mx.maximum(u, 1e-6)  # a prefix as unlikely as that leaves no digits of p
    short = SHIPPED[name](x[:, 1:], q[:, 1:], p[:, :-1], u[:, 1:], g)
    tail = mx.full((50, 1, vocab), -math.inf)
    padded = SHIPPED[name](
        mx.concatenate([x[:, 1:], x[:, :1]], 1),
        mx.concatenate([q[:, 1:], tail], 1),
        p,
        mx.concatenate([u[:, 1:], u[:, :1]], 1),
        g,
    )
    assert padded.accepted.tolist() == short.accepted.tolist()
    assert padded.token.tolist() == short.token.tolist()


@RULES
def test_without_drafts_the_bonus_is_drawn(name):
    p, g = odd_rows(np.random.default_rng(0), 9, 1, 5), mx.random.gumbel((9, 5))
    nothing = mx.zeros((9, 0, 5)), p, mx.zeros((9, 0)), g
    verdict = SHIPPED[name](mx.zeros((9, 0), mx.uint32), *nothing)
    assert verdict.accepted.tolist() == [0] * 9
    assert verdict.token.tolist() == verify.draw(p[:, 0], g).tolist()


@given(st.integers(0, 2**32 - 1), st.integers(0, 4))
def test_match_keeps_drafts_while_they_agree(seed, num):
    rng = np.random.default_rng(seed)
    drafts, tokens = rng.integers(2, size=(9, num)), rng.integers(2, size=(9, num + 1))
    verdict = verify.match(mx.array(drafts), mx.array(tokens, mx.uint32))
    agree = [
        (*(d == t[:-1]), False).index(False)
        for d, t in zip(drafts, tokens, strict=True)
    ]
    assert verdict.accepted.tolist() == agree
    assert verdict.token.tolist() == tokens[np.arange(9), agree].tolist()


# A vocabulary of Gemma's size.


def big_logits(shape, spread, dtype):
    return (mx.random.normal(shape, key=mx.random.key(3)) * spread).astype(dtype)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 12.0])
def test_big_sums_are_accurate(dtype, spread):
    logits = big_logits((3, GEMMA), spread, dtype)
    exact = np.array(logits.astype(mx.float32), np.float64)
    sums = np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(np.exp(logsumexp(logits) - sums), 1, rtol=1e-5)
    logprobs = np.array(log_softmax(logits), np.float64)
    np.testing.assert_allclose(np.exp(logprobs).sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(logprobs, exact - sums, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 1009, GEMMA - 1, GEMMA, GEMMA + 3])
def test_totals_are_accurate(size):
    x = mx.exp(big_logits((2, 3, size), 3.0, mx.float32))
    exact = np.array(x, np.float64).sum(-1)
    np.testing.assert_allclose(total(x), exact, rtol=1e-5)


def test_thresholds_are_accurate_at_a_big_vocabulary():
    p = log_softmax(big_logits((1, 4, GEMMA), 3.0, mx.float32))
    q = log_softmax(p[:, :-1] + 0.5 * big_logits((1, 3, GEMMA), 1.0, mx.float32))
    x = mx.argmax(q + mx.random.gumbel(q.shape, key=mx.random.key(1)), -1)
    exact = [np.exp(np.array(a, np.float64)) for a in (q, p)]
    h = reference.block_thresholds(np.array(x), *exact)
    np.testing.assert_allclose(verify.block_terms(x, q, p).thresholds, h, atol=1e-5)


@pytest.mark.parametrize(("name", "rows"), [("token", 5), ("block", 8)])
def test_memory_is_a_few_rows(name, rows):
    p = log_softmax(big_logits((1, 5, GEMMA), 3.0, mx.float32))
    args = mx.zeros((1, 4), mx.uint32), p[:, :4] + 0, p, mx.zeros((1, 4)), p[:, 0] + 0
    mx.eval(args)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(SHIPPED[name](*args).token)
    assert mx.get_peak_memory() - before < rows * 4 * GEMMA


# The random numbers of a round: two rounds in a row, counted.


TRIALS = 200_000


def two_rounds(judge_by, world, ids=None):
    """Counts of the first four tokens [16]; a prefix is its bits after a leading 1."""
    order = slice(None) if ids is None else ids[0]
    p, q = (logs(np.concatenate([[[1, 1]], *laws])) for laws in (world.p, world.q))
    at = mx.ones(TRIALS, mx.int32)
    for _ in range(2):
        judge_by.begin(2)
        heads, drawn = [at], []
        for _ in range(2):
            judge_by.at = heads[-1]
            drawn.append(judge_by.draw(ids, q[heads[-1]][:, order]))
            heads.append(2 * heads[-1] + drawn[-1].token.astype(mx.int32))
        parts = zip(*drawn, strict=True)
        draft = Draft(*(None if a[0] is None else mx.stack(a, 1) for a in parts))
        heads = mx.stack(heads, 1)
        verdict = judge_by.judge(draft, p[heads]).verdict
        at = mx.take_along_axis(heads, verdict.accepted[:, None], 1)[:, 0]
        at = 2 * at + verdict.token.astype(mx.int32)
    return four_tokens(np.array(at), world)


def four_tokens(at, world):
    """Cut to four tokens, or go on as plain decoding does, and count."""
    ones = np.concatenate([[0], *(p[:, 1] for p in world.p)])
    coins = np.random.default_rng(5).random((3, len(at)))
    for coin in coins:
        at = np.where(at < 16, 2 * at + (coin < ones[np.minimum(at, 15)]), at)
        at = np.where(at >= 32, at // 2, at)
    return np.bincount(at, minlength=32)[16:]


def chi_square(counts, law):
    expected = law * counts.sum()
    return ((counts - expected) ** 2 / expected).sum()


class ReusedNoise(residual.Residual):
    """Wrong: the residual's noise is the first draft's."""

    def begin(self, num):
        super().begin(num)
        first, *others = self._noise
        self._noise, self._gumbel_key = iter([first, *others]), first


class ReusedCoin(residual.Residual):
    """Wrong: the first coin falls as the first draft was drawn."""

    def begin(self, num):
        super().begin(num)
        first, *others = self._noise
        self._noise, self._uniform_key = iter([first, *others]), first


class NoiseByPosition(residual.Residual):
    """Wrong: a discarded draft's noise comes back when its position does."""

    def draw(self, ids, logits):
        noise = mx.random.gumbel((TRIALS, 6, 2), key=mx.random.key(9))
        depth = mx.log2(self.at.astype(mx.float32) + 0.5).astype(mx.int32)
        logprobs = self._draft_law(logits)
        here = mx.take_along_axis(noise, depth[:, None, None], 1)[:, 0]
        return Drawn(verify.draw(logprobs, here), logprobs)


def smooth_world(seed):
    rng = np.random.default_rng(seed)
    p, q = ([rng.dirichlet((1, 1), 2**n) for n in range(7)] for _ in range(2))
    return World(p, q, [])


def deviation(kind, name, seed, ids=None):
    """Chi-square, 15 degrees of freedom, of two rounds under a rule."""
    mx.random.seed(seed)
    world = smooth_world(seed)
    counts = two_rounds(kind(law_of(make_sampler(1.0)), (), 2, name, 0.9), world, ids)
    return chi_square(counts, reference.target_law(World(world.p[:4], [], [])))


@RULES
@pytest.mark.parametrize("seed", range(3))
def test_two_rounds_keep_the_law(name, seed):
    assert deviation(residual.Residual, name, seed) < 45  # p = 8e-5


@RULES
def test_two_rounds_on_candidates_keep_the_law(name):
    ids = mx.broadcast_to(mx.array([[1, 0]], mx.uint32), (TRIALS, 2))
    assert deviation(residual.Residual, name, 0, ids) < 45


@pytest.mark.parametrize("kind", [ReusedNoise, ReusedCoin, NoiseByPosition])
def test_reused_random_numbers_are_caught(kind):
    assert deviation(kind, "block", 3) > 200


@RULES
def test_without_drafts_the_token_comes_from_the_target(name):
    p = log_softmax(mx.array([[[0.5, 2.0, -mx.inf]], [[-mx.inf, -mx.inf, 0.0]]]))
    none = mx.zeros((2, 0), mx.uint32)
    rest = mx.zeros((2, 1)), mx.zeros((2, 3))
    found = SHIPPED[name](none, mx.zeros((2, 0, 3)), p, *rest)
    assert found.accepted.tolist() == [0, 0] and found.token.tolist() == [1, 2]
    matched = verify.match(none, mx.array([[7], [8]]))
    assert matched.accepted.tolist() == [0, 0] and matched.token.tolist() == [7, 8]


class NeverNothing:
    """Stands for ``mx``; no function may be given or return an array of no size."""

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        found = getattr(self.module, name)
        return self.watch(found) if callable(found) else found

    @staticmethod
    def watch(function):
        def watched(*args, **kwargs):
            result = function(*args, **kwargs)
            for array in (*args, result):
                assert not isinstance(array, mx.array) or array.size
            return result

        return watched


@RULES
@pytest.mark.parametrize("num", range(1, 4))
def test_nothing_of_no_size_is_computed(name, num, monkeypatch):
    """MLX's CUDA backend dies of it: a block of one draft has no inner residual."""
    watching = NeverNothing(mx)
    monkeypatch.setattr(verify, "mx", watching)
    for part in ("_residual", "total"):
        monkeypatch.setattr(verify, part, watching.watch(getattr(verify, part)))
    drafts = mx.zeros((1, num), mx.uint32)
    q = log_softmax(mx.zeros((1, num, 5)))
    p = log_softmax(mx.zeros((1, num + 1, 5)))
    found = SHIPPED[name](drafts, q, p, mx.zeros((1, num)), mx.zeros((1, 5)))
    assert found.accepted.tolist() == [num]

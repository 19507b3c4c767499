"""The depth controller on measured and modelled machines, and in generations."""

import gc
import math
import random
import sys
from collections import deque

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import Lean, make_target, plain

from mlx_lm_mtp import MTPStats, depth, mtp_generate_step

# Wall cost of a verify of 1, 2, ... 9 tokens, and of a draft step, in plain steps.
CURVES = {
    "ideal": ([1, 1.02, 1.05, 1.10, 1.15, 1.28, 1.45, 1.65, 1.90], 0.05),
    "M4 Pro, 4-bit": ([1, 1.11, 1.31, 1.45, 1.71, 1.98, 2.20, 2.44, 2.7], 0.05),
    "E4B, mxfp8": ([1, 1.16, 1.40, 1.64, 1.88, 2.12, 2.36, 2.60, 2.84], 0.06),
    "no gain from width": ([1, 1.83, 2.55, 3.26, 3.95, 4.60, 5.28, 6.12, 6.2], 0.05),
    "MoE, uniform": ([1, 1.35, 1.68, 1.99, 2.28, 2.55, 2.81, 3.05, 3.27], 0.12),
    "MoE, overlap": ([1, 1.21, 1.42, 1.62, 1.81, 1.99, 2.17, 2.34, 2.50], 0.12),
    "E4B, H200": ([1, 2.07, 2.08, 2.40, 2.78, 2.93, 3.18, 2.33, 2.21], 0.15),
    "26B-A4B, H200": ([1, 1.21, 1.52, 1.58, 1.85, 1.97, 2.14, 2.16, 2.07], 0.1),
    "31B, H200": ([1, 2.16, 3.09, 3.91, 4.51, 5.02, 5.87, 2.63, 2.59], 0.06),
}
OVERHEAD = 0.03
FALL = 0.97  # of the acceptance from one position to the next
TEXTS = [[0.0], [0.3], [0.6], [0.8], [0.9], [0.95, 0.78, 0.54], [0.0, 0.9]]
SEGMENT = 300  # tokens of one kind of text


def costs_of(curve):
    verify, step = CURVES[curve]
    return [verify[0]] + [verify[k] + k * step + OVERHEAD for k in range(1, 9)]


def shares(acceptance):
    return [acceptance * FALL**i for i in range(8)]


def fixed_rate(costs, kinds, drafts):
    """Expected tokens per time of a fixed depth on a text that changes its kind."""
    times = [
        costs[drafts] / depth.expected_tokens(shares(kind))[drafts] for kind in kinds
    ]
    return len(times) / sum(times)


def simulate(
    controller,
    costs,
    kinds,
    tokens,
    seed=0,
    noise=0.05,
    text=100_000,
    change=0,
    slow=1,
    spells=(60, 20),
    wander=0,
):
    """Tokens per time; a round is chosen before the one that flies is known.

    Every ``text`` tokens a text ends, and its last rounds are shallow. With ``change``
    the round after another depth takes so much longer. Other programs make the machine
    ``slow``, after and for so many rounds as ``spells`` has, and heat makes its pace
    ``wander``, by so much in each plain step, while it returns in two hundred.
    """
    rng, flying = random.Random(seed), deque()
    done, time, last, disturbed = 0, 0.0, None, False
    heat, steps, weather = 0.0, 0, random.Random(seed)
    while done < tokens:
        kind = shares(kinds[done // SEGMENT % len(kinds)])
        drafts, accepted = controller.choose(text - done % text - 1), 0
        while accepted < drafts and rng.random() < kind[accepted]:
            accepted += 1
        disturbed ^= rng.random() * spells[disturbed] < 1
        seconds = costs[drafts] * rng.lognormvariate(0, noise)
        seconds *= (slow if disturbed else 1) * math.exp(heat)
        while wander and steps < time + seconds:
            heat, steps = 0.995 * heat + weather.gauss(0, wander), steps + 1
        if change and drafts != last is not None:
            seconds += change * costs[drafts]
        flying.append((drafts, [accepted], seconds))
        done, time, last = done + 1 + accepted, time + seconds, drafts
        if len(flying) > 1:
            controller.learn(*flying.popleft())
    return done / time


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize(
    "kinds",
    [[0.0], [0.3], [0.6], [0.8], [0.9], [0.95, 0.78, 0.54], [0.0, 0.9]],
    ids=str,
)
def test_adaptive_is_nearly_the_best_fixed_depth(curve, kinds):
    costs = costs_of(curve)
    rates = [fixed_rate(costs, kinds, k) for k in range(9)]
    runs = [simulate(depth.Adaptive(), costs, kinds, 8000, seed) for seed in range(2)]
    found = sum(runs) / len(runs)
    assert found >= 0.97 * max(rates), (found / max(rates), rates)
    assert found >= 0.98 * rates[0]


@given(data=st.data(), limit=st.integers(0, 20))
def test_the_limit_is_kept_and_nonsense_ignored(data, limit):
    controller = depth.Adaptive()
    for _ in range(30):
        drafts = controller.choose(limit)
        assert 0 <= drafts <= min(limit, depth.MAX_DRAFTS)
        accepted = data.draw(st.integers(0, drafts))
        seconds = data.draw(
            st.sampled_from(
                [0.0, -1.0, 5e-324, 1e-9, 0.01, 100.0, 1e300, math.nan, math.inf]
            )
        )
        controller.learn(drafts, [accepted], seconds)
    assert all(0 <= share <= 1 for share in controller.acceptance)


def settled(kinds, tokens=3000, curve="M4 Pro, 4-bit"):
    controller = depth.Adaptive()
    simulate(controller, costs_of(curve), kinds, tokens)
    return controller


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.8, 0.9])
def test_changes_of_depth_that_cost_time_do_not_mislead(curve, acceptance):
    costs, kinds = costs_of(curve), [acceptance]
    best = max(fixed_rate(costs, kinds, k) for k in range(9))
    runs = [
        simulate(depth.Adaptive(), costs, kinds, 6000, seed, change=0.4)
        for seed in range(2)
    ]
    assert sum(runs) / len(runs) >= 0.92 * best


def share_of_the_best(curve, acceptance, **machine):
    """Speed beside the best fixed depth's, on the same machine."""
    costs, kinds = costs_of(curve), [acceptance]

    def rate(controller):
        return sum(
            simulate(controller(), costs, kinds, 6000, seed, **machine)
            for seed in range(3)
        )

    best = max(range(9), key=lambda k: fixed_rate(costs, kinds, k))
    return rate(depth.Adaptive) / rate(lambda: depth.Pinned(best))


@pytest.mark.parametrize("curve", CURVES)
def test_few_changes_are_made_where_one_costs_a_round(curve):
    shares = [share_of_the_best(curve, a, change=1.0) for a in (0.6, 0.9)]
    assert sum(shares) / len(shares) >= 0.96


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.9])
def test_a_machine_that_others_use_too_is_used_well(curve, acceptance):
    assert share_of_the_best(curve, acceptance, slow=1.8) >= 0.9


def test_spells_of_other_programs_hardly_cost():
    """A depth that was tried in a busy moment is not out for long."""
    machine = {"slow": 1.6, "spells": (300, 10), "noise": 0.03, "text": 400}
    found = [share_of_the_best(c, a, **machine) for c in CURVES for a in (0.6, 0.9)]
    assert sum(found) / len(found) >= 0.975


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.9])
def test_a_pace_that_wanders_does_not_mislead(curve, acceptance):
    """What all depths have in common says nothing of any."""
    assert share_of_the_best(curve, acceptance, wander=0.02) >= 0.93


def test_the_end_of_a_text_says_nothing_of_the_next():
    """Where only few drafts fit, and few do not pay."""
    costs, runs = [1, 3, 1.3, 1.3, 1.35, 1.4, 1.45, 1.5, 1.6], range(4)

    def rate(controller):
        return sum(simulate(controller(), costs, [0.8], 8000, s, text=12) for s in runs)

    best = max(rate(lambda k=k: depth.Pinned(k)) for k in range(9))
    assert rate(depth.Adaptive) >= 0.88 * best


@pytest.mark.parametrize("curve", ["ideal", "M4 Pro, 4-bit", "MoE, overlap"])
def test_a_text_that_changes_its_kind_is_followed(curve):
    """Better than any fixed number of drafts does."""
    costs, kinds = costs_of(curve), [0.0, 0.9]
    rates = [simulate(depth.Adaptive(), costs, kinds, 12_000, s) for s in range(3)]
    assert sum(rates) / 3 >= max(fixed_rate(costs, kinds, k) for k in range(9))


def test_acceptance_is_known_well_and_a_change_of_it_soon():
    rng, controller = random.Random(0), depth.Adaptive()

    def observe(share, rounds):
        for _ in range(rounds):
            controller.learn(1, [rng.random() < share], 1.0)
            yield controller.acceptance[0]

    known = list(observe(0.6, 2000))[200:]
    spread = math.sqrt(sum((share - 0.6) ** 2 for share in known) / len(known))
    assert spread < 0.04
    assert list(observe(0.0, 25))[-1] < 0.3
    assert list(observe(1.0, 25))[-1] > 0.5


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=30))
def test_it_is_the_same_to_be_asked_after_every_round_or_once(rounds):
    asked, told = depth.Adaptive(), depth.Adaptive()
    for drafts, accepted in rounds:
        for controller in (asked, told):
            controller.learn(drafts, [min(drafts, accepted)], 1.0 + drafts)
        assert asked.best() <= depth.MAX_DRAFTS
    assert told.acceptance == pytest.approx(asked.acceptance, abs=0.05)
    assert told.best() == asked.best()


def test_it_recovers_from_both_sides():
    """From text that cannot be drafted to text that can, and back."""
    costs = costs_of("M4 Pro, 4-bit")
    controller = settled([0.0])
    assert controller.best() == 0
    simulate(controller, costs, [0.9], 1500)
    assert controller.best() >= 2
    simulate(controller, costs, [0.0], 500)
    assert controller.best() == 0


@pytest.mark.parametrize("curve", CURVES)
def test_once_learnt_a_text_without_hope_is_decoded_plainly(curve):
    costs = costs_of(curve)

    def rate(seed):
        controller = depth.Adaptive()
        simulate(controller, costs, [0.0], 400, seed)
        return simulate(controller, costs, [0.0], 800, seed)

    assert sum(map(rate, range(4))) / 4 >= 0.98 * fixed_rate(costs, [0.0], 0)


@pytest.mark.parametrize("curve", ["ideal", "E4B, H200", "31B, H200"])
@pytest.mark.parametrize("size", [2, 16])
def test_the_end_of_a_text_is_no_try(curve, size):
    """Short texts leave what it takes to find back from a text without hope."""
    costs = costs_of(curve)

    def rate(seed):
        controller = settled([0.9], curve=curve)
        simulate(controller, costs, [0.9], 3000, seed, text=size)
        simulate(controller, costs, [0.0], 1500, seed)
        found = simulate(controller, costs, [0.9], 3000, seed)
        assert controller.best() > 0
        return found

    best = max(fixed_rate(costs, [0.9], k) for k in range(9))
    assert sum(map(rate, range(4))) / 4 >= 0.75 * best


def test_a_machine_that_slows_down_is_noticed():
    controller = settled([0.8])
    assert controller.best() > 0
    slow = costs_of("no gain from width")
    simulate(controller, slow, [0.8], 3000)
    assert controller.best() == 0


@pytest.mark.parametrize("curve", CURVES)
def test_plain_rounds_that_were_timed_in_a_busy_minute_are_timed_again(curve):
    """They are never slower than rounds with drafts, which do all that they do."""
    controller, costs = depth.Adaptive(), costs_of(curve)
    simulate(controller, [2 * cost for cost in costs], [0.0], 5)
    simulate(controller, costs, [0.0], 40)
    assert simulate(controller, costs, [0.0], 400) >= 0.95
    assert controller.best() == 0


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("before, after", [(0.6, 0.6), (0.3, 0.9), (0.9, 0.3)])
@pytest.mark.parametrize("slower", [lambda x: 2 * x, lambda x: x + 1], ids=["x2", "+1"])
def test_times_of_a_slower_day_are_forgotten(curve, before, after, slower):
    """What was learnt in a long context, or on a busy machine, does not stay."""
    costs = costs_of(curve)

    def rate(seed):
        controller = depth.Adaptive()
        simulate(controller, list(map(slower, costs)), [before], 1500, seed)
        simulate(controller, costs, [after], 3000, seed)
        return simulate(controller, costs, [after], 3000, seed)

    best = max(fixed_rate(costs, [after], k) for k in range(9))
    assert sum(map(rate, range(2))) / 2 >= 0.9 * best


# A depth of one or two drafts is the best, and the deep ones look better at first.
SHALLOW = [
    (
        [1, 1.33, 1.69, 2.11, 2.25, 2.36, 2.74, 3.78, 4.71],
        [0.71, 0.14, 0.93, 0.34, 0.46, 0.71, 0.66, 0.73],
    ),
    (costs_of("MoE, uniform"), [0.7, 0.29, 0.19, *[0.18] * 5]),
]


@pytest.mark.parametrize("costs, positions", SHALLOW)
def test_a_shallow_depth_is_found_soon(costs, positions, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "shares", lambda kind: positions)
    rates = [simulate(depth.Adaptive(), costs, [None], 2000, s) for s in range(4)]
    assert sum(rates) / 4 >= 0.95 * fixed_rate(costs, [None], 1)


def test_the_depth_behind_the_hump_is_found():
    assert settled([0.9], curve="31B, H200").best() >= 7


def test_the_first_time_of_a_depth_may_compile_kernels():
    controller, seen = depth.Adaptive(), set()
    costs = costs_of("ideal")
    for _ in range(1000):
        drafts = controller.choose(8)
        factor = 1 if drafts in seen else 50
        seen.add(drafts)
        controller.learn(drafts, [round(0.9 * drafts)], factor * costs[drafts])
    assert controller.best() >= 3


def test_what_is_learnt_outlives_a_generation_but_not_the_pair():
    model = make_target("dense")
    wanted = plain(model, [1, 2], 80)
    drafter = Lean([1, 2, *wanted], [])
    stats = MTPStats()
    steps = mtp_generate_step(
        mx.array([1, 2]), model, drafter, max_tokens=80, stats=stats
    )
    assert [token for token, _, _ in steps] == wanted
    learnt = depth.learnt(model, drafter)
    assert learnt is depth.learnt(model, drafter)
    assert sum(cost.seen for cost in learnt.costs) > 0 and stats.drafted
    key, known = (id(model), id(drafter)), depth._learnt
    assert key in known
    del model, drafter, steps
    gc.collect()
    assert key not in known

"""The written specification of verification, in float64, and the law that it emits.

A rule reads drafted paths x [N, K] with the laws (probabilities) that they were drawn
from, q [N, K, V], and the target's, p [N, K + 1, V]. It answers with

- ``stops`` [N, K + 1]: how likely exactly so many drafts are accepted, over the coins;
- ``nexts`` [N, K + 1, V]: the law of the token that follows them.

``emitted`` adds that up over every path of a small world, without any sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Optional

import numpy as np


class Outcome(NamedTuple):
    stops: np.ndarray
    nexts: np.ndarray


Rule = Callable[[np.ndarray, np.ndarray, np.ndarray], Outcome]


@dataclass(frozen=True, eq=False)
class World:
    """Conditional laws for every prefix of tokens; a prefix of n tokens is a number.

    The draft ends before its next token is drawn where ``stop`` says so. Two ways to
    go wrong: ``drop`` ends it by taking back a token that was drawn, and ``told`` is
    what a rule takes for the drafter's law where the drafter draws from another.
    """

    p: list[np.ndarray]  # K + 1 of [V ** n, V]
    q: list[np.ndarray]  # K of [V ** n, V]
    stop: list[np.ndarray]  # K of [V ** n] bool
    drop: Optional[list[np.ndarray]] = None  # K of [V ** n, V] bool
    told: Optional[list[np.ndarray]] = None  # K of [V ** n, V]

    @property
    def vocab(self) -> int:
        return self.p[0].shape[-1]

    @property
    def depth(self) -> int:
        return len(self.q)


class Paths(NamedTuple):
    """Every draft that can come about; past its end the law is zero throughout."""

    chances: np.ndarray  # [N]
    numbers: np.ndarray  # [N] the path as a number, ended drafts filled up with zeros
    x: np.ndarray  # [N, K]
    q: np.ndarray  # [N, K, V]
    p: np.ndarray  # [N, K + 1, V]


def paths(world: World) -> Paths:
    """Enumerate the drafts of a world."""
    size, depth = world.vocab, world.depth
    chances, numbers = np.ones(1), np.zeros(1, int)
    ended, rows = np.zeros(1, bool), []
    drop = world.drop or [np.zeros_like(q, bool) for q in world.q]
    for q, stop, late in zip(world.q, world.stop, drop, strict=True):
        ended = ended | stop[numbers]
        pad = np.eye(1, size)  # an ended draft goes on with token 0 alone
        chances = (chances[:, None] * np.where(ended[:, None], pad, q[numbers])).ravel()
        ended = (ended[:, None] | late[numbers]).ravel()
        numbers = (numbers[:, None] * size + np.arange(size)).ravel()
        rows = [np.repeat(r, size) for r in rows] + [ended]
        taken = chances > 0
        chances, numbers, ended = chances[taken], numbers[taken], ended[taken]
        rows = [r[taken] for r in rows]
    heads = [numbers // size ** (depth - i) for i in range(depth + 1)]
    told = world.told or world.q
    return Paths(
        chances,
        numbers,
        np.stack([h % size for h in heads[1:]], 1),
        np.stack([told[i][heads[i]] * ~rows[i][:, None] for i in range(depth)], 1),
        np.stack([world.p[i][heads[i]] for i in range(depth + 1)], 1),
    )


def target_law(world: World) -> np.ndarray:
    """The law of the first K + 1 tokens of plain decoding, [V ** (K + 1)]."""
    law = np.ones(1)
    for p in world.p:
        law = (law[:, None] * p).ravel()
    return law


def emitted(world: World, rule: Rule, after: Optional[World] = None) -> np.ndarray:
    """The law of the first K + 1 tokens under a rule, plain decoding after a round.

    With ``after``, plain decoding goes on in that world.
    """
    all_paths, size, depth = paths(world), world.vocab, world.depth
    after = after or world
    stops, nexts = rule(*all_paths[2:])
    law = np.zeros(1)
    for n in range(depth + 1):
        law = (law[:, None] * after.p[n]).reshape(-1, size)
        heads = all_paths.numbers // size ** (depth - n)
        mass = (all_paths.chances * stops[:, n])[:, None] * nexts[:, n]
        np.add.at(law, heads, mass)
        law = law.ravel()
    return law


def law_error(world: World, rule: Rule) -> float:
    """Total variation between what a rule emits and the target's law."""
    return float(np.abs(emitted(world, rule) - target_law(world)).sum() / 2)


def expected_accepted(world: World, rule: Rule) -> float:
    """How many drafts a rule accepts in a round, on average."""
    all_paths = paths(world)
    stops = rule(*all_paths[2:]).stops
    return float(all_paths.chances @ stops @ np.arange(world.depth + 1))


def ratios(x: np.ndarray, q: np.ndarray, p: np.ndarray) -> np.ndarray:
    """p(x) / q(x) [N, K], zero where the draft cannot have been drawn."""
    p_x = np.take_along_axis(p[:, :-1], x[..., None], -1)[..., 0]
    q_x = np.take_along_axis(q, x[..., None], -1)[..., 0]
    return np.where(q_x > 0, p_x / np.where(q_x > 0, q_x, 1), 0)


def prefix_weights(ratio: np.ndarray) -> np.ndarray:
    """P_0 = 1, P_i = min(1, P_{i-1} ratio_i), [N, K + 1]."""
    weights = [np.ones(len(ratio))]
    for r in ratio.T:
        weights.append(np.minimum(1, weights[-1] * r))
    return np.stack(weights, 1)


def residuals(weights: np.ndarray, q: np.ndarray, p: np.ndarray) -> np.ndarray:
    """max(P_i p_i - q_i, 0) [N, K, V]."""
    return np.maximum(weights[:, :-1, None] * p[:, :-1] - q, 0)


def largest(h: np.ndarray) -> np.ndarray:
    """Stop at the largest prefix whose own coin succeeds."""
    fails = np.cumprod(1 - h[:, ::-1], axis=1)[:, ::-1]
    return np.pad(h, [(0, 0), (1, 0)], constant_values=1) * np.pad(
        fails, [(0, 0), (0, 1)], constant_values=1
    )


def first_failure(h: np.ndarray) -> np.ndarray:
    """Stop before the first draft whose coin fails."""
    reached = np.pad(np.cumprod(h, axis=1), [(0, 0), (1, 0)], constant_values=1)
    return reached * np.pad(1 - h, [(0, 0), (0, 1)], constant_values=1)


def next_laws(weights: np.ndarray, q: np.ndarray, p: np.ndarray) -> np.ndarray:
    """The normalised residuals, and after K acceptances the target's law."""
    left = residuals(weights, q, p)
    mass = left.sum(-1, keepdims=True)
    recovered = np.where(mass > 0, left / np.where(mass > 0, mass, 1), p[:, :-1])
    return np.concatenate([recovered, p[:, -1:]], 1)


def token_thresholds(x: np.ndarray, q: np.ndarray, p: np.ndarray) -> np.ndarray:
    return np.minimum(1, ratios(x, q, p))


def block_thresholds(x: np.ndarray, q: np.ndarray, p: np.ndarray) -> np.ndarray:
    """h_i = S_i / (S_i + 1 - P_i), 0 / 0 being 1; h_K = P_K."""
    weights = prefix_weights(ratios(x, q, p))
    mass, rest = residuals(weights, q, p).sum(-1)[:, 1:], 1 - weights[:, 1:-1]
    whole = mass + rest
    h = np.where(whole > 0, mass / np.where(whole > 0, whole, 1), 1)
    return np.concatenate([h, weights[:, -1:]], 1)


def token(x: np.ndarray, q: np.ndarray, p: np.ndarray) -> Outcome:
    """Leviathan et al. 2023, Chen et al. 2023."""
    h = token_thresholds(x, q, p)
    return Outcome(first_failure(h), next_laws(np.ones_like(p[..., 0]), q, p))


def block(x: np.ndarray, q: np.ndarray, p: np.ndarray) -> Outcome:
    """Sun et al., block verification, ICLR 2025."""
    weights = prefix_weights(ratios(x, q, p))
    return Outcome(largest(block_thresholds(x, q, p)), next_laws(weights, q, p))


def compare(x: np.ndarray, q: np.ndarray, p: np.ndarray) -> Outcome:
    """Keep a draft while an independent draw from the target equals it (mlx-lm)."""
    h = np.take_along_axis(p[:, :-1], x[..., None], -1)[..., 0] * (q.sum(-1) > 0)
    others = p[:, :-1] * (np.arange(p.shape[-1]) != x[..., None])
    others = np.where(q.sum(-1, keepdims=True) > 0, others, p[:, :-1])
    mass = others.sum(-1, keepdims=True)
    nexts = others / np.where(mass > 0, mass, 1)
    return Outcome(first_failure(h), np.concatenate([nexts, p[:, -1:]], 1))


def token_residual(x: np.ndarray, q: np.ndarray, p: np.ndarray) -> Outcome:
    """Wrong: accept by block, recover as if by token."""
    return Outcome(block(x, q, p).stops, token(x, q, p).nexts)


def cumulative_product(x: np.ndarray, q: np.ndarray, p: np.ndarray) -> Outcome:
    """Wrong: P_i for h_i."""
    weights = prefix_weights(ratios(x, q, p))
    return Outcome(largest(weights[:, 1:]), next_laws(weights, q, p))


def first_failed_coin(x: np.ndarray, q: np.ndarray, p: np.ndarray) -> Outcome:
    """Wrong: the block rule's coins, scanned as the token rule's."""
    h = block_thresholds(x, q, p)
    return Outcome(first_failure(h), block(x, q, p).nexts)


def last_inner(x: np.ndarray, q: np.ndarray, p: np.ndarray) -> Outcome:
    """Wrong: h_K computed as the others are, by the mass that P_K p leaves."""
    weights = prefix_weights(ratios(x, q, p))
    h = block_thresholds(x, q, p)
    h[:, -1:] = 1 / (2 - weights[:, -1:])
    return Outcome(largest(h), next_laws(weights, q, p))


def plain_recovery(x: np.ndarray, q: np.ndarray, p: np.ndarray) -> Outcome:
    """Wrong: after a rejection draw from the target's law."""
    return Outcome(token(x, q, p).stops, p)


MUTANTS: dict[str, Rule] = {
    "token residual": token_residual,
    "cumulative product": cumulative_product,
    "first failed coin": first_failed_coin,
    "last inner": last_inner,
    "plain recovery": plain_recovery,
}

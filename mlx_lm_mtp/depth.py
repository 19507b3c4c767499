"""How many tokens to draft next, learnt from what rounds cost and what they accept.

The best depth K earns the most tokens per second: 1 + r1 + r1 r2 + ... + r1..rK
expected tokens for the measured wall time of a round with K drafts. Nothing is assumed
about the times: on some backends a wide verify is cheaper than a narrower one, so every
depth is tried that could pay. Trying costs something, and is paid from a purse: a
little of the time, and what lucky tries earn. So does every change of depth, on some
backends as much as a round. Depth 0 is plain decoding.

Only past rounds decide, so the law of the text is kept; see docs/lossless.md.
"""

import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from operator import mul
from typing import Any, Optional, Protocol

from .estimate import UNKNOWN, Costs, Position

MAX_DRAFTS = 8
PURSE = 0.0075  # of the time may go into depths that are not the best known
POOR = 0.5  # of that, where no depth comes near plain decoding
FULL = 16.0  # plain steps that a new purse holds, and no purse more
FIRST = 3  # the depth that is tried first
STRETCH = 3  # rounds of a depth that are chosen at once
STEADY = 8  # and if nothing else is worth it
DWELL = 25  # rounds in which a better depth has to earn what the change costs
PAUSE = 16  # and without drafts, where nothing can be learnt, at most
CLEAR = 0.9  # of plain decoding's speed, below which others are out of the question
LOSSES = 9  # of changes that are remembered


class Depth(Protocol):
    """Chooses the number of drafts of each round."""

    def choose(self, limit: int) -> int:
        """The number of drafts of the next round, at most ``limit``."""

    def learn(self, drafts: int, accepted: Sequence[int], seconds: float) -> None:
        """Hear what a round cost, and how many drafts of each row stood."""


class Pinned:
    """Always the same number."""

    def __init__(self, drafts: int) -> None:
        self._drafts = drafts

    def choose(self, limit: int) -> int:
        return min(self._drafts, limit)

    def learn(self, drafts: int, accepted: Sequence[int], seconds: float) -> None:
        pass


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """Tokens of a round, for each number of drafts from 0 on.

    Args:
        acceptance: For each position, the share accepted where the one before was.
    """
    return list(accumulate(accumulate(acceptance, mul), initial=1.0))


def best_depth(speeds: Mapping[int, float]) -> int:
    """The number of drafts of the highest speed."""
    return max(speeds, key=speeds.__getitem__, default=0)


class Adaptive:
    """Learns from every round of a pair, in this and later generations."""

    def __init__(self) -> None:
        self.positions = [Position() for _ in range(MAX_DRAFTS)]
        self.costs = Costs(MAX_DRAFTS + 1)
        self._purse = 0.0  # seconds
        self._saved = PURSE  # of a round's time, for the purse
        self._rounds = 0  # that nothing has aged by yet
        self._heard: list[tuple[int, Sequence[int], float]] = []
        self._tries: Counter[int] = Counter()  # rounds that fly, by depth
        self._stretch = Stretch()
        self._landed: Optional[int] = None  # depth of the latest round that landed
        self._best = 0  # depth to stay at while another is hardly better
        self._lost: deque[float] = deque([0.0], maxlen=LOSSES)  # seconds, by changes

    def choose(self, limit: int) -> int:
        limit = max(min(limit, MAX_DRAFTS), 0)
        self._rounds += 1
        stretch = self._stretch
        if stretch.left and stretch.drafts <= limit:
            stretch.left -= 1
        else:
            self._stretch = stretch = self._next(limit)
        self._tries[stretch.drafts] += stretch.tries
        return stretch.drafts

    def _next(self, limit: int) -> "Stretch":
        """What to do for the next rounds."""
        self._catch_up()
        if not self.costs[0].sure:
            return Stretch()
        known = self._rates()
        rates = {k: rate for k, rate in known.items() if k <= limit}
        best = self._settled(rates)
        tried, price = self._worth_trying(limit, best, rates[best])
        chosen = tried if price < self._purse else best
        rounds = STEADY if chosen == best == self._stretch.drafts else STRETCH
        # A depth that is too deep for now may be near plain decoding too.
        hopeless = max(list(known.values())[1:], default=inf) < CLEAR * known[0]
        self._saved = POOR * PURSE if hopeless else PURSE
        if hopeless and not chosen:
            # Until the purse can pay for a try, nothing will be learnt.
            wait = (price - self._purse) / (self._saved * self.costs.usual(0))
            rounds = max(rounds, int(min(wait, PAUSE)))
        return Stretch(chosen, rounds - 1, tries=chosen != best)

    def _settled(self, rates: Mapping[int, float]) -> int:
        """The best depth known, if a change to it earns what it costs."""
        best = best_depth(rates)
        if self._best not in rates:
            return best
        pays = 1 + self._change / (DWELL * self.costs.usual(self._best))
        if rates[best] > pays * rates[self._best]:
            self._best = best
        return self._best

    @property
    def _change(self) -> float:
        """Seconds that a change of depth costs, in three of four cases at least."""
        return max(sorted(self._lost)[len(self._lost) // 4], 0.0)

    def _worth_trying(self, limit: int, best: int, rate: float) -> tuple[int, float]:
        """A depth that may be better than the best known, and its price in seconds.

        It is the one that may win most for its price: often a cheap one tells enough.
        """
        seconds = self.costs.hoped(limit)
        tokens = expected_tokens([position.hope() for position in self.positions])
        usual, change = expected_tokens(self._shares()), 2 * self._change
        options, known = [(0.0, best, 0.0)], any(cost.seen for cost in self.costs[1:])
        for k in range(limit + 1) if known else [min(FIRST, limit)]:
            gain = tokens[k] / seconds[k] / rate - 1
            if k == best or gain <= 0:
                continue
            cost = self.costs.expected(k)
            if self.costs[k].sure:
                # It may be old and far too dear: expect one between it and the hope.
                cost = (cost + seconds[k]) / 2
            price = STRETCH * (cost - usual[k] / rate) + change
            options.append((gain / (max(price, 0.0) + seconds[0]), k, price))
        return max(options)[1:]

    def learn(self, drafts: int, accepted: Sequence[int], seconds: float) -> None:
        # What runs once in a round finds its code and data in no cache of the
        # processor, so that costs four times as much.
        if drafts <= MAX_DRAFTS and 1e-6 < seconds < 1e6 and accepted:
            self._heard.append((drafts, accepted, seconds))

    def _catch_up(self) -> None:
        """Age by the rounds that were chosen, and learn from those that landed."""
        for position in self.positions:
            position.age += self._rounds
        self.costs.wait(self._rounds)
        self._rounds = 0
        heard, self._heard = self._heard, []
        for drafts, accepted, seconds in heard:
            self._time(drafts, accepted, seconds)
            for i, position in enumerate(self.positions[:drafts]):
                judged = sum(most >= i for most in accepted)
                position.add(sum(most > i for most in accepted), judged)

    def _time(self, drafts: int, accepted: Sequence[int], seconds: float) -> None:
        """Learn what a round cost, and whether that was worth it."""
        changed = self._landed != drafts  # a machine needs a round to settle then
        self.costs.pace.wait()
        if not changed:
            self.costs.add(drafts, seconds)
        elif self.costs[drafts].sure:
            usual = self.costs.usual(drafts)
            self._lost.append(min(self.costs.pace.usual(seconds) - usual, usual))
        self._landed = drafts
        self._pay(drafts, sum(accepted) / len(accepted), changed)

    def best(self, limit: int = MAX_DRAFTS) -> int:
        """The depth that earns most by what is known."""
        self._catch_up()
        return best_depth(self._rates(limit))

    def _rates(self, limit: int = MAX_DRAFTS) -> dict[int, float]:
        """Expected tokens per second at the depths that have been measured."""
        tokens = expected_tokens(self._shares())
        known = [k for k in range(limit + 1) if self.costs[k].seen]
        return {k: tokens[k] / self.costs.usual(k) for k in known}

    @property
    def acceptance(self) -> list[float]:
        """The share accepted at each position where the one before was."""
        self._catch_up()
        return self._shares()

    def _shares(self) -> list[float]:
        shares, prior = [], UNKNOWN
        for position in self.positions:
            prior = position.share(prior)
            shares.append(prior)
        return shares

    def _pay(self, drafts: int, accepted: float, changed: bool) -> None:
        """Earn a share of a round's time, and book what a try cost or won.

        A try is booked against what the best known depth would have earned, by its
        usual time, or the one to be expected: what once compiled kernels says nothing
        of the depth. It costs a change there and one back. A round that is shallow
        because its text ends is no try.
        """
        plain, cost = self.costs[0], self.costs[drafts]
        if not plain.sure:
            self._purse = FULL * plain.value
            return
        change = self._saved * cost.value
        if self._tries[drafts]:
            self._tries[drafts] -= 1
            usual = self.costs.expected(drafts)
            change += (1 + accepted) / max(self._rates().values()) - usual
            change -= 2 * self._change if changed else 0.0
        self._purse = min(self._purse + change, FULL * self.costs.usual(0))


@dataclass
class Stretch:
    """Rounds of one depth, enough of them that two can be timed."""

    drafts: int = 0
    left: int = 0  # rounds to go
    tries: bool = False  # whether another depth is known to be better


class Adaptives(dict[int, Adaptive]):
    """What was learnt about a pair: costs by rows, and one acceptance for all.

    Rows are counted in powers of two; a sequence decoded alone is in place 0.
    """

    def of(self, rows: int) -> Adaptive:
        """What was learnt in rounds of about so many rows."""
        place = 1 << (rows - 1).bit_length() if rows else 0
        if place not in self:
            self[place] = Adaptive()
            self[place].positions = self.setdefault(0, Adaptive()).positions
        return self[place]


_learnt: dict[tuple[int, int], Adaptives] = {}


def learnt(model: Any, drafter: Any, rows: int = 0) -> Adaptive:
    """What was learnt about a pair in this process, for as long as both live.

    Args:
        model: The target.
        drafter: The drafter.
        rows: Rows of a batch; 0 for a sequence decoded alone.
    """
    key = id(model), id(drafter)
    if key not in _learnt:
        _learnt[key] = Adaptives()
        for part in (model, drafter):
            weakref.finalize(part, _learnt.pop, key, None)
    return _learnt[key].of(rows)

"""What was seen of drafts and rounds, and what may be hoped of them by now.

What is old says little: its weight falls with every round, and hope returns.
"""

from math import exp, inf, log, sqrt

MEMORY = 0.995  # weight of a position's past at each further observation
LATELY = 0.95  # the same where only the latest count
OTHER = 2.0  # standard deviations between the two that make a new text of it
FADING = 0.995  # weight of the past at each round without an observation
UNKNOWN = 0.9  # acceptance that a position may have if nothing is known
# Of the logarithm of a time:
NOISE = 0.01  # variance of a round's
SPREAD = 0.04  # variance of the machine's pace
CALM = 0.95  # of an unusual pace is left after a round
CHANGE = 1e-5  # variance that a depth's own gains per round
FALL = 4e-4  # by which it may have fallen per round, unseen
OUTLIER = 2.5  # standard deviations that count of a surprise: kernels are compiled
QUICKER = -0.4  # a surprise that tells that those before did, or met a busy minute,
FEW = 6  # if these were fewer
DRAFT = 0.03  # of a plain round is what a draft costs at least
LUCK = 0.8  # of the time to be expected is hoped for between depths that are known


class Position:
    """How often a draft position is accepted.

    Many observations tell nearly equal depths apart, but a text may change its kind in
    a moment: once the latest contradict the others, only they count.

    Attributes:
        accepted: Drafts accepted, newer ones weighing more.
        seen: Drafts judged, weighed alike.
        age: Rounds since the latest.
    """

    def __init__(self) -> None:
        self.accepted = self.seen = 0.0
        self._lately = 0.0, 0.0  # the same of the latest
        self.age = 0

    def add(self, accepted: int, seen: int) -> None:
        """Observe it so many times."""
        if not seen:
            return
        faded = FADING**self.age
        kept = MEMORY**seen * faded
        self.accepted = kept * self.accepted + accepted
        self.seen = kept * self.seen + seen
        kept = LATELY**seen * faded
        latest = kept * self._lately[0] + accepted
        number = kept * self._lately[1] + seen
        self._lately = latest, number
        share = self.share(0.5)
        usual = number * share * (1 - share) + 0.25  # a variance, of a draft at least
        if (latest - number * share) ** 2 > OTHER**2 * usual:
            self.accepted, self.seen = latest, number
        self.age = 0

    def share(self, prior: float) -> float:
        """The expected share, which is ``prior`` where nothing is known."""
        return (self.accepted + prior) / (self.seen + 1)

    def hope(self) -> float:
        """The share it may have by now."""
        weight = FADING**self.age
        return (weight * self.accepted + UNKNOWN) / (weight * self.seen + 1)


class Pace:
    """How fast the machine is just now, beside what costs of rounds are told in.

    Other programs and heat make rounds of all depths slow together. A depth that is
    measured in such a minute must not look worse than the others do. What lasts is no
    pace: it is in the cost of the depth in use, and the others are hoped to follow.

    Attributes:
        level: Logarithm of a factor on every time.
        doubt: Variance of the level.
    """

    def __init__(self) -> None:
        self.level = self.doubt = 0.0

    def usual(self, seconds: float) -> float:
        """The time that a round would have taken at the pace of the costs."""
        return seconds * exp(-self.level)

    def wait(self) -> None:
        """A round passed."""
        self.level *= CALM
        self.doubt = SPREAD + CALM**2 * (self.doubt - SPREAD)


class Cost:
    """The wall time of rounds at one depth, at the pace where costs are told.

    Time and pace are followed by a Kalman filter on logarithms. What a round took is
    split between them by how much is known of each: of a depth not seen for long the
    time has changed, of the one in use the pace.

    Attributes:
        seen: Rounds that were timed.
        age: Rounds since the latest of them.
    """

    def __init__(self) -> None:
        self.seen = self.age = 0
        self._mean = 0.0  # of the logarithm
        self._doubt = inf  # its variance

    def add(self, seconds: float, pace: Pace) -> None:
        """Observe it once."""
        found = log(seconds) - pace.level
        surprise = found - self._mean
        if not self.seen or (self.seen < FEW and surprise < QUICKER):
            self._mean, self._doubt = found, pace.doubt + NOISE
        else:
            doubt = self._by_now
            total = doubt + pace.doubt + NOISE
            most = OUTLIER * sqrt(total)
            surprise = max(-most, min(surprise, most))
            mine, other = doubt / total, pace.doubt / total
            self._mean += mine * surprise
            self._doubt = (1 - mine) * doubt
            if self.sure:
                pace.level += other * surprise
                pace.doubt *= 1 - other
        self.seen += 1
        self.age = 0

    @property
    def value(self) -> float:
        """Seconds; 0 if it was never timed."""
        return exp(self._mean) if self.seen else 0.0

    @property
    def sure(self) -> bool:
        """Whether it was measured more than once."""
        return self.seen > 1

    def hope(self, usual: float, least: float) -> float:
        """The time it may take by now, where ``usual`` was to be expected."""
        doubt = sqrt(self._by_now) if self.sure else FALL * self.age
        return max(usual * exp(-doubt), least)

    @property
    def _by_now(self) -> float:
        """The doubt, grown since the latest observation."""
        return self._doubt + CHANGE * self.age + (FALL * self.age) ** 2


class Costs(list[Cost]):
    """What rounds cost at every depth from 0, plain decoding, on.

    Attributes:
        pace: How fast the machine is beside them.
    """

    def __init__(self, depths: int) -> None:
        super().__init__(Cost() for _ in range(depths))
        self.pace = Pace()

    def wait(self, rounds: int) -> None:
        """So many rounds were begun."""
        for cost in self:
            cost.age += rounds

    def add(self, depth: int, seconds: float) -> None:
        """Observe a depth once."""
        self[depth].add(seconds, self.pace)

    def usual(self, depth: int) -> float:
        """The time that rounds of a measured depth take.

        A plain round is quicker than others, which do all that it does and more. So
        newer times of theirs bound its own: what was measured in a busy minute would
        else keep it from being tried again.
        """
        measured = self[depth].value
        if depth:
            return measured
        newer = [
            cost.value / (1 + DRAFT * k)
            for k, cost in enumerate(self)
            if cost.sure and cost.age < self[0].age
        ]
        return min([measured, *newer])

    def expected(self, depth: int) -> float:
        """The time a depth takes, as far as known: else on a line through others."""
        if self[depth].sure:
            return self.usual(depth)
        known = [k for k, cost in enumerate(self) if cost.sure]
        above = [k for k in known if k > depth]
        low = max(k for k in known if k < depth) if above else 0
        high = min(above) if above else max(known)
        first, last = self.usual(low), self.usual(high)
        return first + (last - first) * (depth - low) / max(high - low, 1)

    def hoped(self, limit: int) -> list[float]:
        """The times that depths may take, if what is old or unknown turns out well."""
        plain = self.usual(0)
        deepest = max(k for k, cost in enumerate(self) if cost.sure)
        found = []
        for k, cost in enumerate(self[: limit + 1]):
            least = plain * (1 + DRAFT * k) if k else 0.0
            if cost.sure:
                found.append(cost.hope(self.usual(k), least))
            elif k < deepest:
                found.append(cost.hope(LUCK * self.expected(k), least))
            else:
                found.append(least)
        return found

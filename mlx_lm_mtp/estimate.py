"""What was seen of drafts and rounds, and what may be hoped of them by now.

What is old says little: its weight falls with every round, and hope returns.
"""

from math import exp, inf, log, sqrt

MEMORY = 0.99  # weight of a position's past at each further observation
FADING = 0.995  # and at each round without one
UNKNOWN = 0.9  # acceptance that a position may have if nothing is known
# Of the logarithm of a time:
NOISE = 0.02  # variance of a round's
WANDER = 0.002  # of the machine's pace, per round
CHANGE = 2e-5  # of a depth's own, per round
SLOWER = 0.5  # by which a round may surprise: it may have compiled kernels
QUICKER = -0.4  # by which it tells that all before did so, or met a busy minute,
FEW = 6  # if these were fewer
FALL = 4e-4  # by which the time falls that an old one may take by now, per round


class Position:
    """How often a draft position is accepted, newer rounds weighing more."""

    def __init__(self) -> None:
        self.accepted = self.seen = 0.0
        self.age = 0  # rounds since it was last observed

    def add(self, accepted: bool) -> None:
        """Observe it once."""
        weight = MEMORY * FADING**self.age
        self.accepted = weight * self.accepted + accepted
        self.seen = weight * self.seen + 1
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

    Other programs, heat and a long context make rounds of all depths slow together. A
    depth that is measured in such a minute must not look worse than the others do.

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
        self.doubt += WANDER


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
        found = log(pace.usual(seconds))
        surprise = min(found - self._mean, SLOWER)
        if not self.seen or (self.seen < FEW and surprise < QUICKER):
            self._mean, self._doubt = found, pace.doubt + NOISE
        else:
            doubt = self._doubt + CHANGE * self.age
            mine = doubt / (doubt + pace.doubt + NOISE)
            other = pace.doubt / (doubt + pace.doubt + NOISE)
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
        doubt = sqrt(self._doubt + CHANGE * self.age) if self.sure else 0.0
        return max(usual * exp(-doubt - FALL * self.age), least)

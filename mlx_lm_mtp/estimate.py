"""What was seen of drafts and rounds, and what may be hoped of them by now.

What is old says little: its weight falls with every round, and hope returns.
"""

from collections import deque
from math import log
from statistics import median_low

MEMORY = 0.98  # weight of a position's past at each further observation
FADING = 0.995  # and at each round without one
UNKNOWN = 0.9  # acceptance that a position may have if nothing is known
SAMPLES = 9  # times of a depth that are remembered
OLD = 100  # rounds after which they may hold no longer: in another context, say
OTHER = 0.2  # by which a new time is then another one, as a logarithm
FALL = 1 / 12  # of FADING, by which the time falls that an old one may take by now


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


class Cost:
    """The wall time of rounds at one depth.

    Attributes:
        seconds: The latest times.
        value: Their median; of two the lower, as the first may have compiled kernels.
        age: Rounds since the latest.
    """

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=SAMPLES)
        self.value = 0.0
        self.age = 0

    def add(self, seconds: float) -> None:
        """Observe it once. Of what is old and no longer so, two new times decide."""
        if self.seconds and self.age > OLD and abs(log(seconds / self.value)) > OTHER:
            self.seconds = deque(list(self.seconds)[-1:], maxlen=SAMPLES)
        self.seconds.append(seconds)
        self.value = median_low(self.seconds)
        self.age = 0

    @property
    def sure(self) -> bool:
        """Whether it was measured more than once."""
        return len(self.seconds) > 1

    def hope(self, usual: float, least: float) -> float:
        """The time it may take by now, where ``usual`` was to be expected."""
        return max(usual * FADING ** (FALL * self.age), least)

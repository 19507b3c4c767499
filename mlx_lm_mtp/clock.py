"""Times a round as its caller lives through it."""

from time import perf_counter
from typing import Optional


class Clock:
    """Times a round from landing to landing."""

    def __init__(self) -> None:
        self._last: Optional[float] = None
        self._wait = self._left = 0.0
        self._away = 0.0

    def leave(self) -> None:
        """The caller has the floor."""
        self._left = perf_counter()

    def back(self) -> None:
        """The caller came back for more."""
        self._away += perf_counter() - self._left

    def wait(self) -> None:
        """From here on only the device is waited for."""
        self._wait = perf_counter()

    def landed(self) -> Optional[float]:
        """Seconds since the last landing; None if the caller took most of them."""
        now = perf_counter()
        since = None if self._last is None else now - self._last
        slow = since is not None and self._away > since / 2 > 10 * (now - self._wait)
        self._last, self._away = now, 0.0
        return None if slow else since

"""Times rounds as their caller lives through them."""

from math import inf
from time import perf_counter, thread_time
from typing import Any, Optional


class Clock:
    """Times a round from launch to launch.

    MLX holds a launch back until most of what was launched before is done, so the time
    between the ends of two launches is that of the round which the second one began,
    be the device or the host the slower. When a round lands tells less: by then the
    next one was launched, whatever its size. ``with clock`` stands around what waits
    for the device.
    """

    def __init__(self) -> None:
        self._last = -inf
        self._left = self._away = self._waited = 0.0
        self._watched = False  # whether the caller was slow lately

    def leave(self) -> None:
        """The caller has the floor."""
        self._left = perf_counter()

    def back(self) -> None:
        """The caller came back for more."""
        self._away += perf_counter() - self._left

    def __enter__(self) -> None:
        if self._watched:  # the thread's time is a system call
            self._waited -= perf_counter() - thread_time()

    def __exit__(self, *_: Any) -> None:
        if self._watched:
            self._waited += perf_counter() - thread_time()

    def launched(self) -> Optional[float]:
        """Seconds since the last launch; None if the caller took most of them."""
        now = perf_counter()
        since = now - self._last
        self._watched = self._away > since / 2
        slow = self._watched and since / 2 > 10 * self._waited
        self._last, self._away, self._waited = now, 0.0, 0.0
        return None if slow or since == inf else since

"""One text, generated in slices and timed."""

import time
from collections.abc import Container, Generator
from dataclasses import dataclass, field
from typing import Any, Optional

import mlx.core as mx

from ..stats import MTPStats
from .methods import Cell, Method


@dataclass
class Generation:
    """One text, and what was timed of it: whole rounds; plain ones have one token."""

    cell: Cell
    method: Method
    run: int
    group: int = 0  # of methods that took turns
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    host: float = 0.0  # of these, seconds in which this thread was computing
    peak: int = 0  # bytes
    stats: MTPStats = field(default_factory=MTPStats)  # of the whole text

    @property
    def rate(self) -> Optional[float]:
        """Tokens per second of decoding alone; None if no round was timed."""
        return self.tokens / self.seconds if self.tokens else None


class Text:
    """A text that is generated a slice at a time."""

    def __init__(self, out: Generation, steps: Generator[Any, None, None]) -> None:
        self.out = out
        self.done = False
        self._steps = steps
        self._held = 0  # bytes

    def go_on(self, size: int, ends: Container[int]) -> None:
        """Generate ``size`` tokens, and to the end of a round.

        A round's time is that from the first token of the one before to its own first.
        The round that flew while others had their turn is not timed.

        Args:
            size: Tokens.
            ends: Tokens that end the text.
        """
        out, fresh, last = self.out, 0, None
        for token, _, *drafted in self._steps:
            if token in ends:
                break
            if fresh == 0:
                now = time.perf_counter(), time.thread_time()
            fresh += 1
            if any(drafted):
                continue
            # A round's last token is the target's own.
            if last is not None:
                out.rounds, out.tokens = out.rounds + 1, out.tokens + fresh
                out.seconds += now[0] - last[0]
                out.host += now[1] - last[1]
            size -= fresh
            fresh, last = 0, now
            if size <= 0:
                return
        self.close()

    def close(self) -> None:
        """Generate no more."""
        self.done = True
        self._steps.close()

    def weigh(self, weights: int, before: int) -> None:
        """Note the peak of a slice, as if no other text were there.

        Args:
            weights: Bytes of both models.
            before: Bytes that were in use before the slice, when the peak was reset.
        """
        peak = weights + self._held + mx.get_peak_memory() - before
        self.out.peak = max(self.out.peak, peak)
        self._held += mx.get_active_memory() - before

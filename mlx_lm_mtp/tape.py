"""The random numbers of mlx-lm's samplers, one state per emitted token."""

from collections.abc import Callable
from typing import Any, Optional, cast

import mlx.core as mx


def random_state() -> mx.array:
    """The state of MLX's generator in this thread, [2]."""
    return cast(Any, mx.random.state)[0]


def seed_of(state: mx.array) -> int:
    """The seed that puts MLX's generator into a state it was seen in."""
    high, low = cast(list[int], state.tolist())
    return high << 32 | low


class RandomTape:
    """The states that mlx-lm's generator passes through, one per emitted token."""

    def __init__(self) -> None:
        self._start: Optional[int] = None
        self.marks: list[mx.array] = []
        self._splits = 0

    def rewind(self) -> None:
        """Back to where plain decoding stands before the round's first token."""
        if self._start is None:
            self._start = seed_of(random_state())
        mx.random.seed(self._start)
        self.marks = []

    def mark(self) -> None:
        """Remember the state after one more token."""
        self.marks.append(random_state())

    def start(self, seed: int, sample: Callable[[], Any]) -> None:
        """Begin at a seed; from here on others may use the generator meanwhile.

        Args:
            seed: As for ``mx.random.seed``.
            sample: Draws a token, to show how far it moves the generator.
        """
        self._start = seed
        mx.random.seed(0)
        sample()
        after, key = seed_of(random_state()), mx.random.key(0)
        self._splits = 0
        while seed_of(key) != after:
            key = _following(key)
            self._splits += 1

    def turn_to(self, index: int) -> None:
        """To where plain decoding stands before the round's token ``index``."""
        assert self._start is not None
        high, low = divmod(self._start, 1 << 32)
        key = mx.array([high, low], mx.uint32)
        for _ in range(index * self._splits):
            key = _following(key)
        mx.random.seed(seed_of(key))

    def cut(self, tokens: int) -> None:
        """Go on from the state after so many tokens of this round."""
        if tokens:
            self._start = seed_of(self.marks[tokens - 1])
        self.rewind()


def _following(key: mx.array) -> mx.array:
    """The generator's state after one draw, without waiting for the device."""
    return mx.random.split(key, stream=mx.cpu)[0]

"""The random numbers of mlx-lm's samplers, one state per emitted token."""

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

    def rewind(self) -> None:
        """Back to where plain decoding stands before the round's first token."""
        if self._start is None:
            self._start = seed_of(random_state())
        mx.random.seed(self._start)
        self.marks = []

    def mark(self) -> None:
        """Remember the state after one more token."""
        self.marks.append(random_state())

    def cut(self, tokens: int) -> None:
        """Go on from the state after so many tokens of this round."""
        if tokens:
            self._start = seed_of(self.marks[tokens - 1])
        self.rewind()

"""What bench compares: ways to decode, and what is varied between tables."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

from mlx_lm.generate import generate_step, speculative_generate_step

PLAIN, DRAFT_MODEL, ADAPTIVE = "plain", "draft model", "adaptive"
DRAFT_MODEL_TOKENS = 3  # the default of mlx-lm's commands


@dataclass(frozen=True)
class Cell:
    """What is varied between tables; within one only the method is."""

    kind: str
    context: int
    temp: float
    acceptance: Optional[float] = None

    @property
    def label(self) -> str:
        """For people."""
        length = f"{self.context} tokens" if self.context else "short prompt"
        words = [self.kind, length, f"temperature {self.temp:g}"]
        if self.acceptance is not None:
            words.append(f"acceptance {self.acceptance:g}")
        return ", ".join(words)


@dataclass(frozen=True)
class Method:
    """A way to decode: ours with so many drafts, or a function of mlx-lm's."""

    name: str
    drafts: Optional[int] = None
    start: Optional[Callable[..., Generator[Any, None, None]]] = None
    whole: bool = False  # reads the whole prompt itself


def plain() -> Method:
    """mlx-lm's plain decoding."""
    return Method(PLAIN, start=generate_step)


def with_draft_model(draft_model: Any) -> Method:
    """mlx-lm's speculative decoding with an ordinary model."""
    start = partial(
        speculative_generate_step,
        draft_model=draft_model,
        num_draft_tokens=DRAFT_MODEL_TOKENS,
    )
    return Method(DRAFT_MODEL, start=start, whole=True)


def with_drafts(num: Optional[int]) -> Method:
    """MTP with so many drafts per round, None for as many as pay."""
    return Method(ADAPTIVE if num is None else f"K = {num}", drafts=num)

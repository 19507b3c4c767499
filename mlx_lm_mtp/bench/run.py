"""Generate with every method in turn, in one process, and time it."""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from ..depth import Adaptive, Pinned
from ..generate import mtp_generate_step
from ..measure import Prefilled, prefill
from ..stats import MTPStats
from ..subject import Subject
from .dial import dialled_step

PLAIN, DRAFT_MODEL, ADAPTIVE = "plain", "draft model", "adaptive"
DRAFT_MODEL_TOKENS = 3  # the default of mlx-lm's commands
TOP_P, TOP_K = 0.95, 64  # Gemma's own
WARM_UP = 12  # tokens
SETTLE = 160  # tokens in which the depth that adapts has tried the others


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


@dataclass
class Generation:
    """One timed text."""

    cell: Cell
    method: Method
    run: int
    tokens: int = 0
    first: float = 0.0  # seconds until the first token, with all but one read before
    seconds: float = 0.0  # from the first token to the last
    host: float = 0.0  # of these, seconds in which this thread was computing
    peak: int = 0  # bytes
    stats: MTPStats = field(default_factory=MTPStats)

    @property
    def rate(self) -> Optional[float]:
        """Tokens per second of decoding alone; None for a text of one token."""
        return (self.tokens - 1) / self.seconds if self.tokens > 1 else None


@dataclass
class Bench:
    """Everything that stays the same while methods take turns."""

    subject: Subject
    methods: list[Method]
    cells: list[Cell]
    runs: int
    max_tokens: int
    deadline: float  # on the clock of time.perf_counter
    # A dial makes another text of each cell, so what one taught is not the next's.
    learnt: dict[Cell, Adaptive] = field(default_factory=dict)
    # Seconds to the first token of a whole prompt, plain and with MTP.
    first: dict[tuple[Cell, str], float] = field(default_factory=dict)

    def generations(self) -> Iterator[Generation]:
        """Every method in every cell, all cells once before any twice.

        Stops at the deadline, so a short time means fewer repetitions first; the first
        cell is always finished once.
        """
        warmed: set[tuple[int, float]] = set()
        for run in range(self.runs):
            for cell in self.cells:
                read = self._prefilled(cell)
                if run == 0:
                    self._warm(cell, read, warmed)
                    self._first_tokens(cell)
                turn = run % len(self.methods)
                for method in self.methods[turn:] + self.methods[:turn]:
                    least = run == 0 and cell == self.cells[0]
                    if time.perf_counter() > self.deadline and not least:
                        return
                    yield self._generate(cell, read, method, run)

    def _first_tokens(self, cell: Cell) -> None:
        mine = next((m for m in self.methods if m.start is None), None)
        plain = next((m for m in self.methods if m.name == PLAIN), None)
        for method in (plain, mine):
            if method is None or time.perf_counter() > self.deadline:
                continue
            prompt = self.subject.prompt(cell.kind, cell.context)
            begin = time.perf_counter()
            next(self._steps(cell, prompt, None, method, 1, MTPStats()))
            self.first[cell, method.name] = time.perf_counter() - begin

    def _prefilled(self, cell: Cell) -> Prefilled:
        return prefill(self.subject.model, self.subject.prompt(cell.kind, cell.context))

    def _warm(
        self, cell: Cell, read: Prefilled, warmed: set[tuple[int, float]]
    ) -> None:
        """Have kernels compiled that this cell is the first to use.

        The depth that adapts is timed as in all but the first text of a process.
        """
        compiled = (cell.context, cell.temp) in warmed
        warmed.add((cell.context, cell.temp))
        for method in self.methods:
            adapts = method.name == ADAPTIVE
            if (adapts or not compiled) and time.perf_counter() < self.deadline:
                size = SETTLE if adapts else WARM_UP
                stats = MTPStats()
                for _ in self._steps(
                    cell, read.last, read.copies(), method, size, stats
                ):
                    pass

    def _generate(
        self, cell: Cell, read: Prefilled, method: Method, run: int
    ) -> Generation:
        out = Generation(cell, method, run)
        mx.random.seed(run)
        mx.clear_cache()
        mx.reset_peak_memory()
        steps = self._steps(
            cell, read.last, read.copies(), method, self.max_tokens, out.stats
        )
        start = begin = time.perf_counter()
        busy = time.thread_time()
        for token, *_ in steps:
            now = time.perf_counter()
            if out.tokens == 0:
                out.first, start, busy = now - begin, now, time.thread_time()
            out.tokens += 1
            out.seconds, out.host = now - start, time.thread_time() - busy
            if token in self.subject.ends:
                break
        steps.close()
        # The prefilled caches lie beside the copies that are written to.
        out.peak = mx.get_peak_memory() - read.nbytes
        return out

    def _steps(
        self,
        cell: Cell,
        prompt: mx.array,
        caches: Optional[list[Any]],
        method: Method,
        max_tokens: int,
        stats: MTPStats,
    ) -> Generator[Any, None, None]:
        hot = {"top_p": TOP_P, "top_k": TOP_K} if cell.temp > 0 else {}
        options: dict[str, Any] = {
            "prompt_cache": caches,
            "max_tokens": max_tokens,
            "sampler": make_sampler(cell.temp, **hot),
        }
        if method.whole:
            prompt = self.subject.prompt(cell.kind, cell.context)
            options["prompt_cache"] = None
        if method.start is not None:
            return method.start(prompt, self.subject.model, **options)
        options["stats"] = stats
        pair = self.subject.model, self.subject.drafter
        if cell.acceptance is None:
            return mtp_generate_step(
                prompt, *pair, num_draft_tokens=method.drafts, **options
            )
        options["prompt_cache"] = caches or make_prompt_cache(self.subject.model)
        fixed = None if method.drafts is None else Pinned(method.drafts)
        depth = fixed or self.learnt.setdefault(cell, Adaptive())
        return dialled_step(
            prompt, *pair, acceptance=cell.acceptance, depth=depth, **options
        )

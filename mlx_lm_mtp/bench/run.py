"""Generate with every method in turn, in one process, and time it."""

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from ..depth import MAX_DRAFTS, Adaptive, Pinned
from ..generate import mtp_generate_step
from ..machine import room
from ..measure import Prefilled, prefill
from ..stats import MTPStats
from ..subject import Subject
from .dial import dialled_step
from .methods import ADAPTIVE, PLAIN, Cell, Method
from .text import Generation, Text

TOP_P, TOP_K = 0.95, 64  # Gemma's own
WARM_UP = 12  # tokens
SLICE = 16  # tokens that a method generates before the next has its turn
SETTLE = 240  # rounds in which the depth that adapts has tried the others


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

        Stops at the deadline, so a short time means fewer repetitions first; in the
        first cell every method has a slice at least.
        """
        warmed: set[Any] = set()
        for run in range(self.runs):
            for cell in self.cells:
                read = self._prefilled(cell)
                if run == 0:
                    self._warm(cell, read, warmed)
                    self._first_tokens(cell)
                for group, methods in enumerate(self._groups(read, run)):
                    least = run == 0 and cell == self.cells[0]
                    if time.perf_counter() > self.deadline and not least:
                        return
                    found = [Generation(cell, m, run, group) for m in methods]
                    self._take_turns(read, found)
                    yield from found

    def _groups(self, read: Prefilled, run: int) -> list[list[Method]]:
        """Plain decoding, and with it as many others as the memory holds."""
        first, *others = self.methods
        turn = run % len(others)
        others = others[turn:] + others[:turn]
        size = int(min(len(others), room() / max(read.nbytes, 1) - 1))
        size = max(size, 1)
        starts = range(0, len(others), size)
        return [[first, *others[start : start + size]] for start in starts]

    def _take_turns(self, read: Prefilled, found: list[Generation]) -> None:
        """Generate a text with every method, in slices."""
        mx.random.seed(found[0].run)
        mx.clear_cache()
        weights = mx.get_active_memory() - read.nbytes
        texts = [Text(out, self._text(read, out)) for out in found]
        while texts:
            for text in texts:
                before = mx.get_active_memory()
                mx.reset_peak_memory()
                text.go_on(SLICE, self.subject.ends)
                mx.synchronize(generation_stream)
                text.weigh(weights, before)
            if time.perf_counter() > self.deadline:
                for text in texts:
                    text.close()
            texts = [text for text in texts[1:] + texts[:1] if not text.done]

    def _text(self, read: Prefilled, out: Generation) -> Generator[Any, None, None]:
        asked = out.method, self.max_tokens, out.stats, out.run
        return self._steps(out.cell, read.last, read.copies(), *asked)

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

    def _warm(self, cell: Cell, read: Prefilled, warmed: set[Any]) -> None:
        """Have kernels compiled, and the depth that adapts learn.

        It is timed as in all but the first text of a process. A dial makes another pair
        of each cell.
        """
        shapes = cell.context, cell.temp
        pair = None if cell.acceptance is None else cell
        for method in self.methods:
            size, rounds = 0 if shapes in warmed else WARM_UP, WARM_UP
            if method.name == ADAPTIVE and pair not in warmed:
                size, rounds = SETTLE * (MAX_DRAFTS + 1), SETTLE
            stats = MTPStats()
            steps = self._steps(cell, read.last, read.copies(), method, size, stats)
            for _ in steps if size else ():
                if stats.rounds >= rounds or time.perf_counter() > self.deadline:
                    break
            steps.close()
        warmed |= {shapes, pair}

    def _steps(
        self,
        cell: Cell,
        prompt: mx.array,
        caches: Optional[list[Any]],
        method: Method,
        max_tokens: int,
        stats: MTPStats,
        seed: int = 0,
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
            prompt,
            *pair,
            acceptance=cell.acceptance,
            seed=seed,
            depth=depth,
            **options,
        )

"""Times of bare model calls, and the speed that they and an acceptance predict.

A call is launched while the one before it runs, as in mlx-lm's plain decoding, so that
the host's work counts only where it takes longer than the device's. Every series of
calls reads on from its own copy of the same prefilled caches.
"""

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

from .depth import MAX_DRAFTS, expected_tokens
from .forward import draft_step
from .live import Live
from .propose import Drawn, propose
from .rounds import Seed
from .rule import pick
from .stats import MTPStats
from .target import Target

WARM, LEAST, MOST = 2, 3, 40  # calls of a series: not counted, fewest, most
LATE = 3.0  # times the time that was given; then one call of each must do
PREFILL = 2048  # tokens of a forward


@dataclass(frozen=True)
class Costs:
    """Seconds of bare calls after a context of so many tokens."""

    context: int
    plain: float  # one token of mlx-lm's plain decoding
    verify: dict[int, float]  # a target forward over so many tokens
    draft: dict[int, float]  # so many draft steps
    host: float  # Python building one target forward, which may run beside the device

    def round(self, num: int) -> float:
        """A round of so many drafts whose calls follow each other without a gap."""
        return self.verify[num + 1] + self.draft[num] if num else self.plain

    def mean(self, other: "Costs") -> "Costs":
        """The mean of two measurements after the same context."""
        return Costs(
            self.context,
            fmean((self.plain, other.plain)),
            {n: fmean((t, other.verify[n])) for n, t in self.verify.items()},
            {n: fmean((t, other.draft[n])) for n, t in self.draft.items()},
            fmean((self.host, other.host)),
        )


@dataclass(frozen=True)
class Prefilled:
    """A context that was read, all but its last token."""

    caches: list[Any]
    last: mx.array  # [1]
    prompt: mx.array  # [n]

    def copies(self) -> list[Any]:
        """Caches to write to; nothing is copied before it is written."""
        return copy.deepcopy(self.caches)

    def text(self, size: int) -> mx.array:
        """So many tokens as they follow each other in the context, [1, size]."""
        times = -(-size // len(self.prompt))
        return mx.concatenate([self.prompt] * times)[None, -size:]

    @property
    def nbytes(self) -> int:
        """Bytes that the caches hold."""
        return sum(cache.nbytes for cache in self.caches)


def prefill(model: nn.Module, prompt: mx.array) -> Prefilled:
    """Read a prompt [n], all but its last token."""
    caches = make_prompt_cache(model)
    with mx.stream(generation_stream):
        for start in range(0, len(prompt) - 1, PREFILL):
            end = min(start + PREFILL, len(prompt) - 1)
            Target(model).hidden(prompt[None, start:end], caches)
            mx.eval([cache.state for cache in caches])
            mx.clear_cache()
    return Prefilled(caches, prompt[-1:], prompt)


def measure(
    model: nn.Module, drafter: Any, prompt: mx.array, seconds: float = 8.0
) -> Costs:
    """Time plain decoding, verifies of every width, and every number of draft steps.

    Args:
        model: The target.
        drafter: Its drafter.
        prompt: The context [n].
        seconds: About how long to measure. A slow machine takes longer, as one call
            of each is timed at least.
    """
    read = prefill(model, prompt)
    series: dict[Any, Callable[[], Iterator[Any]]] = {}
    series["plain"] = partial(_plain, model, read)
    for n in range(1, MAX_DRAFTS + 2):
        series["verify", n] = partial(_verifies, model, read, n)
    for n in range(1, MAX_DRAFTS + 1):
        series["draft", n] = partial(_drafts, model, drafter, read, n)
    times: dict[Any, list[float]] = {name: [] for name in series}
    # There and back, so that a machine that slows down does not favour what came first.
    begin, share = time.perf_counter(), seconds / len(series) / 2
    for name in [*series, *reversed(series)]:
        late = time.perf_counter() - begin > LATE * seconds
        if late and times[name]:
            continue
        with mx.stream(generation_stream):
            times[name] += timed(series[name](), share, late)
    middle = {name: median(found) for name, found in times.items()}
    return Costs(
        context=len(prompt),
        plain=middle["plain"],
        verify={n: middle["verify", n] for n in range(1, MAX_DRAFTS + 2)},
        draft={n: middle["draft", n] for n in range(1, MAX_DRAFTS + 1)},
        host=_host(model, read),
    )


def timed(calls: Iterator[Any], seconds: float, late: bool = False) -> list[float]:
    """Seconds between the ends of calls that were launched ahead.

    Args:
        calls: Each item is the arrays of one call, launched when the next is asked for.
        seconds: When to stop, once there are ``LEAST`` of them.
        late: Be content with one.
    """
    warm, least = (0, 1) if late else (WARM, LEAST)
    ends: list[float] = []
    pending = _launch(calls)
    while len(ends) <= warm + least or (
        len(ends) <= warm + MOST and ends[-1] - ends[warm] < seconds
    ):
        following = _launch(calls)
        mx.eval(pending)
        ends.append(time.perf_counter())
        pending = following
    mx.eval(pending)
    return [end - start for start, end in itertools.pairwise(ends[warm:])]


def _launch(calls: Iterator[Any]) -> Any:
    arrays = next(calls)
    mx.async_eval(arrays)
    return arrays


def _plain(model: nn.Module, read: Prefilled) -> Iterator[Any]:
    # It evaluates what it yields and has launched the next: only its pace is measured.
    steps = generate_step(read.last, model, max_tokens=-1, prompt_cache=read.copies())
    for _, logprobs in steps:
        yield logprobs


def _verifies(model: nn.Module, read: Prefilled, width: int) -> Iterator[Any]:
    caches = read.copies()
    # Tokens that are alike would use the same experts.
    tokens = read.text(width)
    while True:
        yield mx.argmax(model(tokens, cache=caches), axis=-1)


def _drafts(model: nn.Module, drafter: Any, read: Prefilled, num: int) -> Iterator[Any]:
    target, caches = Target(model), read.copies()
    hidden = target.hidden(read.last[None], caches)
    seed = Seed(mx.argmax(target.logits(hidden)[:, -1], axis=-1), hidden)
    mx.eval(seed.token, seed.hidden, [cache.state for cache in caches])
    live = Live([caches])
    while True:
        step = draft_step(target, drafter, live, 0)
        yield propose(step, seed, num, _most_likely).pending()


def _most_likely(ids: Optional[mx.array], logits: mx.array) -> Drawn:
    return Drawn(pick(mx.argmax(logits, axis=-1), ids))


def _host(model: nn.Module, read: Prefilled) -> float:
    """Python's time for one forward over a few tokens, with nothing computed."""
    tokens = read.text(4)
    times = []
    for _ in range(LEAST + WARM):
        caches = read.copies()
        start = time.perf_counter()
        model(tokens, cache=caches)
        times.append(time.perf_counter() - start)
    return median(times)


def shares(stats: MTPStats) -> list[float]:
    """For each position, the share accepted where the one before was."""
    before, found = 1.0, []
    for reached in stats.acceptance:
        found.append(reached / before if before else 0.0)
        before = reached
    return found


def predicted(costs: Costs, acceptance: Sequence[float]) -> dict[int, float]:
    """Tokens per second by number of drafts, as far as the acceptance is known.

    Args:
        costs: Of bare calls.
        acceptance: As ``shares`` gives it.
    """
    tokens = expected_tokens(acceptance[: max(costs.draft)])
    return {n: found / costs.round(n) for n, found in enumerate(tokens)}

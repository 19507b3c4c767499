"""The law that mlx-lm's processors and sampler draw a token from.

mlx-lm hands the sampler over as a function from log-probabilities to a token. What
``make_sampler`` built is recognised by its code and taken apart, so that the filters
are mlx-lm's own, in mlx-lm's own order, with the temperature last. A sampler object
may instead offer its law: a method ``law(logprobs)`` that returns the log-probs it
draws from. Any other sampler is opaque: it can only be called.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, Optional, Protocol

import mlx.core as mx
from mlx_lm import sample_utils

from .rounds import MTPError

LOWEST = -3.0e38

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


class Law(Protocol):
    """A map from log-probs as mlx-lm computes them to those it draws from."""

    def __call__(
        self, logprobs: mx.array, coins: Optional[mx.array] = None
    ) -> mx.array:
        """Apply the law.

        Args:
            logprobs: [..., V], normalised, in the model's dtype.
            coins: [..., 1] uniform draws, one per position, that decide XTC.

        Returns:
            [..., V] normalised float32, -inf for impossible tokens.
        """

    def draft(self, heat: float) -> "Law":
        """The law for drafts, at ``heat`` times the temperature where it has one."""

    def on_candidates(self) -> bool:
        """Whether it may be applied to a subset that holds all of the mass."""


def _cells(function: Any) -> dict[str, Any]:
    """The variables that a function closes over."""
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    return {n: c.cell_contents for n, c in zip(names, cells, strict=True)}


def _code(function: Any) -> Optional[CodeType]:
    return getattr(function, "__code__", None)


def _is_one_of(code: Optional[CodeType], known: Iterable[Optional[CodeType]]) -> bool:
    """Whether it is that very code: equal code elsewhere may mean other things."""
    return code is not None and any(code is one for one in known)


def _known_filters() -> tuple[Optional[CodeType], dict[CodeType, str]]:
    """The code of make_sampler's sampler and of the filters inside it."""
    sampler = sample_utils.make_sampler(
        1.0, top_p=0.5, min_p=0.5, top_k=1, xtc_probability=0.5
    )
    methods = _cells(sampler).get("sampling_methods", ())
    filters = {
        m.__code__: name
        for m in methods
        for name in m.__code__.co_names
        if name.startswith("apply_")
    }
    return _code(sampler), filters


_SAMPLER, _FILTERS = _known_filters()
# Filters that keep every one of at most so many candidates, and refuse to be asked.
_KEPT = {"apply_top_k": "top_k", "apply_min_p": "min_tokens_to_keep"}
_PURE_PROCESSORS = tuple(
    map(_code, sample_utils.make_logits_processors({0: 0.0}, 1.1, 1, 1.0, 1, 1.0, 1))
)


def is_greedy(sampler: Optional[Sampler]) -> bool:
    """Whether the sampler is mlx-lm's argmax."""
    return sampler is None or sampler is sample_utils.greedy_sampler


def is_mlx_lm(sampler: Sampler) -> bool:
    """Whether ``make_sampler`` built it: a pure function of log-probs and RNG."""
    known = {"sampling_methods", "temp"}
    if not _is_one_of(_code(sampler), (_SAMPLER,)) or set(_cells(sampler)) != known:
        return False
    methods = _cells(sampler)["sampling_methods"]
    return all(_is_one_of(_code(m), _FILTERS) for m in methods)


def is_pure(processor: LogitsProcessor) -> bool:
    """Whether mlx-lm built this processor, which then keeps no state between calls.

    A processor of unknown origin may: it is called once for each emitted token, in
    order, as in plain decoding.
    """
    return _is_one_of(_code(processor), _PURE_PROCESSORS)


def law_of(sampler: Sampler) -> Optional[Law]:
    """The law a sampler draws from, or None if it is opaque."""
    if is_mlx_lm(sampler):
        cells = _cells(sampler)
        filters = tuple((_FILTERS[m.__code__], m) for m in cells["sampling_methods"])
        return ChainLaw(filters, cells["temp"])
    if callable(getattr(sampler, "law", None)):
        return OfferedLaw(sampler)
    return None


def check_filters(sampler: Optional[Sampler], vocab_size: int) -> None:
    """Refuse what the filters of ``make_sampler`` would refuse at the first token.

    They raise while MLX traces them, and that leaves its random numbers unusable.

    Raises:
        MTPError: Naming the option.
    """
    if sampler is None or not is_mlx_lm(sampler):
        return
    for method in _cells(sampler)["sampling_methods"]:
        cells = _cells(method)
        top_k, threshold = cells.get("top_k", 0), cells.get("xtc_threshold", 0)
        if top_k >= vocab_size:
            raise MTPError(
                f"top_k is {top_k}, it must be below {vocab_size}, the size of this "
                "model's vocabulary"
            )
        if not 0 <= threshold <= 0.5:
            raise MTPError(f"xtc_threshold is {threshold}, it must be 0 to 0.5")


@dataclass(frozen=True)
class OfferedLaw:
    """The law of a sampler object that tells it."""

    sampler: Any

    def __call__(
        self, logprobs: mx.array, coins: Optional[mx.array] = None
    ) -> mx.array:
        return log_softmax(self.sampler.law(logprobs))

    def draft(self, heat: float) -> Law:
        return self

    def on_candidates(self) -> bool:
        return False


@dataclass(frozen=True)
class ChainLaw:
    """The law of a sampler that ``make_sampler`` built."""

    filters: tuple[tuple[str, Callable[[mx.array], mx.array]], ...]
    temp: float
    subset: bool = False  # the filters may meet few candidates

    def __call__(
        self, logprobs: mx.array, coins: Optional[mx.array] = None
    ) -> mx.array:
        for name, apply in self.filters:
            kept = _cells(apply).get(_KEPT.get(name, ""), 0)
            if name == "apply_xtc":
                logprobs = _apply_xtc(apply, logprobs, coins)
            elif not (self.subset and kept >= logprobs.shape[-1]):
                logprobs = apply(logprobs)
        return log_softmax(logprobs * (1.0 / self.temp))

    def draft(self, heat: float) -> Law:
        return replace(self, temp=self.temp * heat, subset=True)

    def on_candidates(self) -> bool:
        # XTC spares some tokens by their id.
        return all(name != "apply_xtc" for name, _ in self.filters)


def _apply_xtc(apply: Any, logprobs: mx.array, coins: Optional[mx.array]) -> mx.array:
    # mlx-lm draws one coin for all rows of a call, which would tie the positions of
    # a round together. At probability 1 its coin always falls the same way.
    cells = _cells(apply)
    excluded = sample_utils.apply_xtc(
        logprobs, 1.0, cells["xtc_threshold"], cells["xtc_special_tokens"]
    )
    assert coins is not None
    return mx.where(coins > cells["xtc_probability"], logprobs, excluded)


def log_softmax(logits: mx.array) -> mx.array:
    """Normalised float32 log-probabilities over the last axis.

    A row without any possible token stays all -inf.
    """
    logits = logits.astype(mx.float32)
    # From the largest down, as logits of thousands leave no digits for their sum.
    logits = logits - mx.maximum(logits.max(axis=-1, keepdims=True), LOWEST)
    return logits - mx.maximum(logsumexp(logits), LOWEST)


def logsumexp(x: mx.array) -> mx.array:
    """Float32 logsumexp over the last axis, kept, accurate for large vocabularies."""
    x = _fold(x.astype(mx.float32), -mx.inf)
    return mx.logsumexp(mx.logsumexp(x, axis=-1), axis=-1, keepdims=True)


def total(x: mx.array) -> mx.array:
    """Float32 sum over the last axis, accurate for large vocabularies."""
    return _fold(x, 0.0).sum(axis=-1).sum(axis=-1)


def _fold(x: mx.array, filling: float) -> mx.array:
    """Split the last axis in two of about equal length.

    One running float32 sum over 262,144 entries loses three digits on the CPU.
    """
    size = x.shape[-1]
    side = math.isqrt(size - 1) + 1 if size > 1 else 1
    while size % side and side * side < 4 * size:
        side += 1
    if size % side:
        pad = [(0, 0)] * (x.ndim - 1) + [(0, -size % side)]
        x = mx.pad(x, pad, constant_values=filling)
    return x.reshape(*x.shape[:-1], x.shape[-1] // side, side)


def normalise(logits: mx.array) -> mx.array:
    """Log-probabilities [..., V] exactly as mlx-lm computes and reports them."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def process(
    processors: Iterable[LogitsProcessor], history: Optional[mx.array], row: mx.array
) -> mx.array:
    """Apply processors to one row [1, V] after a history of tokens [n]."""
    if history is not None and history.size:
        for processor in processors:
            row = processor(history, row)
    return row


def process_rows(
    processors: Sequence[LogitsProcessor],
    history: mx.array,
    drafts: mx.array,
    logits: mx.array,
) -> mx.array:
    """Apply pure processors at each position of a round.

    Args:
        processors: Processors without state.
        history: [n] prompt and everything emitted, the seed token last.
        drafts: [1, K]
        logits: [1, K + 1, V]
    """
    if not processors:
        return logits
    path = mx.concatenate([history, drafts[0].astype(history.dtype)])
    rows = [
        process(processors, path[: history.size + i], logits[:, i])
        for i in range(logits.shape[1])
    ]
    return mx.stack(rows, axis=1)

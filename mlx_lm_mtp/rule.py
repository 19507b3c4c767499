"""How drafts are drawn and judged: what ``Compare`` and ``Residual`` share."""

from collections.abc import Sequence
from typing import NamedTuple, Optional, Union, cast

import mlx.core as mx

from .law import LogitsProcessor, is_pure, process
from .propose import Drawn
from .rounds import Draft, Verdict


class Trial(NamedTuple):
    """A draft judged on the device, or what is needed to judge it on the host."""

    draft: Draft
    logits: mx.array  # [B, K + 1, V] the target's log-probs, or its raw logits
    verdict: Optional[Verdict] = None  # None: only ``decide`` can tell
    others: Sequence[mx.array] = ()

    def pending(self) -> list[mx.array]:
        """What a round computes, to be evaluated together."""
        verdict = self.verdict
        known = [verdict.accepted, verdict.token] if verdict else []
        return [self.draft.tokens, *known, self.logits, *self.others]


class Decision(NamedTuple):
    """A verdict on the host."""

    tokens: list[int]  # accepted drafts, then the recovered or bonus token
    logprobs: mx.array  # [n, V], the target's own for each token
    error: Optional[Exception] = None  # raised after these tokens, by a processor

    @property
    def accepted(self) -> int:
        """How many drafts stand; an error came before the token that follows them."""
        return len(self.tokens) - (self.error is None)


class Rule:
    """What the rules share: the history that processors see.

    The history holds the prompt and everything emitted, so the seed token is its last.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], vocab_size: int) -> None:
        self.processors = processors
        self.pure = all(map(is_pure, processors))
        self.vocab_size = vocab_size
        self.history = mx.array([], mx.int32)
        self._path = self.history

    def extend(self, tokens: Union[mx.array, list[int]]) -> None:
        """Add prompt tokens or emitted tokens [n] to the history, if one is kept."""
        if self.processors:
            self.history = self._after(self.history, mx.array(tokens))

    def seed(self, seed: int) -> None:
        """Draw what ``mx.random.seed`` with this seed would make it draw alone.

        Other rules may then use MLX's generator between the calls of this one.
        """

    def begin(self, num: int) -> None:
        """Start a round of ``num`` drafts."""
        self._path = self.history

    def draw(self, ids: Optional[mx.array], logits: mx.array) -> Drawn:
        """Draw one draft from the drafter's logits; see ``propose.Draw``."""
        raise NotImplementedError

    @property
    def ahead(self) -> bool:
        """Whether a round may be prepared before the last one is read by the host."""
        return not self.processors

    def judge(self, draft: Draft, logits: mx.array) -> Trial:
        """Judge drafts [B, K] by the target's logits [B, K + 1, V]; reads nothing."""
        raise NotImplementedError

    def decide(self, trial: Trial) -> list[Decision]:
        """Bring the verdict of each row to the host: the round's one read."""
        assert trial.verdict is not None
        # Whole arrays: a slice would be computed, behind a round that may fly already.
        following = numbers(trial.verdict.token)
        if not trial.draft.size:
            return [
                Decision([token], trial.logits[i]) for i, token in enumerate(following)
            ]
        accepted = numbers(trial.verdict.accepted)
        drafted = cast(list[list[int]], trial.draft.tokens.tolist())
        return [
            Decision([*drafted[i][:count], following[i]], trial.logits[i])
            for i, count in enumerate(accepted)
        ]

    def _after(self, history: mx.array, tokens: mx.array) -> mx.array:
        if not self.processors:
            return history
        if not history.size:
            return tokens
        return mx.concatenate([history, tokens.astype(history.dtype)])

    def _processed(
        self, ids: Optional[mx.array], logits: mx.array, dense: bool
    ) -> tuple[Optional[mx.array], mx.array]:
        """A draft's logits as the target's will be processed, where that is pure."""
        processors = self.processors if self.pure else ()
        if ids is not None and (processors or dense):
            nothing = mx.full((logits.shape[0], self.vocab_size), -mx.inf, logits.dtype)
            logits, ids = mx.put_along_axis(nothing, ids, logits, axis=-1), None
        return ids, process(processors, self._path, logits)


class Failed(Rule):
    """What is left of a rule that raised: no draft stands, rows end with its error."""

    def __init__(self, error: Exception) -> None:
        super().__init__((), 0)
        self._error = error

    def draw(self, ids: Optional[mx.array], logits: mx.array) -> Drawn:
        return Drawn(mx.zeros(logits.shape[:1], mx.int32))

    def judge(self, draft: Draft, logits: mx.array) -> Trial:
        none = mx.zeros(logits.shape[:1], mx.int32)
        return Trial(draft, logits, Verdict(none, none))

    def decide(self, trial: Trial) -> list[Decision]:
        return [Decision([], row[:0], self._error) for row in trial.logits]


def pick(index: mx.array, ids: Optional[mx.array]) -> mx.array:
    """Turn an index among candidates [B] into a token."""
    if ids is None:
        return index
    return mx.take_along_axis(ids, index[:, None], axis=-1).squeeze(-1)


def numbers(array: mx.array) -> list[int]:
    """Token ids on the host."""
    return cast(list[int], array.tolist())

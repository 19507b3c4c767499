"""A round of several rows: drafted and verified together, judged row by row.

Each row keeps its own rule, with its sampler, processors and random numbers. Rows that
share a rule object, as greedy ones do, are judged together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Optional

import mlx.core as mx

from .buffers import Span
from .propose import Drawn, joined
from .rounds import Draft, Seed, Verdict
from .rule import Decision, Failed, Rule, Trial
from .stats import MTPStats


@dataclass(eq=False)
class Row:
    """One sequence of a batch.

    Attributes:
        uid: Its number.
        rule: How its drafts are drawn and judged.
        span: Where its K/V are.
        tokens: What its cache holds: the prompt and every token handed out.
        left: Tokens it may still emit.
        matcher: What ends its text; mlx-lm's.
        pinned: Its drafts per round, None for as many as the batch chooses.
        stats: Filled.
        gone: Whether it has left the batch; rounds that it is part of may still fly.
        seed: Its last token, and the place in the landed round that predicted it.
    """

    uid: int
    rule: Rule
    span: Span
    tokens: list[int]
    left: int
    matcher: Any
    pinned: Optional[int]
    stats: MTPStats
    gone: bool = False
    seed: tuple[int, int] = (0, 0)
    held: int = field(init=False)

    def __post_init__(self) -> None:
        self.held = self.span.known  # tokens that its cache shall hold


@dataclass
class Part:
    """Rows of a round that are judged together."""

    rule: Rule
    places: list[int]  # in the round
    drafts: int  # how many of the round's they take
    rows: int  # in the whole round
    drawn: list[Drawn] = field(default_factory=list)

    def of(self, array: mx.array) -> mx.array:
        """Its rows of an array [B, ...]."""
        first, size = self.places[0], len(self.places)
        if size == self.rows:
            return array
        if self.places == list(range(first, first + size)):
            return array[first : first + size]
        return array[mx.array(self.places)]

    def draw(self, ids: Optional[mx.array], logits: mx.array) -> Drawn:
        """Draw one draft of each of its rows; see ``propose.Draw``."""
        mine = None if ids is None else self.of(ids)
        self.drawn.append(self._guarded("draw", mine, self.of(logits)))
        return self.drawn[-1]

    def judge(self, logits: mx.array) -> Trial:
        """Judge what was drawn, as far as its rows take it."""
        n = self.drafts
        draft = joined(self.drawn[:n]) if n else Draft.none(len(self.places))
        return self._guarded("judge", draft, self.of(logits)[:, : n + 1])

    def _guarded(self, step: str, *args: Any) -> Any:
        """A step of the rule. What its sampler raises is for these rows alone."""
        try:
            return getattr(self.rule, step)(*args)
        except Exception as e:
            self.rule = Failed(e)
            return getattr(self.rule, step)(*args)


class Parts:
    """The parts of a round, and how to put their arrays together again."""

    def __init__(self, rows: Sequence[Row], numbers: Sequence[int]) -> None:
        found: dict[tuple[int, int], Part] = {}
        for place, (row, number) in enumerate(zip(rows, numbers, strict=True)):
            key = id(row.rule), number
            part = found.setdefault(key, Part(row.rule, [], number, len(rows)))
            part.places.append(place)
        self.parts = list(found.values())
        order = [place for part in self.parts for place in part.places]
        self._back = sorted(range(len(order)), key=order.__getitem__)

    @property
    def ahead(self) -> bool:
        """Whether a round may be prepared before the last one is read by the host."""
        return all(part.rule.ahead for part in self.parts)

    def join(self, arrays: Sequence[mx.array]) -> mx.array:
        """One array [B, ...] of one for each part."""
        if len(arrays) == 1:
            return arrays[0]
        whole = mx.concatenate(list(arrays))
        if self._back == list(range(len(self._back))):
            return whole
        return whole[mx.array(self._back)]

    def draw(self, ids: Optional[mx.array], logits: mx.array) -> Drawn:
        """Draw one draft of each row; see ``propose.Draw``."""
        tokens = []
        for part in self.parts:
            drawn = part.draw(ids, logits)
            tokens.append(drawn.token.astype(mx.int32))
        return Drawn(self.join(tokens))

    def judge(self, logits: mx.array) -> list[Trial]:
        """Judge what was drawn by the target's logits [B, K + 1, V]."""
        return [part.judge(logits) for part in self.parts]


@dataclass(eq=False)
class Flight:
    """A round of several rows that is built, flying or landed."""

    rows: list[Row]
    parts: Parts
    trials: list[Trial]
    hidden: mx.array  # [B, K + 1, H]
    numbers: list[int]  # of drafts, for each row
    reads_prompt: bool = False
    seconds: Optional[float] = None  # once it is launched, if that could be timed

    @property
    def drafts(self) -> int:
        """K."""
        return max(self.numbers)

    @property
    def staying(self) -> list[int]:
        """Places of the rows that are still in the batch."""
        return [i for i, row in enumerate(self.rows) if not row.gone]

    @cached_property
    def verdict(self) -> Optional[Verdict]:
        """What became of each row [B]; None if only the host can tell."""
        verdicts = [trial.verdict for trial in self.trials]
        known = [v for v in verdicts if v is not None]
        if len(known) < len(verdicts):
            return None
        return Verdict(
            self.parts.join([v.accepted.astype(mx.int32) for v in known]),
            self.parts.join([v.token.astype(mx.int32) for v in known]),
        )

    def pending(self) -> list[mx.array]:
        """All that it computes."""
        return [self.hidden, *(a for trial in self.trials for a in trial.pending())]

    def drawn(self) -> list[mx.array]:
        """What was computed from the target's K/V."""
        return [a for trial in self.trials for a in trial.draft.pending()]

    def seed(self, ahead: bool) -> Seed:
        """What the next round of the rows that stay starts from.

        Args:
            ahead: The host has not read yet what became of this round.
        """
        places = self.staying
        if ahead:
            verdict = self.verdict
            assert verdict is not None
            token, index = verdict.token, verdict.accepted
            if len(places) < len(self.rows):
                token, index = token[mx.array(places)], index[mx.array(places)]
        else:
            seeds = mx.array([self.rows[place].seed for place in places], mx.int32)
            token, index = seeds[:, 0], seeds[:, 1]
        hidden = self.hidden
        if len(places) < len(self.rows):
            hidden = hidden[mx.array(places)]
        return Seed.at(token, hidden, index)

    def decisions(self) -> dict[Row, Decision]:
        """What became of the rows that are still in the batch."""
        found: dict[Row, Decision] = {}
        for part, trial in zip(self.parts.parts, self.trials, strict=True):
            rows = [self.rows[place] for place in part.places]
            if not all(row.gone for row in rows):
                found.update(zip(rows, part.rule.decide(trial), strict=True))
        return {row: found[row] for row in self.rows if not row.gone}

"""The rows of a batch that are being decoded.

Every row keeps what its own drafts earned, so a round may bring several tokens of a
row, handed out in order. Rows join and leave between rounds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import mlx.core as mx
from mlx_lm.generate import GenerationBatch

from .clock import Clock
from .depth import Depth
from .flight import Flight, Parts, Row
from .forward import draft_step, launch, verify_forward
from .live import Live
from .propose import propose
from .rounds import Draft, Seed
from .rule import Decision
from .target import Target


@dataclass
class Response(GenerationBatch.Response):  # type: ignore[misc]
    """One token of one sequence, or why the sequence failed."""

    from_draft: bool = False
    error: Optional[Exception] = None


@dataclass
class Crew:
    """What all rows share.

    Attributes:
        target: The target.
        drafter: Its drafter.
        depth: Chooses the drafts of a round of so many rows.
        position: Shift of the drafter's RoPE position; see ``draft_step``.
        disturbed: Whether the device did something else since a round was launched.
    """

    target: Target
    drafter: Any
    depth: Callable[[int], Depth]
    position: int
    disturbed: bool = False


class Decoding:
    """The rows that are being decoded; takes the place of ``GenerationBatch``."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.rows: list[Row] = []
        self.live = Live()
        self.flights: list[Flight] = []
        self._clock = Clock()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def uids(self) -> list[int]:
        """The rows' numbers."""
        return [row.uid for row in self.rows]

    @property
    def tokens(self) -> list[list[int]]:
        """What each row's cache holds."""
        return [row.tokens for row in self.rows]

    @property
    def prompt_cache(self) -> list[Any]:
        """What holds the K/V, to be asked for its bytes."""
        return [self.live] if self.rows else []

    def extract_cache(self, place: int) -> list[Any]:
        """A copy of a row's K/V in mlx-lm's caches."""
        return self.live.extract(place, self.rows[place].held)

    def extend(self, other: "Decoding") -> None:
        """Let the rows of another join."""
        self.rows += other.rows
        self.live.extend(other.live)
        self.flights += other.flights

    def filter(self, keep: list[int]) -> None:
        """Keep the rows at these places."""
        kept = [self.rows[place] for place in keep]
        for row in self.rows:
            row.gone = row not in kept
        self.rows = kept
        self.live.filter(keep)
        self.flights = [flight for flight in self.flights if flight.staying]

    def next(self) -> list[Response]:
        """Land what flies, after the next round was launched where that is possible.

        Returns:
            The tokens of every row, in order.
        """
        if not self.rows:
            return []
        self._clock.back()
        landing = self.flights
        ahead = all(
            flight.parts.ahead and flight.verdict is not None for flight in landing
        )
        following = self._launch(self._seed(landing, ahead)) if ahead else None
        decisions = self._land(landing)
        if following is None:
            following = self._launch(self._seed(landing, ahead))
        self.flights = [following]
        responses = self._respond(decisions)
        self._clock.leave()
        return responses

    def _seed(self, landing: list[Flight], ahead: bool) -> Seed:
        seeds = [flight.seed(ahead) for flight in landing]
        if len(seeds) == 1:
            return seeds[0]
        return Seed(
            mx.concatenate([seed.token for seed in seeds]),
            mx.concatenate([seed.hidden for seed in seeds]),
        )

    def _numbers(self) -> list[int]:
        """How many drafts each row takes in the next round."""
        most, chosen = max(row.left for row in self.rows) - 1, 0
        if any(row.pinned is None for row in self.rows):
            chosen = self.crew.depth(len(self.rows)).choose(most)
        wanted = [chosen if row.pinned is None else row.pinned for row in self.rows]
        return [min(number, most) for number in wanted]

    def _launch(self, seed: Seed) -> Flight:
        crew, live = self.crew, self.live
        numbers = self._numbers()
        parts, num = Parts(self.rows, numbers), max(numbers)
        draft = Draft.none(len(self.rows))
        for part in parts.parts:
            part.rule.begin(num)
        if num:
            step = draft_step(crew.target, crew.drafter, live, crew.position)
            draft = propose(step, seed, num, parts.draw)
        hidden, logits = verify_forward(crew.target, live, draft.after(seed))
        trials = parts.judge(logits)
        flight = Flight(list(self.rows), parts, trials, hidden, numbers)
        verdict = flight.verdict
        live.wrote(1 + num, verdict.accepted if verdict else None)
        with self._clock:
            launch(live, flight.drawn(), flight.pending())
        seconds = self._clock.launched()
        flight.seconds = None if crew.disturbed else seconds
        crew.disturbed = False
        return flight

    def _land(self, landing: list[Flight]) -> dict[Row, Decision]:
        """Read what became of the rounds, and learn from it."""
        with self._clock:
            mx.eval([a for flight in landing for a in flight.pending()])
        found: dict[Row, Decision] = {}
        for flight in landing:
            decisions = flight.decisions()
            drafted = dict(zip(flight.rows, flight.numbers, strict=True))
            for row, decision in decisions.items():
                _take(row, decision, drafted[row], flight.reads_prompt)
            found.update(decisions)
        for flight in landing:
            if flight.seconds is not None:
                self._learn(flight, found, flight.seconds)
        return found

    def _learn(
        self, flight: Flight, decisions: dict[Row, Decision], seconds: float
    ) -> None:
        drafted = zip(flight.rows, flight.numbers, strict=True)
        accepted = [
            decisions[row].accepted
            for row, number in drafted
            if number == flight.drafts and row in decisions
        ]
        depth = self.crew.depth(len(flight.rows))
        depth.learn(flight.drafts, accepted, seconds)

    def _respond(self, decisions: dict[Row, Decision]) -> list[Response]:
        responses: list[Response] = []
        keep = []
        for place, row in enumerate(self.rows):
            told = _told(row, decisions[row])
            if told[-1].finish_reason is None:
                keep.append(place)
            else:
                told[-1].prompt_cache = self.extract_cache(place)
                told[-1].all_tokens = row.tokens
            responses += told
        if len(keep) < len(self.rows):
            self.filter(keep)
        return responses


def _take(row: Row, decision: Decision, drafted: int, prompt: bool) -> None:
    """Move a row on by what its round decided."""
    tokens, accepted = decision.tokens, decision.accepted
    row.rule.extend(tokens)
    # After an error the row leaves; until then any token does.
    row.seed = (tokens or [0])[-1], max(len(tokens) - 1, 0)
    if prompt:
        return
    row.span.landed(accepted)
    shown = min(len(tokens), row.left)
    row.stats.add(min(drafted, row.left), min(accepted, row.left), shown)


def _told(row: Row, decision: Decision) -> list[Response]:
    """A row's tokens up to its end."""
    told: list[Response] = []
    for i, token in enumerate(decision.tokens):
        row.tokens.append(token)
        row.held += 1
        row.left -= 1
        reason = None if row.left else "length"
        if row.matcher.advance(token):
            reason = "stop"
        drafted = i < decision.accepted
        logprobs = decision.logprobs[i]
        told.append(Response(row.uid, token, logprobs, reason, None, None, drafted))
        if reason:
            return told
    if decision.error is not None:
        told.append(failed(row.uid, decision.error))
    return told


def failed(
    uid: int,
    error: Exception,
    cache: Optional[list[Any]] = None,
    tokens: Optional[list[int]] = None,
) -> Response:
    """The last response of a sequence that failed."""
    # mlx-lm's server takes up to eleven of the log-probs.
    return Response(uid, 0, mx.zeros(16), "error", cache, tokens, error=error)

"""mlx-lm's continuous batching with a drafter.

Queue, prompt processing, segments and statistics are mlx-lm's own; what is ours is the
decoding of the rows whose prompts have been read. Every row keeps what its own drafts
earned, so a round may bring several tokens of a row, handed out in order.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from . import cache as kv
from .clock import Clock
from .compare import Compare
from .depth import Depth, Pinned
from .flight import Flight, Parts, Row
from .forward import draft_step, is_lean, verify_forward
from .law import is_greedy
from .pair import check_pair, is_drafter
from .propose import propose
from .ragged import Ragged
from .residual import DRAFT_HEAT, make_rule
from .rounds import MTPError, Seed
from .rule import Decision, Rule
from .stats import MTPStats
from .target import Target

# As in ``loop``: above this many bytes a copy of a buffer costs more than to wait.
COPIED = 32 << 20
ANY = 1 << 30


@dataclass
class Response(GenerationBatch.Response):  # type: ignore[misc]
    """One token of one sequence, or why the sequence failed."""

    from_draft: bool = False
    error: Optional[Exception] = None


@dataclass
class Wish:
    """What a sequence asks for beyond mlx-lm's own options."""

    drafts: Optional[int] = None
    seed: Optional[int] = None
    stats: MTPStats = field(default_factory=MTPStats)


@dataclass(frozen=True)
class Crew:
    """What all rows share."""

    target: Target
    drafter: Any
    depth: Callable[[int], Depth]  # by the number of rows
    greedy: Rule
    position: int  # of the drafter's queries, from the seed token's slot
    rule: Callable[[Any, Any], Rule]


class Decoding:
    """The rows that are being decoded; takes the place of ``GenerationBatch``."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.rows: list[Row] = []
        self.live = Ragged()
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
        landing = self.flights
        ahead = all(
            flight.parts.ahead and flight.verdict() is not None for flight in landing
        )
        following = self._launch(self._seed(landing, ahead)) if ahead else None
        decisions = self._land(landing)
        if following is None:
            following = self._launch(self._seed(landing, ahead))
        self.flights = [following]
        return self._respond(decisions)

    def _seed(self, landing: list[Flight], ahead: bool) -> Seed:
        seeds = [flight.seed(ahead) for flight in landing]
        if len(seeds) == 1:
            return seeds[0]
        return Seed(
            mx.concatenate([seed.token for seed in seeds]),
            mx.concatenate([seed.hidden for seed in seeds]),
        )

    def _launch(self, seed: Seed) -> Flight:
        crew, live = self.crew, self.live
        most = max(row.drafts(row.left - 1) for row in self.rows)
        num = crew.depth(len(self.rows)).choose(most)
        parts = Parts(self.rows, num)
        tokens = seed.token[:, None]
        for part in parts.parts:
            part.rule.begin(num)
        if num:
            step = draft_step(crew.target, crew.drafter, live, crew.position)
            draft = propose(step, seed, num, parts.draw)
            tokens = mx.concatenate([tokens, draft.tokens], axis=1)
        hidden, logits = verify_forward(crew.target, live, tokens)
        flight = Flight(list(self.rows), parts, parts.judge(logits), hidden, num)
        verdict = flight.verdict()
        live.wrote(1 + num, verdict.accepted if verdict else None)
        if num and live.largest > COPIED:
            mx.eval(flight.drawn())
        mx.async_eval(flight.pending())
        return flight

    def _land(self, landing: list[Flight]) -> dict[Row, Decision]:
        """Read what became of the rounds, and learn from it."""
        mx.eval([a for flight in landing for a in flight.pending()])
        found: dict[Row, Decision] = {}
        for flight in landing:
            decisions = flight.decisions()
            for row, decision in decisions.items():
                _take(row, decision, flight)
            found.update(decisions)
        self.live.settle()
        return found

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


def _take(row: Row, decision: Decision, flight: Flight) -> None:
    """Move a row on by what its round decided."""
    tokens, accepted = decision.tokens, decision.accepted
    row.rule.extend(mx.array(tokens, mx.int32))
    # After an error the row leaves; until then any token does.
    row.seed = (tokens or [0])[-1], max(len(tokens) - 1, 0)
    if flight.reads_prompt:
        return
    row.span.landed(accepted)
    drafted = row.drafts(flight.drafts)
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
        nothing = mx.zeros(16)
        told.append(
            Response(row.uid, 0, nothing, "error", None, None, error=decision.error)
        )
    return told


class Prompts(PromptProcessingBatch):  # type: ignore[misc]
    """mlx-lm's prompt processing, which ends in our decoding."""

    start: Callable[["Prompts", list[list[int]]], Decoding]

    def _copy(self) -> "Prompts":
        copied = cast(Prompts, super()._copy())
        copied.start = self.start
        return copied

    def generate(self, tokens: list[list[int]]) -> Decoding:
        """Read the last token of every prompt, and begin to decode."""
        if any(len(part) > 1 for part in tokens):
            self.prompt([part[:-1] for part in tokens])
        return self.start(self, [part[-1:] for part in tokens])


class MTPBatchGenerator(BatchGenerator):  # type: ignore[misc]
    """mlx-lm's ``BatchGenerator`` with a Gemma 4 drafter.

    What mlx-lm's takes means what it means there. A call of ``next`` may return several
    tokens of a sequence, in order.

    Args:
        model: The target.
        drafter: A drafter that fits it.
        num_draft_tokens: Drafts per round; 0 decodes without drafting.
        verification: As for ``mtp_generate_step``.
        draft_heat: Likewise.
        draft_position: Likewise.
        options: mlx-lm's own.

    Raises:
        MTPError: If the pair does not fit, or an option cannot be honoured.
    """

    def __init__(
        self,
        model: nn.Module,
        drafter: Any,
        *,
        num_draft_tokens: Optional[int] = None,
        verification: str = "block",
        draft_heat: float = DRAFT_HEAT,
        draft_position: int = 0,
        **options: Any,
    ) -> None:
        target = Target(model)
        if not is_drafter(drafter) or not is_lean(drafter):
            raise MTPError(
                f"the draft model is a {type(drafter).__name__}; several sequences "
                "need a drafter as load_assistant returns it"
            )
        check_pair(drafter, target)
        size = target.vocab_size

        def rule(sampler: Any, processors: Any) -> Rule:
            return make_rule(sampler, processors, size, verification, draft_heat)

        rule(None, None)  # raises here what is wrong with the options
        super().__init__(model, **options)
        depth = Pinned(3 if num_draft_tokens is None else num_draft_tokens)
        greedy = Compare(greedy_sampler, (), size)
        self._crew = Crew(
            target, drafter, lambda rows: depth, greedy, draft_position, rule
        )
        self._wishes: dict[int, Wish] = {}
        self._seeds: Optional[random.Random] = None
        self._fresh = make_prompt_cache(model, self.max_kv_size)
        self._prompt_batch = Prompts.empty(
            self.model, self.sampler, prefill_step_size=self.prefill_step_size
        )
        self._prompt_batch.start = self._start
        self._generation_batch = Decoding(self._crew)

    def insert(self, prompts: list[list[int]], *args: Any, **options: Any) -> list[int]:
        """Queue sequences whose prompts are in one piece; see ``insert_segments``."""
        return self.insert_segments([[prompt] for prompt in prompts], *args, **options)

    def insert_segments(
        self,
        segments: list[list[list[int]]],
        *args: Any,
        num_draft_tokens: Optional[Sequence[Optional[int]]] = None,
        seeds: Optional[Sequence[Optional[int]]] = None,
        stats: Optional[Sequence[MTPStats]] = None,
        **options: Any,
    ) -> list[int]:
        """Queue sequences, as mlx-lm's method of this name.

        Args:
            segments: Per sequence, its prompt in pieces.
            args: mlx-lm's further arguments.
            num_draft_tokens: Per sequence, most drafts per round; 0 for none.
            seeds: Per sequence, the seed that draws what it would draw alone.
            stats: Per sequence, filled while generating.
            options: mlx-lm's further arguments.

        Returns:
            A number for each sequence.
        """
        size = len(segments)
        caches = options.get("caches", args[1] if len(args) > 1 else None)
        for cache in caches or ():
            if cache is not None:
                kv.check(cache, self._fresh)
        wishes = zip(
            num_draft_tokens or [None] * size,
            seeds or [None] * size,
            stats or [MTPStats() for _ in range(size)],
            strict=True,
        )
        uids: list[int] = super().insert_segments(segments, *args, **options)
        for uid, wish in zip(uids, wishes, strict=True):
            self._wishes[uid] = Wish(*wish)
        return uids

    def remove(self, uids: list[int], return_prompt_caches: bool = False) -> Any:
        """Forget sequences, as mlx-lm's method of this name."""
        for uid in uids:
            self._wishes.pop(uid, None)
        return super().remove(uids, return_prompt_caches)

    def _start(self, prompts: Prompts, last: list[list[int]]) -> Decoding:
        """Read the last prompt tokens and let their rows fly."""
        target = self._crew.target
        hidden = target.hidden(mx.array(last), prompts.prompt_cache)
        logits = target.logits(hidden)
        mx.eval(logits, [c.state for c in prompts.prompt_cache])
        decoding = Decoding(self._crew)
        size = len(prompts.uids)
        decoding.live = Ragged([prompts.extract_cache(i) for i in range(size)])
        for i, uid in enumerate(prompts.uids):
            tokens = prompts.tokens[i] + last[i]
            wish = self._wishes.pop(uid)
            rule = self._rule(prompts.samplers[i], prompts.logits_processors[i], wish)
            rule.extend(mx.array(tokens, mx.int32))
            decoding.rows.append(
                Row(
                    uid,
                    rule,
                    decoding.live.spans[i],
                    tokens,
                    prompts.max_tokens[i],
                    prompts.stop_sequences[i].matcher(),
                    wish.drafts,
                    wish.stats,
                )
            )
        parts = Parts(decoding.rows, 0)
        for part in parts.parts:
            part.rule.begin(0)
        trials = parts.judge(logits)
        flight = Flight(list(decoding.rows), parts, trials, hidden, 0, True)
        mx.async_eval(flight.pending())
        decoding.flights = [flight]
        return decoding

    def _rule(self, sampler: Any, processors: Any, wish: Wish) -> Rule:
        if is_greedy(sampler) and not processors:
            return self._crew.greedy
        rule = self._crew.rule(sampler, processors)
        rule.seed(self._another_seed() if wish.seed is None else wish.seed)
        return rule

    def _another_seed(self) -> int:
        if self._seeds is None:
            drawn = mx.random.randint(0, 2**31 - 1, (2,))
            self._seeds = random.Random(str(drawn.tolist()))
        return self._seeds.getrandbits(64)

"""mlx-lm's continuous batching with a drafter.

Queue, prompt processing, segments and statistics are mlx-lm's own; what is ours is the
decoding of the rows whose prompts have been read.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Optional, SupportsIndex, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from . import cache as kv
from .compare import Compare
from .decoding import Crew, Decoding, Response
from .depth import learnt
from .flight import Flight, Parts, Row
from .forward import is_lean
from .generate import checked_number
from .kinds import is_drafter
from .live import Live
from .pair import check_pair
from .residual import DRAFT_HEAT, make_rule
from .rounds import MTPError
from .rule import Rule
from .stats import MTPStats
from .target import Target


@dataclass(frozen=True)
class Wish:
    """What a sequence asks for beyond mlx-lm's own options."""

    rule: Rule
    pinned: Optional[int]
    stats: MTPStats


class Rules:
    """Makes the rule of each sequence; greedy ones share theirs."""

    def __init__(self, vocab_size: int, verification: str, draft_heat: float) -> None:
        self._options = vocab_size, verification, draft_heat
        self._greedy = make_rule(None, None, *self._options)
        self._seeds: Optional[random.Random] = None

    def make(self, sampler: Any, processors: Any, seed: Optional[int]) -> Rule:
        """A rule with random numbers of its own."""
        try:
            rule = make_rule(sampler, processors, *self._options)
        except (ArithmeticError, TypeError) as e:
            raise MTPError(f"the sampler cannot be used: {e}") from e
        if isinstance(rule, Compare) and rule.sampler is greedy_sampler:
            return rule if processors else self._greedy
        rule.seed(self._another_seed() if seed is None else seed)
        return rule

    def _another_seed(self) -> int:
        if self._seeds is None:
            drawn = mx.random.randint(0, 2**31 - 1, (2,))
            self._seeds = random.Random(str(drawn.tolist()))
        return self._seeds.getrandbits(64)


class Prompts(PromptProcessingBatch):  # type: ignore[misc]
    """mlx-lm's prompt processing, which ends in our decoding."""

    crew: Crew
    wishes: dict[int, Wish]

    def _copy(self) -> "Prompts":
        copied = cast(Prompts, super()._copy())
        copied.crew, copied.wishes = self.crew, self.wishes
        return copied

    def prompt(self, tokens: list[list[int]]) -> None:
        """Process prompt tokens."""
        self.crew.disturbed |= bool(tokens)
        super().prompt(tokens)

    def generate(self, tokens: list[list[int]]) -> Decoding:
        """Read the last token of every prompt, and begin to decode.

        Args:
            tokens: For each row the prompt's last token.
        """
        target, decoding = self.crew.target, Decoding(self.crew)
        self.crew.disturbed = True
        hidden = target.hidden(mx.array(tokens), self.prompt_cache)
        logits = target.logits(hidden)
        mx.eval(logits, [cache.state for cache in self.prompt_cache])
        decoding.live = Live([self.extract_cache(i) for i in range(len(self.uids))])
        decoding.rows = [self._row(decoding, i, tokens[i]) for i in range(len(tokens))]
        none = [0] * len(tokens)
        parts = Parts(decoding.rows, none)
        for part in parts.parts:
            part.rule.begin(0)
        trials = parts.judge(logits)
        flight = Flight(list(decoding.rows), parts, trials, hidden, none, True)
        mx.async_eval(flight.pending())
        decoding.flights = [flight]
        return decoding

    def _row(self, decoding: Decoding, i: int, last: list[int]) -> Row:
        tokens = self.tokens[i] + last
        wish = self.wishes.pop(self.uids[i])
        wish.rule.extend(tokens)
        return Row(
            self.uids[i],
            wish.rule,
            decoding.live.spans[i],
            tokens,
            self.max_tokens[i],
            self.stop_sequences[i].matcher(),
            wish.pinned,
            wish.stats,
        )


class MTPBatchGenerator(BatchGenerator):  # type: ignore[misc]
    """mlx-lm's ``BatchGenerator`` with a Gemma 4 drafter.

    What mlx-lm's takes means what it means there. A call of ``next`` may return several
    tokens of a sequence, in order.

    Args:
        model: The target.
        drafter: A drafter that fits it.
        num_draft_tokens: Drafts per round; 0 decodes without drafting. None learns the
            number that is fastest here for so many sequences.
        verification: As for ``mtp_generate_step``.
        draft_heat: Likewise.
        draft_position: Likewise.
        stats: Filled by sequences that bring no own.
        options: mlx-lm's own.

    Raises:
        MTPError: If the pair does not fit, or an option cannot be honoured.
    """

    _old_wired_limit: Any = None  # ``close`` asks, also where a pair was refused

    def __init__(
        self,
        model: nn.Module,
        drafter: Any,
        *,
        num_draft_tokens: Optional[int] = None,
        verification: str = "block",
        draft_heat: float = DRAFT_HEAT,
        draft_position: int = 0,
        stats: Optional[MTPStats] = None,
        **options: Any,
    ) -> None:
        target = Target(model)
        if not is_drafter(drafter) or not is_lean(drafter):
            raise MTPError(
                f"the draft model is a {type(drafter).__name__}; several sequences "
                "need a drafter as load_assistant returns it"
            )
        check_pair(drafter, target)
        self.rules: Any = Rules(target.vocab_size, verification, draft_heat)
        pinned = checked_number(num_draft_tokens)
        super().__init__(model, **options)
        self._stats = stats or MTPStats()
        self._wishes: dict[int, Wish] = {}
        self._errors: list[Exception] = []  # to be raised by ``next_generated``
        self._prompt_batch = Prompts.empty(
            self.model, self.sampler, prefill_step_size=self.prefill_step_size
        )
        crew = Crew(
            target,
            drafter,
            lambda rows: pinned or learnt(model, drafter, rows),
            draft_position,
        )
        self._prompt_batch.crew, self._prompt_batch.wishes = crew, self._wishes
        self._generation_batch = Decoding(crew)

    def insert(self, prompts: list[list[int]], *args: Any, **options: Any) -> list[int]:
        """Queue sequences whose prompts are in one piece; see ``insert_segments``."""
        return self.insert_segments([[prompt] for prompt in prompts], *args, **options)

    def insert_segments(
        self,
        segments: list[list[list[int]]],
        max_tokens: Optional[list[int]] = None,
        caches: Optional[list[Optional[list[Any]]]] = None,
        all_tokens: Optional[list[list[int]]] = None,
        *args: Any,
        num_draft_tokens: Optional[Sequence[Optional[int]]] = None,
        seeds: Optional[Sequence[Optional[int]]] = None,
        stats: Optional[Sequence[MTPStats]] = None,
        **options: Any,
    ) -> list[int]:
        """Queue sequences, as mlx-lm's method of this name.

        Where a cache holds the whole prompt, the prompt is read again, as a window
        that is full cannot give back its last token.

        Args:
            segments: Per sequence, its prompt in pieces.
            max_tokens: How many tokens to generate.
            caches: The target's caches, or None.
            all_tokens: What these caches hold.
            args: mlx-lm's further arguments.
            num_draft_tokens: Per sequence, drafts per round; 0 for none, None for as
                many as the generator drafts.
            seeds: Per sequence, the seed that draws what it would draw alone.
            stats: Per sequence, filled while generating.
            options: mlx-lm's further arguments.

        Returns:
            A number for each sequence.

        Raises:
            ValueError: If an option cannot be honoured; nothing is queued then.
        """
        size = len(segments)
        # As in mlx-lm, an empty list stands for what is usual.
        max_tokens, caches = max_tokens or None, caches or None
        all_tokens = all_tokens or None
        of_each = {
            "max_tokens": max_tokens,
            "caches": caches,
            "all_tokens": all_tokens,
            "num_draft_tokens": num_draft_tokens,
            "seeds": seeds,
            "stats": stats,
        }
        for name, given in of_each.items():
            if given is not None and len(given) != size:
                raise MTPError(f"{name} has {len(given)} entries for {size} sequences")
        limits = [_whole(number) for number in max_tokens or ()]
        held = [list(tokens) for tokens in all_tokens or [[]] * size]
        caches = list(caches or [None] * size)
        segments = [
            [list(piece) for piece in pieces if len(piece)] for pieces in segments
        ]
        for i, cache in enumerate(caches):
            if cache is not None:
                kv.check(cache, self.fresh_cache())
            if not segments[i] and held[i]:
                segments[i], caches[i], held[i] = [held[i]], None, []
        for num in num_draft_tokens or ():
            checked_number(num)
        uids: list[int] = super().insert_segments(
            segments, limits or None, caches, held, *args, **options
        )
        # What was queued has the sampler and the processors that mlx-lm chose.
        queued = list(self._unprocessed_sequences)[-size:]
        try:
            for i, uid in enumerate(uids):
                *_, sampler, processors, _ = queued[i]
                self._wishes[uid] = Wish(
                    self.rules.make(sampler, processors, seeds[i] if seeds else None),
                    num_draft_tokens[i] if num_draft_tokens else None,
                    stats[i] if stats else self._stats,
                )
        except Exception:
            self.remove(uids)
            raise
        return uids

    def fresh_cache(self) -> list[Any]:
        """An empty cache of the target."""
        return cast(list[Any], make_prompt_cache(self.model, self.max_kv_size))

    def remove(self, uids: list[int], return_prompt_caches: bool = False) -> Any:
        """Forget sequences, as mlx-lm's method of this name."""
        for uid in uids:
            self._wishes.pop(uid, None)
        return super().remove(uids, return_prompt_caches)

    def next_generated(self) -> list[Response]:
        """As mlx-lm's; raises where ``next`` would tell of a sequence's error.

        What was generated meanwhile is returned first.
        """
        responses: list[Response] = [] if self._errors else super().next_generated()
        self._errors += [r.error for r in responses if r.error is not None]
        good = [r for r in responses if r.error is None]
        if self._errors and not good:
            raise self._errors.pop(0)
        return good


def _whole(number: Any) -> int:
    """A count of tokens, of any type of whole numbers."""
    if not isinstance(number, SupportsIndex):
        raise MTPError(f"max_tokens has {number!r}, it must be whole numbers")
    return index(number)

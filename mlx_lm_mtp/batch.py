"""mlx-lm's continuous batching with a drafter.

Queue, prompt processing, segments and statistics are mlx-lm's own; what is ours is the
decoding of the rows whose prompts have been read.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from . import cache as kv
from .compare import Compare
from .decoding import Crew, Decoding
from .depth import Pinned
from .flight import Flight, Parts, Row
from .forward import is_lean
from .kinds import is_drafter
from .law import is_greedy
from .pair import check_pair
from .ragged import Ragged
from .residual import DRAFT_HEAT, make_rule
from .rounds import MTPError
from .rule import Rule
from .stats import MTPStats
from .target import Target


@dataclass
class Wish:
    """What a sequence asks for beyond mlx-lm's own options."""

    drafts: Optional[int] = None
    seed: Optional[int] = None
    stats: MTPStats = field(default_factory=MTPStats)


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

"""``mtp_generate_step``: prefill, then rounds, in the protocol of mlx-lm."""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from . import cache as kv
from .law import LogitsProcessor, Sampler
from .pair import check_pair, is_drafter
from .propose import propose
from .rounds import Draft, MTPError, Seed
from .rule import DRAFT_HEAT, Decision, Rule, make_rule
from .stats import MTPStats
from .target import Target

DEFAULT_DRAFTS = 3

Emission = tuple[int, mx.array, bool]
Progress = Callable[[int, int], Any]


def mtp_generate_step(
    prompt: mx.array,
    model: nn.Module,
    draft_model: Any,
    stream: Any = generation_stream,
    *,
    num_draft_tokens: Optional[int] = None,
    max_tokens: int = 256,
    sampler: Optional[Sampler] = None,
    logits_processors: Optional[Sequence[LogitsProcessor]] = None,
    max_kv_size: Optional[int] = None,
    prompt_cache: Optional[list[Any]] = None,
    prefill_step_size: int = 2048,
    kv_bits: Optional[int] = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 0,
    prompt_progress_callback: Optional[Progress] = None,
    input_embeddings: Optional[mx.array] = None,
    verification: str = "block",
    draft_heat: float = DRAFT_HEAT,
    draft_position: int = 0,
    stats: Optional[MTPStats] = None,
) -> Generator[Emission, None, None]:
    """Generate tokens with a Gemma 4 drafter, from the law of plain decoding.

    The arguments that mlx-lm's ``generate_step`` has mean what they mean there. They
    are checked at the call, before anything is computed.

    Args:
        prompt: Token ids [n]; may be empty if ``input_embeddings`` are given.
        model: The target, a Gemma 4 loaded by mlx-lm.
        draft_model: The drafter, from ``load_assistant``.
        stream: The MLX stream to compute on.
        num_draft_tokens: Drafts per round; 0 decodes without drafting, None leaves
            the number to us.
        max_tokens: How many tokens to generate, -1 for no end.
        sampler: Maps log-probs [1, V] to a token [1]; argmax if None.
        logits_processors: Each maps (history [n], logits [1, V]) to logits.
        max_kv_size: Has no effect on Gemma 4, as in mlx-lm.
        prompt_cache: mlx-lm caches of the target, updated in place. Whenever the
            generator stops they hold what they held, the prompt, and every yielded
            token.
        prefill_step_size: Prompt tokens per forward.
        kv_bits: Refused: mlx-lm cannot quantise a sliding window's cache.
        kv_group_size: Unused, since ``kv_bits`` is refused.
        quantized_kv_start: Likewise.
        prompt_progress_callback: Called with (tokens processed, tokens in all).
        input_embeddings: Embeddings [n, H] to prefill in place of the prompt's.
        verification: "block", "token" or "coupled"; they differ at temperatures above
            zero only. With "coupled" a seed gives the text of plain decoding.
        draft_heat: Temperature of the drafts relative to the target's.
        draft_position: Shift of the drafter's RoPE position from the seed token's
            slot: 0 as in transformers, -1 as in vLLM. Only acceptance depends on it.
        stats: Filled while generating.

    Yields:
        The token, the target's log-probabilities [V] it was judged by, and whether
        the drafter proposed it.

    Raises:
        ValueError: If the pair, the cache or an option cannot be honoured.
    """
    if kv_bits is not None:
        raise MTPError(
            f"kv_bits is {kv_bits}, but mlx-lm cannot quantise the sliding-window "
            "caches of Gemma 4: leave it out"
        )
    num = _checked_number(num_draft_tokens)
    target = Target(model)
    if is_drafter(draft_model):
        check_pair(draft_model, target)
    prompt, input_embeddings = _checked_prompt(prompt, input_embeddings)
    fresh = make_prompt_cache(model, max_kv_size)
    if prompt_cache is not None:
        kv.check(prompt_cache, fresh)
    run = _Run(
        target,
        draft_model,
        fresh if prompt_cache is None else prompt_cache,
        make_rule(
            sampler, logits_processors, target.vocab_size, verification, draft_heat
        ),
        stats or MTPStats(),
        num,
        draft_position,
    )

    def generate() -> Generator[Emission, None, None]:
        with mx.stream(stream):
            try:
                logits = run.prefill(
                    prompt,
                    input_embeddings,
                    prefill_step_size,
                    prompt_progress_callback or (lambda *_: None),
                )
                yield from run.rounds(logits, max_tokens)
            finally:
                if prompt_cache is not None:
                    run.settle()

    return generate()


def _checked_number(num_draft_tokens: Optional[int]) -> int:
    if num_draft_tokens is None:
        return DEFAULT_DRAFTS
    if isinstance(num_draft_tokens, int) and num_draft_tokens >= 0:
        return num_draft_tokens
    raise MTPError(
        f"num_draft_tokens is {num_draft_tokens!r}, it must be a whole number: 0 for "
        "plain decoding, or how many tokens to draft per round"
    )


def _checked_prompt(
    prompt: Any, input_embeddings: Optional[mx.array]
) -> tuple[mx.array, Optional[mx.array]]:
    prompt = prompt if isinstance(prompt, mx.array) else mx.array(prompt, mx.int32)
    if input_embeddings is None:
        if not prompt.size:
            raise MTPError("the prompt is empty: give tokens or input_embeddings")
    elif prompt.size and len(prompt) != len(input_embeddings):
        raise MTPError(
            f"input_embeddings has {len(input_embeddings)} positions, the prompt "
            f"{len(prompt)}: they must agree, or the prompt be empty"
        )
    return prompt, input_embeddings


class _Run:
    """One generation: its caches, seed and what it has yielded."""

    def __init__(
        self,
        target: Target,
        drafter: Any,
        caches: list[Any],
        rule: Rule,
        stats: MTPStats,
        num_drafts: int,
        draft_position: int,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.caches = caches
        self.rule = rule
        self.stats = stats
        self.num_drafts = num_drafts
        self.draft_position = draft_position
        self.yielded: list[int] = []
        self.prompt_end: Optional[int] = None

    def prefill(
        self,
        prompt: mx.array,
        embeddings: Optional[mx.array],
        step_size: int,
        progress: Progress,
    ) -> mx.array:
        """Read the prompt in mlx-lm's own steps; logits [1, 1, V] after it.

        No logits are computed for the positions before the last.
        """
        size = len(prompt) if embeddings is None else len(embeddings)
        self.rule.extend(prompt)
        start, done = kv.length(self.caches), 0
        progress(done, size)
        while size - done > 1:
            end = min(done + step_size, size - 1)
            self._read(prompt, embeddings, done, end)
            mx.eval([c.state for c in self.caches])
            done = end
            progress(done, size)
            mx.clear_cache()
        self.hidden = self._read(prompt, embeddings, done, size)[:, -1:]
        self.prompt_end = start + size
        logits = self.target.logits(self.hidden)
        mx.eval(logits)
        progress(size, size)
        return logits

    def _read(
        self, prompt: mx.array, embeddings: Optional[mx.array], start: int, end: int
    ) -> mx.array:
        part = None if embeddings is None else embeddings[start:end][None]
        return self.target.hidden(prompt[start:end][None], self.caches, part)

    def rounds(self, logits: mx.array, max_tokens: int) -> Iterator[Emission]:
        """Decide the first token by the prompt's logits, then round after round."""
        nothing = Draft(mx.zeros((1, 0), mx.uint32))
        self.rule.begin(0)
        decision = self.rule.judge(nothing, logits)
        while True:
            left = max_tokens - len(self.yielded) - len(decision.tokens)
            going = decision.error is None and left != 0
            # The next drafts are computed while the caller handles these tokens.
            draft = self._launch(decision, left) if going else None
            yield from self._emit(decision)
            if decision.error is not None:
                raise decision.error
            if draft is None:
                return
            decision = self._verify(draft)

    def _launch(self, decision: Decision, left: int) -> Draft:
        self.rule.extend(mx.array(decision.tokens))
        # The seed token is emitted whatever follows it, so at most left - 1 drafts
        # can be used; a negative number of tokens left means no end.
        num = self.num_drafts if left < 0 else min(self.num_drafts, left - 1)
        seed = Seed(mx.array(decision.tokens[-1:]), self.hidden)
        self.seed_token = seed.token
        self.rule.begin(num)
        if num == 0:
            return Draft(mx.zeros((1, 0), mx.uint32))
        position = kv.length(self.caches) + self.draft_position
        draft = propose(
            self.drafter,
            self.target,
            seed,
            self.caches,
            position,
            num,
            self.rule.draw,
        )
        mx.async_eval(*draft.pending())
        return draft

    def _verify(self, draft: Draft) -> Decision:
        start = kv.length(self.caches)
        tokens = mx.concatenate(
            [self.seed_token[:, None], draft.tokens.astype(self.seed_token.dtype)], 1
        )
        # Drafts hold views of the K/V until they are computed; writing to the caches
        # before would copy every buffer.
        mx.eval(draft.pending())
        hidden = self.target.hidden(tokens, self.caches)
        decision = self.rule.judge(draft, self.target.logits(hidden))
        accepted = len(decision.tokens) - 1
        kv.keep(self.caches, start + 1 + max(accepted, 0))
        self.hidden = hidden[:, accepted : accepted + 1]
        self.stats.add(draft.size, max(accepted, 0))
        return decision

    def _emit(self, decision: Decision) -> Iterator[Emission]:
        last = len(decision.tokens) - (decision.error is None)
        drafted = self.prompt_end is not None and bool(self.yielded)
        for i, token in enumerate(decision.tokens):
            self.yielded.append(token)
            if len(self.yielded) % 256 == 0:
                mx.clear_cache()
            yield token, decision.logprobs[i], drafted and i < last

    def settle(self) -> None:
        """Leave the caches with the prompt and every yielded token, exactly.

        An interrupted prefill is left where it stopped, as mlx-lm leaves it.
        """
        if self.prompt_end is None:
            return
        end = self.prompt_end + len(self.yielded)
        kv.keep(self.caches, min(end, kv.length(self.caches)))
        missing = end - kv.length(self.caches)
        if missing:
            self.target.hidden(mx.array([self.yielded[-missing:]]), self.caches)
        mx.eval([c.state for c in self.caches])

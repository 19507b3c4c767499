"""``mtp_generate_step``: the door, in the protocol of mlx-lm's ``generate_step``."""

from collections.abc import Callable, Generator, Iterator, Sequence
from operator import index
from typing import Any, Optional, SupportsIndex

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from . import cache as kv
from .depth import Depth, Pinned, learnt
from .kinds import is_drafter
from .law import LogitsProcessor, Sampler
from .loop import Emission, Progress, Run
from .pair import check_pair
from .residual import DRAFT_HEAT, make_rule
from .rounds import MTPError
from .stats import MTPStats
from .target import Target


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
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Optional[Progress] = None,
    input_embeddings: Optional[mx.array] = None,
    history: Optional[mx.array] = None,
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
        num_draft_tokens: Drafts per round; 0 decodes without drafting. None learns
            the number that is fastest here, see ``depth``.
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
        history: Token ids [n] before the prompt, which logits processors shall see.
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
    pinned = checked_number(num_draft_tokens)
    target = Target(model)
    if is_drafter(draft_model):
        check_pair(draft_model, target)
    prompt, input_embeddings = _checked_prompt(prompt, input_embeddings)
    fresh = make_prompt_cache(model, max_kv_size)
    if prompt_cache is not None:
        kv.check(prompt_cache, fresh)
    rule = make_rule(
        sampler, logits_processors, target.vocab_size, verification, draft_heat
    )
    if history is not None:
        rule.extend(history)
    run = Run(
        target,
        draft_model,
        fresh if prompt_cache is None else prompt_cache,
        rule,
        stats or MTPStats(),
        pinned or learnt(model, draft_model),
        draft_position,
    )
    steps = run.steps(
        prompt,
        input_embeddings,
        max_tokens,
        prefill_step_size,
        prompt_progress_callback or (lambda *_: None),
    )
    return _on(stream, steps, None if prompt_cache is None else run.settle)


def _on(
    stream: Any, steps: Iterator[Emission], settle: Optional[Callable[[], None]]
) -> Generator[Emission, None, None]:
    """Run the steps on a stream, and settle the caller's cache however they end."""
    with mx.stream(stream):
        try:
            yield from steps
        finally:
            if settle is not None:
                settle()


def checked_number(num_draft_tokens: Optional[int]) -> Optional[Depth]:
    """The depth that a user pinned, None for an adaptive one.

    Raises:
        MTPError: If it is no number of drafts.
    """
    if num_draft_tokens is None:
        return None
    if isinstance(num_draft_tokens, SupportsIndex) and index(num_draft_tokens) >= 0:
        return Pinned(index(num_draft_tokens))
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

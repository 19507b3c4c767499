"""One sequence after another, in the protocol of mlx-lm's ``BatchGenerator``.

mlx-lm's server drives its batch generator through ``insert_segments``, ``next``,
``extract_cache`` and ``remove``. This one answers the same calls and decodes its
sequences in turn, so that the server keeps what it does around it: prompt caches by
segment, progress, stop words, cancellation.
"""

import copy
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import (
    GenerationBatch,
    PromptProcessingBatch,
    StopSequences,
    generation_stream,
)
from mlx_lm.models.cache import make_prompt_cache

from .generate import mtp_generate_step
from .law import LogitsProcessor, Sampler
from .rounds import MTPError
from .stats import MTPStats

PATIENCE = 5.0  # seconds until who waits for a turn is told again that it does


@dataclass
class Progress(PromptProcessingBatch.Response):  # type: ignore[misc]
    """How much of a prompt has been read."""


@dataclass
class Response(GenerationBatch.Response):  # type: ignore[misc]
    """One token of one sequence, or why the sequence failed."""

    from_draft: bool = False
    error: Optional[Exception] = None


@dataclass(eq=False)
class _Sequence:
    uid: int
    segments: list[list[int]]  # prompt tokens to read; the last token is the last one
    cache: list[Any]
    tokens: list[int]  # what the cache holds
    options: dict[str, Any]  # for mtp_generate_step
    matcher: Any
    left: int  # tokens to generate
    error: Optional[Exception] = None
    read: int = 0
    size: int = field(init=False)
    steps: Optional[Generator[Any, None, None]] = None

    def __post_init__(self) -> None:
        self.size = sum(map(len, self.segments))


class SerialGenerator:
    """Decodes sequences with a drafter, one after another.

    Args:
        model: The target.
        drafter: A drafter that fits it.
        prefill_step_size: Prompt tokens per forward.
        stream: The MLX stream to compute on.
        options: Further options of ``mtp_generate_step``; those that only matter to
            several rows at once, which mlx-lm's generator also takes, are ignored.
    """

    def __init__(
        self,
        model: nn.Module,
        drafter: nn.Module,
        *,
        prefill_step_size: int = 2048,
        stream: Any = None,
        completion_batch_size: int = 1,
        prefill_batch_size: int = 1,
        **options: Any,
    ) -> None:
        self.model = model
        self.drafter = drafter
        self.prefill_step_size = prefill_step_size
        self.stream = stream or generation_stream
        self.options = options
        self._queue: deque[_Sequence] = deque()  # the first is being decoded
        self._uids = 0
        self._told = time.monotonic()

    def insert_segments(
        self,
        segments: list[list[list[int]]],
        max_tokens: list[int],
        caches: list[Optional[list[Any]]],
        all_tokens: list[list[int]],
        samplers: list[Optional[Sampler]],
        logits_processors: list[Sequence[LogitsProcessor]],
        stop_sequences: list[StopSequences],
        num_draft_tokens: list[Optional[int]],
        stats: list[MTPStats],
    ) -> list[int]:
        """Queue sequences; see mlx-lm's method of this name.

        A sequence that cannot be decoded fails in its turn, not here.

        Args:
            segments: Per sequence, the prompt tokens that its cache does not hold, cut
                where the cache shall be offered by ``extract_cache``.
            max_tokens: How many tokens to generate.
            caches: The target's caches, or None.
            all_tokens: What these caches hold.
            samplers: As for ``mtp_generate_step``.
            logits_processors: Likewise; they see ``all_tokens`` too.
            stop_sequences: What ends the text.
            num_draft_tokens: As for ``mtp_generate_step``.
            stats: Filled while generating.

        Returns:
            A number for each sequence.
        """
        rows = zip(
            segments,
            max_tokens,
            caches,
            all_tokens,
            samplers,
            logits_processors,
            stop_sequences,
            num_draft_tokens,
            stats,
            strict=True,
        )
        uids = []
        for prompt, left, cache, held, sampler, processors, stop, num, counts in rows:
            options = {
                "sampler": sampler,
                "logits_processors": processors,
                "num_draft_tokens": num,
                "stats": counts,
                **self.options,
            }
            prompt, cache, held = self._prepared(prompt, cache, held)
            uids.append(self._uids)
            self._uids += 1
            self._queue.append(
                _Sequence(
                    uids[-1],
                    prompt,
                    cache,
                    held,
                    options,
                    stop.matcher(),
                    left,
                    error=_mistake(prompt, left),
                )
            )
        return uids

    def _prepared(
        self, segments: list[list[int]], cache: Optional[list[Any]], held: list[int]
    ) -> tuple[list[list[int]], list[Any], list[int]]:
        segments = [list(segment) for segment in segments if segment]
        if not segments and held:
            # The cache holds the whole prompt, and a window that is full cannot give
            # back its last token: the prompt is read again.
            segments, cache, held = [list(held)], None, []
        if segments and len(segments[-1]) > 1:
            segments[-1:] = [segments[-1][:-1], segments[-1][-1:]]
        if cache is None:
            cache = make_prompt_cache(self.model)
        return segments, cache, list(held)

    def next(self) -> tuple[list[Progress], list[Response]]:
        """Do one piece of work: read a piece of a prompt, or emit one token."""
        if not self._queue:
            return [], []
        sequence = self._queue[0]
        waiting = self._tell_waiting()
        try:
            if sequence.steps is None:
                return [*waiting, self._read(sequence)], []
            return waiting, [self._emit(sequence)]
        except Exception as e:  # of this sequence alone; who asked for it is told
            self.remove([sequence.uid])
            nothing = mx.zeros(16)
            return waiting, [
                Response(
                    sequence.uid,
                    0,
                    nothing,
                    "error",
                    make_prompt_cache(self.model),
                    [],
                    error=e,
                )
            ]

    def _tell_waiting(self) -> list[Progress]:
        """Sign of life for those behind the first; finds out who has left, too."""
        if time.monotonic() - self._told < PATIENCE:
            return []
        self._told = time.monotonic()
        others = list(self._queue)[1:]
        return [Progress(s.uid, (0, s.size), False, False) for s in others]

    def _read(self, sequence: _Sequence) -> Progress:
        if sequence.error is not None:
            raise sequence.error
        segment = sequence.segments[0]
        if len(sequence.segments) == 1 and len(segment) == 1:
            sequence.steps = mtp_generate_step(
                mx.array(segment),
                self.model,
                self.drafter,
                self.stream,
                max_tokens=sequence.left,
                prompt_cache=sequence.cache,
                history=mx.array(sequence.tokens) if sequence.tokens else None,
                **sequence.options,
            )
            sequence.tokens += segment
            whole = sequence.size, sequence.size
            return Progress(sequence.uid, whole, True, True)
        piece = segment[: self.prefill_step_size]
        with mx.stream(self.stream):
            self.model(mx.array(piece)[None], cache=sequence.cache)
            mx.eval([c.state for c in sequence.cache])
            mx.clear_cache()
        sequence.tokens += piece
        sequence.read += len(piece)
        del segment[: len(piece)]
        if not segment:
            sequence.segments.pop(0)
        progress = sequence.read, sequence.size
        return Progress(sequence.uid, progress, not segment, False)

    def _emit(self, sequence: _Sequence) -> Response:
        assert sequence.steps is not None
        token, logprobs, from_draft = next(sequence.steps)
        sequence.tokens.append(token)
        sequence.left -= 1
        response = Response(sequence.uid, token, logprobs, None, None, None, from_draft)
        if sequence.left == 0:
            response.finish_reason = "length"
        if sequence.matcher.advance(token):
            response.finish_reason = "stop"
        if response.finish_reason is not None:
            self.remove([sequence.uid])  # leaves the cache with every token
            response.prompt_cache = sequence.cache
            response.all_tokens = sequence.tokens
        return response

    def extract_cache(self, uids: list[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """A copy of the cache of each sequence, and the tokens it holds."""
        return {
            s.uid: (copy.deepcopy(s.cache), s.tokens)
            for s in self._queue
            if s.uid in uids
        }

    def remove(self, uids: list[int]) -> None:
        """Forget sequences."""
        for sequence in [s for s in self._queue if s.uid in uids]:
            self._queue.remove(sequence)
            if sequence.steps is not None:
                sequence.steps.close()

    @property
    def prompt_cache_nbytes(self) -> int:
        """The bytes of all caches."""
        return sum(c.nbytes for s in self._queue for c in s.cache)

    def close(self) -> None:
        """Forget every sequence."""
        self.remove([s.uid for s in self._queue])


def _mistake(prompt: list[list[int]], max_tokens: int) -> Optional[Exception]:
    if not prompt:
        return MTPError("the prompt is empty: give at least one token")
    if max_tokens <= 0:
        return MTPError(f"max_tokens is {max_tokens}, it must be 1 or more")
    return None

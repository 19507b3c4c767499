"""``mlx_lm.server``: drafters by request, in mlx-lm's own serving loop.

Where mlx-lm makes its ``BatchGenerator``, a target with a drafter gets
ours: that is the seam of continuous batching. Requests that mlx-lm serves one by one (a
seed, images) go through ``stream_generate``, as everywhere.
"""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Optional

from ..rounds import MTPError
from . import flags, handler, provider
from .flags import Drafting
from .handler import Drafts, is_asked
from .patch import Wrap

log = logging.getLogger("mlx_lm_mtp")

# The provider of the serving loop that runs in this thread.
_models: ContextVar[Any] = ContextVar("models", default=None)
# The commands that run in this process.
_commands: list[str] = []


def wrappers() -> dict[str, Wrap]:
    """What takes the place of each name."""
    return {
        "argparse": _wrap_argparse,
        "main": _wrap_main,
        "stream_generate": _wrap_stream,
        "BatchGenerator": _wrap_batch_generator,
        "_make_logits_processors": _wrap_processors,
        "ModelProvider.load_default": _wrap_load_default,
        "ResponseGenerator._generate": _wrap_loop,
        "ResponseGenerator._tokenize": _wrap_tokenize,
        **provider.wrappers(),
        **handler.wrappers(),
    }


# The command --------------------------------------------------------------------------


def _wrap_argparse(original: ModuleType) -> ModuleType:
    """The parser is made inside ``main``, from this module."""

    class ArgumentParser(argparse.ArgumentParser):
        def parse_args(self, *args: Any, **kwargs: Any) -> Any:
            flags.add(self)
            return super().parse_args(*args, **kwargs)

    stand_in = ModuleType(original.__name__)
    stand_in.__dict__.update(vars(original), ArgumentParser=ArgumentParser)
    return stand_in


def _wrap_main(original: Any) -> Any:
    def main(*args: Any, **kwargs: Any) -> Any:
        _commands.append("server")
        try:
            original(*args, **kwargs)
        finally:
            _commands.pop()

    return flags.wrap_main(main)


def _wrap_load_default(original: Any) -> Any:
    """A pair of the command line that does not fit ends the command.

    It is loaded in the serving thread, while the main thread waits for connections and
    cannot always be interrupted: a command in the background ignores that signal.
    """

    def load_default(self: Any) -> None:
        try:
            original(self)
        except MTPError as e:
            if not _commands:
                raise
            flags.complain(e)
            sys.stderr.flush()
            os._exit(2)

    return load_default


# Requests -----------------------------------------------------------------------------


def _wrap_tokenize(original: Any) -> Any:
    def _tokenize(self: Any, tokenizer: Any, request: Any, args: Any) -> Any:
        if not is_asked(self):
            return original(self, tokenizer, request, args)
        try:
            found = original(self, tokenizer, request, args)
        except Exception as e:
            line = " ".join(str(e).split()) or type(e).__name__
            raise MTPError(f"the request makes no prompt: {line}") from e
        if not isinstance(found[0], list) or not all(
            isinstance(token, int) for token in found[0]
        ):
            raise MTPError("the request makes no prompt: it must be one text")
        _check(args, self.model_provider, tokenizer)
        unused = _why_not(self.model_provider, args)
        if unused:
            log.info("MTP: not used for this request: %s", unused)
        return found

    return _tokenize


def _check(args: Any, models: Any, tokenizer: Any) -> None:
    """What only shows once the model is known, and would fail inside MLX.

    With and without drafts: either way it would end the serving thread.
    """
    from mlx_lm.server import _make_sampler

    from ..law import check_filters
    from ..target import Target

    try:
        size = Target(models.model).vocab_size
    except MTPError:
        return  # no Gemma 4
    check_filters(_make_sampler(args, tokenizer), size)
    for token in args.logits.logit_bias or {}:
        if not 0 <= token < size:
            raise MTPError(f"logit_bias names token {token}, there are {size}")


def _why_not(models: Any, args: Any) -> Optional[str]:
    if args.model.draft is None:
        return "its draft_model is null"
    if Drafts.of(args.num_draft_tokens).pinned == 0:
        return "its num_draft_tokens is 0"
    return provider.why_not(models)


def _wrap_stream(original: Any) -> Any:
    """Requests served one by one."""

    def stream_generate(**kwargs: Any) -> Any:
        drafting, drafts = kwargs["draft_model"], kwargs["num_draft_tokens"]
        if not isinstance(drafting, Drafting) or not isinstance(drafts, Drafts):
            return original(**kwargs)
        kwargs["draft_model"] = drafting.having(stats=drafts.stats)
        kwargs["num_draft_tokens"] = drafts.pinned
        return _counted(original(**kwargs), drafts)

    return stream_generate


def _counted(steps: Any, drafts: Drafts) -> Iterator[Any]:
    drafts.served = True
    with contextlib.closing(steps):
        try:
            for response in steps:
                drafts.accepted += response.from_draft
                yield response
        finally:
            drafts.report()


def _wrap_processors(original: Any) -> Any:
    """Give a request's drafts a seat on the way to the batch generator."""

    def _make_logits_processors(args: Any) -> Any:
        processors = Processors(original(args))
        processors.drafts = args.num_draft_tokens
        return processors

    return _make_logits_processors


class Processors(list[Any]):
    """Logits processors of a request, and its drafts."""

    drafts: Any


def _wrap_loop(original: Any) -> Any:
    def _generate(self: Any) -> None:
        _models.set(self.model_provider)
        original(self)

    return _generate


def _wrap_batch_generator(original: Any) -> Any:
    def make_batch_generator(model: Any, **options: Any) -> Any:
        models = _models.get()
        drafting = getattr(models, "draft_model", None)
        if not isinstance(drafting, Drafting) or models.model is not model:
            return original(model, **options)
        from ..batch import MTPBatchGenerator

        options.update(drafting.options)
        return Serving(MTPBatchGenerator(model, drafting.drafter, **options))

    return make_batch_generator


class Serving:
    """An MTP batch generator as mlx-lm's server drives it.

    Brings each request's drafts along, and an error to the one who asked.
    """

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self.drafts: dict[int, Drafts] = {}
        self.refused: dict[int, Exception] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)

    def insert_segments(self, *, logits_processors: Any, **options: Any) -> list[int]:
        """As mlx-lm's, for one request whose processors carry its drafts.

        What cannot be honoured is told by ``next``.
        """
        [request] = [Drafts.of(p.drafts) for p in logits_processors]
        request.served = True
        try:
            [uid] = self.generator.insert_segments(
                logits_processors=logits_processors,
                num_draft_tokens=[request.pinned],
                stats=[request.stats],
                **options,
            )
        except Exception as e:  # whatever it is, it is for this request alone
            uid = -1 - len(self.refused)
            self.refused[uid] = e
        self.drafts[uid] = request
        return [uid]

    def next(self) -> tuple[list[Any], list[Any]]:
        """As mlx-lm's; an error goes to the request's client."""
        from mlx_lm.generate import PromptProcessingBatch

        try:
            told, responses = self.generator.next()
        except Exception as e:  # of no one sequence: all who wait are told
            log.exception("decoding failed")
            told, responses = [], []
            self.refused.update(dict.fromkeys(self.drafts, e))
            self.generator.remove(list(self.drafts))
        responses = [*self._refusals(), *responses]
        for response in responses:
            drafts = self.drafts[response.uid]
            drafts.accepted += response.from_draft
            if response.error is not None:
                # mlx-lm puts a progress on the request's queue as it is, and raises
                # what is an exception there. The rest of the response ends it.
                told.append(
                    PromptProcessingBatch.Response(
                        response.uid, response.error, False, False
                    )
                )
                response.finish_reason = "stop"
            if response.finish_reason is not None:
                self.drafts.pop(response.uid).report()
        return told, responses

    def _refusals(self) -> list[Any]:
        from ..decoding import failed

        refused, self.refused = self.refused, {}
        fresh = self.generator.fresh_cache
        return [failed(uid, error, fresh(), []) for uid, error in refused.items()]

    def remove(self, uids: list[int]) -> None:
        """As mlx-lm's."""
        for uid in uids:
            self.drafts.pop(uid, None)
            self.refused.pop(uid, None)
        self.generator.remove(uids)

"""``mlx_lm.generate`` and everything built on ``stream_generate``."""

import weakref
from types import FunctionType
from typing import Any, Optional

from ..kinds import is_drafter
from . import flags
from .flags import AssistantPath, Drafting
from .patch import Wrap

# Options that stream_generate does not hand to a draft model's step.
WITHHELD = ("prompt_progress_callback", "input_embeddings")


def wrappers() -> dict[str, Wrap]:
    """What takes the place of each name."""
    return {
        "speculative_generate_step": _wrap_step,
        "stream_generate": _wrap_stream,
        "generate": _wrap_generate,
        "batch_generate": _wrap_batch_generate,
        "load": _wrap_load,
        "setup_arg_parser": flags.wrap_parser,
        "main": flags.wrap_main,
    }


def _drafting(draft_model: Any) -> Optional[Drafting]:
    """A request for MTP, if this draft model is one."""
    if isinstance(draft_model, Drafting) or draft_model is None:
        return draft_model
    return Drafting(draft_model) if is_drafter(draft_model) else None


def _wrap_step(original: Any) -> Any:
    def speculative_generate_step(
        prompt: Any, model: Any, draft_model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        drafting = _drafting(draft_model)
        if drafting is None:
            return original(prompt, model, draft_model, *args, **kwargs)
        from ..generate import mtp_generate_step

        kwargs.update(drafting.options)
        return mtp_generate_step(prompt, model, drafting.drafter, *args, **kwargs)

    return speculative_generate_step


def _wrap_stream(original: Any) -> Any:
    def stream_generate(*args: Any, **kwargs: Any) -> Any:
        draft_model = kwargs.get("draft_model", args[4] if len(args) > 4 else None)
        drafting = _drafting(draft_model)
        if drafting is None:
            return original(*args, **kwargs)
        withheld = {name: kwargs.pop(name) for name in WITHHELD if name in kwargs}
        drafting = drafting.having(**withheld)
        if len(args) > 4:
            return original(*args[:4], drafting, *args[5:], **kwargs)
        return original(*args, **{**kwargs, "draft_model": drafting})

    return stream_generate


def _wrap_generate(original: Any) -> Any:
    def generate(*args: Any, **kwargs: Any) -> Any:
        drafting = _drafting(kwargs.get("draft_model"))
        if drafting is None:
            return original(*args, **kwargs)
        from ..stats import MTPStats

        stats = kwargs.pop("stats", None) or MTPStats()
        kwargs["draft_model"] = drafting.having(stats=stats)
        text = original(*args, **kwargs)
        if kwargs.get("verbose", args[3] if len(args) > 3 else False):
            print(stats.summary())
        flags.tell_unused(stats, kwargs.get("num_draft_tokens"))
        return text

    return generate


def _wrap_batch_generate(original: Any) -> Any:
    def batch_generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        drafting = _drafting(kwargs.get("draft_model"))
        if drafting is None:
            return original(model, *args, **kwargs)
        from ..batch import MTPBatchGenerator
        from ..stats import MTPStats

        drafter = drafting.drafter
        options = {"stats": MTPStats(), **drafting.options}
        del kwargs["draft_model"]

        def make(model: Any, **theirs: Any) -> Any:
            return MTPBatchGenerator(model, drafter, **{**options, **theirs})

        response = _with_names(original, BatchGenerator=make)(model, *args, **kwargs)
        stats = kwargs.get("stats", options["stats"])
        if kwargs.get("verbose", args[4] if len(args) > 4 else False):
            print(stats.summary())
        flags.tell_unused(stats, kwargs.get("num_draft_tokens"))
        return response

    return batch_generate


def _with_names(function: Any, **names: Any) -> Any:
    """The same function, which sees other values of these global names."""
    changed = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed


def _wrap_load(original: Any) -> Any:
    last: list[weakref.ref[Any]] = []

    def load(path_or_hf_repo: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path_or_hf_repo, AssistantPath):
            model, tokenizer = (ref() for ref in last)
            assert model is not None
            return path_or_hf_repo.load(model), tokenizer
        loaded = original(path_or_hf_repo, *args, **kwargs)
        last[:] = [weakref.ref(part) for part in loaded[:2]]
        return loaded

    return load

"""Every name of mlx-lm that we replace, and how to put it back.

A module is patched wholly or not at all: what we rely on is checked first.
"""

import functools
import importlib.metadata
import logging
import os
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, Optional

from . import flags
from .flags import AssistantPath, Drafting

TESTED = ("0.32.0", "0.32.1", "0.32.2")
SUPPORTED = "0.32."
MODELS_PATH = os.path.join(os.path.dirname(os.path.dirname(__file__)), "models")
# Options that stream_generate does not hand to a draft model's step.
WITHHELD = ("prompt_progress_callback", "input_embeddings")

log = logging.getLogger("mlx_lm_mtp")

_patched: dict[str, tuple[Any, Any]] = {}  # dotted name -> (original, replacement)


class Unavailable(Exception):
    """Why MTP cannot take part in this mlx-lm."""


def version() -> Optional[str]:
    """The version of mlx-lm: the imported one, else the installed one."""
    module = sys.modules.get("mlx_lm")
    if module is not None:
        return getattr(module, "__version__", None)
    try:
        return importlib.metadata.version("mlx-lm")
    except importlib.metadata.PackageNotFoundError:
        return None


def patched() -> list[str]:
    """The names replaced so far."""
    return sorted(_patched)


def apply(module: ModuleType) -> None:
    """Patch one module of mlx-lm.

    Raises:
        Unavailable: If this mlx-lm is not one that we know; it is left untouched.
    """
    found = version()
    if not str(found).startswith(SUPPORTED):
        raise Unavailable(
            f"mlx-lm {found} is not one that this mlx-lm-mtp knows ({SUPPORTED}x): "
            "upgrade mlx-lm-mtp, or install a known mlx-lm"
        )
    if module.__name__ == "mlx_lm.models":
        if MODELS_PATH not in module.__path__:
            module.__path__.append(MODELS_PATH)
    elif module.__name__ == "mlx_lm.generate":
        _replace(module, GENERATE)


def restore() -> None:
    """Put every original back, wherever mlx-lm has bound the replacement."""
    for name, (original, replacement) in _patched.items():
        _rebind(name.rsplit(".", 1)[1], replacement, original)
    _patched.clear()
    models = sys.modules.get("mlx_lm.models")
    if models is not None and MODELS_PATH in models.__path__:
        models.__path__.remove(MODELS_PATH)


def _replace(module: ModuleType, wrappers: dict[str, Callable[[Any], Any]]) -> None:
    missing = [name for name in wrappers if not callable(getattr(module, name, None))]
    if missing:
        raise Unavailable(
            f"this mlx-lm {version()} has no {module.__name__}.{missing[0]}: "
            "report it, and run without the assistant"
        )
    for name, wrap in wrappers.items():
        original = getattr(module, name)
        if getattr(original, "_mlx_lm_mtp", False):
            continue
        replacement = functools.wraps(original)(wrap(original))
        replacement._mlx_lm_mtp = True  # type: ignore[attr-defined]
        _patched[f"{module.__name__}.{name}"] = (original, replacement)
        setattr(module, name, replacement)
        _rebind(name, original, replacement)


def _rebind(name: str, old: Any, new: Any) -> None:
    """Follow ``from .generate import name`` in mlx-lm's other modules."""
    for key, module in list(sys.modules.items()):
        ours = key == "mlx_lm" or key.startswith("mlx_lm.")
        if ours and module is not None and module.__dict__.get(name) is old:
            setattr(module, name, new)


def _drafting(draft_model: Any) -> Optional[Drafting]:
    """A request for MTP, if this draft model is one."""
    if isinstance(draft_model, Drafting) or draft_model is None:
        return draft_model
    from ..pair import is_drafter

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
        if kwargs.get("num_draft_tokens") != 0 and not stats.drafted:
            log.warning("MTP: the text ended before the assistant was used")
        return text

    return generate


def _wrap_load(original: Any) -> Any:
    last: list[weakref.ref[Any]] = []

    def load(path_or_hf_repo: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path_or_hf_repo, AssistantPath):
            from ..pair import load_assistant

            model, tokenizer = (ref() for ref in last)
            assert model is not None
            drafter = load_assistant(path_or_hf_repo, model)
            return path_or_hf_repo.drafting(drafter), tokenizer
        loaded = original(path_or_hf_repo, *args, **kwargs)
        last[:] = [weakref.ref(part) for part in loaded[:2]]
        return loaded

    return load


def _wrap_parser(original: Any) -> Any:
    def setup_arg_parser(*args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        flags.add(parser)
        return parser

    return setup_arg_parser


def _wrap_main(original: Any) -> Any:
    def main(*args: Any, **kwargs: Any) -> Any:
        from ..rounds import MTPError

        try:
            return original(*args, **kwargs)
        except MTPError as e:
            flags.refuse(e)

    return main


GENERATE: dict[str, Callable[[Any], Any]] = {
    "speculative_generate_step": _wrap_step,
    "stream_generate": _wrap_stream,
    "generate": _wrap_generate,
    "load": _wrap_load,
    "setup_arg_parser": _wrap_parser,
    "main": _wrap_main,
}

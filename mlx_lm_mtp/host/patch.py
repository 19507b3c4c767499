"""How names of mlx-lm are replaced, and how they are put back.

A module is patched wholly or not at all: what we rely on is checked first. What takes
the place of each name is in the files of ``HOMES``.
"""

import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Optional

TESTED = ("0.32.0", "0.32.1", "0.32.2")
SUPPORTED = "0.32."
MODELS_PATH = os.path.join(os.path.dirname(os.path.dirname(__file__)), "models")
# Each file has wrappers() -> {name: original -> replacement}.
HOMES = {
    "mlx_lm.generate": ".generate",
    "mlx_lm.chat": ".talk",
    "mlx_lm.benchmark": ".benchmark",
    "mlx_lm.server": ".server",
}
# What it defines is bound by value in mlx-lm's other modules, and followed there.
FOLLOWED = "mlx_lm.generate"

Wrap = Callable[[Any], Any]


class Unavailable(Exception):
    """Why MTP cannot take part in this mlx-lm."""


@dataclass(frozen=True)
class _Patch:
    owner: Any  # a module, or a class in it
    name: str
    original: Any
    replacement: Any
    followed: bool

    def undo(self) -> None:
        if getattr(self.owner, self.name, None) is self.replacement:
            setattr(self.owner, self.name, self.original)
        if self.followed:
            _rebind(self.name, self.replacement, self.original)


_patched: dict[str, _Patch] = {}  # by dotted name, in the order of patching


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
    else:
        home = importlib.import_module(HOMES[module.__name__], __package__)
        _replace(module, home.wrappers())


def restore() -> None:
    """Put every original back, wherever mlx-lm has bound the replacement."""
    for patch in reversed(_patched.values()):
        patch.undo()
    _patched.clear()
    models = sys.modules.get("mlx_lm.models")
    if models is not None and MODELS_PATH in models.__path__:
        models.__path__.remove(MODELS_PATH)


def _replace(module: ModuleType, wrappers: dict[str, Wrap]) -> None:
    """Replace names of a module, and methods as ``Class.method``."""
    found = {name: _find(module, name) for name in wrappers}
    for name, (owner, attribute, original) in found.items():
        key = f"{module.__name__}.{name}"
        if key in _patched and original is _patched[key].replacement:
            continue
        replacement = wrappers[name](original)
        functools.update_wrapper(replacement, original, updated=())
        followed = module.__name__ == FOLLOWED and not _is_taken(original)
        _patched[key] = _Patch(owner, attribute, original, replacement, followed)
        setattr(owner, attribute, replacement)
        if followed:
            _rebind(attribute, original, replacement)


def _is_taken(original: Any) -> bool:
    """Whether another module of mlx-lm defines it, where the others take it from."""
    home = str(getattr(original, "__module__", FOLLOWED))
    return home.startswith("mlx_lm.") and home != FOLLOWED


def _find(module: ModuleType, name: str) -> tuple[Any, str, Any]:
    """Where a name lives, its last part, and its value."""
    *path, attribute = name.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, None)
    value = getattr(owner, attribute, None)
    if value is None:
        raise Unavailable(
            f"this mlx-lm {version()} has no {module.__name__}.{name}: "
            "report it, and run without the assistant"
        )
    return owner, attribute, value


def _rebind(name: str, old: Any, new: Any) -> None:
    """Follow ``from .generate import name`` in mlx-lm's other modules."""
    for key, module in list(sys.modules.items()):
        ours = key == "mlx_lm" or key.startswith("mlx_lm.")
        if ours and module is not None and module.__dict__.get(name) is old:
            setattr(module, name, new)

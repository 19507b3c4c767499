"""Gemma 4 multi-token prediction for mlx-lm. Importing this changes nothing."""

TYPE_CHECKING = False  # typing takes ten milliseconds, and this runs at start-up

__version__ = "0.1.0"

_HOME = {
    "load_assistant": ".pair",
    "mtp_generate_step": ".generate",
    "MTPStats": ".stats",
    "MTPError": ".rounds",
    "enable": ".host",
    "disable": ".host",
    "status": ".host",
}

__all__ = [
    "MTPError",
    "MTPStats",
    "disable",
    "enable",
    "load_assistant",
    "mtp_generate_step",
    "status",
]

if TYPE_CHECKING:
    from typing import Any

    from .generate import mtp_generate_step as mtp_generate_step
    from .host import disable as disable
    from .host import enable as enable
    from .host import status as status
    from .pair import load_assistant as load_assistant
    from .rounds import MTPError as MTPError
    from .stats import MTPStats as MTPStats


def __getattr__(name: str) -> "Any":
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

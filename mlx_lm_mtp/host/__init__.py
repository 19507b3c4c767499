"""Enter mlx-lm: a start-up hook, and the explicit switch for those who prefer it.

A ``.pth`` file beside the package calls ``activate`` at every start of the interpreter,
so this module imports only what Python has imported already. Nothing else happens until
mlx-lm is imported: then the modules in ``SEAMS`` are patched right after they are
executed, and whatever goes wrong there leaves them as they are.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

SEAMS = (
    "mlx_lm.models",
    "mlx_lm.generate",
    "mlx_lm.chat",
    "mlx_lm.benchmark",
    "mlx_lm.server",
)
FLAG = "--mtp-assistant"

_failures: dict[str, str] = {}


class _Finder:
    """Finds nothing itself: patches what the other finders find."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in SEAMS:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    _patch_after(spec.loader)
                return spec
        return None


def _patch_after(loader: "Any") -> None:
    """Patch a module right after this loader has executed it."""
    execute = loader.exec_module

    def exec_module(module: "Any") -> None:
        loader.__dict__.pop("exec_module", None)
        execute(module)
        _try(module)

    loader.exec_module = exec_module


def _try(module: "Any") -> None:
    try:
        from . import patch

        patch.apply(module)
    except Exception as e:
        # Plain mlx-lm must work whatever this is; status() and asking for MTP tell it.
        reason = str(e) or type(e).__name__
        told = reason in _failures.values()
        _failures[module.__name__] = reason
        if not told and any(a.split("=")[0] == FLAG for a in sys.argv):
            line = f"mlx-lm-mtp: error: {FLAG} is not available: {reason}"
            print(line, file=sys.stderr)
    else:
        _failures.pop(module.__name__, None)


def _reason() -> str:
    """Why MTP is not available; modules may share a reason."""
    return "; ".join(dict.fromkeys(_failures.values()))


def _finder() -> "Optional[_Finder]":
    return next((f for f in sys.meta_path if isinstance(f, _Finder)), None)


def activate() -> None:
    """Called at start-up: watch for mlx-lm, unless MLX_LM_MTP_DISABLE=1."""
    if os.environ.get("MLX_LM_MTP_DISABLE", "0") in ("", "0") and _finder() is None:
        sys.meta_path.insert(0, _Finder())


def enable() -> None:
    """Put MTP into mlx-lm, now and in modules imported later. Idempotent.

    Raises:
        ValueError: If the installed mlx-lm is not one that we know; it is then left as
            it was.
    """
    import mlx_lm.generate  # noqa: F401

    from ..rounds import MTPError

    if _finder() is None:
        sys.meta_path.insert(0, _Finder())
    for name in SEAMS:
        if name in sys.modules:
            _try(sys.modules[name])
    if _failures:
        reason = _reason()
        disable()
        raise MTPError(f"MTP is not available: {reason}")


def disable() -> None:
    """Take MTP out of mlx-lm: every name is again what it was. Idempotent."""
    finder = _finder()
    if finder is not None:
        sys.meta_path.remove(finder)
    _failures.clear()
    if "mlx_lm" in sys.modules:
        from . import patch

        patch.restore()


def status() -> "dict[str, Any]":
    """What is patched, which mlx-lm this is, and whether we tested with it.

    Returns:
        ``enabled``: whether MTP is in the mlx-lm of this process, or will be once it
        is imported; ``mlx_lm``: its version; ``tested``: whether our tests ran with it;
        ``patched``: names replaced so far; ``reason``: why MTP is not available, or
        None.
    """
    from . import patch

    patched = patch.patched()
    version = patch.version()
    return {
        "enabled": bool(patched) or (_finder() is not None and not _failures),
        "mlx_lm": version,
        "tested": version in patch.TESTED,
        "patched": patched,
        "reason": _reason() or None,
    }

"""What a measurement was made on: versions, device, memory."""

import math
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import __version__

PACKAGES = ("mlx", "mlx-lm", "transformers")
FAST_BLAS = ("openblas", "libmkl", "libblis", "libarmpl")
MEMORY_KEYS = ("max_recommended_working_set_size", "memory_size", "total_memory")
CROWDED = 0.8  # of the memory; with more the system moves some of it to disk


def about() -> dict[str, Any]:
    """Versions and device, by name."""
    found = {"mlx-lm-mtp": __version__} | {name: version(name) for name in PACKAGES}
    info = mx.device_info()
    return found | {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": f"{mx.default_device().type.name}: {info.get('device_name', '?')}",
    }


def memory() -> dict[str, int]:
    """Bytes in use, most in use so far, and, where MLX tells, what there is."""
    info = mx.device_info()
    sizes = [int(info[key]) for key in MEMORY_KEYS if key in info]
    known = {"available": sizes[0]} if sizes else {}
    return {"active": mx.get_active_memory(), "peak": mx.get_peak_memory(), **known}


def room() -> float:
    """Bytes that may still be used; no end where MLX does not tell what there is."""
    found = memory()
    return CROWDED * found.get("available", math.inf) - found["active"]


def uses_reference_blas() -> bool:
    """Whether this is MLX on a Linux CPU without a fast BLAS in the process."""
    if mx.default_device().type != mx.DeviceType.cpu or sys.platform != "linux":
        return False
    # NumPy and SciPy bring a BLAS of their own, which MLX does not see.
    libraries = [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "numpy" not in line and "scipy" not in line
    ]
    return not any(name in line for line in libraries for name in FAST_BLAS)

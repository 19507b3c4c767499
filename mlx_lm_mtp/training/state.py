"""A training that can be interrupted at any moment: one file, replaced at once."""

import json
from pathlib import Path
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from ..rounds import MTPError

FILE = "checkpoint.safetensors"
DRAFTER, OPTIMIZER = "drafter.", "optimizer."


def flat(tree: Any) -> dict[str, mx.array]:
    """The arrays of a tree by their dotted names."""
    arrays: Any = tree_flatten(tree, destination={})
    return dict(arrays)


def save_state(
    folder: Path, drafter: nn.Module, optimizer: optim.Optimizer, about: dict[str, Any]
) -> None:
    """Write the checkpoint; a kill leaves the one before or this one, whole."""
    arrays = {
        **{DRAFTER + k: v for k, v in flat(drafter.trainable_parameters()).items()},
        **{OPTIMIZER + k: v for k, v in flat(optimizer.state).items()},
    }
    temporary = folder / f".{FILE}.part.safetensors"
    mx.save_safetensors(str(temporary), arrays, {"about": json.dumps(about)})
    temporary.replace(folder / FILE)


def read_about(folder: Path) -> Optional[dict[str, Any]]:
    """What an unfinished training in this folder says of itself, if there is one."""
    if not (folder / FILE).exists():
        return None
    return _load(folder)[1]


def _load(folder: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    try:
        loaded: Any = mx.load(str(folder / FILE), return_metadata=True)
        arrays, metadata = loaded
        about: dict[str, Any] = json.loads(metadata["about"])
    except (RuntimeError, KeyError, ValueError) as e:
        raise MTPError(f"{folder / FILE} is damaged: delete it to begin anew") from e
    return arrays, about


def load_state(folder: Path, drafter: nn.Module, optimizer: optim.Optimizer) -> None:
    """Bring drafter and optimizer to where the checkpoint was written."""
    arrays, _ = _load(folder)

    def part(prefix: str) -> list[tuple[str, mx.array]]:
        n = len(prefix)
        return [(k[n:], v) for k, v in arrays.items() if k.startswith(prefix)]

    drafter.load_weights(part(DRAFTER), strict=False)
    optimizer.init(drafter.trainable_parameters())
    optimizer.state = tree_unflatten(part(OPTIMIZER))


def check_resumable(about: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse to go on with other settings: the result would be of neither run.

    Raises:
        MTPError: Naming the first setting that differs.
    """
    for name, value in settings.items():
        before = about["settings"].get(name)
        if before != value:
            flag = "--" + name.replace("_", "-")
            raise MTPError(
                f"the training to resume had {flag} {before}, now it is {value}: "
                "give the same, or another --save-path"
            )

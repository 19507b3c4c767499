"""Where a drafter is: a folder, a Hugging Face repository, or the official one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from mlx_lm.utils import _download, hf_repo_to_path

from .kinds import DRAFTERS
from .rounds import MTPError
from .target import MODEL_TYPES

AUTO = "auto"
# Hidden size of each Gemma 4; fine-tuned and quantised ones keep it.
SIZES = {1536: "E2B", 2560: "E4B", 3840: "12B", 2816: "26B-A4B", 5376: "31B"}
# Converted for MLX, and what Google published; both hold the same weights.
OFFICIAL = (
    "mlx-community/gemma-4-{}-it-assistant-bf16",
    "google/gemma-4-{}-it-assistant",
)


def find_assistant(path_or_repo: str) -> Path:
    """The local folder of a drafter, downloaded if need be.

    Only reads ``config.json`` and looks for the weights' files, so that a wrong path
    is refused before a large target is loaded.

    Raises:
        MTPError: If there is no usable drafter at this place.
    """
    folder = _resolve(path_or_repo)
    config = read_config(folder)
    found = config.get("model_type")
    if found not in DRAFTERS:
        raise MTPError(
            f"{folder} holds a {found!r} model, --mtp-assistant needs a Gemma 4 "
            f"assistant ({' or '.join(DRAFTERS)})"
        )
    if not list(folder.glob("model*.safetensors")):
        raise MTPError(
            f"no model*.safetensors in {folder}: the assistant's weights are missing, "
            "download them again"
        )
    for missing in _missing_shards(folder):
        raise MTPError(
            f"{folder} lacks {missing}, which its index names: "
            "download the assistant again"
        )
    return folder


def holds_assistant(path_or_repo: str) -> bool:
    """Whether the checkpoint at this place is an assistant.

    Raises:
        MTPError: If there is no checkpoint.
    """
    return read_config(_resolve(path_or_repo)).get("model_type") in DRAFTERS


def _resolve(path_or_repo: str, **options: Any) -> Path:
    path = Path(path_or_repo).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise MTPError(
            f"{path} is a file, an assistant is a folder with config.json and "
            "model.safetensors"
        )
    try:
        return Path(_download(str(path_or_repo), **options))
    except HFValidationError as e:
        raise MTPError(
            f"there is no folder {path_or_repo!r}, and it is no name of a Hugging "
            "Face repository either"
        ) from e
    except (OSError, ValueError) as e:
        # huggingface_hub's errors are OSErrors, and offline mode a ValueError.
        raise MTPError(
            f"there is no folder {path_or_repo!r}, and fetching it from the Hugging "
            f"Face hub failed: {_first_line(e)}"
        ) from e


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a checkpoint.

    Raises:
        MTPError: If there is none, or it cannot be read.
    """
    file = folder / "config.json"
    if not file.exists():
        raise MTPError(
            f"no config.json in {folder}: a model is a folder with config.json "
            "and model.safetensors"
        )
    return _read(file)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except ValueError as e:
        raise MTPError(f"{file} is not valid JSON: {e}") from e
    if not isinstance(found, dict):
        raise MTPError(f"{file} holds no JSON object")
    return found


def _missing_shards(folder: Path) -> Iterator[str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = _read(index).get("weight_map")
        if not isinstance(names, dict):
            raise MTPError(f"{index} has no weight_map: download the model again")
        shards = map(str, names.values())
        yield from sorted({n for n in shards if not (folder / n).exists()})


def find_official(hidden_size: int) -> Path:
    """The local folder of the official assistant for targets of a hidden size.

    What the hub's cache on this machine holds comes first; else it is downloaded.

    Raises:
        MTPError: If no assistant is known for this size, or it cannot be had.
    """
    if hidden_size not in SIZES:
        known = ", ".join(f"{name} {size}" for size, name in sorted(SIZES.items()))
        raise MTPError(
            f"no official assistant is known for a target of hidden size {hidden_size} "
            f"({known}): name one, --mtp-assistant PATH_OR_REPO"
        )
    repositories = [name.format(SIZES[hidden_size]) for name in OFFICIAL]
    for repository in repositories:
        try:
            return find_assistant(str(hf_repo_to_path(repository)))
        except (OSError, ValueError):  # not in the cache, or not whole
            continue
    try:
        return find_assistant(repositories[0])
    except MTPError as e:
        raise MTPError(
            f"{repositories[0]} is not in the local hub cache, and cannot be fetched: "
            f"{_first_line(e.__cause__ or e)}; fetch it once while online, or name a "
            "folder, --mtp-assistant PATH"
        ) from e


def hidden_size_of(path_or_repo: str) -> int:
    """The hidden size of a target that is not loaded yet, from its config.json.

    Raises:
        MTPError: If it cannot be read, or is not a Gemma 4.
    """
    config = read_config(_resolve(path_or_repo, allow_patterns=["config.json"]))
    found = config.get("model_type")
    size = config.get("text_config", config).get("hidden_size")
    if found not in MODEL_TYPES or size is None:
        raise MTPError(
            f"the target {path_or_repo} is a {found!r} model; MTP needs a Gemma 4 "
            f"({', '.join(MODEL_TYPES)}): load one, or drop the assistant"
        )
    return int(size)

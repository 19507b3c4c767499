"""--mtp-assistant auto finds the official assistant of a target's size."""

import json
import os
import shutil
import subprocess
import sys

import huggingface_hub
import pytest
from conftest import PAIRS

from mlx_lm_mtp import MTPError, hub, load_assistant

MLX = "mlx-community/gemma-4-{}-it-assistant-bf16"
GOOGLE = "google/gemma-4-{}-it-assistant"
SIZE = 128  # the hidden size of the pairs


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache; the hub itself is out of reach."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def put(cache, repository, *files):
    """Put an assistant, or some of its files, into a hub cache."""
    home = cache / f"models--{repository.replace('/', '--')}"
    snapshot = home / "snapshots" / "a1"
    source = PAIRS / "e" / "assistant"
    snapshot.mkdir(parents=True)
    for name in files or os.listdir(source):
        shutil.copy(source / name, snapshot)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("a1")
    return snapshot


@pytest.mark.parametrize(
    "size, name",
    [(1536, "E2B"), (2560, "E4B"), (3840, "12B"), (2816, "26B-A4B"), (5376, "31B")],
)
@pytest.mark.parametrize("repository", [MLX, GOOGLE])
def test_every_size_has_its_assistant(cache, size, name, repository):
    snapshot = put(cache, repository.format(name))
    assert hub.find_official(size) == snapshot


def test_the_converted_one_comes_first_if_it_is_whole(cache):
    google = put(cache, GOOGLE.format("E4B"))
    put(cache, MLX.format("E4B"), "config.json")
    assert hub.find_official(2560) == google
    shutil.rmtree(cache / f"models--{MLX.format('E4B').replace('/', '--')}")
    assert hub.find_official(2560) == google
    assert hub.find_official(2560) != put(cache, MLX.format("E4B"))
    assert hub.find_official(2560) == cache.joinpath(
        "models--mlx-community--gemma-4-E4B-it-assistant-bf16", "snapshots", "a1"
    )


def test_what_is_not_cached_is_downloaded(cache, monkeypatch):
    asked = []

    def download(repository, **options):
        asked.append((repository, options.get("local_files_only", False)))
        raise OSError("no route to the hub")

    monkeypatch.setattr("mlx_lm.utils.snapshot_download", download)
    with pytest.raises(MTPError, match="no route to the hub") as caught:
        hub.find_official(5376)
    assert asked[-1] == (MLX.format("31B"), False)
    assert all(local for _, local in asked[:-1])
    assert MLX.format("31B") in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_size_is_told(cache):
    with pytest.raises(MTPError, match=r"hidden size 128 .E2B 1536, .* name one"):
        hub.find_official(SIZE)


@pytest.mark.parametrize("nested", [True, False])
def test_the_size_is_in_the_configuration(tmp_path, nested):
    text = {"model_type": "gemma4_text", "hidden_size": 2816}
    config = {"model_type": "gemma4", "text_config": text} if nested else text
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert hub.hidden_size_of(str(tmp_path)) == 2816


def test_another_model_has_none(tmp_path):
    config = {"model_type": "llama", "hidden_size": 2560}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MTPError, match="is a 'llama' model; MTP needs a Gemma 4"):
        hub.hidden_size_of(str(tmp_path))


def test_load_assistant_takes_auto(cache, pair_e, monkeypatch):
    monkeypatch.setitem(hub.SIZES, SIZE, "E2B")
    put(cache, MLX.format("E2B"))
    drafter = load_assistant("auto", pair_e.model)
    assert drafter.model_type == "gemma4_assistant"


COMMAND = """
import sys
from mlx_lm_mtp import hub
hub.SIZES[128] = "E2B"
from mlx_lm.{} import main
main()
"""


@pytest.mark.parametrize("command", ["generate", "benchmark"])
@pytest.mark.parametrize("cached", [True, False])
def test_commands_take_auto(tmp_path, command, cached):
    if cached:
        put(tmp_path, MLX.format("E2B"))
    options = {
        "generate": ["--prompt", "import os", "--max-tokens", "20"],
        "benchmark": ["-p", "9", "-g", "20", "-n", "1"],
    }
    arguments = ["--model", str(PAIRS / "e" / "target"), "--mtp-assistant", "auto"]
    run = subprocess.run(
        [sys.executable, "-c", COMMAND.format(command), *arguments, *options[command]],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"},
    )
    if cached:
        assert run.returncode == 0 and "MTP: " in run.stdout, run.stderr
    else:
        assert run.returncode == 2 and len(run.stderr.splitlines()) == 1
        assert MLX.format("E2B") in run.stderr

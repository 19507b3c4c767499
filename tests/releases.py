"""Released mlx-lm: its source archives, and its own tests without a network."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Version and SHA-256 of its source archive.
ARCHIVES = {
    "0.32.0": "035ca44b08c3476630a205d2c9bdea26825a6a8359f974944d4985230e41859f",
    "0.32.1": "7934554bdde3acbd3b2dcc8e0ba36538c30ae1b6c98e232329d320e9cdd6ce2a",
    "0.32.2": "1af8a92f6a141c3e2bf5b0369ac4464203a8e2189c47b9e40d3e921e5b3a1fe9",
}
LATEST = max(ARCHIVES, key=lambda version: [*map(int, version.split("."))])
CACHE = "MLX_LM_ARCHIVES"  # a folder where archives are looked for and kept
MODEL = "models--mlx-community--Qwen1.5-0.5B-Chat-4bit"


def pip(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pip", *map(str, arguments), "-q"],
        capture_output=True,
        text=True,
    )


def install(folder, *arguments):
    """Install packages of the index into a folder of its own, and return it."""
    run = pip("install", "--target", folder, *arguments)
    assert run.returncode == 0, f"the package index refused: {run.stderr}"
    return folder


def archive(version):
    """The source archive of a release, from the package index, its hash checked."""
    default = Path(tempfile.gettempdir()) / "mlx-lm-archives"
    folder = Path(os.environ.get(CACHE, default))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"mlx_lm-{version}.tar.gz"
    if not path.exists():
        asked = folder / f"{version}.txt"
        asked.write_text(f"mlx-lm=={version} --hash=sha256:{ARCHIVES[version]}\n")
        options = ("--no-deps", "--no-binary", "mlx-lm", "--require-hashes")
        run = pip("download", *options, "-d", folder, "-r", asked)
        if run.returncode:
            pytest.fail(
                f"mlx-lm {version} did not come from the package index "
                f"(put its source archive into {folder}):\n{run.stderr}"
            )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == ARCHIVES[version], f"{path} is not the released archive: delete it"
    return path


def unpack(version, folder):
    """Unpack a release into a folder and return its root."""
    with tarfile.open(archive(version)) as tar:
        # Python 3.11.0 to 3.11.3 have no filters; the archive is known by its hash.
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(folder, **safe)
    return folder / f"mlx_lm-{version}"


# Their tests -------------------------------------------------------------------------


def make_hub(root):
    """A hub cache with a small random stand-in for the model that the tests load."""
    snapshot = root / MODEL / "snapshots" / "stand-in"
    snapshot.mkdir(parents=True)
    (root / MODEL / "refs").mkdir()
    (root / MODEL / "refs" / "main").write_text("stand-in")
    make_tokenizer().save_pretrained(snapshot)
    config = {
        "model_type": "qwen2",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": 512,
    }
    (snapshot / "config.json").write_text(json.dumps(config))
    # Their server lists what has one.
    (snapshot / "model.safetensors.index.json").write_text("{}")
    mx.random.seed(0)
    model = qwen2.Model(qwen2.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(snapshot / "model.safetensors"), weights)
    return root


def make_tokenizer():
    """One token per byte, in the order of Qwen's vocabulary: "!" is 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template="{% for m in messages %}{{ m.role ~ m.content }} {% endfor %}",
    )


RUN = """
import json, random, sys, unittest
import mlx.core as mx

class Result(unittest.TestResult):
    outcomes = {}
    def startTest(self, test):
        # Some draw their weights, with whatever seed the process has.
        mx.random.seed(0)
        random.seed(0)
        super().startTest(test)
    def addSuccess(self, test):
        self.outcomes.setdefault(test.id(), "ok")
    def addSkip(self, test, reason):
        self.outcomes[test.id()] = "skipped"
    def addFailure(self, test, error):
        self.outcomes[test.id()] = "failed"
    def addSubTest(self, test, subtest, error):
        if error:
            self.outcomes[test.id()] = "failed"
    addError = addFailure

path, patterns, *modules = sys.argv[1:]
loader = unittest.TestLoader()
loader.testNamePatterns = patterns.split()
loader.loadTestsFromNames(modules).run(Result())
json.dump(Result.outcomes, open(path, "w"))
"""


def outcomes(folder, hub, modules, patterns="*", **environment):
    """Run mlx-lm's tests in a folder: what became of each, by its id.

    ``patterns`` are those of unittest's ``-k``, spaces between them. The outcomes are
    what the run wrote down, not its exit code: some MLX builds abort at the exit.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        run = subprocess.run(
            [sys.executable, "-c", RUN, file.name, patterns, *modules],
            cwd=folder,
            capture_output=True,
            text=True,
            env=os.environ
            | {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
            | environment,
        )
        told = Path(file.name).read_text()
    assert told, f"the tests of {folder} died:\n{run.stderr[-2000:]}"
    return json.loads(told)

"""Profiles of hypothesis, the trained pairs, and models small enough to read."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import hypothesis
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load

from mlx_lm_mtp import load_assistant

# The first call of an MLX function compiles: no deadline.
hypothesis.settings.register_profile("dev", max_examples=25, deadline=None)
hypothesis.settings.register_profile(
    "ci", max_examples=25, deadline=None, derandomize=True, database=None
)
hypothesis.settings.register_profile("deep", max_examples=2000, deadline=None)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev")
)

PAIRS = Path(__file__).parent / "pairs"


@dataclass
class Pair:
    """A trained pair and what transformers computed with it."""

    name: str

    @property
    def target_path(self):
        return str(PAIRS / self.name / "target")

    @property
    def assistant_path(self):
        return str(PAIRS / self.name / "assistant")

    @cached_property
    def loaded(self):
        return load(self.target_path)

    @property
    def model(self):
        return self.loaded[0]

    @property
    def tokenizer(self):
        return self.loaded[1]

    @cached_property
    def drafter(self):
        return load_assistant(self.assistant_path, self.model)

    @cached_property
    def goldens(self):
        return np.load(PAIRS / self.name / "goldens.npz")

    @property
    def window(self):
        return self.model.language_model.args.sliding_window


@pytest.fixture(scope="session", params=["e", "moe"])
def pair(request):
    return Pair(request.param)


@pytest.fixture(scope="session")
def pair_e():
    return Pair("e")


@pytest.fixture(scope="session")
def prompts():
    return mx.array(np.load(PAIRS / "prompts.npy").astype(np.int32))


@pytest.fixture(scope="module")
def eager():
    """Run mlx-lm's compiled filters uncompiled: each set of flags compiles anew."""
    mx.disable_compile()
    yield
    mx.enable_compile()

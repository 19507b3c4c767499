"""Gemma 4 pairs in their true shapes with random weights: speed without checkpoints.

Where the shapes come from. Targets E2B, E4B, 26B-A4B and 31B: the configurations in
ollama/ollama, x/models/gemma4/gemma4_test.go (E2B's are mlx-lm's defaults too). 12B:
config.json of google/gemma-4-12B-it. Drafters: E2B, config.json of
google/gemma-4-E2B-it-assistant; 12B and 31B, ml-explore/mlx-swift-lm,
Tests/MLXLMTests/Gemma4AssistantDraftModelTests.swift and Gemma4AssistantTests.swift;
E4B and 26B-A4B by the same rule, which gives the sizes that are published for them
(78.5 M parameters, 0.84 GB).

Weights are drawn in the layout they are stored in, quantised ones as random words, so
that 31B is built in seconds and no tensor is held in another form as well. What random
weights cannot show: acceptance (there is a dial), and routing that prefers some
experts.
"""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4

from .pair import model_file
from .rounds import MTPError

GROUP = 64
BITS = (4, 8, 16)
PART = 1 << 28  # entries drawn at a time

_E = {"num_attention_heads": 8, "hidden_size_per_layer_input": 256}
_LARGE = {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 262144,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
}
TARGETS: dict[str, dict[str, Any]] = {
    "e2b": {
        **_E,
        "hidden_size": 1536,
        "num_hidden_layers": 35,
        "num_kv_shared_layers": 20,
        "intermediate_size": 6144,
        "num_key_value_heads": 1,
        "sliding_window_pattern": 5,
        "use_double_wide_mlp": True,
    },
    "e4b": {
        **_E,
        "hidden_size": 2560,
        "num_hidden_layers": 42,
        "num_kv_shared_layers": 18,
        "intermediate_size": 10240,
        "num_key_value_heads": 2,
        "sliding_window_pattern": 6,
        "use_double_wide_mlp": False,
    },
    "12b": {
        **_LARGE,
        "hidden_size": 3840,
        "num_hidden_layers": 48,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
    },
    "26b-a4b": {
        **_LARGE,
        "hidden_size": 2816,
        "num_hidden_layers": 30,
        "intermediate_size": 2112,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "31b": {
        **_LARGE,
        "hidden_size": 5376,
        "num_hidden_layers": 60,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
}
SIZES = tuple(TARGETS)
# What every size has in common.
_COMMON = {
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
_SHARED_WITH_DRAFTER = (
    *_COMMON,
    "sliding_window",
    "num_key_value_heads",
    "num_global_key_value_heads",
    "attention_k_eq_v",
    "max_position_embeddings",
)


def configs(size: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The target's ``text_config`` and the drafter's config.json of a size.

    Raises:
        MTPError: If there is no such size.
    """
    if size not in TARGETS:
        raise MTPError(f"there is no Gemma 4 {size!r}: give one of {', '.join(SIZES)}")
    target = _COMMON | TARGETS[size]
    large = size not in ("e2b", "e4b")
    text = {k: target[k] for k in _SHARED_WITH_DRAFTER if k in target}
    text |= {
        "hidden_size": 1024 if large else 256,
        "intermediate_size": 8192 if large else 2048,
        "num_attention_heads": target["num_attention_heads"] if large else 4,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
    }
    drafter = {
        "text_config": text,
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": not large,
        "num_centroids": 2048,
    }
    return target, drafter


def make_pair(
    size: str, bits: int = 4, drafter_bits: int = 16, shrink: int = 1, seed: int = 0
) -> tuple[nn.Module, Any]:
    """A target and its drafter with random weights.

    Args:
        size: One of ``SIZES``.
        bits: 4 or 8 quantise the target as ``mlx_lm.convert`` does, 16 is bfloat16.
        drafter_bits: Likewise for the drafter.
        shrink: Divide widths and vocabulary by this and keep one or two groups of
            layers, for tests.
        seed: Of the weights.

    Raises:
        MTPError: If there is no such size or number of bits.
    """
    for name, number in {"--bits": bits, "--mtp-quantize": drafter_bits}.items():
        if number not in BITS:
            raise MTPError(f"{name} is {number}, synthetic pairs have 4, 8 or 16")
    text, config = configs(size)
    if shrink > 1:
        text, config = _shrunk(text, config, shrink)
    args = gemma4.ModelArgs.from_dict(
        {"text_config": text, "vocab_size": text["vocab_size"]}
    )
    target_key, drafter_key = mx.random.split(mx.random.key(seed))
    target = gemma4.Model(args)
    _fill(target, bits, target_key)
    ours = model_file()
    drafter = ours.Model(ours.ModelArgs.from_dict(config))
    _fill(drafter, drafter_bits, drafter_key)
    return target, drafter


def _shrunk(
    text: dict[str, Any], config: dict[str, Any], by: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    text = _narrow(text, by)
    group, shared = text["sliding_window_pattern"], bool(text["num_kv_shared_layers"])
    text["num_hidden_layers"] = group * (1 + shared)
    text["num_kv_shared_layers"] = group * shared
    config = _narrow(config, by) | {"text_config": _narrow(config["text_config"], by)}
    return text, config


def _narrow(config: dict[str, Any], by: int) -> dict[str, Any]:
    out = dict(config)
    for name, number in config.items():
        if "hidden_size" in name or "intermediate" in name or "head_dim" in name:
            out[name] = max(number // by // GROUP, 1) * GROUP if number else 0
        elif "vocab_size" in name or name in ("sliding_window", "num_centroids"):
            out[name] = number // by
        elif name == "num_experts":
            out[name] = max(number // by, config["top_k_experts"])
    return out


def _fill(model: nn.Module, bits: int, key: mx.array) -> None:
    """Replace the initial weights, which are never computed, by random ones."""
    model.set_dtype(mx.bfloat16)
    if bits < 16:
        # A drafter has no predicate of its own; mlx-lm then quantises all it can.
        rule = getattr(model, "quant_predicate", lambda *_: True)
        nn.quantize(
            model,
            GROUP,
            bits,
            class_predicate=lambda path, module: (
                hasattr(module, "to_quantized")
                and module.weight.shape[-1] % GROUP == 0
                and rule(path, module)
            ),
        )
    modules = model.modules()
    for module, own in zip(modules, mx.random.split(key, len(modules)), strict=True):
        module.update(_drawn(module, own))
        mx.eval([value for value in module.values() if isinstance(value, mx.array)])


def _drawn(module: nn.Module, key: mx.array) -> dict[str, mx.array]:
    """Weights of one module: unit gain, norms and scalars as they are built."""
    weight = module.get("weight")
    if "scales" in module:
        return _words(module, key)
    if weight is not None and weight.ndim > 1:
        bound = (3 / weight.shape[-1]) ** 0.5

        def uniform(shape: tuple[int, ...], key: mx.array) -> mx.array:
            return mx.random.uniform(-bound, bound, shape, weight.dtype, key)

        return {"weight": _by_parts(uniform, weight.shape, key)}
    if "token_ordering" in module:
        size = module["token_ordering"].size
        return {"token_ordering": mx.random.permutation(size, key=key)}
    return {}


def _words(module: Any, key: mx.array) -> dict[str, mx.array]:
    words, scales = module["weight"], module["scales"]
    levels = 2**module.bits
    step = (12 / (scales.shape[-1] * module.group_size)) ** 0.5 / levels
    spread = mx.random.uniform(0.5 * step, 1.5 * step, scales.shape, key=key)
    spread = spread.astype(scales.dtype)
    return {
        "weight": _by_parts(_random_words, words.shape, key),
        "scales": spread,
        "biases": spread * (-(levels - 1) / 2),
    }


def _random_words(shape: tuple[int, ...], key: mx.array) -> mx.array:
    # The bits of new keys; randint goes through float32 and leaves the lowest zero.
    size = math.prod(shape)
    return mx.random.split(key, -(-size // 2)).flatten()[:size].reshape(shape)


def _by_parts(
    draw: Callable[[tuple[int, ...], mx.array], mx.array],
    shape: tuple[int, ...],
    key: mx.array,
) -> mx.array:
    """Draw a few rows at a time: a table may have more entries than 32 bits count."""
    rows = max(PART // math.prod(shape[1:]), 1)
    starts = range(0, shape[0], rows)
    keys = mx.random.split(key, len(starts))
    parts = [
        draw((min(rows, shape[0] - start), *shape[1:]), own)
        for start, own in zip(starts, keys, strict=True)
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)

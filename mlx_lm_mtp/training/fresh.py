"""A new drafter for a target, of a given size."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

from ..pair import model_classes
from ..rounds import MTPError
from ..target import Target
from .clusters import Rows, order_by_cluster

# What every drafter has: four layers, as Google's.
TEMPLATE = Path(__file__).with_name("assistant.json")
# What it takes over from the target, whose keys and values it reads.
SHARED = (
    "attention_k_eq_v",
    "global_head_dim",
    "head_dim",
    "max_position_embeddings",
    "num_global_key_value_heads",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "vocab_size",
)
MAX_CENTROIDS, CLUSTER_SIZE, MIN_TOP_K = 2048, 32, 8
ROWS = 8192  # of the target's embedding at once


def fresh_config(target: Target, size: int) -> dict[str, Any]:
    """The config.json of a drafter with ``size`` hidden numbers.

    Raises:
        MTPError: If the size is too small to mean anything.
    """
    if size < 8:
        raise MTPError(f"--init is {size}, a drafter's hidden size of 8 or more")
    config: dict[str, Any] = json.loads(TEMPLATE.read_text())
    if getattr(target.model, "model_type", "") == "gemma4_unified":
        config["model_type"] = "gemma4_unified_assistant"
        config["architectures"] = ["Gemma4UnifiedAssistantForCausalLM"]
    centroids = _num_centroids(target.vocab_size)
    dtype = target.embed(mx.zeros((1, 1), mx.int32)).dtype
    config |= {
        "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": centroids > 1,
        "num_centroids": centroids,
        "centroid_intermediate_top_k": max(MIN_TOP_K, centroids // 64),
        "dtype": str(dtype).split(".")[-1],
    }
    heads = max(4, *(heads for heads, _ in target.kv_shapes().values()))
    config["text_config"] |= {
        **{name: getattr(target.config, name) for name in SHARED},
        "hidden_size": size,
        "intermediate_size": 3 * size,
        "num_attention_heads": heads,
    }
    return config


def _num_centroids(vocab_size: int) -> int:
    """The largest power of two whose clusters are even and not too small."""
    count = 1
    while (
        count < MAX_CENTROIDS
        and vocab_size % (2 * count) == 0
        and vocab_size // (2 * count) >= CLUSTER_SIZE
    ):
        count *= 2
    return count


def fresh_drafter(target: Target, config: dict[str, Any], seed: int) -> nn.Module:
    """A new drafter whose space is the target's main directions; its layers are random.

    So similar tokens start alike, which is what clusters are made of, and token and
    hidden state enter in the coordinates in which the head reads.
    """
    model_class, args_class = model_classes(config)
    drafter: nn.Module = model_class(args_class.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(seed), 256))

    def draw(path: str, weight: mx.array) -> mx.array:
        if "post_" in path and path.endswith("layernorm.weight"):
            # Each branch starts small, so that the stack starts near the identity.
            return weight * (2 * len(drafter.layers)) ** -0.5
        if weight.ndim < 2:
            return weight
        return mx.random.normal(weight.shape, key=next(keys)) * weight.shape[-1] ** -0.5

    drafter.update(tree_map_with_path(draw, drafter.parameters()))
    size = config["text_config"]["hidden_size"]
    main = _main_directions(target, size)
    drafter.pre_projection.weight = mx.array(np.concatenate([main.T, main.T], 1))
    drafter.post_projection.weight = mx.array(main)
    rows = np.concatenate([part @ main for part in _embedded(target)])
    # Half the size of a random matrix: the first logits are small.
    scaled = rows * (0.5 * size**-0.5 / max(float(rows.std()), 1e-6))
    drafter.model.embed_tokens.weight = mx.array(scaled)
    if config["use_ordered_embeddings"]:
        order = order_by_cluster(rows, config["num_centroids"])
        drafter.masked_embedding.token_ordering = mx.array(order.astype(np.int32))
    return drafter


def _embedded(target: Target) -> Iterator[Rows]:
    """The target's token rows, part by part [n, H] float32."""
    for start in range(0, target.vocab_size, ROWS):
        ids = mx.arange(start, min(start + ROWS, target.vocab_size))
        yield np.array(target.embed(ids[None])[0].astype(mx.float32))


def _main_directions(target: Target, size: int) -> Rows:
    """The directions [H, size] in which the target's token rows spread most."""
    spread = np.zeros((target.hidden_size, target.hidden_size), np.float64)
    for part in _embedded(target):
        spread += part.T @ part
    main = np.linalg.eigh(spread)[1][:, ::-1][:, :size].astype(np.float32)
    return np.pad(main, [(0, 0), (0, size - main.shape[1])])

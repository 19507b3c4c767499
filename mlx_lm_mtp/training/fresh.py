"""A new drafter for a target, of a given size."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

from ..pair import _classes as model_classes
from ..rounds import MTPError
from ..target import Target
from .clusters import Rows, order_by_cluster

LAYER_TYPES = ["sliding_attention"] * 3 + ["full_attention"]  # as Google's drafters
MAX_CENTROIDS, CLUSTER_SIZE, MIN_TOP_K = 2048, 32, 8
ROWS = 8192  # of the target's embedding at once


def fresh_config(target: Target, size: int) -> dict[str, Any]:
    """The config.json of a drafter with ``size`` hidden numbers.

    Raises:
        MTPError: If the size is not positive.
    """
    if size < 8:
        raise MTPError(f"--init is {size}, a drafter's hidden size of 8 or more")
    unified = getattr(target.model, "model_type", "") == "gemma4_unified"
    centroids = _num_centroids(target.vocab_size)
    return {
        "architectures": [
            "Gemma4UnifiedAssistantForCausalLM"
            if unified
            else "Gemma4AssistantForCausalLM"
        ],
        "model_type": "gemma4_unified_assistant" if unified else "gemma4_assistant",
        "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": centroids > 1,
        "num_centroids": centroids,
        "centroid_intermediate_top_k": max(MIN_TOP_K, centroids // 64),
        "dtype": str(target.embed(mx.zeros((1, 1), mx.int32)).dtype).split(".")[-1],
        "text_config": _text_config(target, size),
        "tie_word_embeddings": True,
    }


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


def _text_config(target: Target, size: int) -> dict[str, Any]:
    theirs = target.config
    kinds = target.kv_shapes()
    layers = [kind for kind in LAYER_TYPES if kind in kinds]
    heads = max(4, *(heads for heads, _ in kinds.values()))
    return {
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": theirs.attention_k_eq_v,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": theirs.pad_token_id,
        "enable_moe_block": False,
        "final_logit_softcapping": None,
        "global_head_dim": theirs.global_head_dim,
        "head_dim": theirs.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": size,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": 3 * size,
        "layer_types": layers,
        "max_position_embeddings": theirs.max_position_embeddings,
        "num_attention_heads": heads,
        "num_global_key_value_heads": theirs.num_global_key_value_heads,
        "num_hidden_layers": len(layers),
        "num_key_value_heads": theirs.num_key_value_heads,
        "num_kv_shared_layers": len(layers),
        "rms_norm_eps": theirs.rms_norm_eps,
        "rope_parameters": theirs.rope_parameters,
        "sliding_window": theirs.sliding_window,
        "tie_word_embeddings": True,
        "use_double_wide_mlp": False,
        "vocab_size": theirs.vocab_size,
        "vocab_size_per_layer_input": 0,
    }


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

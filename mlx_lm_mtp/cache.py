"""mlx-lm's own caches: which are taken, and their entries, in order.

mlx-lm's sliding-window cache copies its window at every write of several tokens, and
``trim_prompt_cache`` does nothing, without a word, once the window is full. During a
generation the entries therefore live in buffers of ours; see ``live``.
"""

from typing import Any, Optional

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from .rounds import MTPError


def check(caches: list[Any], expected: list[Any]) -> None:
    """Refuse a prompt cache that cannot be kept exact.

    Args:
        caches: The caller's prompt cache.
        expected: A fresh cache of the same model.

    Raises:
        MTPError: If a cache is of another class or window, or lengths differ.
    """
    if len(caches) != len(expected):
        raise MTPError(
            f"the prompt cache has {len(caches)} layers, this model needs "
            f"{len(expected)}: make it with make_prompt_cache(model)"
        )
    for i, (cache, like) in enumerate(zip(caches, expected, strict=True)):
        if _kind(cache) == _kind(like):
            continue
        hint = "make it with make_prompt_cache(model)"
        if isinstance(cache, QuantizedKVCache):
            hint = "MTP needs an unquantised cache, make it without kv_bits"
        raise MTPError(
            f"layer {i} of the prompt cache is a {_describe(cache)}, "
            f"this model needs a {_describe(like)}: {hint}"
        )
    lengths = sorted({cache.offset for cache in caches})
    if len(lengths) > 1:
        raise MTPError(
            f"the layers of the prompt cache hold {lengths[0]} to {lengths[-1]} "
            "tokens, all must hold the same: start from a fresh cache"
        )


def window(cache: Any) -> Optional[int]:
    """W of a cache, None where it keeps everything."""
    return cache.max_size if isinstance(cache, RotatingKVCache) else None


def _kind(cache: Any) -> tuple[Any, ...]:
    return type(cache), window(cache), getattr(cache, "keep", None)


def _describe(cache: Any) -> str:
    size = window(cache)
    return type(cache).__name__ + (f" of window {size}" if size else "")


def length(caches: list[Any]) -> int:
    """How many tokens every layer holds."""
    return min(cache.offset for cache in caches)


def take(cache: Any) -> tuple[mx.array, mx.array]:
    """Take the entries that hold tokens, in order, out of one of mlx-lm's caches."""
    keys, values = cache.keys, cache.values
    cache.keys = cache.values = None
    if isinstance(cache, RotatingKVCache):
        keys, values = map(cache._temporal_order, (keys, values))
        return keys[..., -cache.max_size :, :], values[..., -cache.max_size :, :]
    # What a trimmed cache left behind may be anything, even NaN.
    if cache.offset < keys.shape[2]:
        keys[..., cache.offset :, :] = 0
        values[..., cache.offset :, :] = 0
    return keys, values


def put(cache: Any, keys: mx.array, values: mx.array, tokens: int) -> None:
    """Put entries into one of mlx-lm's caches.

    Args:
        cache: One of ``KVCache`` or ``RotatingKVCache``.
        keys: [1, heads, n, D], in order; of a window exactly those that it holds.
        values: Likewise.
        tokens: How many tokens the cache shall have seen.
    """
    cache.keys, cache.values, cache.offset = keys, values, tokens
    if isinstance(cache, RotatingKVCache):
        cache._idx = keys.shape[2]

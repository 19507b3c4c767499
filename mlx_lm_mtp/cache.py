"""Keep exactly the tokens that were emitted, in mlx-lm's own caches.

mlx-lm's ``trim_prompt_cache`` does nothing, without a word, once a sliding window is
full. Its layout allows an exact answer nevertheless: a write of S > 1 tokens puts a
rotating cache into temporal order and keeps W - 1 older entries beside the S new ones
(W the window), a write of one token leaves W in a ring. Either way the tokens of the
last write can be dropped, and the W - 1 entries that the next query may see remain.
"""

from typing import Any, Optional

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from .rounds import MTPError

KV = tuple[mx.array, mx.array]


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
        if type(cache) is type(like) and _window(cache) == _window(like):
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


def _window(cache: Any) -> Optional[tuple[int, int]]:
    if isinstance(cache, RotatingKVCache):
        return cache.max_size, cache.keep
    return None


def _describe(cache: Any) -> str:
    window = _window(cache)
    return type(cache).__name__ + (f" of window {window[0]}" if window else "")


def length(caches: list[Any]) -> int:
    """How many tokens every layer holds."""
    return min(cache.offset for cache in caches)


def keep(caches: list[Any], tokens: int) -> None:
    """Drop everything after the first ``tokens`` tokens, exactly.

    Raises:
        RuntimeError: If a full window no longer holds what must remain: only the
            tokens of the last write can be dropped.
    """
    for cache in caches:
        drop = cache.offset - tokens
        if drop <= 0:
            continue
        if isinstance(cache, RotatingKVCache):
            _drop(cache, drop)
        else:
            cache.trim(drop)


def _drop(cache: RotatingKVCache, drop: int) -> None:
    keys = cache._temporal_order(cache.keys)
    values = cache._temporal_order(cache.values)
    offset, held = cache.offset - drop, keys.shape[2] - drop
    if held < min(offset, cache.max_size - 1):
        raise RuntimeError(
            f"cannot drop {drop} of {cache.offset} tokens from a window of "
            f"{cache.max_size} that holds {keys.shape[2]}"
        )
    # A window that was full must fill its buffer again. The entry in front is the
    # one that the next write evicts, and no query sees it before.
    pad = max(min(offset, cache.max_size) - held, 0)
    cache.keys, cache.values = _head(keys, held, pad), _head(values, held, pad)
    cache.offset, cache._idx = offset, held + pad


def _head(entries: mx.array, held: int, pad: int) -> mx.array:
    entries = entries[..., :held, :]
    return mx.pad(entries, [(0, 0), (0, 0), (pad, 0), (0, 0)]) if pad else entries


def valid_kv(cache: Any, window: Optional[int]) -> KV:
    """The entries that hold tokens, the newest ``window`` of them at most.

    A ring is returned unordered: keys carry their positions.
    """
    keys, values = cache.keys, cache.values
    if cache.offset < keys.shape[2]:
        keys, values = keys[..., : cache.offset, :], values[..., : cache.offset, :]
    if window is not None and keys.shape[2] > window:
        keys, values = keys[..., -window:, :], values[..., -window:, :]
    return keys, values

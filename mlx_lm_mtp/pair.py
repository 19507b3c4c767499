"""Load a drafter and check that it fits its target, or say why not."""

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model

from .hub import AUTO, find_assistant, find_official, read_config
from .rounds import MTPError
from .tape import random_state, seed_of
from .target import Target

MODEL_FILE = Path(__file__).parent / "models" / "gemma4_assistant.py"
BITS = (2, 3, 4, 5, 6, 8)  # that MLX's kernels know
GROUPS = (64, 32)


@functools.cache
def model_file() -> ModuleType:
    """Our model file, also where mlx-lm has its own or cannot find ours."""
    name = f"mlx_lm.models.{MODEL_FILE.stem}"
    found = importlib.util.find_spec(name)
    if found is not None and found.origin == str(MODEL_FILE):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, MODEL_FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Our ``Model`` and ``ModelArgs``, as mlx-lm's ``load_model`` asks for them."""
    return model_file().Model, model_file().ModelArgs


def read_args(config: dict[str, Any]) -> Any:
    """The ``ModelArgs`` of a drafter's configuration.

    Raises:
        MTPError: If something is missing or makes no sense.
    """
    try:
        return model_file().ModelArgs.from_dict(config)
    except (TypeError, ValueError, KeyError) as e:
        raise MTPError(f"the assistant's config.json is not usable: {e}") from e


def load_assistant(
    path_or_repo: str, model: nn.Module, quantize: Optional[int] = None
) -> nn.Module:
    """Load a Gemma 4 drafter for a target. No tokenizer files are needed.

    Args:
        path_or_repo: A local folder, a Hugging Face repository, or "auto" for the
            official assistant of the target's size.
        model: The target, as ``mlx_lm.load`` returned it.
        quantize: Bits to quantise the drafter to, its head too. Text and law stay the
            target's; only the acceptance may move.

    Returns:
        The drafter. It holds no state of a generation, several may share it.

    Raises:
        ValueError: If there is no drafter there, or it does not fit the target; one
            line that names what was found and what is needed.
    """
    target = Target(model)
    if path_or_repo == AUTO:
        folder = find_official(target.hidden_size)
    else:
        folder = find_assistant(path_or_repo)
    config = read_config(folder)
    args = read_args(config)
    for misfit in misfits(args, target):
        raise MTPError(f"the assistant in {folder} does not fit this target: {misfit}")
    target.check_head()
    drafter = _load_weights(folder)
    _check_ordering(drafter, folder)
    return drafter if quantize is None else _quantised(drafter, config, quantize)


def _quantised(drafter: Any, config: dict[str, Any], bits: int) -> nn.Module:
    if bits not in BITS:
        raise MTPError(
            f"an assistant cannot be quantised to {bits} bits, give one of "
            f"{', '.join(map(str, BITS))}"
        )
    if "quantization" in config:
        raise MTPError("the assistant is quantised already: do not ask for it again")
    width = drafter.args.text.hidden_size
    group = next((size for size in GROUPS if width % size == 0), None)
    if group is None:
        raise MTPError(
            f"the assistant's hidden size {width} is no multiple of {GROUPS[-1]}: it "
            "cannot be quantised"
        )
    nn.quantize(
        drafter,
        group,
        bits,
        class_predicate=lambda _, module: (
            hasattr(module, "to_quantized") and module.weight.shape[-1] % group == 0
        ),
    )
    return drafter


def _load_weights(folder: Path) -> nn.Module:
    # Building a model draws its initial weights: a seed that was set before must give
    # the same text as without a drafter.
    seed = seed_of(random_state())
    try:
        drafter, _ = load_model(folder, get_model_classes=model_classes)
    except (ValueError, RuntimeError, KeyError) as e:
        reason = " ".join(str(e).split())
        raise MTPError(
            f"the assistant's weights in {folder} do not match its config.json or "
            f"are damaged: {reason[:300]}"
        ) from e
    finally:
        mx.random.seed(seed)
    return drafter


def _check_ordering(drafter: nn.Module, folder: Path) -> None:
    if not drafter.args.use_ordered_embeddings:
        return
    ordering = mx.sort(drafter.masked_embedding.token_ordering)
    if not mx.array_equal(ordering, mx.arange(ordering.size)):
        raise MTPError(
            f"token_ordering in {folder} is not a permutation of the vocabulary: "
            "the conversion damaged it, convert the assistant again"
        )


def check_pair(drafter: nn.Module, target: Target) -> None:
    """Refuse a loaded drafter that does not fit.

    Raises:
        MTPError: One line that names what was found and what is needed.
    """
    for misfit in misfits(drafter.args, target):
        raise MTPError(f"the assistant does not fit this target: {misfit}")


def misfits(args: Any, target: Target) -> Iterator[str]:
    """Why a drafter with these arguments cannot draft for the target, if so."""
    text = args.text
    numbers = {
        "backbone_hidden_size": (args.backbone_hidden_size, target.hidden_size),
        "vocab_size": (text.vocab_size, target.vocab_size),
        "sliding_window": (text.sliding_window, target.window),
    }
    for name, (found, needed) in numbers.items():
        if found != needed:
            yield f"its {name} is {found}, the target needs {needed}"
    shapes = target.kv_shapes()
    for kind in sorted(set(text.layer_types)):
        yield from _attention_misfit(text, kind, shapes.get(kind))


def _attention_misfit(
    text: Any, kind: str, shared: Optional[tuple[int, int]]
) -> Iterator[str]:
    if shared is None:
        yield f"it needs K/V of {kind} layers, the target has none"
        return
    heads, head_dim = shared
    full = kind == "full_attention"
    found_dim = (text.global_head_dim if full else None) or text.head_dim
    if found_dim != head_dim:
        yield f"its {kind} head size is {found_dim}, the target's is {head_dim}"
    found_heads = text.num_key_value_heads
    if full and text.attention_k_eq_v and text.num_global_key_value_heads:
        found_heads = text.num_global_key_value_heads
    if found_heads != heads:
        yield f"it expects {found_heads} {kind} K/V heads, the target has {heads}"
    if text.num_attention_heads % heads:
        yield (
            f"its {text.num_attention_heads} query heads do not share the target's "
            f"{heads} {kind} K/V heads evenly"
        )

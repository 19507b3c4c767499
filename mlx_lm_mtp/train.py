"""``python -m mlx_lm_mtp train``: distil a drafter onto a target.

For a target that was fine-tuned or quantised, or that has no drafter of its own.
"""

import argparse
import sys
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm import load
from mlx_lm.utils import _download

from .hub import find_assistant, read_config
from .options import check_least
from .pair import load_assistant
from .rounds import MTPError
from .target import Target
from .training import card, state
from .training.data import Row, check_batch, folder_of, load_rows
from .training.distil import Distiller, freeze_fixed
from .training.fresh import fresh_config, fresh_drafter
from .training.loop import Interrupted, Plan, fit, make_optimizer
from .training.own_text import own_rows

# What a resumed training must not change.
SETTINGS = (
    "model",
    "adapter_path",
    "mtp_assistant",
    "init",
    "data",
    "mask_prompt",
    "own_text",
    "own_tokens",
    "iters",
    "batch_size",
    "learning_rate",
    "max_seq_length",
    "num_draft_tokens",
    "seed",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command; those mlx-lm's LoRA tool has mean the same."""
    add = parser.add_argument
    add("--model", required=True, help="target: a folder or a Hugging Face repository")
    add("--adapter-path", help="LoRA adapters of the target")
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--mtp-assistant", help="drafter to start from")
    start.add_argument(
        "--init", type=int, metavar="SIZE", help="start anew with this hidden size"
    )
    add("--data", required=True, help="folder of train.jsonl and valid.jsonl, or a set")
    add("--mask-prompt", action="store_true", help="learn from the answers only")
    add(
        "--own-text", type=int, default=0, metavar="N", help="add N texts by the target"
    )
    add("--own-tokens", type=int, default=256, help="length of each of these")
    add("--save-path", type=Path, required=True, help="folder for the drafter")
    add("--iters", type=int, default=1000)
    add("--batch-size", type=int, default=4)
    add("--learning-rate", type=float, default=3e-4)
    add("--max-seq-length", type=int, default=2048)
    add("--num-draft-tokens", type=int, default=4, help="unrolled steps")
    add("--grad-checkpoint", action="store_true", help="use less memory, more time")
    add("--steps-per-eval", type=int, default=100)
    add("--val-batches", type=int, default=8)
    add("--save-every", type=int, default=50)
    add("--seed", type=int, default=0)
    add("--resume", action="store_true", help="go on where an interrupt stopped")


def check_options(args: argparse.Namespace) -> None:
    """Refuse numbers that mean nothing.

    Raises:
        MTPError: Naming the option.
    """
    check_least(
        args,
        iters=1,
        batch_size=1,
        own_tokens=1,
        num_draft_tokens=1,
        steps_per_eval=1,
        val_batches=1,
        save_every=1,
        max_seq_length=1,
    )
    if not 0 < args.learning_rate < inf:
        raise MTPError(f"--learning-rate is {args.learning_rate}, it must be positive")
    if args.seed < 0:
        raise MTPError(f"--seed is {args.seed}, it cannot be negative")
    if args.own_text < 0:
        raise MTPError(f"--own-text is {args.own_text}, it cannot be negative")


def open_output(args: argparse.Namespace) -> Optional[dict[str, Any]]:
    """Make the output folder; what a training to resume says of itself, or None.

    Raises:
        MTPError: If it cannot be written, or holds something not to be overwritten.
    """
    folder: Path = args.save_path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise MTPError(f"cannot write to --save-path {folder}: {e.strerror}") from e
    about = state.read_about(folder)
    if args.resume and about is None:
        raise MTPError(f"there is nothing to resume in {folder}")
    if about is not None and not args.resume:
        raise MTPError(
            f"{folder} holds a training interrupted at step {about['step']}: add "
            "--resume to go on, or give another --save-path"
        )
    if about is None and (folder / "config.json").exists():
        raise MTPError(f"{folder} already holds a model: give another --save-path")
    if about is not None:
        state.check_resumable(about, _settings(args))
    return about


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in SETTINGS}


def _load_target(args: argparse.Namespace) -> tuple[nn.Module, Any, Path]:
    try:
        folder = Path(_download(args.model))
        model, tokenizer = load(str(folder), adapter_path=args.adapter_path)
    except (OSError, ValueError, KeyError) as e:
        reason = " ".join(str(e).split())
        raise MTPError(f"cannot load the target {args.model}: {reason[:300]}") from e
    model.freeze()
    return model, tokenizer, folder


def _start(
    args: argparse.Namespace, target: Target, folder: Path
) -> tuple[Any, dict[str, Any], dict[str, Any], Path]:
    """The drafter in float32, its config, the types to store it in, its tokenizer."""
    if args.init is not None:
        config = fresh_config(target, args.init)
        drafter = fresh_drafter(target, config, args.seed)
        stored = getattr(mx, config["dtype"])
        dtypes = dict.fromkeys(state.flat(drafter.parameters()), stored)
    else:
        folder = find_assistant(args.mtp_assistant)
        config = read_config(folder)
        if "quantization" in config:
            raise MTPError(
                f"the assistant {args.mtp_assistant} is quantised: train the one it "
                "was made from, and quantise the result with mlx_lm.convert -q"
            )
        drafter = load_assistant(str(folder), target.model)
        dtypes = {k: v.dtype for k, v in state.flat(drafter.parameters()).items()}
    drafter.update(tree_map(_as_float32, drafter.parameters()))
    freeze_fixed(drafter)
    return drafter, config, dtypes, folder


def _as_float32(weight: mx.array) -> mx.array:
    floating = mx.issubdtype(weight.dtype, mx.floating)
    return weight.astype(mx.float32) if floating else weight


def _load_data(args: argparse.Namespace, target: Target, tokenizer: Any) -> Any:
    longest = target.config.max_position_embeddings
    if args.max_seq_length > longest:
        raise MTPError(
            f"--max-seq-length is {args.max_seq_length}, the target reads at most "
            f"{longest} tokens"
        )
    train, valid = load_rows(
        args.data, tokenizer, args.max_seq_length, args.mask_prompt
    )
    check_batch(train, args.batch_size)
    return train, valid


def run(args: argparse.Namespace) -> None:
    """Train a drafter and write its folder.

    Raises:
        MTPError: For anything that the user can mend; before work starts.
        Interrupted: After a Ctrl-C, with everything saved.
    """
    check_options(args)
    about = open_output(args)
    model, tokenizer, folder = _load_target(args)
    target = Target(model)
    train, valid = _load_data(args, target, tokenizer)
    drafter, config, dtypes, source = _start(args, target, folder)
    if args.own_text:
        train = train + _own_text(args, model, tokenizer, train)
    plan = Plan(
        iters=args.iters,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        seed=args.seed,
        steps_per_eval=args.steps_per_eval,
        val_batches=args.val_batches,
        save_every=args.save_every,
    )
    optimizer = make_optimizer(plan)
    if about is None:
        measured = asdict(card.measure(model, drafter, valid))
        optimizer.init(drafter.trainable_parameters())
        about = {"settings": _settings(args), "before": measured, "step": 0}
    else:
        state.load_state(args.save_path, drafter, optimizer)
    distiller = Distiller(target, drafter, args.num_draft_tokens, args.grad_checkpoint)
    fit(distiller, optimizer, plan, train, valid, about["step"], args.save_path, about)
    card.write_drafter(args.save_path, drafter, config, dtypes)
    card.copy_tokenizer(source, args.save_path)
    before = card.restore(about["before"])
    trained = load_assistant(str(args.save_path), model)
    after = card.measure(model, trained, valid)
    pair = f"--model {folder_of(args.model)}"
    if args.adapter_path:
        pair += f" --adapter-path {folder_of(args.adapter_path)}"
    card.write_card(args.save_path, pair, _facts(args, train, valid), before, after)
    (args.save_path / state.FILE).unlink()
    print(f"before  {before.summary()}\nafter   {after.summary()}")
    print(f"The drafter is in {args.save_path}: give it to --mtp-assistant.")


def _own_text(
    args: argparse.Namespace, model: nn.Module, tokenizer: Any, train: list[Row]
) -> list[Row]:
    print(f"{args.own_text} texts by the target", file=sys.stderr)
    return own_rows(
        model,
        tokenizer,
        train,
        count=args.own_text,
        max_tokens=args.own_tokens,
        seed=args.seed,
        folder=args.save_path,
    )


def _facts(
    args: argparse.Namespace, train: list[Row], valid: list[Row]
) -> dict[str, str]:
    target, began = folder_of(args.model), f"hidden size {args.init}, at random"
    if args.adapter_path:
        target += f", adapters {folder_of(args.adapter_path)}"
    if args.mtp_assistant:
        began = folder_of(args.mtp_assistant)
    tokens = sum(len(row.tokens) for row in train)
    return {
        "target": target,
        "started from": began,
        "data": f"{folder_of(args.data)}: {len(train)} rows, {tokens} tokens",
        "of these by the target itself": str(args.own_text),
        "held out": f"{len(valid)} rows",
        "steps": f"{args.iters} of {args.batch_size} rows",
        "learning rate": str(args.learning_rate),
        "unrolled drafts": str(args.num_draft_tokens),
        "seed": str(args.seed),
    }


def main(args: argparse.Namespace) -> int:
    """The command: its exit status."""
    # On the CPU MLX compiles with the system's C++ compiler, shape by shape: it
    # costs minutes where a step takes seconds.
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    if on_cpu:
        mx.disable_compile()
    try:
        run(args)
    except Interrupted as e:
        print(f"\nInterrupted after step {e.step}; the same with --resume goes on.")
        return 130
    finally:
        if on_cpu:
            mx.enable_compile()
    return 0

"""The pair that ``bench`` and ``doctor`` look at: given, embedded, or synthetic."""

import argparse
from dataclasses import dataclass
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import load

from .demo import ASSISTANT, TARGET
from .pair import BITS as DRAFTER_BITS
from .pair import load_assistant
from .prompts import KINDS, RANDOM_KIND, make_prompt, random_prompt
from .rounds import MTPError
from .synthetic import BITS, SIZES, TARGETS, make_pair
from .target import Target

EMBEDDED = "the pair in the box"


@dataclass
class Subject:
    """A pair and how to write prompts for it."""

    name: str
    model: nn.Module
    drafter: Any
    tokenizer: Optional[Any] = None  # None: synthetic, prompts are random

    @property
    def target(self) -> Target:
        """The target as a drafter sees it."""
        return Target(self.model)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of prompt that are measured unless others are asked for."""
        return (RANDOM_KIND,) if self.tokenizer is None else KINDS

    @property
    def ends(self) -> set[int]:
        """Tokens that end a text."""
        return set() if self.tokenizer is None else set(self.tokenizer.eos_token_ids)

    def prompt(self, kind: str, context: int) -> mx.array:
        """Token ids [n]; see ``prompts.make_prompt``."""
        if kind == RANDOM_KIND:
            return random_prompt(self.target.vocab_size, context)
        return make_prompt(self.tokenizer, kind, context)


def add_pair_arguments(
    parser: argparse.ArgumentParser, acceptances: Optional[str] = None
) -> None:
    """Options that name a pair; without any it is the embedded one.

    Args:
        parser: Where to.
        acceptances: "+" if --acceptance may be given several values.
    """
    add = parser.add_argument
    add("--model", help="target: a folder or a Hugging Face repository")
    add("--mtp-assistant", metavar="PATH_OR_REPO", help="its drafter")
    add(
        "--synthetic",
        choices=SIZES,
        help="random weights in the true shapes of this Gemma 4",
    )
    add("--bits", type=int, choices=BITS, default=4, help="of a synthetic target")
    add(
        "--mtp-quantize",
        type=int,
        choices=DRAFTER_BITS,
        metavar="BITS",
        help="quantise the drafter, its head too",
    )
    add(
        "--acceptance",
        type=_share,
        nargs=acceptances,
        metavar="A",
        help="accept each draft of a synthetic pair with this probability",
    )
    add("--shrink", type=int, default=1, help=argparse.SUPPRESS)


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a probability")
    return share


def check_pair_arguments(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other, before anything is loaded.

    Raises:
        MTPError: Naming them.
    """
    if "" in (args.model, args.mtp_assistant):
        raise MTPError("--model or --mtp-assistant is empty: give a folder or a repo")
    if args.synthetic and (args.model or args.mtp_assistant):
        raise MTPError("--synthetic makes its own pair: leave --model out")
    if bool(args.model) != bool(args.mtp_assistant):
        given, lacking = ("--model", "--mtp-assistant")[:: 1 if args.model else -1]
        raise MTPError(f"{given} needs {lacking}: a pair is a target and its drafter")
    if args.acceptance is not None and not args.synthetic:
        raise MTPError(
            "--acceptance sets what a synthetic pair accepts; a real pair accepts what "
            "it does: add --synthetic, or leave it out"
        )


def load_model(path_or_repo: str) -> tuple[nn.Module, Any]:
    """A model and its tokenizer, as mlx-lm loads them.

    Raises:
        MTPError: If they cannot be loaded.
    """
    try:
        model, tokenizer = load(path_or_repo)[:2]
    except (OSError, ValueError, KeyError) as e:
        reason = " ".join(str(e).split())
        raise MTPError(f"cannot load the model {path_or_repo}: {reason[:300]}") from e
    return model, tokenizer


def open_subject(args: argparse.Namespace) -> Subject:
    """Load or make the pair.

    Raises:
        MTPError: If the options contradict each other, or the pair does not load or
            fit.
    """
    check_pair_arguments(args)
    if args.synthetic:
        return _synthetic(args)
    model, tokenizer = load_model(args.model or str(TARGET))
    assistant = args.mtp_assistant or str(ASSISTANT)
    drafter = load_assistant(assistant, model, args.mtp_quantize)
    return Subject(args.model or EMBEDDED, model, drafter, tokenizer)


def _synthetic(args: argparse.Namespace) -> Subject:
    experts = TARGETS[args.synthetic].get("enable_moe_block")
    if experts and args.bits == 16 and mx.default_device().type == mx.DeviceType.cpu:
        raise MTPError(
            "MLX cannot compute bfloat16 experts on a CPU: give --bits 4 or 8"
        )
    pair = make_pair(args.synthetic, args.bits, args.mtp_quantize or 16, args.shrink)
    kind = {16: "bfloat16"}.get(args.bits, f"{args.bits}-bit")
    name = f"synthetic {args.synthetic.upper()}, {kind}"
    if args.mtp_quantize:
        name += f", drafter {args.mtp_quantize}-bit"
    return Subject(name, *pair)

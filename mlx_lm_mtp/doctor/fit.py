"""Does the pair fit, and why not."""

import argparse
from dataclasses import dataclass, field
from typing import Any, Optional

from ..demo import ASSISTANT, TARGET
from ..hub import (
    AUTO,
    OFFICIAL,
    SIZES,
    find_assistant,
    find_official,
    hidden_size_of,
    read_config,
)
from ..pair import load_assistant, misfits, read_args
from ..rounds import MTPError
from ..subject import (
    EMBEDDED,
    Subject,
    check_pair_arguments,
    load_model,
    open_subject,
)
from ..target import Target


@dataclass
class Fit:
    """A pair that fits, or the reasons why it does not."""

    subject: Optional[Subject] = None
    facts: dict[str, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


def find_fit(args: argparse.Namespace) -> Fit:
    """Load the pair, or collect everything that is wrong with it.

    Raises:
        MTPError: If the options contradict each other.
    """
    check_pair_arguments(args)
    fit = Fit()
    try:
        if args.synthetic:
            fit.subject = open_subject(args)
        else:
            _try(args, fit)
    except MTPError as e:
        fit.reasons = [str(e)]
    if fit.subject is not None:
        fit.facts = _facts(fit.subject)
    return fit


def _try(args: argparse.Namespace, fit: Fit) -> None:
    """What the configurations tell first; only the weights tell the rest."""
    assistant, name = args.mtp_assistant or str(ASSISTANT), args.model or str(TARGET)
    if assistant == AUTO:
        folder = find_official(hidden_size_of(name))
    else:
        folder = find_assistant(assistant)
    config = read_config(folder)
    model, tokenizer = load_model(name)
    target = Target(model)
    found = read_args(config)
    fit.reasons = [f"the assistant: {reason}" for reason in misfits(found, target)]
    if fit.reasons:
        fit.reasons += _belongs(found.backbone_hidden_size, target.hidden_size)
        return
    drafter = load_assistant(assistant, model, args.mtp_quantize)
    fit.subject = Subject(args.model or EMBEDDED, model, drafter, tokenizer)


def _belongs(assistant: int, target: int) -> list[str]:
    """Which official assistants these hidden sizes of targets belong to."""
    ours, theirs = (SIZES.get(size) for size in (target, assistant))
    if ours == theirs or ours is None:
        return []
    found = f"this looks like {theirs}'s" if theirs else "this is for another target"
    return [f"{found}; the target is {ours}: take {OFFICIAL[0].format(ours)}"]


def _facts(subject: Subject) -> dict[str, Any]:
    """What had to agree, and does."""
    target, args = subject.target, subject.drafter.args
    shared = {
        kind: f"{heads} K/V heads of size {size}"
        for kind, (heads, size) in target.kv_shapes().items()
    }
    head = "dense over the vocabulary"
    if args.use_ordered_embeddings:
        head = (
            f"centroids, {args.centroid_intermediate_top_k} of {args.num_centroids} "
            "clusters"
        )
    return {
        "hidden size": target.hidden_size,
        "vocabulary": target.vocab_size,
        "window": target.window,
        **shared,
        "drafter's hidden size": args.text.hidden_size,
        "drafter's head": head,
    }

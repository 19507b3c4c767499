"""``python -m mlx_lm_mtp doctor``: does this pair work here, how fast, and if not, why.

What to run first with real weights on a new machine, and what to paste into a report.
The exit status is 0 if the pair fits, 1 if not.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from typing import Any

import mlx.core as mx

from ..depth import MAX_DRAFTS
from ..host import status
from ..machine import about, memory, uses_reference_blas
from ..measure import measure
from ..options import check_least
from ..subject import Subject, add_pair_arguments
from . import examine
from .advice import warnings
from .fit import find_fit
from .text import text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_pair_arguments(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object")
    add("--max-tokens", "-m", type=int, default=64, help="of each text")
    add("--positions", type=int, default=36, help="where to compare logits of forwards")
    add(
        "--time-limit",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="measure less once this is over (120)",
    )


def main(args: argparse.Namespace) -> int:
    """The command: its exit status."""
    # Two tokens make a speed, and the widest forward compared reads nine.
    check_least(args, max_tokens=2, positions=9, time_limit=1)
    fit = find_fit(args)
    subject = fit.subject
    report = {
        "fit": subject is not None,
        "pair": subject.name if subject else args.model or args.mtp_assistant,
        "about": about(),
        "plugin": status(),
        "reference_blas": uses_reference_blas(),
        "facts": fit.facts,
        "reasons": fit.reasons,
    }
    if subject is not None:
        if sys.stderr.isatty():
            seconds = f"about {args.time_limit:.0f} seconds"
            print(f"{subject.name} fits; measuring for {seconds}", file=sys.stderr)
        report |= _measured(subject, args)
        report["warnings"] = warnings(report)
    print(json.dumps(report) if args.json else text(report).lstrip())
    return 0 if report["fit"] else 1


def _measured(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    deadline = time.perf_counter() + args.time_limit
    mx.reset_peak_memory()
    prompt = subject.prompt(subject.kinds[0], 0)
    costs = measure(subject.model, subject.drafter, prompt, args.time_limit / 10)
    exact = examine.exactness(subject, args.positions, deadline - args.time_limit / 2)
    found = examine.acceptance(subject, args.max_tokens, deadline - args.time_limit / 3)
    accepted = found[0]["shares"]
    if args.acceptance is not None:
        accepted = [args.acceptance] * MAX_DRAFTS
    # Whatever the rest took, a speed is measured.
    deadline = max(deadline, time.perf_counter() + args.time_limit / 4)
    times = asdict(costs)
    for name in ("verify", "draft"):
        times[name] = {str(number): cost for number, cost in times[name].items()}
    return {
        "trained": subject.tokenizer is not None,
        "target": examine.weights(subject.model),
        "drafter": examine.weights(subject.drafter),
        "times": times,
        "exactness": exact,
        "acceptance": found,
        "depth": examine.depth(
            subject, costs, accepted, args.acceptance, args.max_tokens, deadline
        ),
        "memory": memory(),
    }

"""``python -m mlx_lm_mtp bench``: plain decoding, MTP at every depth, in one process.

Methods take turns within each text, so that a machine that slows down slows all of
them; ratios are to the plain text that was generated meanwhile. Speeds are of decoding
alone.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, Optional

from ..depth import MAX_DRAFTS
from ..kinds import is_drafter
from ..machine import about
from ..measure import Costs, measure
from ..options import check_least
from ..prompts import RANDOM_KIND
from ..rounds import MTPError
from ..subject import Subject, add_pair_arguments, load_model, open_subject
from .chart import chart
from .methods import Cell, Method, plain, with_draft_model, with_drafts
from .run import Bench
from .summary import Row, cells_of, costs_table, summarise, table
from .text import Generation

ADAPTIVE = "adaptive"
COSTS = 0.05  # of the time at most goes into bare calls, before and again after


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_pair_arguments(parser, acceptances="+")
    add = parser.add_argument
    add("--draft-model", help="also time mlx-lm's own drafting with this model")
    add(
        "--num-draft-tokens",
        type=_number,
        nargs="+",
        default=[*range(1, MAX_DRAFTS + 1), None],
        metavar="N",
        help="numbers of drafts, or 'adaptive' (1 to 8 and adaptive)",
    )
    add(
        "--kinds",
        nargs="+",
        metavar="KIND",
        help="code, chat, copy, prose (all four), random",
    )
    add(
        "--contexts",
        type=int,
        nargs="+",
        metavar="N",
        help="tokens of the prompt, 0 for the request alone (0 and the window)",
    )
    add("--temps", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    add("--runs", type=int, default=3, help="turns of every method")
    add("--max-tokens", "-m", type=int, default=128, help="of each text")
    add(
        "--time-limit",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="start nothing after this, repetitions go first (600)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON lines")
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    add("--svg", type=Path, metavar="FILE", help="draw speed against depth")


def _number(text: str) -> Optional[int]:
    if text == ADAPTIVE:
        return None
    number = int(text)
    if not 0 <= number <= MAX_DRAFTS:
        raise argparse.ArgumentTypeError(f"{text} is not 0 to {MAX_DRAFTS}")
    return number


def main(args: argparse.Namespace) -> int:
    """The command: its exit status."""
    begin = time.perf_counter()
    _check(args)
    subject = open_subject(args)
    cells = _cells(args, subject)
    methods = _methods(args, subject)
    deadline = begin + (1 - COSTS) * args.time_limit
    bench = Bench(subject, methods, cells, args.runs, args.max_tokens, deadline)
    show = _Show(args, subject)
    show.about()
    costs = _costs(bench, args.time_limit)
    generations: list[Generation] = []
    status = 0
    try:
        for generation in bench.generations():
            generations.append(generation)
            show.generation(generation)
        # Again, as a machine may be in another mood by now.
        again = _costs(bench, args.time_limit)
        costs = {
            context: found.mean(again[context]) for context, found in costs.items()
        }
    except KeyboardInterrupt:
        status = 130  # what there is by now is shown
    for found in costs.values():
        show.costs(found)
    panels = []
    for cell in cells:
        rows = summarise(cell, generations, costs[cell.context], bench.first)
        if rows:
            show.rows(cell, rows)
            panels.append((cell.label, rows))
    if args.svg:
        args.svg.write_text(chart(subject.name, panels))
    return status


def _check(args: argparse.Namespace) -> None:
    check_least(args, runs=1, max_tokens=2, time_limit=1)
    if args.draft_model == "":
        raise MTPError("--draft-model is empty: give a folder or a repo")
    for temp in args.temps:
        if not 0 <= temp < inf:
            raise MTPError(f"--temps has {temp}, it must be 0 or more")
    if args.contexts:
        check_least(args, contexts=0)
    if args.svg and not args.svg.parent.is_dir():
        raise MTPError(f"--svg: there is no folder {args.svg.parent}")
    if args.svg and args.svg.is_dir():
        raise MTPError(f"--svg: {args.svg} is a folder, a file is needed")


def _methods(args: argparse.Namespace, subject: Subject) -> list[Method]:
    methods = [plain()]
    if args.draft_model:
        model, tokenizer = load_model(args.draft_model)
        if is_drafter(model):
            raise MTPError(
                f"--draft-model {args.draft_model} is a drafter of MTP: give it as "
                "--mtp-assistant, and an ordinary model here"
            )
        ours = subject.tokenizer
        if ours is None or tokenizer.vocab_size != ours.vocab_size:
            raise MTPError(
                f"--draft-model {args.draft_model} has another vocabulary than "
                f"{subject.name}"
            )
        methods.append(with_draft_model(model))
    return methods + [with_drafts(num) for num in dict.fromkeys(args.num_draft_tokens)]


def _cells(args: argparse.Namespace, subject: Subject) -> list[Cell]:
    kinds = args.kinds or subject.kinds
    known = dict.fromkeys((*subject.kinds, RANDOM_KIND))
    for kind in kinds:
        if kind not in known:
            some = ", ".join(known)
            raise MTPError(f"there are no {kind!r} prompts: give some of {some}")
    contexts = args.contexts or [0, subject.target.window]
    shares = args.acceptance or [None]
    return [Cell(*key) for key in product(kinds, contexts, args.temps, shares)]


def _costs(bench: Bench, limit: float) -> dict[int, Costs]:
    contexts = dict.fromkeys(cell.context for cell in bench.cells)
    subject, seconds = bench.subject, min(4.0, COSTS * limit / len(contexts))
    prompts = {n: subject.prompt(subject.kinds[0], n) for n in contexts}
    pair = subject.model, subject.drafter
    return {n: measure(*pair, prompt, seconds) for n, prompt in prompts.items()}


class _Show:
    """Prints what was found, in the form that was asked for."""

    def __init__(self, args: argparse.Namespace, subject: Subject) -> None:
        self.args, self.subject = args, subject

    def about(self) -> None:
        found = {"pair": self.subject.name} | about()
        if self.args.json:
            _line("about", found)
            return
        mark = "- " if self.args.markdown else ""
        print("\n".join(f"{mark}{name}: {value}" for name, value in found.items()))

    def costs(self, costs: Costs) -> None:
        if self.args.json:
            _line("costs", asdict(costs))
        else:
            print("\n" + costs_table(costs, self.args.markdown))

    def generation(self, generation: Generation) -> None:
        if self.args.json:
            method = generation.method.name
            numbers = {k: v for k, v in vars(generation).items() if k != "method"}
            numbers |= {"cell": asdict(generation.cell), "rate": generation.rate}
            numbers["stats"] = asdict(generation.stats)
            _line("generation", {"method": method} | numbers)
        elif sys.stderr.isatty():
            turn = f"{generation.run + 1} of {self.args.runs}"
            print(f"{generation.cell.label}: {turn}", file=sys.stderr)

    def rows(self, cell: Cell, rows: list[Row]) -> None:
        if self.args.json:
            for row in rows:
                numbers = {k: v for k, v in vars(row).items() if k != "method"}
                numbers["stats"] = asdict(row.stats)
                names = {"cell": asdict(cell), "method": row.method.name}
                _line("summary", names | numbers)
            return
        title = f"### {cell.label}\n" if self.args.markdown else f"{cell.label}:"
        print(f"\n{title}\n{table(list(map(cells_of, rows)), self.args.markdown)}")


def _line(event: str, content: dict[str, Any]) -> None:
    print(json.dumps({"event": event} | content), flush=True)

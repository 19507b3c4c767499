"""``python -m mlx_lm_mtp throughput``: many sequences at once, with and without MTP.

All sequences of a table's line decode for as long as it is timed, so that none waits
for the last. Contexts are read once, and every method goes on from copies of them.
Methods take turns; ratios are taken within a turn.
"""

import argparse
import copy
import time
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any, Optional, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from .batch import MTPBatchGenerator
from .bench.dial import Dial
from .bench.summary import markdown_row, table
from .generate import checked_number
from .machine import about
from .options import check_least
from .rounds import MTPError
from .rule import Rule
from .stats import MTPStats, merged
from .subject import Subject, add_pair_arguments, open_subject

ENDLESS = 1 << 30
PLAIN, ADAPTIVE = "plain", "adaptive"
WARM_UP, LEAST = 4, 6  # rounds before the clock starts, and at least after it
# Likewise for what learns: at first, and whenever the text begins again.
SETTLE, SETTLE_AGAIN, LEAST_LEARNING = 100, 20, 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_pair_arguments(parser)
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N")
    add("--num-draft-tokens", type=int, nargs="*", default=[0, 1, 2, 3, 4], metavar="N")
    add("--context", type=int, default=256, help="tokens of a prompt, about")
    add("--runs", type=int, default=3, help="turns of every method")
    add("--seconds", type=float, default=0.5, help="for which each turn is timed")


def main(args: argparse.Namespace) -> int:
    """The command: its exit status."""
    check_least(args, rows=1, runs=1, context=2)
    if not 0 < args.seconds < inf:
        raise MTPError(f"--seconds is {args.seconds}, it must be positive")
    for number in args.num_draft_tokens:
        checked_number(number)
    subject = open_subject(args)
    print(f"{subject.name}, {args.context} tokens of context")
    print("\n".join(f"- {name}: {value}" for name, value in about().items()))
    contexts = _read(subject, max(args.rows), args.context)
    methods = [PLAIN, *map(str, args.num_draft_tokens), ADAPTIVE]
    heads = ["rows", PLAIN, *(f"{m} drafts" for m in methods[1:-1]), ADAPTIVE]
    print("\nTokens per second, of all rows together:\n")
    print(table([], markdown=True, head=[*heads, "of plain", "tokens per round"]))
    for rows in args.rows:
        print(_line(args, subject, contexts[:rows], methods), flush=True)
    return 0


@dataclass(frozen=True)
class Context:
    """A prompt that was read, all but its last token."""

    caches: list[Any]
    last: int


@dataclass(frozen=True)
class Speed:
    """Tokens per second of all rows, and what their rounds did."""

    rate: float
    stats: MTPStats


def _line(
    args: argparse.Namespace,
    subject: Subject,
    contexts: list[Context],
    methods: list[str],
) -> str:
    runs: list[dict[str, Speed]] = []
    for run in range(args.runs):
        turn = run % len(methods)
        runs.append({})
        for method in methods[turn:] + methods[:turn]:
            runs[-1][method] = _timed(args, subject, contexts, method, run)
    rates = [median(found[method].rate for found in runs) for method in methods]
    share = median(found[ADAPTIVE].rate / found[PLAIN].rate for found in runs)
    stats = merged(found[ADAPTIVE].stats for found in runs)
    cells = [len(contexts), *(f"{rate:.0f}" for rate in rates), f"{share:.2f}"]
    return markdown_row([*map(str, cells), f"{stats.tokens_per_forward:.2f}"])


def _read(subject: Subject, rows: int, size: int) -> list[Context]:
    generator = MTPBatchGenerator(subject.model, subject.drafter, num_draft_tokens=0)
    kinds = subject.kinds
    # Not one as long as another, so that no two are the same.
    prompts = [subject.prompt(kinds[i % len(kinds)], size + i) for i in range(rows)]
    ids = [cast(list[int], prompt.tolist()) for prompt in prompts]
    uids = generator.insert(ids, [1] * rows)
    found = {}
    while responses := generator.next_generated():
        found.update({r.uid: Context(r.prompt_cache, r.token) for r in responses})
    generator.close()
    return [found[uid] for uid in uids]


class Dialled:
    """Makes rules whose drafts stand by the fall of coins."""

    def __init__(self, rules: Any, acceptance: float) -> None:
        self._rule = cast(Rule, Dial(rules.make(None, None, None), acceptance))

    def make(self, sampler: Any, processors: Any, seed: Optional[int]) -> Rule:
        """The same rule for every row."""
        return self._rule


def _timed(
    args: argparse.Namespace,
    subject: Subject,
    contexts: list[Context],
    method: str,
    run: int,
) -> Speed:
    rows, stats = len(contexts), MTPStats()
    warm, least = WARM_UP, LEAST
    if method == ADAPTIVE:
        warm, least = SETTLE_AGAIN if run else SETTLE, LEAST_LEARNING
    generator = _generator(args, subject, rows, method, stats)
    generator.insert(
        [[context.last] for context in contexts],
        [ENDLESS] * rows,
        [copy.deepcopy(context.caches) for context in contexts],
    )
    going: set[int] = set()
    while len(going) < rows:
        going |= {r.uid for r in generator.next_generated()}
    for _ in range(warm):
        generator.next_generated()
    vars(stats).update(vars(MTPStats()))
    start, tokens, rounds = time.perf_counter(), 0, 0
    while rounds < least or time.perf_counter() - start < args.seconds:
        tokens += len(generator.next_generated())
        rounds += 1
    seconds = time.perf_counter() - start
    generator.close()
    del generator
    mx.clear_cache()
    return Speed(tokens / seconds, stats)


def _generator(
    args: argparse.Namespace, subject: Subject, rows: int, method: str, stats: MTPStats
) -> Any:
    options: dict[str, Any] = {
        "prefill_batch_size": rows,
        "completion_batch_size": rows,
    }
    if method == PLAIN:
        return BatchGenerator(subject.model, **options)
    generator = MTPBatchGenerator(
        subject.model,
        subject.drafter,
        num_draft_tokens=None if method == ADAPTIVE else int(method),
        stats=stats,
        **options,
    )
    if args.acceptance is not None:
        generator.rules = Dialled(generator.rules, args.acceptance)
    return generator

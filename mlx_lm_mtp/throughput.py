"""``python -m mlx_lm_mtp throughput``: many sequences at once, with and without MTP.

All sequences of a table's line decode for as long as it is timed, so that none waits
for the last. Contexts are read once, and every method goes on from copies of them.
"""

import argparse
import copy
import sys
import time
from dataclasses import dataclass
from typing import Any, Optional, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from .batch import MTPBatchGenerator
from .bench.dial import Dial
from .bench.summary import table
from .generate import checked_number
from .machine import about
from .rounds import MTPError
from .rule import Rule
from .stats import MTPStats
from .subject import Subject, add_pair_arguments, open_subject

ENDLESS = 1 << 30
PLAIN, ADAPTIVE = "plain", "adaptive"
WARM = {ADAPTIVE: 60}  # rounds before the clock starts; what learns needs more
WARM_UP = 4
LEAST = 6  # rounds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_pair_arguments(parser)
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N")
    add("--num-draft-tokens", type=int, nargs="*", default=[0, 1, 2, 3, 4], metavar="N")
    add("--context", type=int, default=256, help="tokens of every prompt")
    add("--seconds", type=float, default=1.0, help="for which each cell is timed")


def main(args: argparse.Namespace) -> int:
    """The command: its exit status."""
    if min(args.rows) < 1 or args.context < 2 or args.seconds <= 0:
        raise MTPError("--rows must be 1 or more, --context 2, --seconds above 0")
    for number in args.num_draft_tokens:
        checked_number(number)
    subject = open_subject(args)
    print(f"{subject.name}, {args.context} tokens of context")
    print("\n".join(f"- {name}: {value}" for name, value in about().items()))
    contexts = _read(subject, max(args.rows), args.context)
    methods = [PLAIN, *map(str, args.num_draft_tokens), ADAPTIVE]
    heads = ["rows", PLAIN, *(f"{m} drafts" for m in methods[1:-1]), ADAPTIVE]
    heads += ["of plain", "tokens per round"]
    lines = []
    for rows in args.rows:
        found = []
        for method in methods:
            found.append(_timed(args, subject, contexts[:rows], method))
            if sys.stderr.isatty():
                print(f"{rows} rows, {method}", end="\r", file=sys.stderr)
        rates = [f"{speed.rate:.0f}" for speed in found]
        share = found[-1].rate / found[0].rate
        lines.append(
            [
                str(rows),
                *rates,
                f"{share:.2f}",
                f"{found[-1].stats.tokens_per_forward:.2f}",
            ]
        )
    print("\nTokens per second, of all rows together:\n")
    print(table(lines, markdown=True, head=heads))
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


def _read(subject: Subject, rows: int, size: int) -> list[Context]:
    generator = MTPBatchGenerator(subject.model, subject.drafter, num_draft_tokens=0)
    mx.random.seed(0)
    prompts = mx.random.randint(0, subject.target.vocab_size, (rows, size)).tolist()
    uids = generator.insert(cast(list[list[int]], prompts), [1] * rows)
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
    args: argparse.Namespace, subject: Subject, contexts: list[Context], method: str
) -> Speed:
    rows, stats = len(contexts), MTPStats()
    generator = _generator(args, subject, rows, method, stats)
    generator.insert(
        [[context.last] for context in contexts],
        [ENDLESS] * rows,
        [copy.deepcopy(context.caches) for context in contexts],
    )
    going: set[int] = set()
    while len(going) < rows:
        going |= {r.uid for r in generator.next_generated()}
    for _ in range(WARM.get(method, WARM_UP)):
        generator.next_generated()
    vars(stats).update(vars(MTPStats()))
    start, tokens, rounds = time.perf_counter(), 0, 0
    while rounds < LEAST or time.perf_counter() - start < args.seconds:
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

"""From generations to rows of a table."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Optional

from ..measure import Costs, predicted, shares
from ..stats import MTPStats, merged
from .methods import ADAPTIVE, PLAIN, Cell, Method
from .text import Generation

HEAD = (
    "",
    "tok/s",
    "x plain",
    "spread",
    "x best K",
    "predicted",
    "tok/forward",
    "accepted by position",
    "round ms",
    "x bare",
    "host ms",
    "first ms",
    "peak GB",
)


@dataclass
class Row:
    """One method in one cell. Ratios are taken run by run; these are their medians."""

    method: Method
    stats: MTPStats
    peak: int  # bytes
    rate: Optional[float] = None  # tokens per second
    ratio: Optional[float] = None  # to plain
    low: Optional[float] = None  # of the ratios
    high: Optional[float] = None
    best: Optional[float] = None  # to the best pinned number, see ``against_best``
    predicted: Optional[float] = None  # the ratio by bare calls and acceptance
    round: Optional[float] = None  # seconds
    bare: Optional[float] = None  # the round over its bare calls
    host: Optional[float] = None  # seconds of a round in which this thread computes
    first: Optional[float] = None  # seconds to the first token of a whole prompt


def deepest(generations: Iterable[Generation]) -> MTPStats:
    """The counts at the largest pinned number of drafts."""
    pinned = [g for g in generations if g.method.drafts]
    most = max((g.method.drafts or 0 for g in pinned), default=0)
    return merged(g.stats for g in pinned if g.method.drafts == most)


def summarise(
    cell: Cell,
    generations: Iterable[Generation],
    costs: Costs,
    first: dict[tuple[Cell, str], float],
) -> list[Row]:
    """One row for each method of a cell.

    Args:
        cell: Which.
        generations: Of any cells.
        costs: Of bare calls at the cell's context.
        first: Seconds to the first token, by cell and name of the method.
    """
    mine = [g for g in generations if g.cell == cell]
    accepted = shares(deepest(mine))
    if cell.acceptance is not None:
        accepted = [cell.acceptance] * len(costs.draft)
    speeds = predicted(costs, accepted)
    ratios = _ratios(mine)
    best = against_best(list(ratios.values()))
    rows = []
    for method in dict.fromkeys(g.method for g in mine):
        group = [g for g in mine if g.method == method]
        row = _row(method, group)
        found = [run[method] for run in ratios.values() if method in run]
        if found:
            row.ratio, row.low, row.high = median(found), min(found), max(found)
        row.best = best.get(method)
        row.first = first.get((cell, method.name))
        expected = None
        if method.name == ADAPTIVE and accepted:
            expected = max(speeds.values())
        if method.drafts in speeds:
            expected = speeds[method.drafts]
            row.bare = row.round and row.round / costs.round(method.drafts)
        row.predicted = expected and expected * costs.plain
        rows.append(row)
    return rows


def _row(method: Method, group: list[Generation]) -> Row:
    stats = merged(g.stats for g in group)
    row = Row(method, stats, peak=max(g.peak for g in group))
    timed = [g for g in group if g.rounds]
    if timed:
        row.rate = median(g.tokens / g.seconds for g in timed)
    if timed and stats.rounds:
        row.round = median(g.seconds / g.rounds for g in timed)
        row.host = median(g.host / g.rounds for g in timed)
    return row


def _ratios(generations: list[Generation]) -> dict[int, dict[Method, float]]:
    """Speeds over that of the plain text they took turns with, by run and method."""
    plain = {(g.run, g.group): g.rate for g in generations if g.method.name == PLAIN}
    found: dict[int, dict[Method, float]] = {}
    for g in generations:
        base = plain.get((g.run, g.group))
        if g.rate and base:
            found.setdefault(g.run, {})[g.method] = g.rate / base
    return found


def against_best(ratios: Sequence[Mapping[Method, float]]) -> dict[Method, float]:
    """The speed of each method over that of the best pinned number, in the median.

    Which number is the best in a run is decided by the other runs: chosen by its own
    noise it would look better than it is.

    Args:
        ratios: For each run, speeds over plain decoding's.
    """
    found: dict[Method, list[float]] = {}
    for i, here in enumerate(ratios):
        others = [*ratios[:i], *ratios[i + 1 :]]
        usual = {
            method: median([run[method] for run in others if method in run] or [ratio])
            for method, ratio in here.items()
            if method.drafts is not None
        }
        if usual:
            best = here[max(usual, key=usual.__getitem__)]
            for method, ratio in here.items():
                found.setdefault(method, []).append(ratio / best)
    return {method: median(shares) for method, shares in found.items()}


def cells_of(row: Row) -> list[str]:
    """The texts of a row, in the order of ``HEAD``."""
    shares = " ".join(f"{share:.0%}" for share in row.stats.acceptance)
    spread = f"{row.low:.2f}-{row.high:.2f}" if row.low and row.high else ""
    return [
        row.method.name,
        _text(row.rate, ".1f"),
        _text(row.ratio, ".2f"),
        spread,
        _text(row.best, ".2f"),
        _text(row.predicted, ".2f"),
        _text(row.stats.tokens_per_forward or None, ".2f"),
        shares,
        _text(row.round, ".2f", 1e3),
        _text(row.bare, ".2f"),
        _text(row.host, ".2f", 1e3),
        _text(row.first, ".0f", 1e3),
        _text(row.peak, ".2f", 1e-9),
    ]


def _text(number: Optional[float], form: str, unit: float = 1.0) -> str:
    return "" if number is None else format(number * unit, form)


def table(
    rows: list[list[str]], markdown: bool = False, head: Sequence[str] = HEAD
) -> str:
    """Columns of text under their heads, for a terminal or for a page."""
    if markdown:
        return "\n".join(map(markdown_row, [list(head), ["---"] * len(head), *rows]))
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in [list(head), *rows]
    )


def markdown_row(cells: Sequence[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"


def costs_table(costs: Costs, markdown: bool = False) -> str:
    """What bare calls cost after a context."""
    verify = " ".join(f"{1e3 * t:.1f}" for t in costs.verify.values())
    draft = " ".join(f"{1e3 * t:.1f}" for t in costs.draft.values())
    lines = [
        f"Bare calls after {costs.context} tokens, ms:",
        f"plain step {1e3 * costs.plain:.1f}",
        f"verify of 1 to {len(costs.verify)} tokens {verify}",
        f"1 to {len(costs.draft)} draft steps {draft}",
        f"Python building one forward {1e3 * costs.host:.1f}",
    ]
    return "\n".join(
        f"- {line}" if markdown and i else line for i, line in enumerate(lines)
    )

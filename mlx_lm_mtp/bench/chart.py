"""Speed against the number of drafts, as an SVG of a few shapes."""

from collections.abc import Sequence
from html import escape

from .methods import ADAPTIVE
from .summary import Row

WIDTH, HEIGHT, COLUMNS = 360, 220, 3
LEFT, RIGHT, TOP, BOTTOM = 36, 12, 34, 30
MEASURED, PREDICTED, PLAIN_LINE = "#1f5fbf", "#c2571a", "#888888"


def chart(title: str, panels: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """One panel for each cell: measured with its spread, predicted, adaptive.

    Args:
        title: Above all.
        panels: The label and the rows of each cell.
    """
    lines = -(-len(panels) // COLUMNS)
    columns = min(len(panels), COLUMNS)
    width, height = columns * WIDTH, lines * HEIGHT + 44
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _label(LEFT, 16, title, size=13),
        _key(),
    ]
    for i, (label, rows) in enumerate(panels):
        x, y = i % COLUMNS * WIDTH, i // COLUMNS * HEIGHT + 44
        out += [f'<g transform="translate({x},{y})">', *_panel(label, rows), "</g>"]
    return "\n".join([*out, "</svg>"]) + "\n"


def _key() -> str:
    names = {"measured": MEASURED, "predicted": PREDICTED, "plain": PLAIN_LINE}
    return "".join(
        _label(LEFT + 80 * i, 32, name, color=color)
        for i, (name, color) in enumerate(names.items())
    )


def _panel(label: str, rows: Sequence[Row]) -> list[str]:
    points = {row.method.drafts: row for row in rows if row.method.drafts is not None}
    adaptive = [row.ratio for row in rows if row.method.name == ADAPTIVE and row.ratio]
    heights = [row.high or 0.0 for row in rows]
    heights += [row.predicted or 0.0 for row in rows]
    top = max([1.25, *heights]) * 1.05
    deepest = max([1, *points])

    def x(num: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * num / deepest

    def y(ratio: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * ratio / top

    out = [_label(LEFT, 20, label)]
    for ratio in _ticks(top):
        color = PLAIN_LINE if ratio == 1 else "#e4e4e4"
        out += [_line(x(0), y(ratio), x(deepest), y(ratio), color)]
        out += [_label(LEFT - 26, y(ratio) + 4, f"{ratio:g}x")]
    out += [_label(x(n) - 3, HEIGHT - 14, str(n)) for n in range(deepest + 1)]
    out += [_label(x(deepest) - 84, HEIGHT - 2, "drafts per round")]
    if adaptive:
        ratio = adaptive[0]
        out += [_line(x(0), y(ratio), x(deepest), y(ratio), MEASURED, dashes="6 4")]
        out += [_label(x(0) + 4, y(ratio) - 4, f"adaptive {ratio:.2f}", MEASURED)]
    guessed = [(0, 1.0)]
    guessed += [
        (n, r.predicted) for n, r in sorted(points.items()) if n and r.predicted
    ]
    path = " ".join(f"{x(n):.1f},{y(ratio):.1f}" for n, ratio in guessed)
    out += [f'<polyline points="{path}" fill="none" stroke="{PREDICTED}"/>']
    for num, row in points.items():
        if row.ratio and row.low and row.high:
            out += [_line(x(num), y(row.low), x(num), y(row.high), MEASURED)]
            out += [
                f'<circle cx="{x(num):.1f}" cy="{y(row.ratio):.1f}" r="3.5" '
                f'fill="{MEASURED}"/>'
            ]
    return out


def _ticks(top: float) -> list[float]:
    step = 0.5 if top < 4 else 1.0
    return [step * i for i in range(int(top / step) + 1)]


def _line(
    x1: float, y1: float, x2: float, y2: float, color: str, dashes: str = "none"
) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{color}" stroke-dasharray="{dashes}"/>'
    )


def _label(x: float, y: float, text: str, color: str = "black", size: int = 11) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size}">'
        f"{escape(text)}</text>"
    )

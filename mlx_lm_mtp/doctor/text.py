"""A report as text."""

from collections.abc import Iterator
from typing import Any


def text(report: dict[str, Any]) -> str:
    """For people; the report is that of ``doctor --json``."""
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield from _section("Installation", report["about"])
    yield from _section("Pair", {"": report["pair"]} | report["facts"])
    if not report["fit"]:
        yield ""
        yield "The pair does not fit:"
        yield from (f"  {reason}" for reason in report["reasons"])
        return
    yield "  fits"
    yield from _section(
        "Weights", {name: _weights(report[name]) for name in ("target", "drafter")}
    )
    yield from _section("Milliseconds", _times(report["times"]))
    yield from _section("Accepted by position", _acceptance(report["acceptance"]))
    yield from _section(
        "Logits of wide forwards, against single tokens",
        {f"{w['width']} tokens": _exact(w) for w in report["exactness"]},
    )
    yield from _section("Speed", _speed(report["depth"]))
    yield from _section("Memory, GB", _memory(report["memory"]))
    yield ""
    yield "What to do:" if report["warnings"] else "Nothing to mend."
    yield from (f"  {warning}" for warning in report["warnings"])


def _section(title: str, facts: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield title
    width = max(map(len, facts))
    yield from (f"  {name.ljust(width)}  {fact}" for name, fact in facts.items())


def _weights(found: dict[str, Any]) -> str:
    return f"{found['bytes'] / 1e9:.2f} GB, {', '.join(found['types'])}"


def _times(times: dict[str, Any]) -> dict[str, str]:
    return {
        "plain step": _ms([times["plain"]]),
        f"verify of 1 to {len(times['verify'])} tokens": _ms(times["verify"].values()),
        f"1 to {len(times['draft'])} draft steps": _ms(times["draft"].values()),
        "Python building one forward": _ms([times["host"]]),
    }


def _ms(seconds: Any) -> str:
    return " ".join(f"{1e3 * s:.2f}" for s in seconds)


def _acceptance(found: list[dict[str, Any]]) -> dict[str, str]:
    return {
        f"temperature {a['temperature']:g}, draft_position {a['draft_position']}": (
            " ".join(f"{share:.0%}" for share in a["accepted"])
            + f", {a['tokens_per_forward']:.2f} tokens per forward"
        )
        for a in found
    }


def _exact(width: dict[str, Any]) -> str:
    if width["equal"] == width["positions"]:
        return f"the same bits at {width['positions']} positions"
    return (
        f"{width['positions'] - width['equal']} of {width['positions']} differ, by "
        f"{width['largest']:.2g} at most; another token at {width['other_token']}"
        + (f" (gap {width['gap']:.2g})" if width["other_token"] else "")
    )


def _speed(depth: dict[str, Any]) -> dict[str, str]:
    measured, chosen = depth["measured"], depth["chosen"]
    expected = depth["predicted"][str(chosen)]
    plain = measured["plain"]
    out = {"plain": _rate(plain), "drafts per round that pay most": str(chosen)}
    out["predicted with them"] = f"{expected:.1f} tokens/s"
    for name, rate in measured.items():
        if name != "plain":
            gain = f", {rate / plain:.2f} times plain" if rate and plain else ""
            out[f"measured, {name}"] = _rate(rate) + gain
    return out


def _rate(rate: Any) -> str:
    return "not measured" if rate is None else f"{rate:.1f} tokens/s"


def _memory(memory: dict[str, int]) -> dict[str, str]:
    return {name: f"{number / 1e9:.2f}" for name, number in memory.items()}

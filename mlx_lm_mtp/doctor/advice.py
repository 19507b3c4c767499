"""What a report tells its reader to do."""

from collections.abc import Iterator
from typing import Any

from ..machine import CROWDED

COSTLY_STEP = 0.1  # of a plain step
LARGE_DRAFTER = 200e6  # bytes
POOR = 0.3  # first draft accepted
SLOWED = 1.25  # plain decoding at the end over the beginning


def warnings(report: dict[str, Any]) -> list[str]:
    """One line for each thing to mend; the report is that of ``doctor --json``."""
    return [*_installation(report), *_pair(report), *_machine(report)]


def _installation(report: dict[str, Any]) -> Iterator[str]:
    host = report["plugin"]
    if host["reason"]:
        yield f"mlx-lm's commands do not know MTP here: {host['reason']}"
    elif not host["enabled"]:
        yield (
            "mlx-lm's commands do not know MTP here: the start-up hook is switched off "
            "(MLX_LM_MTP_DISABLE) or missing; unset it, or install mlx-lm-mtp again"
        )
    elif not host["tested"]:
        yield (
            f"mlx-lm {host['mlx_lm']} is newer than what mlx-lm-mtp was tested with: "
            "report what does not work"
        )
    if report["reference_blas"]:
        yield (
            "MLX computes with the reference BLAS here, many times slower than "
            "OpenBLAS: install it and preload it, see docs/training.md, last section"
        )


def _pair(report: dict[str, Any]) -> Iterator[str]:
    times, drafter = report["times"], report["drafter"]
    step = times["draft"]["1"] / times["plain"]
    large = drafter["bytes"] > LARGE_DRAFTER
    if step > COSTLY_STEP and large and not drafter["quantised"]:
        yield (
            f"one draft step takes {step:.0%} of a plain step: quantise the drafter "
            "(--mtp-quantize 4, or mlx_lm.convert -q)"
        )
    by_key = {(a["temperature"], a["draft_position"]): a for a in report["acceptance"]}
    greedy = by_key[0.0, 0]["accepted"]
    if report["trained"] and greedy and greedy[0] < POOR:
        yield (
            f"only {greedy[0]:.0%} of first drafts stand: the assistant fits in shape "
            "but was made for other weights; give this target's own, or train one "
            "(python -m mlx_lm_mtp train)"
        )
    here, there = (by_key[0.0, position]["tokens_per_forward"] for position in (0, -1))
    if report["trained"] and there > 1.02 * here:
        yield (
            f"draft_position=-1 gives {there:.2f} tokens per forward, the default "
            f"{here:.2f}: use it, and report this"
        )
    other = sum(width["other_token"] for width in report["exactness"])
    if other:
        gap = max(width["gap"] for width in report["exactness"])
        yield (
            "kernels of different widths round differently here: greedy text may part "
            f"from plain decoding's where two tokens are within {gap:.2g} of each other"
        )
    if report["depth"]["chosen"] == 0:
        yield "drafting does not pay with these costs and this acceptance: it stays off"


def _machine(report: dict[str, Any]) -> Iterator[str]:
    memory = report["memory"]
    if memory["peak"] > CROWDED * memory.get("available", float("inf")):
        yield (
            f"{memory['peak'] / 1e9:.1f} of {memory['available'] / 1e9:.1f} GB were in "
            "use: close other programs, or take a smaller quantisation"
        )
    rate = report["depth"]["measured"]["plain"]
    if rate and 1 / rate > SLOWED * report["times"]["plain"]:
        slower = 1 / rate / report["times"]["plain"] - 1
        yield (
            f"plain decoding was {slower:.0%} slower at the end than at the beginning: "
            "other programs are running, or the machine is hot; measure again"
        )

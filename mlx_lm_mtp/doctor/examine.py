"""What is measured of a pair that fits."""

import time
from itertools import product
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.sample_utils import make_sampler

from ..bench.methods import Cell, plain, with_drafts
from ..bench.run import TOP_K, TOP_P, Bench
from ..depth import best_depth
from ..generate import mtp_generate_step
from ..measure import Costs, predicted, prefill, shares
from ..stats import MTPStats, merged
from ..subject import Subject

TEMPS = (0.0, 1.0)
POSITIONS = (0, -1)  # transformers' and vLLM's
DRAFTS = 4
WIDTHS = range(2, 10)


def weights(model: nn.Module) -> dict[str, Any]:
    """How large a model is and in what types it is stored."""
    bits = {
        f"{module.bits}-bit"
        for module in model.modules()
        if "scales" in module and hasattr(module, "bits")
    }
    parameters = dict(tree_flatten(model.parameters()))
    floats = {
        str(value.dtype).rsplit(".", 1)[-1]
        for value in parameters.values()
        if mx.issubdtype(value.dtype, mx.floating)
    }
    return {
        "bytes": sum(value.nbytes for value in parameters.values()),
        "types": sorted(bits) + sorted(floats),
        "quantised": bool(bits),
    }


def acceptance(subject: Subject, tokens: int, deadline: float) -> list[dict[str, Any]]:
    """Share of drafts that stand, at each temperature and for each RoPE position.

    Args:
        subject: The pair.
        tokens: Length of each text.
        deadline: On the clock of ``time.perf_counter``; what comes after is left out.
    """
    found: dict[tuple[float, int], MTPStats] = {}
    for kind, temp, position in product(subject.kinds, TEMPS, POSITIONS):
        if time.perf_counter() > deadline and (temp, position) in found:
            continue
        stats = MTPStats()
        hot = {"top_p": TOP_P, "top_k": TOP_K} if temp else {}
        mx.random.seed(0)
        steps = mtp_generate_step(
            subject.prompt(kind, 0),
            subject.model,
            subject.drafter,
            num_draft_tokens=DRAFTS,
            max_tokens=tokens,
            sampler=make_sampler(temp, **hot),
            draft_position=position,
            stats=stats,
        )
        for token, *_ in steps:
            if token in subject.ends:
                break
        key = temp, position
        found[key] = merged([found.get(key, MTPStats()), stats])
    return [
        {
            "temperature": temp,
            "draft_position": position,
            "accepted": stats.acceptance,
            "shares": shares(stats),
            "tokens_per_forward": stats.tokens_per_forward,
        }
        for (temp, position), stats in found.items()
    ]


def exactness(
    subject: Subject, positions: int, deadline: float
) -> list[dict[str, Any]]:
    """Logits of wide forwards against those of single tokens, on one greedy text.

    Args:
        subject: The pair.
        positions: How many tokens of the text to compare at.
        deadline: On the clock of ``time.perf_counter``; widths after it are left out,
            but for the first.

    Returns:
        For each width: how many positions were compared, at how many all logits are
        the same bits, the largest difference, at how many the most likely token is
        another, and how far the two most likely ones were apart there at most.
    """
    read = prefill(subject.model, subject.prompt(subject.kinds[0], 0))
    caches, token = read.copies(), read.last
    tokens, rows = [], []
    for _ in range(positions):
        tokens.append(token)
        logits = subject.model(token[None], cache=caches)[:, -1].astype(mx.float32)
        rows.append(logits)
        token = mx.argmax(logits, axis=-1)
        mx.eval(token, logits)
    text, single = mx.stack(tokens, axis=1), mx.concatenate(rows)
    found: list[dict[str, Any]] = []
    for width in WIDTHS:
        if not found or time.perf_counter() < deadline:
            found.append(_compare(subject.model, read.copies(), text, single, width))
    return found


def _compare(
    model: nn.Module, caches: list[Any], text: mx.array, single: mx.array, width: int
) -> dict[str, Any]:
    wide = []
    for start in range(0, text.shape[1] - width + 1, width):
        wide.append(model(text[:, start : start + width], cache=caches)[0])
        mx.eval(wide[-1])
    logits = mx.concatenate(wide).astype(mx.float32)
    single = single[: len(logits)]
    other = mx.argmax(logits, axis=-1) != mx.argmax(single, axis=-1)
    first, second = (mx.sort(single, axis=-1)[:, -i] for i in (1, 2))
    gaps = mx.where(other, first - second, 0.0)
    return {
        "width": width,
        "positions": len(logits),
        "equal": (logits == single).all(axis=-1).sum().item(),
        "largest": mx.abs(logits - single).max().item(),
        "other_token": other.sum().item(),
        "gap": gaps.max().item(),
    }


def depth(
    subject: Subject,
    costs: Costs,
    accepted: list[float],
    dial: Optional[float],
    tokens: int,
    deadline: float,
) -> dict[str, Any]:
    """The depth that pays most by costs and acceptance, its speed, and what came.

    Args:
        subject: The pair.
        costs: Of bare calls.
        accepted: For each position, the share accepted where the one before was.
        dial: Acceptance to measure with, if it is set by hand.
        tokens: Length of each text to measure with.
        deadline: When to stop.
    """
    speeds = predicted(costs, accepted)
    chosen = best_depth(speeds)
    methods = [plain(), with_drafts(chosen), with_drafts(None)]
    cells = [Cell(kind, 0, 0.0, dial) for kind in subject.kinds]
    bench = Bench(subject, methods, cells, 1, tokens, deadline)
    generations = list(bench.generations())
    found = {}
    for method in methods:
        mine = [g for g in generations if g.method == method and g.rate]
        seconds = sum(g.seconds for g in mine)
        count = sum(g.tokens for g in mine)
        found[method.name] = count / seconds if seconds else None
    return {
        "chosen": chosen,
        "predicted": {str(n): speed for n, speed in speeds.items()},
        "measured": found,
    }

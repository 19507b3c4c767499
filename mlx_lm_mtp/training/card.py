"""Measure a drafter as it is used, and write its folder with a card that says so."""

import json
import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import __version__
from ..generate import mtp_generate_step
from ..stats import MTPStats
from .data import Row
from .state import flat

NUM_DRAFTS = 3
PROMPTS, PROMPT, TOKENS = 8, 64, 64  # of a measurement
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def measure(model: nn.Module, drafter: Any, rows: list[Row]) -> MTPStats:
    """Greedy rounds on the starts of held-out rows."""
    stats = MTPStats()
    step = max(len(rows) // PROMPTS, 1)
    for row in rows[::step][:PROMPTS]:
        prompt = row.tokens[: row.start or min(PROMPT, len(row.tokens) // 2)]
        rounds = mtp_generate_step(
            mx.array(prompt),
            model,
            drafter,
            num_draft_tokens=NUM_DRAFTS,
            max_tokens=TOKENS,
            stats=stats,
        )
        for _ in rounds:
            pass
    return stats


def write_drafter(
    folder: Path, drafter: nn.Module, config: dict[str, Any], dtypes: dict[str, Any]
) -> None:
    """Weights and config in the layout that Hugging Face ships.

    Args:
        folder: Where to.
        drafter: The drafter.
        config: Its config.json.
        dtypes: The type to store each weight in.
    """
    weights = {k: v.astype(dtypes[k]) for k, v in flat(drafter.parameters()).items()}
    key = "masked_embedding.token_ordering"
    if key in weights:
        weights[key] = weights[key].astype(mx.int64)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    path = str(folder / "model.safetensors")
    mx.save_safetensors(path, weights, {"format": "pt"})


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Put the pair's tokenizer beside the drafter, as Google does."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def restore(stats: dict[str, Any]) -> MTPStats:
    """The inverse of ``dataclasses.asdict``."""
    return MTPStats(**stats)


def write_card(
    folder: Path, pair: str, facts: dict[str, str], before: MTPStats, after: MTPStats
) -> None:
    """README.md: what the drafter is for, what it learnt from, how good it is.

    Args:
        folder: The drafter's.
        pair: Options of mlx-lm that load the target.
        facts: Lines of the table.
        before: What was measured before training.
        after: And after.
    """
    lines = [
        "---",
        "library_name: mlx",
        "pipeline_tag: text-generation",
        "tags: [mlx, gemma4_assistant, speculative-decoding]",
        "---",
        "",
        "# A Gemma 4 drafter",
        "",
        "Trained with `mlx_lm_mtp train`; use it with",
        "",
        f"    mlx_lm.generate {pair} --mtp-assistant THIS_FOLDER",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
        *(f"| {name} | {version(name)} |" for name in ("mlx", "mlx-lm")),
        f"| mlx-lm-mtp | {__version__} |",
        "",
        f"Greedy rounds of {NUM_DRAFTS} drafts on held-out text ({PROMPTS} prompts "
        f"of at most {PROMPT} tokens, or the data's own; {TOKENS} tokens each):",
        "",
        "| | tokens per target forward | accepted by position |",
        "|---|---|---|",
        *(_row(name, s) for name, s in (("before", before), ("after", after))),
        "",
        "Counts: `training.json`.",
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines))
    counts = {"facts": facts, "before": asdict(before), "after": asdict(after)}
    (folder / "training.json").write_text(json.dumps(counts, indent=1) + "\n")


def _row(name: str, stats: MTPStats) -> str:
    shares = " / ".join(f"{share:.1%}" for share in stats.acceptance)
    return f"| {name} | {stats.tokens_per_forward:.2f} | {shares} |"

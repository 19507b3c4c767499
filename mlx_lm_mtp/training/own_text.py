"""The target's own continuations, which are what a drafter meets in use."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import batch_generate
from mlx_lm.sample_utils import make_sampler

from .data import Row

FILE = "own_text.json"
PROMPT = 64  # tokens, where a row does not say where its prompt ends
BATCH = 32


def own_rows(
    model: Any,
    tokenizer: Any,
    rows: list[Row],
    *,
    count: int,
    max_tokens: int,
    seed: int,
    folder: Path,
) -> list[Row]:
    """Continue the prompts of ``count`` rows; written once and read on resuming.

    Every other text is greedy, the rest is drawn at temperature 1.
    """
    file = folder / FILE
    if file.exists():
        return [Row(**row) for row in json.loads(file.read_text())]
    mx.random.seed(seed)
    prompts = [_prompt(rows[i % len(rows)]) for i in range(count)]
    made: list[Row] = []
    for start in range(0, count, BATCH):
        for half, temperature in enumerate((0.0, 1.0)):
            asked = prompts[start : start + BATCH][half::2]
            made += _continue(model, tokenizer, asked, max_tokens, temperature)
    temporary = file.with_suffix(".part")
    temporary.write_text(
        json.dumps([{"tokens": r.tokens, "start": r.start} for r in made])
    )
    temporary.replace(file)
    return made


def _prompt(row: Row) -> list[int]:
    return row.tokens[: row.start or min(PROMPT, len(row.tokens) // 2)]


def _continue(
    model: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    max_tokens: int,
    temperature: float,
) -> list[Row]:
    if not prompts:
        return []
    made = batch_generate(
        model,
        tokenizer,
        prompts,
        max_tokens=max_tokens,
        return_token_ids=True,
        sampler=make_sampler(temperature),
    )
    return [
        Row(prompt + list(new), len(prompt))
        for prompt, new in zip(prompts, made.token_ids, strict=True)
        if len(new) > 1
    ]

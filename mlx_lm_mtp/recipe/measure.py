"""The figures of the pair's card: the stage ``measure``, on any machine."""

import json
from pathlib import Path

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step

from mlx_lm_mtp import MTPStats, load_assistant, mtp_generate_step

TOKENS = 200


def measure(pair: Path, prompts: Path, num_drafts: int = 3) -> MTPStats:
    """Decode every prompt plainly and with MTP, greedy, and compare."""
    model, tokenizer = load(str(pair / "target"))
    drafter = load_assistant(str(pair / "assistant"), model)
    total = MTPStats()
    for prompt in json.loads(prompts.read_text()):
        ids = mx.array(tokenizer.encode(prompt["text"]))
        plain = [t for t, _ in generate_step(ids, model, max_tokens=TOKENS)]
        steps = mtp_generate_step(
            ids,
            model,
            drafter,
            num_draft_tokens=num_drafts,
            max_tokens=TOKENS,
            stats=total,
        )
        same = plain == [int(token) for token, *_ in steps]
        name = f"{prompt['file']}, {ids.size} tokens"
        print(f"{'same text' if same else 'ANOTHER TEXT'}  {name}", flush=True)
    print(total.summary())
    return total

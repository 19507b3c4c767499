"""Tokens per target forward by verification and number of drafts, as Markdown.

    python tests/measure_acceptance.py           # the table of docs/lossless.md
    python tests/measure_acceptance.py --heats   # draft temperatures, at K = 3

Sampling is Gemma's default: temperature 1, top-k 64, top-p 0.95.
"""

import argparse
from functools import partial

import mlx.core as mx
from conftest import PAIRS, Pair
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlx_lm_mtp import MTPStats, rule, verify
from mlx_lm_mtp.loop import Run
from mlx_lm_mtp.propose import Drawn
from mlx_lm_mtp.target import Target

SAMPLER = {"temp": 1.0, "top_k": 64, "top_p": 0.95}


class SampleAndCompare(rule.Compare):
    """mlx-lm's own rule: drafts and target are sampled apart, and compared."""

    def draw(self, ids, logits):
        _, logits = self._processed(ids, logits, dense=True)
        return Drawn(self.sampler(rule.normalise(logits)))

    def begin(self, num):
        pass

    def judge(self, draft, logits):
        logprobs = rule.normalise(logits)
        tokens = self.sampler(logprobs[0])[None]
        return rule._read(draft, verify.match(draft.tokens, tokens), logprobs)


RULES = {
    "block": partial(rule.make_rule, verification="block"),
    "token": partial(rule.make_rule, verification="token"),
    "coupled": partial(rule.make_rule, verification="coupled"),
    "greedy drafts": partial(rule.make_rule, verification="block", draft_heat=0),
    "sample and compare": lambda s, p, v: SampleAndCompare(s, p or (), v),
}


def tokens_per_forward(pair, prompts, make, num, tokens):
    """Mean over all rounds of all prompts."""
    stats, target = MTPStats(), Target(pair.model)
    mx.random.seed(0)
    for prompt in prompts:
        judge = make(make_sampler(**SAMPLER), None, target.vocab_size)
        caches = make_prompt_cache(pair.model)
        run = Run(target, pair.drafter, caches, judge, stats, num, 0)
        for _ in run.steps(prompt, None, tokens, 2048, lambda *_: None):
            pass
    return stats.tokens_per_forward


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heats", action="store_true")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=150)
    args = parser.parse_args()
    import numpy as np

    prompts = mx.array(np.load(PAIRS / "prompts.npy").astype(np.int32))
    prompts = [row[:160] for row in prompts[: args.prompts]]
    rows, columns = RULES, list(range(1, 9))
    if args.heats:
        rows = {
            f"draft_heat {heat}": partial(rule.make_rule, draft_heat=heat)
            for heat in (0.0, 0.7, 0.8, 0.9, 1.0, 1.15)
        }
        columns = [3]
    for name in ("e", "moe"):
        pair = Pair(name)
        print(f"\n| `{name}` | " + " | ".join(f"K = {k}" for k in columns) + " |")
        print("|---" * (len(columns) + 1) + "|")
        for label, make in rows.items():
            cells = [
                tokens_per_forward(pair, prompts, make, k, args.tokens) for k in columns
            ]
            numbers = " | ".join(f"{cell:.2f}" for cell in cells)
            print(f"| {label} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()

"""Tokens per target forward by verification and number of drafts, as Markdown.

    python tests/measure_acceptance.py           # the table of docs/lossless.md
    python tests/measure_acceptance.py --heats   # draft temperatures

Sampling is Gemma's default: temperature 1, top-k 64, top-p 0.95.
"""

import argparse
from functools import partial

import mlx.core as mx
import numpy as np
from conftest import PAIRS, Pair
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlx_lm_mtp import MTPStats, residual, verify
from mlx_lm_mtp.compare import Compare
from mlx_lm_mtp.depth import Pinned
from mlx_lm_mtp.law import law_of, normalise
from mlx_lm_mtp.live import Live
from mlx_lm_mtp.loop import Run
from mlx_lm_mtp.propose import Drawn
from mlx_lm_mtp.rule import Trial
from mlx_lm_mtp.target import Target

SAMPLER = {"temp": 1.0, "top_k": 64, "top_p": 0.95}


class SampleAndCompare(Compare):
    """mlx-lm's own rule: drafts and target are sampled apart, and compared."""

    def draw(self, ids, logits):
        _, logits = self._processed(ids, logits, dense=True)
        return Drawn(self.sampler(normalise(logits)))

    def begin(self, num):
        pass

    def judge(self, draft, logits):
        logprobs = normalise(logits)
        tokens = self.sampler(logprobs[0])[None]
        return Trial(draft, logprobs, verify.match(draft.tokens, tokens))


RULES = {
    "block": partial(residual.make_rule, verification="block"),
    "token": partial(residual.make_rule, verification="token"),
    "coupled": partial(residual.make_rule, verification="coupled"),
    "greedy drafts": partial(residual.make_rule, verification="block", draft_heat=0),
    "sample and compare": lambda s, p, v: SampleAndCompare(s, p or (), v),
}


def tokens_per_forward(pair, prompts, make, num, tokens):
    """Mean over all rounds of all prompts."""
    stats, target = MTPStats(), Target(pair.model)
    mx.random.seed(0)
    for prompt in prompts:
        judge = make(make_sampler(**SAMPLER), None, target.vocab_size)
        caches = make_prompt_cache(pair.model)
        run = Run(target, pair.drafter, caches, judge, stats, Pinned(num), 0)
        for _ in run.steps(prompt, None, tokens, 2048, lambda *_: None):
            pass
    return stats.tokens_per_forward


def overlaps(pair, prompts, heats, depth=3):
    """Mean sum of min(p, q) by depth along held-out text, for each draft heat.

    It is the probability that a draft stands. The drafts are the text's own tokens, so
    every heat is measured at the same places.
    """
    target, chain = Target(pair.model), law_of(make_sampler(**SAMPLER))
    sums, count = np.zeros((len(heats), depth)), 0
    for text in prompts:
        caches = make_prompt_cache(pair.model)
        target.hidden(text[None, :1], caches)
        live = Live([caches])
        hidden = target.hidden(text[None], make_prompt_cache(pair.model))
        laws = chain(normalise(target.logits(hidden)[0]))
        for end in range(2, text.size - depth):
            live.reserve(1)
            target.hidden(text[None, end - 1 : end], live.buffers.layers)
            live.wrote(1, mx.zeros(1, mx.int32))
            live.spans[0].landed(0)
            if end < 100 or end % 4:
                continue
            views = {k: live.buffers.view(i) for k, i in target.lenders().items()}
            kv = {kind: (view.keys, view.values) for kind, view in views.items()}
            h = hidden[:, end - 1 : end]
            for i in range(depth):
                inputs = target.embed(text[None, end + i : end + i + 1])
                h, logits = pair.drafter(mx.concatenate([inputs, h], -1), kv, end)
                logprobs = normalise(logits[:, 0])
                for j, heat in enumerate(heats):
                    q = chain.draft(heat)(logprobs)[0]
                    both = mx.minimum(mx.exp(laws[end + i]), mx.exp(q))
                    sums[j, i] += both.sum().item()
            count += 1
    return sums / count


def print_heats(pairs, prompts):
    heats = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
    for name in pairs:
        print(f"\n| `{name}` | " + " | ".join(f"{heat}" for heat in heats) + " |")
        print("|---" * (len(heats) + 1) + "|")
        table = overlaps(Pair(name), prompts, heats)
        for i, row in enumerate(table.T):
            print(f"| draft {i + 1} | " + " | ".join(f"{x:.3f}" for x in row) + " |")


def print_rules(pairs, rules, prompts, tokens):
    columns = list(range(1, 9))
    for name in pairs:
        pair = Pair(name)
        print(f"\n| `{name}` | " + " | ".join(f"K = {k}" for k in columns) + " |")
        print("|---" * (len(columns) + 1) + "|")
        for label in rules:
            cells = [
                tokens_per_forward(pair, prompts, RULES[label], k, tokens)
                for k in columns
            ]
            numbers = " | ".join(f"{cell:.2f}" for cell in cells)
            print(f"| {label} | {numbers} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heats", action="store_true")
    parser.add_argument("--pairs", nargs="+", default=["e", "moe"])
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=150)
    args = parser.parse_args()
    prompts = mx.array(np.load(PAIRS / "prompts.npy").astype(np.int32))
    prompts = prompts[: args.prompts]
    if args.heats:
        print_heats(args.pairs, list(prompts))
    else:
        prompts = [row[:160] for row in prompts]
        print_rules(args.pairs, args.rules, prompts, args.tokens)


if __name__ == "__main__":
    main()

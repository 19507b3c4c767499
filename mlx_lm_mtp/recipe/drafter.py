"""Train the drafter against the frozen target.

A seed at every position of a sequence is drafted from in parallel. Row i holds the
hidden state of token i and the token i + 1, the seed's, whose slot is i + 1: so it sees
the entries up to i, which is what the target's own row i sees.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mlx_lm_mtp.training.clusters import order_by_cluster

from .folders import assistant_config, save_drafter
from .gemma4 import Drafter, Target
from .own_text import Writer
from .target import bfloat16
from .trainer import Plan, Trainer, fit, load_stream, shares

WEIGHTS = (1.0, 0.8, 0.65, 0.5)  # of the unrolled steps' losses
CLUSTER_WEIGHT = 0.3
OWN_SHARE = 0.6  # of a batch's rows: the target's own text
PROMPT = 64  # tokens of a file before the target's own text


class Distillation:
    """The loss of K unrolled steps, and how often they agree with the target."""

    def __init__(
        self, target: Target, drafter: Drafter, length: int, device: torch.device
    ) -> None:
        self.target, self.drafter, self.device = target, drafter, device
        self.positions = torch.arange(length, device=device)
        self.clusters = False

    def _unrolled(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The target's logits [B, N, V], and z [B, N, H] of each step."""
        with torch.no_grad():
            hidden, shared = self.target(tokens, self.positions)
            logits = self.target.logits(hidden)
        states = []
        with bfloat16(self.device):
            for k in range(1, len(WEIGHTS) + 1):
                embedded = self.target.embed(tokens.roll(-k, 1)).detach()
                hidden, z = self.drafter(embedded, hidden, self.positions + 1, shared)
                states.append(z)
        return logits, states

    def loss(self, tokens: Tensor) -> Tensor:
        """Cross-entropy to the target's law, and of the clusters' masses."""
        logits, states = self._unrolled(tokens)
        probs = logits.softmax(-1)
        total = torch.zeros((), device=self.device)
        for k, (z, weight) in enumerate(zip(states, WEIGHTS, strict=True), 1):
            with bfloat16(self.device):
                ours = self.drafter.logits(z[:, :-k])
                scores = self.drafter.masked_embedding.centroids(z[:, :-k]).float()
            law = probs[:, k:]
            total += weight * _cross_entropy(ours, law)
            if self.clusters:
                order = self.drafter.masked_embedding.token_ordering
                mass = law[..., order].unflatten(-1, (scores.shape[-1], -1)).sum(-1)
                total += weight * CLUSTER_WEIGHT * _cross_entropy(scores, mass)
        return total

    @torch.no_grad()
    def agreement(self, tokens: Tensor) -> list[float]:
        """Share of positions whose first k drafts are the target's choices."""
        logits, states = self._unrolled(tokens)
        choice = logits.argmax(-1)
        size = tokens.shape[1] - len(WEIGHTS)
        alive = torch.ones_like(tokens[:, :size], dtype=torch.bool)
        result = []
        for k, z in enumerate(states, 1):
            alive &= self._draft(z)[:, :size] == choice[:, k : k + size]
            result.append(alive.float().mean().item())
        return result

    def _draft(self, z: Tensor) -> Tensor:
        ours = self.drafter.logits(z.float())
        if self.clusters:
            head = self.drafter.masked_embedding
            scores = head.centroids(z.float())
            top = scores.topk(self.drafter.top_k, -1).indices
            rows = head.token_ordering.view(scores.shape[-1], -1)[top].flatten(-2)
            seen = torch.full_like(ours, -torch.inf)
            ours = seen.scatter(-1, rows, ours.gather(-1, rows))
        return ours.argmax(-1)


def _cross_entropy(logits: Tensor, law: Tensor) -> Tensor:
    return -(law * logits.log_softmax(-1)).sum(-1).mean()


def train_drafter(
    target: Target, data: Path, out: Path, plan: Plan, own_rows: int
) -> Drafter:
    """Train, save after every report, and return the drafter."""
    device = target.embed_tokens.weight.device
    torch.manual_seed(0)
    dice = torch.Generator(device).manual_seed(0)
    config = assistant_config()
    target.eval().requires_grad_(False)
    drafter = Drafter(config).to(device)
    print(f"drafter: {sum(p.numel() for p in drafter.parameters()):,} parameters")
    distil = Distillation(target, drafter, plan.length, device)
    train, valid = (load_stream(data, part, device) for part in ("train", "valid"))
    counts = shares(plan.batch)
    writer = Writer(target, own_rows, plan.length)
    starts = train.rows(shares(own_rows), PROMPT, dice)
    tests = 4 * plan.batch
    starts[:tests] = valid.rows(shares(tests), PROMPT, dice)
    test, own = writer(starts).tensor_split([tests])
    print("the target's own text is written", flush=True)
    # Even rows are greedy.
    samples = {
        "files": valid.rows([plan.batch, 0], plan.length, dice),
        "own greedy": test[::2][: plan.batch],
        "own drawn": test[1::2][: plan.batch],
    }

    def batch(_: int) -> Tensor:
        rows = train.rows(counts, plan.length, dice)
        number = round(plan.batch * OWN_SHARE)
        pick = torch.randint(len(own), (number,), generator=dice, device=device)
        rows[-number:] = own[pick]
        return rows

    def report(step: int) -> str:
        save_drafter(drafter, config, data, out)
        parts = []
        for name, rows in samples.items():
            agreed = " ".join(f"{x:.3f}" for x in distil.agreement(rows))
            parts.append(f"{name} {agreed}")
        return "; ".join(parts)

    trainer = Trainer(drafter, plan, distil.loss)
    half = plan.steps // 2
    fit(trainer, batch, report, last=half)
    _cluster(drafter)
    distil.clusters = True
    trainer.capture()
    fit(trainer, batch, report, first=half)
    return drafter


def _cluster(drafter: Drafter) -> None:
    rows = drafter.model.embed_tokens.weight.detach().float().cpu().numpy()
    head = drafter.masked_embedding
    order = order_by_cluster(np.asarray(rows), head.centroids.weight.shape[0])
    head.token_ordering.copy_(torch.from_numpy(order))

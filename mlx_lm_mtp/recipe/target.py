"""Train the target: next-token prediction."""

from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .folders import save_target, target_config
from .gemma4 import Target
from .trainer import Plan, Trainer, fit, load_stream, shares


def bfloat16(device: torch.device) -> AbstractContextManager[None]:
    # A graph must not hold the weights that autocast would cache in its warm-up.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def train_target(data: Path, out: Path, plan: Plan, device: torch.device) -> Target:
    """Train, save after every report, and return the target."""
    torch.manual_seed(0)
    dice = torch.Generator(device).manual_seed(0)
    config = target_config()
    model = Target(config["text_config"]).to(device)
    print(f"target: {sum(p.numel() for p in model.parameters()):,} parameters")
    positions = torch.arange(plan.length, device=device)

    def loss(tokens: Tensor) -> Tensor:
        with bfloat16(device):
            hidden, _ = model(tokens, positions)
            logits = model.logits(hidden[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    train, valid = (load_stream(data, part, device) for part in ("train", "valid"))
    held_out = [
        valid.rows(counts, plan.length, torch.Generator(device).manual_seed(1))
        for counts in ([2 * plan.batch, 0], [0, 2 * plan.batch])
    ]

    def report(step: int) -> str:
        save_target(model, config, data, out)
        with torch.no_grad():
            files, chats = (
                sum(loss(half).item() for half in rows.split(plan.batch)) / 2
                for rows in held_out
            )
        return f"held out: files {files:.4f}, chats {chats:.4f}"

    trainer = Trainer(model, plan, loss)
    counts = shares(plan.batch)
    fit(trainer, lambda _: train.rows(counts, plan.length, dice), report)
    return model

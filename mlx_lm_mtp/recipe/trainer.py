"""AdamW steps, captured whole as a CUDA graph where there is a GPU.

The models are so thin that launching kernels one by one would cost several times what
the kernels do.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

CHAT_SHARE = 0.3  # of a batch's rows


@dataclass(frozen=True)
class Plan:
    """How long, how wide and how fast to train."""

    steps: int
    learning_rate: float
    batch: int
    length: int
    warmup: int = 200
    weight_decay: float = 0.1


class Stream:
    """Token streams on the device, cut at random into rows."""

    def __init__(self, arrays: list[np.ndarray], device: torch.device) -> None:
        self.arrays = [
            torch.from_numpy(a.astype(np.int32)).to(device, torch.int32) for a in arrays
        ]

    def rows(self, counts: list[int], length: int, dice: torch.Generator) -> Tensor:
        """Rows [sum(counts), length], so many of each stream."""
        parts = []
        for array, count in zip(self.arrays, counts, strict=True):
            device = array.device
            top = len(array) - length
            starts = torch.randint(top, (count, 1), generator=dice, device=device)
            parts.append(array[starts + torch.arange(length, device=device)])
        return torch.cat(parts).long()


def load_stream(data: Path, part: str, device: torch.device) -> Stream:
    names = (f"{part}_files", f"{part}_chats")
    return Stream([np.load(data / f"{name}.npy") for name in names], device)


def shares(batch: int) -> list[int]:
    """How many rows of files and of chats a batch has."""
    chats = round(batch * CHAT_SHARE)
    return [batch - chats, chats]


def _optimizer(model: nn.Module, plan: Plan, rate: Tensor) -> torch.optim.AdamW:
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in params if p.ndim > 1],
            "weight_decay": plan.weight_decay,
        },
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    cuda = rate.is_cuda
    return torch.optim.AdamW(
        groups, lr=rate, betas=(0.9, 0.95), eps=1e-10, capturable=cuda, fused=cuda
    )


def learning_rate(plan: Plan, step: int) -> float:
    """A linear warm-up, then linear to zero."""
    up = min(1.0, (step + 1) / plan.warmup)
    return plan.learning_rate * min(up, (plan.steps - step) / plan.steps)


class Trainer:
    """Runs ``loss`` and AdamW over a buffer of tokens [B, N]."""

    def __init__(
        self, model: nn.Module, plan: Plan, loss: Callable[[Tensor], Tensor]
    ) -> None:
        device = next(model.parameters()).device
        self.model, self.plan, self._loss = model, plan, loss
        shape = (plan.batch, plan.length)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.rate = torch.zeros((), device=device)
        self.loss = torch.zeros((), device=device)
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = _optimizer(model, plan, self.rate)
        self.capture()

    def capture(self) -> None:
        """(Re)build the step, after a change of the loss."""
        self._run: Callable[[], None] = self._step
        if not self.rate.is_cuda:
            return
        self.rate.zero_()  # the warm-up steps must not train
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._run = graph.replay

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self.tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def step(self, number: int, tokens: Tensor) -> None:
        self.rate.fill_(learning_rate(self.plan, number))
        self.tokens.copy_(tokens)
        self._run()


def fit(
    trainer: Trainer,
    batches: Callable[[int], Tensor],
    report: Callable[[int], str],
    first: int = 0,
    last: int | None = None,
    every: int = 500,
) -> None:
    """Train from step ``first`` up to ``last``, telling how it goes."""
    start = time.perf_counter()
    last = trainer.plan.steps if last is None else last
    for step in range(first, last):
        trainer.step(step, batches(step))
        if (step + 1) % every == 0 or step + 1 == last:
            loss = trainer.loss.item()
            pace = (time.perf_counter() - start) / (step + 1 - first)
            print(
                f"step {step + 1}/{trainer.plan.steps}  loss {loss:.4f}  "
                f"{report(step + 1)}  {1e3 * pace:.1f} ms a step",
                flush=True,
            )

"""Steps, evaluations and checkpoints, until done or interrupted."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from tqdm import tqdm

from ..rounds import MTPError
from .data import Row, batch_of, collate
from .distil import Distiller
from .state import save_state

CLIP = 1.0
WARMUP_SHARE = 20  # one step of so many


@dataclass(frozen=True)
class Plan:
    """How long, how fast and how often to look."""

    iters: int
    batch_size: int
    learning_rate: float
    seed: int
    steps_per_eval: int
    val_batches: int
    save_every: int

    def rate(self, step: int) -> float:
        """A linear warm-up, then linear to zero."""
        warmup = max(self.iters // WARMUP_SHARE, 1)
        left = (self.iters - step) / self.iters
        return self.learning_rate * min((step + 1) / warmup, left)


class Interrupted(Exception):
    """Ctrl-C came; everything up to ``step`` is saved."""

    def __init__(self, step: int) -> None:
        super().__init__(f"interrupted after step {step}")
        self.step = step


@contextmanager
def _sigint_noted() -> Iterator[Callable[[], bool]]:
    """Let a step finish before an interrupt counts; a second one is not waited for."""
    noted: list[int] = []

    def note(number: int, _: Any) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)


def make_optimizer(plan: Plan) -> optim.Optimizer:
    """AdamW; the loop sets its rate."""
    return optim.AdamW(plan.rate(0), betas=[0.9, 0.95], weight_decay=0.01)


def _make_step(
    distiller: Distiller, optimizer: optim.Optimizer
) -> Callable[[mx.array, mx.array], mx.array]:
    drafter = distiller.drafter
    value_and_grad = nn.value_and_grad(drafter, distiller.loss)

    def step(tokens: mx.array, learnt: mx.array) -> mx.array:
        loss, grads = value_and_grad(tokens, learnt)
        grads, _ = optim.clip_grad_norm(grads, CLIP)
        optimizer.update(drafter, grads)
        return loss

    state = [drafter.state, optimizer.state]
    return partial(mx.compile, inputs=state, outputs=state)(step)


def held_out_agreement(
    distiller: Distiller, rows: list[Row], plan: Plan
) -> list[float]:
    """Share of held-out positions whose first k drafts are the target's choices."""
    agreed = possible = mx.zeros(distiller.num_drafts, mx.int32)
    for start in range(0, len(rows), plan.batch_size)[: plan.val_batches]:
        batch = collate(rows[start : start + plan.batch_size])
        new, of = distiller.agreement(*batch)
        agreed, possible = agreed + new, possible + of
        mx.eval(agreed, possible)
    shares: Any = (agreed / mx.maximum(possible, 1)).tolist()
    return list(shares)


def fit(
    distiller: Distiller,
    optimizer: optim.Optimizer,
    plan: Plan,
    train: list[Row],
    valid: list[Row],
    first: int,
    folder: Path,
    about: dict[str, Any],
) -> None:
    """Train from step ``first`` to the end of the plan.

    Raises:
        Interrupted: After a Ctrl-C, with a checkpoint written.
    """
    step_fn = _make_step(distiller, optimizer)
    state = [distiller.drafter.state, optimizer.state]

    def save(done: int) -> None:
        save_state(folder, distiller.drafter, optimizer, {**about, "step": done})

    def look() -> str:
        shares = held_out_agreement(distiller, valid, plan)
        return " ".join(f"{share:.1%}" for share in shares)

    if not first:
        save(0)
    with (
        _sigint_noted() as interrupted,
        tqdm(total=plan.iters, initial=first, unit="step") as bar,
    ):
        held_out = look()
        for step in range(first, plan.iters):
            optimizer.learning_rate = mx.array(plan.rate(step))
            batch = batch_of(train, plan.batch_size, plan.seed, step)
            loss = step_fn(*collate(batch))
            mx.eval(loss, state)
            if not isfinite(cast(float, loss.item())):
                raise MTPError(
                    f"the loss of step {step + 1} is {loss.item()}: the training came "
                    "apart, start again with a lower --learning-rate"
                )
            done = step + 1
            if done % plan.steps_per_eval == 0 or done == plan.iters:
                held_out = look()
                bar.write(f"step {done}: loss {loss.item():.4f}, held out {held_out}")
            bar.set_postfix_str(f"loss {loss.item():.3f}, held out {held_out}")
            bar.update()
            if interrupted() or done % plan.save_every == 0 or done == plan.iters:
                save(done)
            if interrupted():
                raise Interrupted(done)

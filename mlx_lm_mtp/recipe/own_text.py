"""The target's own continuations: what a drafter meets when it is used."""

import torch
from torch import Tensor

from .gemma4 import Store, Target, head_size


class Writer:
    """Continues the starts of many rows at once.

    Every token takes the same one-token step, prompt tokens too, so one CUDA graph
    serves all.
    """

    def __init__(self, target: Target, batch: int, length: int) -> None:
        device = target.embed_tokens.weight.device
        self.target, self.length = target, length
        config = target.config
        self.stores = [
            Store(batch, length, head_size(config, i), device)
            for i in range(target.owners)
        ]
        self.rows = torch.zeros((batch, length + 1), dtype=torch.long, device=device)
        self.prompt = torch.zeros((), dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        # Half of the rows are greedy, half are drawn at temperature 1.
        self.heat = (torch.arange(batch, device=device) % 2).float()[:, None]
        self.slots = torch.arange(length, device=device)
        self._run = self._step if device.type == "cpu" else self._captured()

    def _captured(self) -> "torch.cuda.CUDAGraph.replay":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay

    def _step(self) -> None:
        past = self.position - self.slots[None]
        window = self.target.config["sliding_window"]
        mask = {True: past >= 0, False: (past >= 0) & (past < window)}
        token = self.rows.index_select(1, self.position)
        hidden, _ = self.target(token, self.position, mask, self.stores)
        logits = self.target.logits(hidden)[:, 0]
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
        drawn = (logits + self.heat * noise).argmax(-1, keepdim=True)
        known = self.rows.index_select(1, self.position + 1)
        inside = self.position + 1 < self.prompt
        self.rows.index_copy_(1, self.position + 1, torch.where(inside, known, drawn))
        self.position += 1

    @torch.no_grad()
    def __call__(self, starts: Tensor) -> Tensor:
        """Rows [B, length] that begin with starts [B, n]."""
        self.rows.zero_()
        self.rows[:, : starts.shape[1]] = starts
        self.prompt.fill_(starts.shape[1])
        self.position.zero_()
        for _ in range(self.length - 1):
            self._run()
        return self.rows[:, : self.length].clone()

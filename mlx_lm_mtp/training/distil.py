"""The loss: K unrolled draft steps at the constant position, against the target's law.

A seed at every position of a sequence is drafted from in parallel. Row i takes the
hidden state of token i and token i + 1, the seed's, whose slot is i + 1. So it sees the
K/V up to i, which is what the target's own row i sees: the masks are the target's, and
the RoPE offset is 1. Step k reads token i + k and is held against the law at row i + k.

Shapes: B rows, T tokens, K steps, V vocabulary, C tokens of a chunk, H hidden.
"""

from typing import Any, NamedTuple, Union

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache

from ..target import Target

STEP_DECAY = 0.8  # each further step's loss weighs so much of the one before
CLUSTER_WEIGHT = 0.3  # of the loss that teaches the centroids
CHUNK_NUMBERS = 2**25  # logits held at once

Mask = Union[str, mx.array]
SharedKV = dict[str, tuple[mx.array, mx.array]]


class Reading(NamedTuple):
    """What the target makes of a batch."""

    hidden: mx.array  # [B, T, H]
    shared_kv: SharedKV  # all T entries, also of the sliding layers


def read(target: Target, tokens: mx.array) -> Reading:
    """Run the target over whole sequences [B, T]."""
    # Plain caches keep every entry; the mask still slides.
    caches = [KVCache() for _ in target.owners()]
    hidden = target.hidden(tokens, caches)
    shared_kv = {
        layer.layer_type: (
            cache.keys[..., : cache.offset, :],
            cache.values[..., : cache.offset, :],
        )
        for layer, cache in zip(target.owners(), caches, strict=True)
    }
    return Reading(hidden, shared_kv)


def freeze_fixed(drafter: nn.Module) -> None:
    """Leave only weights trainable: not the permutation, nor the layers' scalars.

    Both are buffers in the checkpoint's own format.
    """
    drafter.unfreeze()
    drafter.freeze(keys=["token_ordering", "layer_scalar"], strict=False)


class Distiller:
    """Holds a drafter against its target.

    Args:
        target: The target, which is only read.
        drafter: The drafter, in float32.
        num_drafts: K, how many steps to unroll.
        grad_checkpoint: Recompute each step when its gradient is needed.
    """

    def __init__(
        self,
        target: Target,
        drafter: Any,
        num_drafts: int,
        grad_checkpoint: bool = False,
    ) -> None:
        self.target, self.drafter, self.num_drafts = target, drafter, num_drafts
        self.grad_checkpoint = grad_checkpoint
        if drafter.args.use_ordered_embeddings:
            head = drafter.masked_embedding
            self.ordering, self.clusters = head.token_ordering, head.num_centroids
        else:
            self.ordering, self.clusters = mx.arange(target.vocab_size), 0

    def loss(self, tokens: mx.array, learnt: mx.array) -> mx.array:
        """Cross-entropy to the target's law, over the steps.

        Args:
            tokens: [B, T].
            learnt: Rows whose law counts, [B, T] bool.
        """
        reading = read(self.target, tokens)
        states = self._aligned(self._unroll(tokens, reading))
        weights = self._weights(learnt)
        entropy, clusters = self._cross_entropies(reading.hidden, states)
        total = entropy + CLUSTER_WEIGHT * clusters if self.clusters else entropy
        return (total * weights).sum()

    def agreement(
        self, tokens: mx.array, learnt: mx.array
    ) -> tuple[mx.array, mx.array]:
        """How many positions' first k drafts are the target's choices.

        Returns:
            Counts [K] for k = 1 to K, and of how many positions [K].
        """
        room = learnt.shape[1] - self.num_drafts
        if room <= 0:
            none = mx.zeros((self.num_drafts,), mx.int32)
            return none, none
        reading = read(self.target, tokens)
        choice = self._choices(reading.hidden)
        alive = learnt[:, :room]
        agreed, possible = [], []
        for k, state in enumerate(self._unroll(tokens, reading), 1):
            size = alive.shape[1]
            alive_rows = learnt[:, k : k + size]
            alive = (
                alive
                & alive_rows
                & (self._drafts(state)[:, :size] == choice[:, k : k + size])
            )
            agreed.append(alive.sum())
            possible.append((alive_rows & learnt[:, :size]).sum())
        return mx.stack(agreed), mx.stack(possible)

    def _unroll(self, tokens: mx.array, reading: Reading) -> list[mx.array]:
        """The drafter's states after each step, K times [B, T, H_drafter]."""
        masks = self._masks(tokens.shape[1])

        def step(
            params: Any, embedded: mx.array, hidden: mx.array, shared_kv: SharedKV
        ) -> tuple[mx.array, mx.array]:
            self.drafter.update(params)
            h = self.drafter.pre_projection(mx.concatenate([embedded, hidden], -1))
            for layer in self.drafter.model.layers:
                kind = layer.layer_type
                h, _, _ = layer(h, masks[kind], shared_kv=shared_kv[kind], offset=1)
            h = self.drafter.model.norm(h)
            return self.drafter.post_projection(h), h

        run = mx.checkpoint(step) if self.grad_checkpoint else step
        hidden, states = reading.hidden, []
        for k in range(1, self.num_drafts + 1):
            embedded = self.target.embed(mx.roll(tokens, -k, 1))
            params = self.drafter.trainable_parameters()
            hidden, state = run(params, embedded, hidden, reading.shared_kv)
            states.append(state)
        return states

    def _masks(self, length: int) -> dict[str, Mask]:
        sliding: Mask = "causal"
        if length > self.target.window:
            sliding = create_causal_mask(length, window_size=self.target.window)
        return {"full_attention": "causal", "sliding_attention": sliding}

    def _aligned(self, states: list[mx.array]) -> mx.array:
        """[K, B, T, H_drafter] where row j holds what is held against the law at j."""
        length = states[0].shape[1]
        late = [min(k, length) for k in range(1, len(states) + 1)]
        return mx.stack(
            [
                mx.pad(state[:, : length - k], [(0, 0), (k, 0), (0, 0)])
                for k, state in zip(late, states, strict=True)
            ]
        )

    def _weights(self, learnt: mx.array) -> mx.array:
        """[K, B, T], of each step's rows; they sum to one for the first step."""
        rows = mx.arange(learnt.shape[1])
        weights = []
        for k in range(1, self.num_drafts + 1):
            counted = learnt & (rows >= k)
            share = STEP_DECAY ** (k - 1) / mx.maximum(counted.sum(), 1)
            weights.append(counted * share)
        return mx.stack(weights)

    def _chunks(self, rows: int) -> list[int]:
        """Where to split the ordered vocabulary, between clusters."""
        size = self.target.vocab_size
        unit = size // self.clusters if self.clusters else 1
        step = max(CHUNK_NUMBERS // rows // unit, 1) * unit
        return list(range(step, size, step))

    def _cross_entropies(
        self, hidden: mx.array, states: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Of the tokens and of the clusters' masses, each [K, B, T].

        The vocabulary is passed cluster by cluster, in chunks whose logits are computed
        again for the gradient, so that memory does not grow with V.
        """
        borders = self._chunks(
            (self.num_drafts + 1) * hidden.shape[0] * hidden.shape[1]
        )
        parts = mx.split(self.ordering, borders)
        # One gather and a split, whose gradient is one scatter and not one a chunk.
        rows = mx.split(self.drafter.model.embed_tokens.weight[self.ordering], borders)
        norm = self._logsumexp(hidden, list(parts))

        def chunk(
            states: mx.array, rows: mx.array, part: mx.array
        ) -> tuple[mx.array, mx.array, mx.array]:
            logits = self.target.logits(hidden, mx.stop_gradient(part)).astype(
                mx.float32
            )
            probs = mx.exp(logits - norm)
            ours = states @ rows.T
            dot = (probs * ours).sum(-1)
            mass = probs
            if self.clusters:
                size = self.target.vocab_size // self.clusters
                mass = mx.unflatten(probs, -1, (-1, size)).sum(-1)
            return dot, mx.logsumexp(ours, -1), mass

        run = mx.checkpoint(chunk) if borders else chunk
        dots, norms, masses = zip(
            *(run(states, r, p) for r, p in zip(rows, parts, strict=True)), strict=True
        )
        entropy = mx.logsumexp(mx.stack(list(norms)), axis=0) - sum(dots)
        if not self.clusters:
            return entropy, entropy
        scores = self.drafter.masked_embedding.centroids(states)
        mass = mx.concatenate(list(masses), -1)
        return entropy, mx.logsumexp(scores, -1) - (mass * scores).sum(-1)

    def _logsumexp(self, hidden: mx.array, parts: list[mx.array]) -> mx.array:
        norms = [
            mx.logsumexp(self.target.logits(hidden, part).astype(mx.float32), -1)
            for part in parts
        ]
        return mx.stop_gradient(mx.logsumexp(mx.stack(norms, -1), -1, keepdims=True))

    def _choices(self, hidden: mx.array) -> mx.array:
        """The target's greedy tokens [B, T]."""
        step = max(CHUNK_NUMBERS // hidden.shape[0] // self.target.vocab_size, 1)
        cuts = list(range(step, hidden.shape[1], step))
        parts = mx.split(hidden, cuts, axis=1)
        return mx.concatenate(
            [mx.argmax(self.target.logits(part), -1) for part in parts], 1
        )

    def _drafts(self, states: mx.array) -> mx.array:
        """The drafter's greedy tokens [B, T]."""
        batch, length, hidden = states.shape
        step = max(CHUNK_NUMBERS // batch // hidden // self._num_candidates(), 1)
        parts = mx.split(states, list(range(step, length, step)), axis=1)
        return mx.concatenate([self._draft(part) for part in parts], 1)

    def _num_candidates(self) -> int:
        if not self.clusters:
            return 1
        top_k: int = self.drafter.masked_embedding.top_k
        return self.target.vocab_size // self.clusters * top_k

    def _draft(self, states: mx.array) -> mx.array:
        ids, logits = self.drafter.candidates(states)
        best = mx.argmax(logits, -1)
        if ids is None:
            return best
        return mx.take_along_axis(ids, best[..., None], -1).squeeze(-1)

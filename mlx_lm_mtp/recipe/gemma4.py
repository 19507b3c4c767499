"""Gemma 4's text model and its drafter in PyTorch, in the few lines training needs.

Parameters have the names of the checkpoint, so a ``state_dict`` is the file.
"""

import math
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KV = tuple[Tensor, Tensor]
Shared = dict[bool, KV]
Config = dict[str, Any]


class RMSNorm(nn.Module):
    def __init__(self, size: int, init: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), init))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, 1e-6).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def is_full(config: Config, layer: int) -> bool:
    return bool(config["layer_types"][layer] == "full_attention")


def head_size(config: Config, layer: int) -> int:
    return int(config["global_head_dim" if is_full(config, layer) else "head_dim"])


class Rope(nn.Module):
    """Half-rotating RoPE; full attention rotates only a part of the head."""

    def __init__(self, config: Config, full: bool) -> None:
        super().__init__()
        kind = "full_attention" if full else "sliding_attention"
        size = config["global_head_dim" if full else "head_dim"]
        rope = config["rope_parameters"][kind]
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        speeds = rope["rope_theta"] ** -exponents
        rotated = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
        speeds[rotated:] = 0.0
        self.register_buffer("speeds", speeds, persistent=False)
        self.speeds: Tensor

    def forward(self, positions: Tensor) -> KV:
        """Cosines and sines [N, size] of positions [N]."""
        angles = positions.float()[:, None] * self.speeds
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: KV) -> Tensor:
    first, second = x.float().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return (x.float() * rope[0] + turned * rope[1]).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        self.size = head_size(config, layer)
        owners = config["num_hidden_layers"] - config["num_kv_shared_layers"]
        self.has_kv = layer < owners
        self.q_proj = linear(hidden, heads * self.size)
        self.q_norm = RMSNorm(self.size)
        self.o_proj = linear(heads * self.size, hidden)
        if self.has_kv:
            self.k_proj = linear(hidden, self.size)
            self.v_proj = linear(hidden, self.size)
            self.k_norm = RMSNorm(self.size)

    def keys_values(self, x: Tensor, rope: KV) -> KV:
        keys = rotate(self.k_norm(self.k_proj(x)), rope)
        values = self.v_proj(x)
        values = F.rms_norm(values.float(), (self.size,), eps=1e-6).to(values.dtype)
        return keys[:, None], values[:, None]  # [B, 1, N, size]

    def forward(
        self, x: Tensor, kv: KV, rope: KV, mask: Optional[Tensor], window: int
    ) -> Tensor:
        batch, length, _ = x.shape
        queries = self.q_proj(x).view(batch, length, -1, self.size)
        queries = rotate(self.q_norm(queries).transpose(1, 2), rope)
        keys, values = (t.expand(-1, queries.shape[1], -1, -1) for t in kv)
        if mask is None and window:
            out = attend_window(queries, keys, values, window)
        else:
            out = F.scaled_dot_product_attention(
                queries, keys, values, mask, is_causal=mask is None, scale=1.0
            )
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def attend_window(queries: Tensor, keys: Tensor, values: Tensor, size: int) -> Tensor:
    """Causal attention to the newest ``size`` entries, over whole sequences.

    Blocks of ``size`` queries see their own block and the one before, so that the cost
    grows with the length and not with its square.
    """
    batch, _, length, _ = queries.shape
    queries, keys, values = (
        t.unflatten(2, (length // size, size)) for t in (queries, keys, values)
    )
    keys, values = (torch.cat([t.roll(1, 2), t], 3) for t in (keys, values))
    rows = torch.arange(size, device=queries.device)[:, None] + size
    past = rows - torch.arange(2 * size, device=queries.device)
    seen = ((past >= 0) & (past < size)).expand(length // size, -1, -1).clone()
    seen[0, :, :size] = False  # nothing is before the first block
    seen = seen.repeat(batch, 1, 1)[:, None]
    flat = (t.transpose(1, 2).flatten(0, 1) for t in (queries, keys, values))
    out = F.scaled_dot_product_attention(*flat, seen, scale=1.0)
    return out.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, width)
        self.up_proj = linear(hidden, width)
        self.down_proj = linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        hidden, width = config["hidden_size"], config["intermediate_size"]
        count = config["num_hidden_layers"]
        # Each branch starts small, so that a deep stack starts near the identity.
        small = (2 * count) ** -0.5
        self.self_attn = Attention(config, layer)
        self.window = 0 if is_full(config, layer) else config["sliding_window"]
        double = config["use_double_wide_mlp"] and not self.self_attn.has_kv
        self.mlp = MLP(hidden, 2 * width if double else width)
        self.input_layernorm = RMSNorm(hidden)
        self.post_attention_layernorm = RMSNorm(hidden, small)
        self.pre_feedforward_layernorm = RMSNorm(hidden)
        self.post_feedforward_layernorm = RMSNorm(hidden, small)
        extra = config["hidden_size_per_layer_input"]
        if extra:
            self.per_layer_input_gate = linear(hidden, extra)
            self.per_layer_projection = linear(extra, hidden)
            self.post_per_layer_input_norm = RMSNorm(hidden, small)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self,
        h: Tensor,
        kv: KV,
        rope: KV,
        mask: Optional[Tensor] = None,
        extra: Optional[Tensor] = None,
    ) -> Tensor:
        normed = self.input_layernorm(h)
        attended = self.self_attn(normed, kv, rope, mask, self.window)
        h = h + self.post_attention_layernorm(attended)
        mixed = self.mlp(self.pre_feedforward_layernorm(h))
        h = h + self.post_feedforward_layernorm(mixed)
        if extra is not None:
            gate = F.gelu(self.per_layer_input_gate(h), approximate="tanh")
            told = self.per_layer_projection(gate * extra)
            h = h + self.post_per_layer_input_norm(told)
        return h


class Target(nn.Module):
    """The text model; ``forward`` is over a whole sequence."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        count, extra = (
            config["num_hidden_layers"],
            config["hidden_size_per_layer_input"],
        )
        self.extra = extra
        self.owners = count - config["num_kv_shared_layers"]
        self.embed_tokens = nn.Embedding(vocab, hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.5 * hidden**-0.5)
        self.embed_tokens_per_layer = nn.Embedding(vocab, count * extra)
        nn.init.normal_(self.embed_tokens_per_layer.weight, std=extra**-0.5)
        self.per_layer_model_projection = linear(hidden, count * extra)
        self.per_layer_projection_norm = RMSNorm(extra)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(count))
        self.norm = RMSNorm(hidden)
        self.ropes = nn.ModuleList([Rope(config, False), Rope(config, True)])

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens(tokens) * math.sqrt(self.config["hidden_size"])

    def extras(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """Per-layer inputs, [layers, B, N, extra]."""
        shape = (*tokens.shape, -1, self.extra)
        told = self.per_layer_model_projection(embedded)
        told = told * self.config["hidden_size"] ** -0.5
        told = self.per_layer_projection_norm(told.view(shape))
        own = self.embed_tokens_per_layer(tokens).view(shape) * math.sqrt(self.extra)
        return ((told + own) * 2**-0.5).permute(2, 0, 1, 3)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Optional[dict[bool, Tensor]] = None,
        stores: Optional[list["Store"]] = None,
    ) -> tuple[Tensor, dict[bool, KV]]:
        """Hidden states after the final norm, and the shared K/V of each type.

        Without masks (of full attention True, of the window False) it is causal over
        the sequence.
        """
        h = self.embed(tokens)
        extras = self.extras(tokens, h)
        ropes = [rope(positions) for rope in self.ropes]
        shared: Shared = {}
        for i, layer in enumerate(self.layers):
            full = is_full(self.config, i)
            rope = ropes[full]
            if i < self.owners:
                normed = layer.input_layernorm(h)
                kv = layer.self_attn.keys_values(normed, rope)
                shared[full] = kv if stores is None else stores[i].put(kv, positions)
            seen = None if mask is None else mask[full]
            h = layer(h, shared[full], rope, seen, extras[i])
        return self.norm(h), shared

    def logits(self, hidden: Tensor) -> Tensor:
        cap = self.config["final_logit_softcapping"]
        raw = F.linear(hidden, self.embed_tokens.weight).float()
        return torch.tanh(raw / cap) * cap


class Store:
    """A layer's K/V of a generation, in buffers that a CUDA graph can hold."""

    def __init__(self, batch: int, length: int, size: int, device: torch.device):
        shape = (batch, 1, length, size)
        self.kv = torch.zeros(shape, device=device), torch.zeros(shape, device=device)

    def put(self, kv: KV, positions: Tensor) -> KV:
        for buffer, new in zip(self.kv, kv, strict=True):
            buffer.index_copy_(2, positions, new.to(buffer.dtype))
        return self.kv


class Drafter(nn.Module):
    """The assistant: queries only, keys and values are the target's."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        text, backbone = config["text_config"], config["backbone_hidden_size"]
        hidden = text["hidden_size"]
        self.config = text
        self.pre_projection = linear(2 * backbone, hidden)
        self.post_projection = linear(hidden, backbone)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(text["vocab_size"], hidden)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.5 * hidden**-0.5)
        count = text["num_hidden_layers"]
        self.model.layers = nn.ModuleList(Layer(text, i) for i in range(count))
        self.model.norm = RMSNorm(hidden)
        self.ropes = nn.ModuleList([Rope(text, False), Rope(text, True)])
        self.top_k = config["centroid_intermediate_top_k"]
        self.masked_embedding = nn.Module()
        centroids = config["num_centroids"]
        self.masked_embedding.centroids = linear(hidden, centroids)
        ordering = torch.arange(text["vocab_size"])
        self.masked_embedding.register_buffer("token_ordering", ordering)

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, shared: Shared
    ) -> tuple[Tensor, Tensor]:
        """One draft step at every position: the next hidden state, and z."""
        ropes = [rope(positions) for rope in self.ropes]
        z = self.pre_projection(torch.cat([embedded, hidden], -1))
        for i, layer in enumerate(self.model.layers):
            full = is_full(self.config, i)
            z = layer(z, shared[full], ropes[full])
        z = self.model.norm(z)
        return self.post_projection(z), z

    def logits(self, z: Tensor) -> Tensor:
        return F.linear(z, self.model.embed_tokens.weight).float()

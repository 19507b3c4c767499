# Copyright © 2026 the mlx-lm-mtp authors

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple, Union

import mlx.core as mx
import mlx.nn as nn

from . import gemma4_text
from .base import BaseModelArgs

SharedKV = Dict[str, Tuple[mx.array, mx.array]]
Masks = Optional[Dict[str, Optional[mx.array]]]


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str = "gemma4_assistant"
    text_config: Optional[Dict[str, Any]] = None
    backbone_hidden_size: int = 1536
    use_ordered_embeddings: bool = False
    num_centroids: int = 2048
    centroid_intermediate_top_k: int = 32
    tie_word_embeddings: bool = True

    def __post_init__(self):
        # Every layer of a drafter reads the target's keys and values.
        text_config = dict(self.text_config or {})
        layers = text_config.get("num_hidden_layers", 4)
        text_config.update(num_hidden_layers=layers, num_kv_shared_layers=layers)
        self.text_config = text_config
        self.text = gemma4_text.ModelArgs.from_dict(text_config)
        if self.use_ordered_embeddings and self.text.vocab_size % self.num_centroids:
            raise ValueError(
                f"num_centroids {self.num_centroids} does not divide the vocabulary "
                f"of {self.text.vocab_size} tokens"
            )


class MaskedEmbedding(nn.Module):
    """Finds the clusters of tokens that are worth scoring.

    ``token_ordering`` is a permutation of the vocabulary, cluster by cluster.
    """

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.top_k = min(args.centroid_intermediate_top_k, args.num_centroids)
        self.num_centroids = args.num_centroids
        self.centroids = nn.Linear(
            args.text.hidden_size, args.num_centroids, bias=False
        )
        self.token_ordering = mx.arange(args.text.vocab_size, dtype=mx.int32)

    def __call__(self, h: mx.array) -> mx.array:
        """Map hidden states [..., H] to candidate token ids [..., C]."""
        scores = self.centroids(h)
        if self.top_k < self.num_centroids:
            top = mx.argpartition(-scores, kth=self.top_k - 1, axis=-1)
            top = top[..., : self.top_k]
        else:
            top = mx.broadcast_to(mx.arange(self.num_centroids), scores.shape)
        clusters = self.token_ordering.reshape(self.num_centroids, -1)
        return clusters[top].flatten(-2)


class AssistantModel(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        text = args.text
        self.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)
        self.layers = [
            gemma4_text.DecoderLayer(text, layer_idx=i)
            for i in range(text.num_hidden_layers)
        ]
        self.norm = nn.RMSNorm(text.hidden_size, eps=text.rms_norm_eps)

    def __call__(
        self,
        h: mx.array,
        shared_kv: SharedKV,
        position: Union[int, mx.array],
        masks: Masks = None,
    ) -> mx.array:
        for layer in self.layers:
            kind = layer.layer_type
            mask = masks[kind] if masks else None
            h, _, _ = layer(h, mask, shared_kv=shared_kv[kind], offset=position)
        return self.norm(h)


class Model(nn.Module):
    """The Gemma 4 drafter.

    It proposes the target's next token from the target's embedding of the last
    token, the hidden state that predicted that token, and the target's own keys
    and values. It writes no cache.
    """

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = AssistantModel(args)
        hidden, backbone = args.text.hidden_size, args.backbone_hidden_size
        self.pre_projection = nn.Linear(2 * backbone, hidden, bias=False)
        self.post_projection = nn.Linear(hidden, backbone, bias=False)
        if args.use_ordered_embeddings:
            self.masked_embedding = MaskedEmbedding(args)

    def step(
        self,
        inputs_embeds: mx.array,
        shared_kv: SharedKV,
        position: Union[int, mx.array],
        masks: Masks = None,
    ) -> Tuple[mx.array, mx.array]:
        """One draft step without the head.

        Args:
            inputs_embeds (mx.array): [B, 1, 2 * H_target], the target's scaled
              embedding of the last token, then its hidden state.
            shared_kv (dict): Keys and values [B, heads, entries, head size] of the
              target for each attention type.
            position (int or mx.array): The RoPE position, an int or [B].
            masks (dict): Which entries count [B, 1, 1, entries], for each attention
              type; None if all do.

        Returns:
            Tuple[mx.array, mx.array]: The hidden state for the next step
              [B, 1, H_target] and the drafter's own [B, 1, H].
        """
        h = self.pre_projection(inputs_embeds)
        h = self.model(h, shared_kv, position, masks)
        return self.post_projection(h), h

    def candidates(self, h: mx.array) -> Tuple[Optional[mx.array], mx.array]:
        """Score only the tokens that the head considers.

        Returns:
            Tuple[Optional[mx.array], mx.array]: Token ids [B, 1, C] and their logits
              [B, 1, C]; ids are None for a dense head, where C is the vocabulary.
        """
        if not self.args.use_ordered_embeddings:
            return None, self.model.embed_tokens.as_linear(h)
        ids = self.masked_embedding(h)
        rows = self.model.embed_tokens(ids)
        return ids, (rows @ mx.expand_dims(h, -1)).squeeze(-1)

    def __call__(
        self,
        inputs_embeds: mx.array,
        shared_kv: Optional[SharedKV] = None,
        position: Union[int, mx.array] = 0,
        cache: Any = None,
    ) -> Tuple[mx.array, mx.array]:
        """One draft step; see ``step`` for the arguments.

        Returns:
            Tuple[mx.array, mx.array]: The hidden state [B, 1, H_target] and the
              logits [B, 1, V], -inf for tokens the centroid head left out.
        """
        if shared_kv is None:
            raise ValueError(
                "A Gemma 4 assistant reads its target's keys and values: it cannot "
                "generate alone or as an ordinary draft model. If mlx-lm-mtp is "
                "installed, mlx_lm_mtp.status() says why it does not take part."
            )
        hidden, h = self.step(inputs_embeds, shared_kv, position)
        ids, logits = self.candidates(h)
        if ids is not None:
            shape = (*logits.shape[:-1], self.args.text.vocab_size)
            nothing = mx.full(shape, -mx.inf, logits.dtype)
            logits = mx.put_along_axis(nothing, ids, logits, axis=-1)
        return hidden, logits

    def sanitize(self, weights: Dict[str, mx.array]) -> Dict[str, mx.array]:
        unused = ("lm_head.",) if self.args.tie_word_embeddings else ()
        if not self.args.use_ordered_embeddings:
            unused += ("masked_embedding.",)
        weights = {k: v for k, v in weights.items() if not k.startswith(unused)}
        key = "masked_embedding.token_ordering"
        if key in weights:
            weights[key] = weights[key].astype(mx.int32)
        return weights

    @property
    def layers(self) -> List[nn.Module]:
        return self.model.layers

    def make_cache(self) -> List[Any]:
        return []

"""The inside of mlx-lm's Gemma 4. No other file names its attributes."""

from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import logit_softcap

from .rounds import MTPError

MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified")


class Target:
    """A Gemma 4 seen the way a drafter needs it.

    Args:
        model: A model loaded by mlx-lm.

    Raises:
        MTPError: If the model is not a Gemma 4.
    """

    def __init__(self, model: nn.Module) -> None:
        text: Any = getattr(model, "language_model", model)
        found = getattr(model, "model_type", type(model).__name__)
        if found not in MODEL_TYPES or not hasattr(text, "model"):
            raise MTPError(
                f"the target is a {found!r} model; MTP needs a Gemma 4 "
                f"({', '.join(MODEL_TYPES)}): load one, or drop the assistant"
            )
        self.model = model
        self._text = text
        self._inner = text.model
        self.config = text.args

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def window(self) -> int:
        """Length of the sliding attention, W."""
        return self.config.sliding_window

    def owners(self) -> list[nn.Module]:
        """The layers that own a cache, in the order of the caches."""
        shared = self.config.num_kv_shared_layers
        return self._inner.layers[: len(self._inner.layers) - shared]

    def kv_shapes(self) -> dict[str, tuple[int, int]]:
        """K/V heads and head size that each attention type shares."""
        return {
            layer.layer_type: (layer.self_attn.n_kv_heads, layer.self_attn.head_dim)
            for layer in self.owners()
        }

    def embed(self, tokens: mx.array) -> mx.array:
        """Scaled input embeddings of tokens [B, L]: [B, L, H]."""
        return self._inner.embed_tokens(tokens) * self._inner.embed_scale

    def hidden(
        self,
        tokens: mx.array,
        cache: Optional[list[Any]],
        input_embeddings: Optional[mx.array] = None,
    ) -> mx.array:
        """Read tokens [B, L] into the cache.

        Returns:
            Hidden states after the final norm, [B, L, H].
        """
        return self._inner(tokens, cache=cache, input_embeddings=input_embeddings)

    def logits(self, hidden: mx.array, tokens: Optional[mx.array] = None) -> mx.array:
        """The head: [B, L, H] to softcapped logits [B, L, V].

        Args:
            hidden: Hidden states after the final norm.
            tokens: Compute the logits of these ids [C] only, in their order.
        """
        tied = self._text.tie_word_embeddings
        head = self._inner.embed_tokens if tied else self._text.lm_head
        if tokens is not None:
            out = _rows_as_linear(head, tokens, hidden)
        else:
            out = head.as_linear(hidden) if tied else head(hidden)
        softcap = self._text.final_logit_softcapping
        return out if softcap is None else logit_softcap(softcap, out)

    def lenders(self) -> dict[str, int]:
        """The cache that a drafter reads for each attention type: the last one."""
        return {layer.layer_type: i for i, layer in enumerate(self.owners())}

    def check_head(self) -> None:
        """Make sure that ``logits(hidden(x))`` is what the model itself computes.

        Raises:
            MTPError: If this mlx-lm computes its logits in another way.
        """
        token = mx.zeros((1, 1), mx.int32)
        ours = self.logits(self.hidden(token, None))
        if not mx.array_equal(ours, self.model(token), equal_nan=True):
            raise MTPError(
                "this mlx-lm computes Gemma 4's logits in a way that mlx-lm-mtp does "
                "not know; run without the assistant and report both versions"
            )


def _rows_as_linear(head: Any, tokens: mx.array, hidden: mx.array) -> mx.array:
    """``head`` with only the rows of these tokens; it may be quantised."""
    weight = head["weight"][tokens]
    if "scales" not in head:
        return hidden @ weight.T
    return mx.quantized_matmul(
        hidden,
        weight,
        scales=head["scales"][tokens],
        biases=head["biases"][tokens] if "biases" in head else None,
        transpose=True,
        group_size=head.group_size,
        bits=head.bits,
        mode=head.mode,
    )

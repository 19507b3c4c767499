"""Random Gemma 4 targets of a few layers, and drafters that follow a script."""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma4_text
from mlx_lm.models.cache import KVCache

from mlx_lm_mtp.live import Live

VOCAB = 61
PATTERN = ["sliding_attention", "sliding_attention", "full_attention"]
# One of each kind of Gemma 4, in small.
KINDS = {
    "dense": {},
    "e": {"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 4},
    "k_eq_v": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "moe": {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 8,
    },
}


def make_target(kind: str = "dense", window: int = 8, seed: int = 0, pattern=None):
    """A random float32 target whose logits are far from ties."""
    mx.random.seed(seed)
    options = {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "num_key_value_heads": 2,
        **KINDS[kind],
    }
    pattern = pattern or 2 * PATTERN
    layers = len(pattern) + options["num_kv_shared_layers"]
    args = gemma4_text.ModelArgs(
        hidden_size=16,
        num_hidden_layers=layers,
        intermediate_size=24,
        num_attention_heads=2,
        head_dim=8,
        global_head_dim=16,
        vocab_size=VOCAB,
        vocab_size_per_layer_input=VOCAB,
        sliding_window=window,
        layer_types=(pattern * 2)[:layers],
        **options,
    )
    model = gemma4_text.Model(args)
    model.update(
        {"model": {"embed_tokens": {"weight": mx.random.normal((VOCAB, 16)) * 0.5}}}
    )
    mx.eval(model.parameters())
    return model


def plain(model, prompt: Sequence[int], tokens: int, **options) -> list[int]:
    """What mlx-lm's own plain decoding emits."""
    steps = generate_step(mx.array(prompt), model, max_tokens=tokens, **options)
    return [token for token, _ in steps]


class Scripted:
    """A drafter that knows the answer and accepts as many drafts as it is told.

    ``accepts[i]`` is how many drafts of the i-th round are right (the rest are wrong);
    after the script every draft is right.
    """

    def __init__(self, sequence: Sequence[int], accepts: Sequence[int], vocab=VOCAB):
        self.sequence = list(sequence)
        self.accepts = list(accepts)
        self.vocab = vocab
        self.rounds = 0
        self._position = -1
        self._step = 0

    def __call__(self, inputs_embeds, shared_kv, position):
        if position != self._position:
            self._position, self._step = position, 0
            self.rounds += 1
        self._step += 1
        script = self.accepts[self.rounds - 1 : self.rounds]
        right = not script or self._step <= script[0]
        following = position + self._step
        token = self.sequence[following] if following < len(self.sequence) else 0
        token = token if right else (token + 1) % self.vocab
        logits = mx.where(mx.arange(self.vocab) == token, 0.0, -mx.inf)
        hidden = inputs_embeds[..., : inputs_embeds.shape[-1] // 2]
        return mx.zeros_like(hidden), logits[None, None]


class Lean(Scripted):
    """The same through the lean door, where the host does not know the position.

    It sees only whether the position is that of the step before.
    """

    def step(self, inputs_embeds, shared_kv, position, masks):
        if position is not self._position:
            self._position, self._step = position, 0
            self.rounds += 1
        self._step += 1
        script = self.accepts[self.rounds - 1 : self.rounds]
        right = not script or self._step <= script[0]
        sequence = mx.array([*self.sequence, *[0] * 64])
        token = sequence[position + self._step] + (not right)
        hidden = inputs_embeds[..., : inputs_embeds.shape[-1] // 2]
        return mx.zeros_like(hidden), token % self.vocab

    def candidates(self, h):
        logits = mx.where(mx.arange(self.vocab) == h[:, None], 0.0, -mx.inf)
        return None, logits[:, None]


def shared_kv(target, caches):
    """What the drafter is shown of caches that hold a text; empties them."""
    held = Live([caches]).buffers
    views = {kind: held.view(i) for kind, i in target.lenders().items()}
    return {kind: (view.keys, view.values) for kind, view in views.items()}


def poison(caches) -> None:
    """Fill what no longer holds a token with NaN."""
    for cache in caches:
        if isinstance(cache, KVCache) and cache.keys is not None:
            cache.keys[..., cache.offset :, :] = mx.nan
            cache.values[..., cache.offset :, :] = mx.nan

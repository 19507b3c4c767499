"""Decide how much of a draft stands, so that the target's law is kept exactly.

Pure functions of arrays over B rows: no model, no host read, and the random draws are
arguments. With p the target's law and q the drafter's,

- ``token`` accepts each draft x with probability min(1, p(x) / q(x)) until one fails,
  and then draws from the residual max(p - q, 0) (Leviathan et al. 2023,
  arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318);
- ``block`` judges the draft as a whole: P_i = min(1, P_{i-1} p(x_i) / q(x_i)), and the
  largest prefix whose own coin falls below h_i stands; the residual is
  max(P p - q, 0) (Sun et al., block verification, ICLR 2025, arXiv 2403.10444). It
  accepts at least as much as ``token``, and no verifier accepts more;
- ``match`` compares with tokens that the target itself drew: greedy decoding, coupled
  drafts, and samplers that can only be called.

Draws: ``uniforms`` in [0, 1), one per draft; ``gumbel`` one per token of the
vocabulary, for the token after the accepted prefix. They must be independent of the
noise that drew the drafts and fresh in every round.
"""

import mlx.core as mx

from .law import total
from .rounds import Verdict

TINY = 1.2e-38  # the smallest normal float32, which GPUs do not flush to zero
TALLEST = 100.0  # beyond any Gumbel noise that 32 random bits give


def match(drafts: mx.array, tokens: mx.array) -> Verdict:
    """Accept drafts [B, K] while they equal the target's tokens [B, K + 1]."""
    equal = drafts == tokens[:, :-1].astype(drafts.dtype)
    accepted = mx.cumprod(equal.astype(mx.int32), axis=1).sum(axis=1)
    return Verdict(accepted, _at(tokens, accepted))


def token(
    drafts: mx.array,
    draft_logprobs: mx.array,
    target_logprobs: mx.array,
    uniforms: mx.array,
    gumbel: mx.array,
) -> Verdict:
    """Token-by-token rejection sampling.

    Args:
        drafts: [B, K] token ids, each drawn from its ``draft_logprobs`` row.
        draft_logprobs: [B, K, V] normalised float32, -inf for impossible tokens.
        target_logprobs: [B, K + 1, V] likewise.
        uniforms: [B, K] in [0, 1).
        gumbel: [B, V] standard Gumbel noise.
    """
    ratio_logs = _ratio_logs(drafts, draft_logprobs, target_logprobs)
    kept = uniforms < mx.exp(mx.minimum(ratio_logs, 0.0))
    accepted = mx.cumprod(kept.astype(mx.int32), axis=1).sum(axis=1)
    scale = mx.zeros((drafts.shape[0], 1), mx.float32)
    return Verdict(
        accepted, _follow(accepted, scale, draft_logprobs, target_logprobs, gumbel)
    )


def block(
    drafts: mx.array,
    draft_logprobs: mx.array,
    target_logprobs: mx.array,
    uniforms: mx.array,
    gumbel: mx.array,
) -> Verdict:
    """Block verification; the arguments are those of ``token``."""
    batch, num = drafts.shape
    if num == 0:
        return token(drafts, draft_logprobs, target_logprobs, uniforms, gumbel)
    prefix = _prefix_logs(_ratio_logs(drafts, draft_logprobs, target_logprobs))
    thresholds = _block_thresholds(prefix, draft_logprobs, target_logprobs)
    # The largest prefix whose coin succeeds: a failed coin does not end the scan.
    stands = (uniforms < thresholds) * mx.arange(1, num + 1)
    accepted = stands.max(axis=1)
    start = mx.zeros((batch, 1), mx.float32)
    scale = _at(mx.concatenate([start, prefix], axis=1), accepted)[:, None]
    return Verdict(
        accepted, _follow(accepted, scale, draft_logprobs, target_logprobs, gumbel)
    )


def _ratio_logs(
    drafts: mx.array, draft_logprobs: mx.array, target_logprobs: mx.array
) -> mx.array:
    """log(p(x) / q(x)) of each draft [B, K], -inf where either is zero."""
    ids = drafts[..., None]
    num = drafts.shape[1]
    p = mx.take_along_axis(target_logprobs[:, :num], ids, axis=-1).squeeze(-1)
    q = mx.take_along_axis(draft_logprobs, ids, axis=-1).squeeze(-1)
    possible = mx.isfinite(p) & mx.isfinite(q)
    ratio = mx.where(possible, p, 0.0) - mx.where(possible, q, 0.0)
    return mx.where(possible, ratio, -mx.inf)


def _prefix_logs(ratio_logs: mx.array) -> mx.array:
    """log P_i = min(0, log P_{i-1} + log ratio_i), in closed form [B, K]."""
    sums = mx.cumsum(ratio_logs, axis=1)
    return sums - mx.maximum(mx.cummax(sums, axis=1), 0.0)


def _block_thresholds(
    prefix: mx.array, draft_logprobs: mx.array, target_logprobs: mx.array
) -> mx.array:
    """h_i of i = 1..K [B, K]: S_i / (S_i + 1 - P_i) with S_i the residual's mass."""
    num = prefix.shape[1]
    inner = prefix[:, :-1]
    residuals = _residual(
        inner[..., None], draft_logprobs[:, 1:], target_logprobs[:, 1:num]
    )
    mass = total(residuals) if num > 1 else mx.zeros_like(inner)
    whole = mass - mx.expm1(inner)
    h = mx.where(whole > 0, mass / mx.where(whole > 0, whole, 1.0), 1.0)
    return mx.concatenate([h, mx.exp(prefix[:, -1:])], axis=1)


def _residual(
    scale: mx.array, draft_logprobs: mx.array, target_logprobs: mx.array
) -> mx.array:
    """max(P p - q, 0) with log P = scale [..., 1]."""
    return mx.maximum(mx.exp(scale + target_logprobs) - mx.exp(draft_logprobs), 0.0)


def _follow(
    accepted: mx.array,
    scale: mx.array,
    draft_logprobs: mx.array,
    target_logprobs: mx.array,
    gumbel: mx.array,
) -> mx.array:
    """Draw the token after the accepted prefix [B]: recovered or bonus."""
    num = draft_logprobs.shape[1]
    p = _at(target_logprobs, accepted)
    if num == 0:
        return _draw(p, gumbel)
    q = _at(draft_logprobs, mx.minimum(accepted, num - 1))
    residual = _residual(scale, q, p)
    # Only rounding empties a residual that is asked for; the law is then p itself.
    recovers = (accepted < num)[:, None] & (residual.max(axis=-1, keepdims=True) > 0)
    logs = mx.where(residual > 0, mx.log(mx.maximum(residual, TINY)), -mx.inf)
    return _draw(mx.where(recovers, logs, p), gumbel)


def _draw(logs: mx.array, gumbel: mx.array) -> mx.array:
    """Gumbel-max. Noise of -inf, which MLX can draw, must not level the impossible."""
    noisy = logs + mx.maximum(gumbel, -TALLEST)
    return mx.argmax(mx.where(logs > -mx.inf, noisy, -mx.inf), axis=-1)


def _at(rows: mx.array, index: mx.array) -> mx.array:
    """rows[b, index[b]] for each b: [B, N, ...] and [B] to [B, ...]."""
    index = index.reshape(-1, *[1] * (rows.ndim - 1))
    return mx.take_along_axis(rows, index, axis=1).squeeze(1)

"""Decide how much of a draft stands, so that the target's law is kept exactly.

Pure functions of arrays over B rows: no model, no host read, and the random draws are
arguments. With p the target's law and q the drafter's,

- ``token`` accepts each draft x with probability min(1, p(x) / q(x)) until one fails,
  and then draws from the residual max(p - q, 0) (Leviathan et al. 2023,
  arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318);
- ``block`` judges the draft as a whole: P_i = min(1, P_{i-1} p(x_i) / q(x_i)), and the
  largest prefix whose own coin falls below h_i stands; the residual is
  max(P p - q, 0) (Sun et al., block verification, ICLR 2025, arXiv 2403.10444). It
  accepts at least as much as ``token``, and none that sees only the drafted path
  accepts more;
- ``match`` compares with tokens that the target itself drew: greedy decoding, coupled
  drafts, and samplers that can only be called.

Draws: ``uniforms`` in [0, 1), one per draft; ``gumbel`` one per token of the
vocabulary, for the token after the accepted prefix. They must be independent of the
noise that drew the drafts and fresh in every round.

A row with fewer than K drafts is padded with drafts whose law is -inf throughout: no
coin accepts them, and what precedes them is judged as if they were not there.
"""

from functools import cache
from typing import NamedTuple

import mlx.core as mx

from .law import total
from .rounds import Verdict

TINY = 1.2e-38  # the smallest normal float32, which GPUs do not flush to zero
FAINTEST = -4.0  # below all finite Gumbel noise of 32 random bits


def match(drafts: mx.array, tokens: mx.array) -> Verdict:
    """Accept drafts [B, K] while they equal the target's tokens [B, K + 1]."""
    if not drafts.shape[1]:
        return Verdict(_none(drafts), tokens.squeeze(1))
    accepted = _leading(drafts == tokens[:, :-1].astype(drafts.dtype))
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
    if not drafts.shape[1]:
        return Verdict(_none(drafts), draw(target_logprobs[:, 0], gumbel))
    terms = token_terms(drafts, draft_logprobs, target_logprobs)
    accepted = _leading(uniforms < terms.thresholds)
    next_logs = follow(accepted, terms, draft_logprobs, target_logprobs)
    return Verdict(accepted, draw(next_logs, gumbel))


def block(
    drafts: mx.array,
    draft_logprobs: mx.array,
    target_logprobs: mx.array,
    uniforms: mx.array,
    gumbel: mx.array,
) -> Verdict:
    """Block verification; the arguments are those of ``token``."""
    if not drafts.shape[1]:
        return Verdict(_none(drafts), draw(target_logprobs[:, 0], gumbel))
    terms = block_terms(drafts, draft_logprobs, target_logprobs)
    accepted = _largest(uniforms < terms.thresholds)
    next_logs = follow(accepted, terms, draft_logprobs, target_logprobs)
    return Verdict(accepted, draw(next_logs, gumbel))


class Terms(NamedTuple):
    """What a rule knows of a draft before any coin falls."""

    thresholds: mx.array  # [B, K] prefix i passes if its coin falls below
    prefix_logs: mx.array  # [B, K + 1] log P of each prefix, the empty one first


def token_terms(
    drafts: mx.array, draft_logprobs: mx.array, target_logprobs: mx.array
) -> Terms:
    """min(1, p(x) / q(x)) of each draft; the prefixes before it are taken as given."""
    ratio_logs = _ratio_logs(drafts, draft_logprobs, target_logprobs)
    batch, num = drafts.shape
    return Terms(
        mx.exp(mx.minimum(ratio_logs, 0.0)), mx.zeros((batch, num + 1), mx.float32)
    )


def block_terms(
    drafts: mx.array, draft_logprobs: mx.array, target_logprobs: mx.array
) -> Terms:
    """h_i = S_i / (S_i + 1 - P_i) with S_i the mass of residual i, and h_K = P_K."""
    ratio_logs = _ratio_logs(drafts, draft_logprobs, target_logprobs)
    num = drafts.shape[1]
    prefix = _prefix_logs(ratio_logs)
    whole_passes = mx.exp(prefix[:, num:])
    if num == 1:
        return Terms(whole_passes, prefix)
    inner = prefix[:, 1:num]
    mass = total(
        _residual(inner[..., None], draft_logprobs[:, 1:], target_logprobs[:, 1:num])
    )
    whole = mass - mx.expm1(inner)
    h = mx.where(whole > 0, mass / mx.maximum(whole, TINY), 1.0)
    return Terms(mx.concatenate([h, whole_passes], axis=1), prefix)


def follow(
    accepted: mx.array,
    terms: Terms,
    draft_logprobs: mx.array,
    target_logprobs: mx.array,
) -> mx.array:
    """The law of the token after the accepted prefix [B, V], as logs of any scale."""
    num = draft_logprobs.shape[1]
    p = _at(target_logprobs, accepted)
    q = _at(draft_logprobs, mx.minimum(accepted, num - 1))
    residual = _residual(_at(terms.prefix_logs, accepted)[:, None], q, p)
    # Only rounding empties a residual that is asked for; the law is then p itself.
    recovers = (accepted < num)[:, None] & (residual.max(axis=-1, keepdims=True) > 0)
    logs = mx.where(residual > 0, mx.log(mx.maximum(residual, TINY)), -mx.inf)
    return mx.where(recovers, logs, p)


def draw(logs: mx.array, gumbel: mx.array) -> mx.array:
    """Gumbel-max. Noise of -inf, which MLX can draw, must not level the impossible."""
    return mx.argmax(logs + mx.maximum(gumbel, FAINTEST), axis=-1)


def _none(drafts: mx.array) -> mx.array:
    """No draft stands. Computing on arrays of no size kills MLX's CUDA backend."""
    return _zeros(drafts.shape[0])


@cache
def _zeros(rows: int) -> mx.array:
    return mx.array([0] * rows, mx.int32)


def _leading(passes: mx.array) -> mx.array:
    """How many pass before the first that fails, [B, K] to [B]."""
    return mx.cumprod(passes.astype(mx.int32), axis=1).sum(axis=1)


def _largest(passes: mx.array) -> mx.array:
    """The largest prefix that passes: a failed coin does not end the scan."""
    places = mx.arange(passes.shape[1] + 1)
    return (mx.pad(passes, [(0, 0), (1, 0)]) * places).max(axis=1)


def _ratio_logs(
    drafts: mx.array, draft_logprobs: mx.array, target_logprobs: mx.array
) -> mx.array:
    """log(p(x) / q(x)) of each draft [B, K], -inf where either is zero."""
    ids = drafts[..., None]
    num = drafts.shape[1]
    p = mx.take_along_axis(target_logprobs[:, :num], ids, axis=-1).squeeze(-1)
    q = mx.take_along_axis(draft_logprobs, ids, axis=-1).squeeze(-1)
    drawable = mx.isfinite(q)
    return mx.where(drawable, p - mx.where(drawable, q, 0.0), -mx.inf)


def _prefix_logs(ratio_logs: mx.array) -> mx.array:
    """log P_i = min(0, log P_{i-1} + log ratio_i) of i = 0..K, in closed form."""
    sums = mx.cumsum(mx.pad(ratio_logs, [(0, 0), (1, 0)]), axis=1)
    return sums - mx.cummax(sums, axis=1)


@mx.compile  # one pass over the rows, and no copies of them
def _residual(
    scale: mx.array, draft_logprobs: mx.array, target_logprobs: mx.array
) -> mx.array:
    """max(P p - q, 0) with log P = scale [..., 1]."""
    return mx.maximum(mx.exp(scale + target_logprobs) - mx.exp(draft_logprobs), 0.0)


def _at(rows: mx.array, index: mx.array) -> mx.array:
    """rows[b, index[b]] for each b: [B, N, ...] and [B] to [B, ...]."""
    index = index.reshape(-1, *[1] * (rows.ndim - 1))
    return mx.take_along_axis(rows, index, axis=1).squeeze(1)

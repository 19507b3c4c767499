"""The values that cross the stages of a round, and the words for them.

The *target* is the big model, the *drafter* the small one. A round starts from a
*seed*: the last emitted token, which the target has not read yet, and the hidden
state that predicted it. The drafter turns it into a *draft* of K tokens; the target
reads the seed token and the draft in one forward (*verify*); the *verdict* says how
many drafts are *accepted* and which token follows them: *recovered* from the residual
law after a rejection, or the *bonus* after K acceptances.

Shapes: B rows, K drafts, V vocabulary, C candidates, H hidden.
"""

from functools import cache
from typing import NamedTuple, Optional

import mlx.core as mx


class MTPError(ValueError):
    """A mistake that the user can mend, told in one line."""


class Seed(NamedTuple):
    """What a round starts from."""

    token: mx.array  # [B] emitted, not yet in the target's cache
    hidden: mx.array  # [B, 1, H] the target's, after the final norm

    @classmethod
    def at(cls, token: mx.array, hidden: mx.array, index: mx.array) -> "Seed":
        """Tokens [B] and, of hidden states [B, L, H], those at index [B]."""
        if hidden.shape[1] > 1:
            index = index.astype(mx.int32)[:, None, None]
            hidden = mx.take_along_axis(hidden, index, axis=1)
        return cls(token, hidden)


class Draft(NamedTuple):
    """Proposed tokens and the law each was drawn from.

    Without ``logprobs`` each token was certain (its law is one-hot). With ``ids`` the
    laws are given on those candidates and are zero elsewhere.
    """

    tokens: mx.array  # [B, K]
    logprobs: Optional[mx.array] = None  # [B, K, V] or [B, K, C], float32
    ids: Optional[mx.array] = None  # [B, K, C]

    @property
    def size(self) -> int:
        """K."""
        return self.tokens.shape[1]

    @classmethod
    @cache
    def none(cls, rows: int = 1) -> "Draft":
        """The draft of a round without drafts."""
        return cls(mx.array([[]] * rows, mx.uint32))

    def after(self, seed: Seed) -> mx.array:
        """What a verify reads: the seed token and the drafts, [B, 1 + K]."""
        if not self.size:
            return mx.expand_dims(seed.token, 1)
        drafted = self.tokens.astype(seed.token.dtype)
        return mx.concatenate([seed.token[:, None], drafted], axis=1)

    def pending(self) -> list[mx.array]:
        """What was computed from the target's K/V."""
        if not self.size:
            return []
        law = [] if self.logprobs is None else [self.logprobs]
        return [self.tokens, *law, *([] if self.ids is None else [self.ids])]

    def law(self, vocab_size: int) -> mx.array:
        """The law of each draft over the whole vocabulary, [B, K, V] log-probs."""
        if self.logprobs is not None and self.ids is None:
            return self.logprobs
        ids = self.tokens[..., None] if self.ids is None else self.ids
        known = self.logprobs
        if known is None:
            known = mx.zeros(ids.shape, mx.float32)
        nothing = mx.full((*ids.shape[:-1], vocab_size), -mx.inf, mx.float32)
        return mx.put_along_axis(nothing, ids, known, axis=-1)


class Verdict(NamedTuple):
    """What became of a draft."""

    accepted: mx.array  # [B] how many of the first drafts stand
    token: mx.array  # [B] recovered or bonus

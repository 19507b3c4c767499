"""MTP whose acceptance is set by hand, for pairs with random weights."""

import random
from collections.abc import Generator
from typing import Any, Optional, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..depth import Adaptive, Pinned
from ..law import Sampler
from ..loop import Emission, Run
from ..measure import PREFILL
from ..propose import Drawn
from ..residual import make_rule
from ..rounds import Draft, Verdict
from ..rule import Rule, Trial
from ..stats import MTPStats
from ..target import Target

DECK = 128  # cards


class Dial:
    """A rule whose drafts stand by the fall of cards, for as long as none fails.

    Every place of a text has a card of a deck that is shuffled by ``seed``, so some
    stretches of a text are hard and others easy, and are so for every method that is
    compared. Each row of a batch begins elsewhere in the deck.

    All of the work is still done, on the device and on the host. Random weights repeat
    themselves, and a mixture of experts reads less for tokens that are alike: drafts
    are moved to other tokens. The token that follows is the one the rule found.
    """

    def __init__(self, rule: Rule, acceptance: float, seed: int = 0) -> None:
        self._rule = rule
        good = round(acceptance * DECK)
        cards = [1] * good + [0] * (DECK - good)
        random.Random(seed).shuffle(cards)
        self._cards = mx.array(cards)
        self._places = mx.zeros((0,), mx.int32)  # [B], as of the latest draft
        self._passed = 0  # places since

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def draw(self, ids: Optional[mx.array], logits: mx.array) -> Drawn:
        """As the rule does, but another token."""
        drawn = self._rule.draw(ids, logits)
        vocab_size = self._rule.vocab_size
        moved = (drawn.token + random.randrange(vocab_size)) % vocab_size
        return drawn._replace(token=moved)

    def judge(self, draft: Draft, logits: mx.array) -> Trial:
        """As the rule does, but for how many drafts stand."""
        trial = self._rule.judge(draft, logits)
        assert trial.verdict is not None
        self._passed += 1  # the seed's place
        if not draft.size:
            return trial
        rows, num = draft.tokens.shape
        if len(self._places) != rows:
            self._places = mx.arange(rows) * (DECK // rows)
        places = self._places + self._passed
        cards = mx.take(self._cards, (places[:, None] + mx.arange(num)) % DECK)
        accepted = mx.cumprod(cards, axis=1).sum(axis=1)
        self._places, self._passed = places + accepted, 0
        return trial._replace(verdict=Verdict(accepted, trial.verdict.token))


def dialled_step(
    prompt: mx.array,
    model: nn.Module,
    drafter: Any,
    *,
    acceptance: float,
    seed: int,
    depth: Adaptive | Pinned,
    max_tokens: int,
    sampler: Optional[Sampler],
    prompt_cache: list[Any],
    stats: MTPStats,
) -> Generator[Emission, None, None]:
    """``mtp_generate_step`` on a cache that is not needed afterwards."""
    target = Target(model)
    rule = Dial(make_rule(sampler, None, target.vocab_size), acceptance, seed)
    run = Run(target, drafter, prompt_cache, cast(Rule, rule), stats, depth, 0)
    with mx.stream(generation_stream):
        yield from run.steps(prompt, None, max_tokens, PREFILL, lambda *_: None)

"""Emit what the target's sampler draws; keep drafts while they agree.

Greedy decoding, seeded coupling, and whatever can only be called.
"""

from collections.abc import Sequence
from typing import Optional

import mlx.core as mx

from . import verify
from .law import (
    LogitsProcessor,
    Sampler,
    is_greedy,
    is_mlx_lm,
    normalise,
    process,
    process_rows,
)
from .propose import Drawn
from .rounds import Draft
from .rule import Decision, Rule, Trial, numbers, pick
from .tape import RandomTape, random_state, seed_of


class Compare(Rule):
    """Emit what the target's sampler draws; keep drafts while they agree.

    A sampler of mlx-lm's is called on the very random numbers that plain decoding
    would use at each position, so the text does not depend on the drafter. Its drafts
    share those numbers, so that they agree often. Where the sampler is opaque or a
    processor may keep state, rows are judged one by one: each is called once for each
    emitted token, in order.
    """

    def __init__(
        self, sampler: Sampler, processors: Sequence[LogitsProcessor], vocab_size: int
    ) -> None:
        super().__init__(processors, vocab_size)
        self.sampler = sampler
        greedy = is_greedy(sampler)
        self._random = None if greedy or not is_mlx_lm(sampler) else RandomTape()
        self._walks = not (self.pure and (greedy or self._random))
        self._seed: Optional[int] = None  # the generator's state if it is shared
        self._drawn = 0

    def seed(self, seed: int) -> None:
        self._seed = seed
        if self._random:
            row = mx.zeros((1, self.vocab_size))
            self._random.start(seed, lambda: self.sampler(row))

    def begin(self, num: int) -> None:
        super().begin(num)
        self._drawn = 0
        if self._random:
            self._random.rewind()

    def draw(self, ids: Optional[mx.array], logits: mx.array) -> Drawn:
        ids, logits = self._processed(ids, logits, dense=self._random is not None)
        if self._random:
            if self._seed is not None:
                self._random.turn_to(self._drawn)
                self._drawn += 1
            token = self.sampler(normalise(logits))
        else:
            token = pick(mx.argmax(logits, axis=-1), ids)
        self._path = self._after(self._path, token)
        return Drawn(token)

    @property
    def ahead(self) -> bool:
        return super().ahead and not self._walks and self._random is None

    def judge(self, draft: Draft, logits: mx.array) -> Trial:
        if self._random:
            self._random.rewind()
        if self._walks:
            return Trial(draft, logits)
        logits = process_rows(self.processors, self.history, draft.tokens, logits)
        logprobs = normalise(logits)
        if self._random is None:
            verdict = verify.match(draft.tokens, self.sampler(logprobs))
            return Trial(draft, logprobs, verdict)
        rows = []
        for i in range(logprobs.shape[1]):
            rows.append(self.sampler(logprobs[:, i]))
            self._random.mark()
        verdict = verify.match(draft.tokens, mx.stack(rows, axis=1))
        return Trial(draft, logprobs, verdict, self._random.marks)

    def decide(self, trial: Trial) -> list[Decision]:
        if trial.verdict is None:
            return [self._walk(trial.draft, trial.logits)]
        decisions = super().decide(trial)
        if self._random:
            self._random.cut(len(decisions[0].tokens))
        return decisions

    def _walk(self, draft: Draft, logits: mx.array) -> Decision:
        drafted = numbers(draft.tokens[0])
        tokens: list[int] = []
        rows: list[mx.array] = []
        history = self.history
        error = None
        if self._random:
            self._random.rewind()
        elif self._seed is not None:
            mx.random.seed(self._seed)
        for i in range(logits.shape[1]):
            try:
                row = normalise(process(self.processors, history, logits[:, i]))
                tokens += numbers(self.sampler(row))
            except Exception as e:
                # The tokens before it stand: the caller gets them first, then this.
                error = e
                break
            rows.append(row)
            if self._random:
                self._random.mark()
            if i == len(drafted) or tokens[i] != drafted[i]:
                break
            history = self._after(history, mx.array(tokens[-1:]))
        if self._random:
            self._random.cut(len(tokens))
        elif self._seed is not None:
            self._seed = seed_of(random_state())
        return Decision(tokens, mx.concatenate(rows or [logits[0, :0]]), error)

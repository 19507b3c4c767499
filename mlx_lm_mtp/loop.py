"""One generation: prefill, rounds, and the cache it leaves behind."""

from collections.abc import Callable, Iterator
from typing import Any, Optional

import mlx.core as mx

from . import cache as kv
from .propose import propose
from .rounds import Draft, Seed
from .rule import Decision, Rule
from .stats import MTPStats
from .target import Target

Emission = tuple[int, mx.array, bool]
Progress = Callable[[int, int], Any]


class Run:
    """One generation: its caches, seed and what it has yielded."""

    def __init__(
        self,
        target: Target,
        drafter: Any,
        caches: list[Any],
        rule: Rule,
        stats: MTPStats,
        num_drafts: int,
        draft_position: int,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.caches = caches
        self.rule = rule
        self.stats = stats
        self.num_drafts = num_drafts
        self.draft_position = draft_position
        self.yielded: list[int] = []
        self.prompt_end: Optional[int] = None

    def steps(
        self,
        prompt: mx.array,
        embeddings: Optional[mx.array],
        max_tokens: int,
        prefill_step_size: int,
        progress: Progress,
    ) -> Iterator[Emission]:
        """Prefill, then decide the first token by its logits, then go on in rounds."""
        logits = self._prefill(prompt, embeddings, prefill_step_size, progress)
        self.rule.begin(0)
        decision = self.rule.judge(Draft(mx.zeros((1, 0), mx.uint32)), logits)
        while True:
            left = max_tokens - len(self.yielded) - len(decision.tokens)
            going = decision.error is None and left != 0
            # The next drafts are computed while the caller handles these tokens.
            draft = self._launch(decision, left) if going else None
            yield from self._emit(decision)
            if decision.error is not None:
                raise decision.error
            if draft is None:
                return
            decision = self._verify(draft)

    def _prefill(
        self,
        prompt: mx.array,
        embeddings: Optional[mx.array],
        step_size: int,
        progress: Progress,
    ) -> mx.array:
        """Read the prompt in mlx-lm's own steps; logits [1, 1, V] after it.

        No logits are computed for the positions before the last.
        """
        size = len(prompt) if embeddings is None else len(embeddings)
        self.rule.extend(prompt)
        start, done = kv.length(self.caches), 0
        progress(done, size)
        while size - done > 1:
            end = min(done + step_size, size - 1)
            self._read(prompt, embeddings, done, end)
            mx.eval([c.state for c in self.caches])
            done = end
            progress(done, size)
            mx.clear_cache()
        self.hidden = self._read(prompt, embeddings, done, size)[:, -1:]
        self.prompt_end = start + size
        logits = self.target.logits(self.hidden)
        mx.eval(logits)
        progress(size, size)
        return logits

    def _read(
        self, prompt: mx.array, embeddings: Optional[mx.array], start: int, end: int
    ) -> mx.array:
        part = None if embeddings is None else embeddings[start:end][None]
        return self.target.hidden(prompt[start:end][None], self.caches, part)

    def _launch(self, decision: Decision, left: int) -> Draft:
        self.rule.extend(mx.array(decision.tokens))
        # The seed token is emitted whatever follows it, so at most left - 1 drafts
        # can be used; a negative number of tokens left means no end.
        num = self.num_drafts if left < 0 else min(self.num_drafts, left - 1)
        seed = Seed(mx.array(decision.tokens[-1:]), self.hidden)
        self.seed_token = seed.token
        self.rule.begin(num)
        if num == 0:
            return Draft(mx.zeros((1, 0), mx.uint32))
        position = kv.length(self.caches) + self.draft_position
        draft = propose(
            self.drafter,
            self.target,
            seed,
            self.caches,
            position,
            num,
            self.rule.draw,
        )
        mx.async_eval(*draft.pending())
        return draft

    def _verify(self, draft: Draft) -> Decision:
        start = kv.length(self.caches)
        tokens = mx.concatenate(
            [self.seed_token[:, None], draft.tokens.astype(self.seed_token.dtype)], 1
        )
        # Drafts hold views of the K/V until they are computed; writing to the caches
        # before would copy every buffer.
        mx.eval(draft.pending())
        hidden = self.target.hidden(tokens, self.caches)
        decision = self.rule.judge(draft, self.target.logits(hidden))
        accepted = len(decision.tokens) - 1
        kv.keep(self.caches, start + 1 + max(accepted, 0))
        self.hidden = hidden[:, accepted : accepted + 1]
        self.stats.add(draft.size, max(accepted, 0))
        return decision

    def _emit(self, decision: Decision) -> Iterator[Emission]:
        last = len(decision.tokens) - (decision.error is None)
        drafted = self.prompt_end is not None and bool(self.yielded)
        for i, token in enumerate(decision.tokens):
            self.yielded.append(token)
            if len(self.yielded) % 256 == 0:
                mx.clear_cache()
            yield token, decision.logprobs[i], drafted and i < last

    def settle(self) -> None:
        """Leave the caches with the prompt and every yielded token, exactly.

        An interrupted prefill is left where it stopped, as mlx-lm leaves it.
        """
        if self.prompt_end is None:
            return
        end = self.prompt_end + len(self.yielded)
        kv.keep(self.caches, min(end, kv.length(self.caches)))
        missing = end - kv.length(self.caches)
        if missing:
            self.target.hidden(mx.array([self.yielded[-missing:]]), self.caches)
        mx.eval([c.state for c in self.caches])

"""One generation: prefill, rounds, and the cache it leaves behind.

A round is *launched* once the device has all of its work, and *lands* when the host
reads what became of it. While one flies, the next is built on the values that it will
have, and launched, so the device never waits for Python; then the first is read, and
its tokens are handed out. Where a rule has to see the tokens first, the next round is
built after the reading.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

import mlx.core as mx

from . import cache as kv
from .clock import Clock
from .depth import Depth
from .forward import draft_step, is_lean, launch, verify_forward
from .live import Live
from .propose import propose
from .rounds import Draft, Seed
from .rule import Decision, Rule, Trial
from .stats import MTPStats
from .target import Target

Emission = tuple[int, mx.array, bool]
Progress = Callable[[int, int], Any]
ENDLESS = 1 << 62


@dataclass
class Round:
    """A round that is built, flying or landed."""

    trial: Trial
    hidden: mx.array  # [1, K + 1, H]
    size: int = 0  # K
    reads_prompt: bool = False
    seconds: Optional[float] = None  # once it is launched, if that could be timed

    def seed(self) -> Seed:
        """What the next round starts from, before the host knows it."""
        verdict = self.trial.verdict
        assert verdict is not None
        return Seed.at(verdict.token, self.hidden, verdict.accepted)

    def seed_after(self, decision: Decision) -> Seed:
        """Likewise, from what the host has decided."""
        row = decision.accepted
        return Seed(mx.array(decision.tokens[-1:]), self.hidden[:, row : row + 1])


class Run:
    """One generation: its caches, and what it has yielded."""

    def __init__(
        self,
        target: Target,
        drafter: Any,
        caches: list[Any],
        rule: Rule,
        stats: MTPStats,
        depth: Depth,
        draft_position: int,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.caches = caches
        self.rule = rule
        self.stats = stats
        self.depth = depth
        self.draft_position = draft_position
        self.yielded: list[int] = []
        self.live: Optional[Live] = None
        self._ahead = rule.ahead and is_lean(drafter)
        self._prompt_end = 0
        self._flying: Optional[Round] = None
        self._clock = Clock()

    def steps(
        self,
        prompt: mx.array,
        embeddings: Optional[mx.array],
        max_tokens: int,
        prefill_step_size: int,
        progress: Progress,
    ) -> Iterator[Emission]:
        """Prefill, then decide the first token by its logits, then go on in rounds.

        Args:
            prompt: Token ids [n].
            embeddings: [n, H] to prefill in place of the prompt's, or None.
            max_tokens: Negative for no end.
            prefill_step_size: Prompt tokens per forward.
            progress: Called with (tokens processed, tokens in all).
        """
        hidden, logits = self._prefill(prompt, embeddings, prefill_step_size, progress)
        self._prompt_end = kv.length(self.caches)
        if max_tokens == 0:
            return
        live = self.live = Live([self.caches])
        self.rule.begin(0)
        flying = Round(self.rule.judge(Draft.none(), logits), hidden, reads_prompt=True)
        mx.async_eval(flying.trial.pending())
        left = max_tokens if max_tokens > 0 else ENDLESS
        while True:
            following = None
            # Unless what flies may end the text: then nothing more is to be computed.
            if self._ahead and left > 1 + flying.size:
                num = self.depth.choose(left - 2)  # what flies brings a token at least
                following = self._build(live, flying.seed(), num)
                self._launch(live, following)
            decision = self._land(live, flying, left)
            shown = decision.tokens[:left]
            left -= len(shown)
            if left == 0 or decision.error is not None:
                yield from self._emit(decision, shown)
                if decision.error is not None:
                    raise decision.error
                return
            if following is None:
                num = self.depth.choose(left - 1)
                following = self._build(live, flying.seed_after(decision), num)
                self._launch(live, following)
            yield from self._emit(decision, shown)
            flying = following

    def _prefill(
        self,
        prompt: mx.array,
        embeddings: Optional[mx.array],
        step_size: int,
        progress: Progress,
    ) -> tuple[mx.array, mx.array]:
        """Read the prompt in mlx-lm's own steps.

        Returns:
            The hidden state [1, 1, H] and the logits [1, 1, V] after it. No logits are
            computed for the positions before.
        """
        size = len(prompt) if embeddings is None else len(embeddings)
        self.rule.extend(prompt)
        done = 0
        progress(done, size)
        while size - done > 1:
            end = min(done + step_size, size - 1)
            self._read(prompt, embeddings, done, end)
            mx.eval([c.state for c in self.caches])
            done = end
            progress(done, size)
            mx.clear_cache()
        hidden = self._read(prompt, embeddings, done, size)[:, -1:]
        logits = self.target.logits(hidden)
        mx.eval(logits)
        progress(size, size)
        return hidden, logits

    def _read(
        self, prompt: mx.array, embeddings: Optional[mx.array], start: int, end: int
    ) -> mx.array:
        part = None if embeddings is None else embeddings[start:end][None]
        return self.target.hidden(prompt[start:end][None], self.caches, part)

    def _build(self, live: Live, seed: Seed, num: int) -> Round:
        """Draft ``num`` tokens and judge them; nothing of it is evaluated."""
        self.rule.begin(num)
        draft = Draft.none()
        if num:
            step = draft_step(self.target, self.drafter, live, self.draft_position)
            draft = propose(step, seed, num, self.rule.draw)
            if not self._ahead:
                mx.async_eval(*draft.pending())
        hidden, logits = verify_forward(self.target, live, draft.after(seed))
        trial = self.rule.judge(draft, logits)
        live.wrote(1 + num, trial.verdict.accepted if trial.verdict else None)
        return Round(trial, hidden, num)

    def _launch(self, live: Live, built: Round) -> None:
        drawn = built.trial.draft.pending()
        with self._clock:
            launch(live, drawn, [*built.trial.pending(), built.hidden])
        built.seconds = self._clock.launched()
        self._flying = built

    def _land(self, live: Live, flying: Round, left: int) -> Decision:
        """Read what became of a round, and learn from it."""
        with self._clock:
            [decision] = self.rule.decide(flying.trial)
        accepted = decision.accepted
        self.rule.extend(decision.tokens)
        if flying.reads_prompt:
            return decision
        live.spans[0].landed(accepted)
        if self._flying is flying:
            self._flying = None
        size, tokens = flying.size, min(len(decision.tokens), left)
        self.stats.add(min(size, left), min(accepted, left), tokens)
        if flying.seconds is not None and tokens == len(decision.tokens):
            self.depth.learn(size, [accepted], flying.seconds)
        return decision

    def _emit(self, decision: Decision, shown: list[int]) -> Iterator[Emission]:
        accepted = decision.accepted
        for i, token in enumerate(shown):
            row = decision.logprobs[i]
            self.yielded.append(token)
            if len(self.yielded) % 256 == 0:
                mx.clear_cache()
            self._clock.leave()
            yield token, row, i < accepted
            self._clock.back()

    def settle(self) -> None:
        """Leave the caches with the prompt and every yielded token, exactly.

        An interrupted prefill is left where it stopped, as mlx-lm leaves it.
        """
        if self.live is None:
            return
        end = self._prompt_end + len(self.yielded)
        # What flies has written its seed token, whatever becomes of it.
        held = self.live.spans[0].known + (self._flying is not None)
        self.live.give_back(self.caches, min(end, held))
        self.live = None
        if end > held:
            missing = mx.array([self.yielded[held - end :]])
            self.target.hidden(missing, self.caches)
        mx.eval([c.state for c in self.caches])

"""What happened in a generation, per round and per draft position."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

FEW = 4  # rounds after which a depth that adapts has tried to draft


@dataclass
class MTPStats:
    """Counts of one generation; pass one to ``mtp_generate_step`` to have it filled.

    Attributes:
        tokens: Tokens that rounds decided. The first token comes with the prompt and
            is not counted.
        rounds: Forwards of the target after the prompt.
        drafted: How many rounds drafted at least i + 1 tokens, for each i.
        accepted: How many rounds accepted at least i + 1 drafts, for each i.
    """

    tokens: int = 0
    rounds: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int, tokens: int) -> None:
        """Count a round: its drafts, those accepted, and the tokens it emitted."""
        self.rounds += 1
        self.tokens += tokens
        missing = drafted - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        for i in range(drafted):
            self.drafted[i] += 1
            self.accepted[i] += i < accepted

    @property
    def tokens_per_forward(self) -> float:
        """Mean tokens per forward of the target."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def drafts_per_round(self) -> float:
        """Mean drafted tokens per round."""
        return sum(self.drafted) / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Share of the rounds that drafted a position that also accepted it."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]

    def summary(self) -> str:
        """One line for people."""
        shares = " ".join(f"{share:.0%}" for share in self.acceptance) or "none"
        return (
            f"MTP: {self.tokens_per_forward:.2f} tokens per target forward, "
            f"accepted by position {shares}, "
            f"{self.drafts_per_round:.2f} drafts per round"
        )

    def unused(self) -> str:
        """One line for those who asked for drafts and got none."""
        few = self.rounds < FEW
        why = "the text ended before" if few else "drafting does not pay here"
        return f"MTP: the assistant was not used: {why}"


def merged(parts: Iterable[MTPStats]) -> MTPStats:
    """The counts of several generations."""
    total = MTPStats()
    for part in parts:
        total.rounds += part.rounds
        total.tokens += part.tokens
        total.drafted = _added(total.drafted, part.drafted)
        total.accepted = _added(total.accepted, part.accepted)
    return total


def _added(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]

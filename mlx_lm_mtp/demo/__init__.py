"""``python -m mlx_lm_mtp demo``: a small trained pair, plain and with MTP.

The pair is Gemma 4's E2B in small and writes Python; ``README.md`` beside this file
says how it was made and how good it is.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

FOLDER = Path(__file__).parent
TARGET, ASSISTANT = FOLDER / "target", FOLDER / "assistant"
PROMPT = "def read_lines(path, encoding='utf-8'):"
NUM_DRAFTS = 3
GAP = 4  # between the columns
REAL_COMMAND = (
    "mlx_lm.generate --model mlx-community/gemma-4-e4b-it-4bit \\\n"
    "    --mtp-assistant mlx-community/gemma-4-E4B-it-assistant-bf16 --prompt ..."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "prompt", nargs="?", default=PROMPT, help="how some Python begins, or a request"
    )
    parser.add_argument("--max-tokens", "-m", type=int, default=200)
    parser.add_argument(
        "--path", action="store_true", help="print the two folders and leave"
    )


@dataclass
class Run:
    """One way of decoding: what it wrote so far, and in what time."""

    name: str
    tokens: list[int]
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second, of decoding alone."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds else 0.0


def _timed(run: Run, steps: Iterator[Any], eos: set[int]) -> Iterator[int]:
    """Tokens up to an end token; the first, which waits for the prompt, is free."""
    start = time.perf_counter()
    for token, *_ in steps:
        if run.tokens:
            run.seconds += time.perf_counter() - start
        run.tokens.append(token)
        if token in eos:
            return
        yield token
        start = time.perf_counter()


class _Column:
    """Text that stays in its half of a terminal; without one, plain text."""

    def __init__(self, title: str, left: int, width: Optional[int]) -> None:
        self.left, self.width, self.used, self.lines = left, width, 0, 1
        self.write(title + "\n" + "-" * len(title) + "\n")

    def write(self, text: str) -> None:
        if self.width is None:
            print(text, end="", flush=True)
            return
        out = ""
        for character in text.expandtabs(4):
            if character == "\n" or self.used == self.width:
                out += f"\n\x1b[{self.left + 1}G"
                self.lines, self.used = self.lines + 1, 0
            if character != "\n":
                out, self.used = out + character, self.used + 1
        print(out, end="", flush=True)

    def show(self, tokens: Iterator[int], tokenizer: Any) -> None:
        detokenizer = tokenizer.detokenizer
        for token in tokens:
            detokenizer.add_token(token)
            self.write(detokenizer.last_segment)
        detokenizer.finalize()
        self.write(detokenizer.last_segment)


def _beside(first: _Column, title: str) -> _Column:
    """The second column: to the right of the first if that is still on the screen."""
    if first.width is None or first.lines >= shutil.get_terminal_size().lines:
        print("\n")
        return _Column(title, 0, first.width)
    left = first.width + GAP
    print(f"\x1b[{first.lines - 1}A\x1b[{left + 1}G", end="")
    return _Column(title, left, first.width)


def _width() -> Optional[int]:
    columns = shutil.get_terminal_size().columns
    return (columns - GAP) // 2 if sys.stdout.isatty() and columns >= 80 else None


def main(args: argparse.Namespace) -> int:
    """The command: its exit status."""
    if args.path:
        print(f"{TARGET}\n{ASSISTANT}")
        return 0
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    from ..generate import mtp_generate_step
    from ..pair import load_assistant
    from ..rounds import MTPError
    from ..stats import MTPStats

    if not args.prompt.strip() or args.max_tokens < 1:
        raise MTPError("the demo needs a prompt and at least one token to write")
    model, tokenizer = load(str(TARGET))
    drafter = load_assistant(str(ASSISTANT), model)
    turn = [{"role": "user", "content": args.prompt}]
    prompt = mx.array(tokenizer.apply_chat_template(turn, add_generation_prompt=True))
    eos, stats = set(tokenizer.eos_token_ids), MTPStats()
    options = {"num_draft_tokens": NUM_DRAFTS, "max_tokens": args.max_tokens}
    warm = mtp_generate_step(prompt, model, drafter, **(options | {"max_tokens": 9}))
    for _ in warm:  # the first forwards build their kernels
        pass
    plain, mtp = Run("plain", []), Run("MTP", [])
    steps = generate_step(prompt, model, max_tokens=args.max_tokens)
    print(args.prompt + "\n")
    # One after the other, since together each would slow the other down.
    left = _Column("plain decoding", 0, _width())
    left.show(_timed(plain, steps, eos), tokenizer)
    steps = mtp_generate_step(prompt, model, drafter, stats=stats, **options)
    right = _beside(left, "multi-token prediction")
    right.show(_timed(mtp, steps, eos), tokenizer)
    print("\n" * max(left.lines - right.lines, 0))
    print(_summary(plain, mtp, stats))
    return 0 if plain.tokens == mtp.tokens else 1


def _summary(plain: Run, mtp: Run, stats: Any) -> str:
    same = "the same text" if plain.tokens == mtp.tokens else "NOT the same text"
    shares = " / ".join(f"{share:.0%}" for share in stats.acceptance) or "none"
    gain = mtp.rate / plain.rate if plain.rate else 0.0
    return (
        f"\nplain {plain.rate:6.1f} tokens/s\n"
        f"MTP   {mtp.rate:6.1f} tokens/s, {gain:.2f} times as fast, {same}\n"
        f"      {stats.tokens_per_forward:.2f} tokens per target forward, accepted by "
        f"position {shares}\n\n"
        f"This pair is a toy. For a real model:\n\n{REAL_COMMAND}\n"
    )

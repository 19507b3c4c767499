"""Python's standard library as training text, its tokenizer, and the held-out files.

The sources are under the PSF licence, which lets them be redistributed and trained on,
and every Python installation has them.
"""

import ast
import hashlib
import json
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    "<video_soft_token>",
    "<start_of_audio>",
    "<end_of_audio>",
    "<audio_soft_token>",
]
EOS, BOS = 1, 2
# Generated tables, data that is broken on purpose, and other people's code.
LEFT_OUT = ("site-packages", "encodings", "pydoc_data", "lib2to3/tests/data")
HELD_OUT_SHARE = 32  # one file of so many
PROMPTS, PROMPT = 10, 200  # how many, and their tokens with <bos>
PIECE = 600  # characters, about 200 tokens
MAX_LINES = 80  # of a function or class that becomes a conversation


@dataclass(frozen=True)
class Source:
    """One file of the library."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Decided by the name alone, so that every version splits alike."""
        return _digest(self.name) % HELD_OUT_SHARE == 0


def _digest(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)


def read_library(folder: Path) -> list[Source]:
    """All readable sources below a folder, in the order of their names."""
    sources = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if name.startswith(LEFT_OUT) or "/data/" in name:
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip() and "\0" not in text:
            sources.append(Source(name, text))
    if not sources:
        raise SystemExit(f"no Python sources below {folder}")
    return sources


def fingerprint(sources: list[Source]) -> str:
    """A hash of every name and text."""
    total = hashlib.sha256()
    for source in sources:
        total.update(f"{source.name}\0{source.text}\0".encode())
    return total.hexdigest()


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE that puts <bos> before a text, as Gemma's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    return tokenizer


def conversations(source: Source) -> Iterator[str]:
    """Functions and classes as turns of a chat.

    The user gives the first lines and the model goes on, or the user gives what the
    docstring says and the model writes the whole.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source.text)
        except (SyntaxError, ValueError):
            return
    lines = source.text.splitlines()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.walk(tree):
        if not isinstance(node, kinds) or node.end_lineno is None:
            continue
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if 4 <= code.count("\n") + 1 <= MAX_LINES:
            yield _conversation(code, ast.get_docstring(node))


def _conversation(code: str, docstring: str | None) -> str:
    pick = _digest(code)
    summary = (docstring or "").strip().split("\n\n")[0]
    if summary and pick % 3 == 0:
        asked, answer = " ".join(summary.split()), code
    else:
        rows = code.split("\n")
        head = 1 + pick % min(4, len(rows) - 2)
        asked, answer = "\n".join(rows[:head]).strip(), "\n".join(rows[head:])
    return (
        f"<start_of_turn>user\n{asked}<end_of_turn>\n"
        f"<start_of_turn>model\n{answer.rstrip()}<end_of_turn>\n"
    )


def pieces(source: Source) -> Iterator[str]:
    """The file in pieces of whole lines, for trainers that read a text a row."""
    piece = ""
    for line in source.text.splitlines(keepends=True):
        if piece and len(piece) + len(line) > PIECE:
            yield piece
            piece = ""
        piece += line
    yield piece


def write_rows(path: Path, sources: list[Source]) -> None:
    """One row of ``{"text": ...}`` a piece."""
    rows = [json.dumps({"text": p}) for s in sources for p in pieces(s)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")


def held_out_prompts(
    sources: list[Source], tokenizer: Tokenizer
) -> list[dict[str, str]]:
    """Passages of PROMPT tokens from the middle of the longest held-out files."""
    longest = sorted(sources, key=lambda s: (-len(s.text), s.name))[:PROMPTS]
    prompts = []
    for source in longest:
        lines = source.text.splitlines(keepends=True)
        text = "".join(lines[len(lines) // 3 :])
        ids = tokenizer.encode(text, add_special_tokens=False).ids[: PROMPT - 1]
        prompts.append({"file": source.name, "text": tokenizer.decode(ids)})
    return prompts


def _encode(tokenizer: Tokenizer, texts: list[str], end: list[int]) -> np.ndarray:
    rows = [row.ids + end for row in tokenizer.encode_batch(texts)]
    return np.array([token for row in rows for token in row], np.uint16)


def prepare(library: Path, out: Path, vocab_size: int = 2048) -> None:
    """Write tokenizer.json, corpus.json, token streams ``*.npy`` and ``jsonl/``.

    The last is the text as mlx-lm's trainers take it.
    """
    out.mkdir(parents=True, exist_ok=True)
    sources = read_library(library)
    parts = {
        "train": [s for s in sources if not s.held_out],
        "valid": [s for s in sources if s.held_out],
    }
    tokenizer = train_tokenizer([s.text for s in parts["train"]], vocab_size)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    about = {
        "text": "CPython standard library, PSF licence",
        "python": sys.version.split()[0],
        "sha256": fingerprint(sources),
        "files": {name: len(part) for name, part in parts.items()},
        "held_out": [s.name for s in parts["valid"]],
        "tokens": {},
    }
    for name, part in parts.items():
        write_rows(out / "jsonl" / f"{name}.jsonl", part)
        chats = [chat for source in part for chat in conversations(source)]
        streams = {
            f"{name}_files": _encode(tokenizer, [s.text for s in part], [EOS]),
            f"{name}_chats": _encode(tokenizer, chats, []),
        }
        for key, tokens in streams.items():
            np.save(out / f"{key}.npy", tokens)
            about["tokens"][key] = len(tokens)
    prompts = held_out_prompts(parts["valid"], tokenizer)
    (out / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")
    (out / "corpus.json").write_text(json.dumps(about, indent=1) + "\n")

"""Prompts to measure with: four kinds of text at any length of context.

Long contexts are made of what every Python carries: its language reference for prose,
the sources of its library for code.
"""

import importlib
import inspect
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx

SNIPPET = '''def read_table(path, delimiter=","):
    """Read a table with a header line.

    Returns:
        A list of dictionaries, one for each row.
    """
    with open(path, encoding="utf-8") as lines:
        names = next(lines).rstrip("\\n").split(delimiter)
        return [dict(zip(names, line.rstrip("\\n").split(delimiter))) for line in lines]
'''
REQUESTS = {
    "code": "Write a Python class for a least recently used cache, with tests.",
    "chat": "I slept badly and have a long meeting tomorrow. What should I do tonight?",
    "copy": "Repeat this function word for word, then once more with a docstring that "
    f"says what happens to an empty file:\n\n{SNIPPET}",
    "prose": "Write the first page of a story about a lighthouse keeper who finds a "
    "letter addressed to someone with her own name.",
}
KINDS = tuple(REQUESTS)
RANDOM_KIND = "random"
SHORTEST = 32  # tokens of a random prompt without a context


def _code() -> str:
    modules = map(importlib.import_module, ("argparse", "tarfile", "inspect", "typing"))
    return "\n\n".join(map(inspect.getsource, modules))


def _prose() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


MATERIAL: dict[str, Callable[[], str]] = {
    "code": _code,
    "chat": _prose,
    "copy": _code,
    "prose": _prose,
}


def make_prompt(tokenizer: Any, kind: str, context: int) -> mx.array:
    """Token ids [n] of a conversation's first turn.

    Args:
        tokenizer: mlx-lm's, with or without a chat template.
        kind: One of ``KINDS``.
        context: How many tokens the prompt should have: material comes before the
            request. Shorter than the request means the request alone.
    """
    request = REQUESTS[kind]
    bare = _encode(tokenizer, request)
    missing = context - len(bare)
    if missing <= 0:
        return mx.array(bare)
    text = MATERIAL[kind]()
    # A token is rarely longer than eight characters of such text, on average.
    ids = tokenizer.encode(text[: 8 * missing], add_special_tokens=False)
    while len(ids) < missing:
        ids = ids + ids
    material = tokenizer.decode(ids[:missing])
    return mx.array(_encode(tokenizer, f"{material}\n\n{request}"))


def _encode(tokenizer: Any, text: str) -> list[int]:
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(text))
    turn = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True))


def random_prompt(vocab_size: int, context: int) -> mx.array:
    """Random ids [n]: what no drafter expects, and no tokenizer is needed for."""
    draw = random.Random(context)
    size = max(context, SHORTEST)
    return mx.array([draw.randrange(vocab_size) for _ in range(size)])

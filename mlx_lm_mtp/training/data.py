"""Text for training, read by mlx-lm's own code and cut into batches."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tuner.datasets import load_dataset

from ..rounds import MTPError

HELD_OUT_SHARE = 16  # one row of so many, where the data hold none out
PAD_TO = 32


@dataclass(frozen=True)
class Row:
    """One text; nothing is learnt before token ``start``, the end of its prompt."""

    tokens: list[int]
    start: int = 0


def load_rows(
    data: str, tokenizer: Any, max_length: int, mask_prompt: bool = False
) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows held out, of a folder or a Hugging Face data set.

    Raises:
        MTPError: If the data cannot be read, are empty or longer than ``max_length``.
    """
    options = SimpleNamespace(
        data=data, train=True, test=False, mask_prompt=mask_prompt
    )
    try:
        train, valid, _ = load_dataset(options, tokenizer)
    except IndexError as e:
        raise MTPError(f"a file of {data} is empty: it needs one row a line") from e
    except ImportError as e:
        raise MTPError(
            f"there is no folder {data}, and to read it as a Hugging Face data set "
            "needs the package datasets: pip install datasets"
        ) from e
    except (ValueError, OSError, KeyError) as e:
        reason = " ".join(str(e).split())
        raise MTPError(f"cannot read the data {data}: {reason[:300]}") from e
    train_rows = _tokenized(train, "train", data, max_length)
    valid_rows = _tokenized(valid, "valid", data, max_length)
    if not valid_rows:
        valid_rows = train_rows[::HELD_OUT_SHARE]
        train_rows = [r for i, r in enumerate(train_rows) if i % HELD_OUT_SHARE]
    if not train_rows:
        raise MTPError(f"{data} holds too little text: at least two rows are needed")
    return train_rows, valid_rows


def _tokenized(dataset: Any, part: str, data: str, max_length: int) -> list[Row]:
    rows = []
    for i in range(len(dataset)):
        where = f"row {i + 1} of {part} in {data}"
        try:
            tokens, start = dataset.process(dataset[i])
        except (KeyError, IndexError, TypeError, AttributeError) as e:
            raise MTPError(
                f"{where} is not like the first: {type(e).__name__} {e}"
            ) from e
        if len(tokens) > max_length:
            raise MTPError(
                f"{where} has {len(tokens)} tokens, more than --max-seq-length "
                f"{max_length}: raise it, or split the text"
            )
        # A draft needs a token, the state before it and a law after it.
        if len(tokens) > max(start, 1) + 1:
            rows.append(Row(list(tokens), start))
    return rows


def check_batch(rows: list[Row], batch_size: int) -> None:
    """Refuse a batch that the data cannot fill.

    Raises:
        MTPError: If there are fewer rows than ``batch_size``.
    """
    if len(rows) < batch_size:
        raise MTPError(
            f"the data hold {len(rows)} rows to train on, fewer than --batch-size "
            f"{batch_size}: lower it or add text"
        )


def batch_of(rows: list[Row], batch_size: int, seed: int, step: int) -> list[Row]:
    """The batch of a step; a function of the step alone, so that a resumed run agrees.

    Every row is seen once an epoch, in an order of the epoch's own; a rest that fills
    no batch waits for the next.
    """
    epoch, number = divmod(step, len(rows) // batch_size)
    order = np.random.default_rng([seed, epoch]).permutation(len(rows))
    picked = order[number * batch_size : (number + 1) * batch_size]
    return [rows[i] for i in picked]


def collate(rows: list[Row]) -> tuple[mx.array, mx.array]:
    """Tokens [B, T] int32, and where the target's law is to be learnt [B, T] bool."""
    longest = max(len(row.tokens) for row in rows)
    length = -(-longest // PAD_TO) * PAD_TO
    tokens = np.zeros((len(rows), length), np.int32)
    learnt = np.zeros((len(rows), length), np.bool_)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = row.tokens
        # Row j holds the law of token j + 1.
        learnt[i, max(row.start - 1, 0) : len(row.tokens) - 1] = True
    return mx.array(tokens), mx.array(learnt)


def folder_of(data: str) -> str:
    """A name of the data for people, without the user's folders."""
    return Path(data).name if Path(data).exists() else data

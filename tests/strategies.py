"""Small worlds: laws for every prefix of tokens, with all that can go wrong in them."""

import numpy as np
from hypothesis import strategies as st
from reference import World

WEIGHTS = (0, 0, 1e-6, 0.05, 0.3, 1, 1, 5)
KINDS = ("dense", "sparse", "equal", "disjoint", "truncated", "p one-hot", "q one-hot")
STOPS = ("never", "unsure", "anywhere")


def _normal(rows: np.ndarray) -> np.ndarray:
    """Scale rows to laws; a row without any mass goes to its first token."""
    empty = rows.sum(-1, keepdims=True) == 0
    rows = np.where(empty, np.eye(1, rows.shape[-1]), rows)
    return rows / rows.sum(-1, keepdims=True)


def _one_hot(rng: np.random.Generator, count: int, vocab: int) -> np.ndarray:
    return np.eye(vocab)[rng.integers(vocab, size=count)]


def laws(
    rng: np.random.Generator, kind: str, count: int, vocab: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of laws (p, q) [count, vocab]."""
    some = WEIGHTS[2:] if kind == "dense" else WEIGHTS
    p, q = rng.choice(some, size=(2, count, vocab))
    if kind == "equal":
        q = p
    if kind == "disjoint":
        side = (np.arange(vocab) + rng.integers(vocab, size=(count, 1))) % vocab == 0
        p, q = np.where(side, 1, 0), np.where(side, 0, q)
        q = np.where(q.sum(-1, keepdims=True) > 0, q, ~side)
        if rng.integers(2):
            p, q = q, p
    if kind == "truncated":
        q = np.where(p >= p.max(-1, keepdims=True), p, 0)
    if kind == "p one-hot":
        p = _one_hot(rng, count, vocab)
    if kind == "q one-hot":
        q = _one_hot(rng, count, vocab)
    return _normal(p), _normal(q)


def make_world(seed: int, vocab: int, depth: int, kind: str, stop: str) -> World:
    """One world; "mixed" takes another kind at every depth."""
    rng = np.random.default_rng(seed)
    p, q, stops = [], [], []
    for n in range(depth + 1):
        this = str(rng.choice(KINDS)) if kind == "mixed" else kind
        p_n, q_n = laws(rng, this, vocab**n, vocab)
        p.append(p_n)
        q.append(q_n)
        stops.append(
            {
                "never": np.zeros(vocab**n, bool),
                "unsure": q_n.max(-1) < 0.6,
                "anywhere": rng.random(vocab**n) < 0.3,
            }[stop]
        )
    return World(p, q[:-1], stops[:-1])


def worlds(
    kinds: tuple[str, ...] = (*KINDS, "mixed"), stops: tuple[str, ...] = STOPS
) -> st.SearchStrategy[World]:
    """Worlds of 2 to 4 tokens, 1 to 4 drafts."""
    return st.builds(
        make_world,
        seed=st.integers(0, 2**32 - 1),
        vocab=st.integers(2, 4),
        depth=st.integers(1, 4),
        kind=st.sampled_from(kinds),
        stop=st.sampled_from(stops),
    )

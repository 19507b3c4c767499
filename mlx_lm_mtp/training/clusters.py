"""Sort a vocabulary into clusters of equal size, for a drafter's centroid head."""

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
Order = npt.NDArray[np.int64]


def order_by_cluster(rows: Rows, num_clusters: int) -> Order:
    """A permutation of the vocabulary in which each cluster is a contiguous run.

    Splits the tokens again and again along the direction in which they differ most;
    balanced by construction, and fast for the 262,144 tokens of Gemma 4.

    Args:
        rows: Token embeddings [V, H], float32.
        num_clusters: Divides V.

    Raises:
        ValueError: If it does not.
    """
    if len(rows) % num_clusters:
        raise ValueError(
            f"{num_clusters} clusters do not divide {len(rows)} tokens evenly"
        )
    return _split(rows, np.arange(len(rows)), num_clusters)


def _split(rows: Rows, tokens: Order, num_clusters: int) -> Order:
    if num_clusters == 1:
        return tokens
    left = num_clusters // 2
    border = len(tokens) // num_clusters * left
    part = rows[tokens]
    part = part - part.mean(axis=0)
    direction = np.linalg.eigh(part.T @ part)[1][:, -1]
    ranked = tokens[np.argsort(part @ direction, kind="stable")]
    return np.concatenate(
        [
            _split(rows, ranked[:border], left),
            _split(rows, ranked[border:], num_clusters - left),
        ]
    )

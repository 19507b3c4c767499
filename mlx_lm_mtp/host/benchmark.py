"""``mlx_lm.benchmark``: as ``mlx_lm.chat``, and several sequences together."""

from .patch import Wrap
from .talk import Companion


def wrappers() -> dict[str, Wrap]:
    """What takes the place of each name."""
    companion = Companion()
    return {**companion.wrappers(), "batch_generate": companion.wrap_stream}

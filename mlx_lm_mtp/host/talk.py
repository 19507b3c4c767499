"""``mlx_lm.chat``, which knows no draft models, nor does ``mlx_lm.benchmark``.

Their ``main`` parses, loads one model and calls ``stream_generate``. One ``Companion``
per command brings the drafter along.
"""

from functools import partial
from typing import Any, Optional

from ..stats import MTPStats
from . import flags
from .flags import AssistantPath, Drafting
from .patch import Wrap


def wrappers() -> dict[str, Wrap]:
    """What takes the place of each name."""
    return Companion().wrappers()


class Companion:
    """The drafter of one run of a command."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.path: Optional[AssistantPath] = None
        self.number: Optional[int] = None
        self.drafting: Optional[Drafting] = None
        self.stats = MTPStats()

    def wrappers(self) -> dict[str, Wrap]:
        """What takes the place of each name."""
        return {
            "setup_arg_parser": partial(flags.wrap_parser, then=self._take),
            "load": self.wrap_load,
            "stream_generate": self.wrap_stream,
            "main": self.wrap_main,
        }

    def wrap_main(self, original: Any) -> Any:
        """Begin without a drafter, end with what it did."""

        def main(*args: Any, **kwargs: Any) -> Any:
            self._start()
            result = original(*args, **kwargs)
            if self.drafting is not None:
                print(self.stats.summary())
                flags.tell_unused(self.stats, self.number)
            return result

        return flags.wrap_main(main)

    def _take(self, parsed: Any) -> None:
        self.path, self.number = parsed.draft_model, parsed.num_draft_tokens

    def wrap_load(self, original: Any) -> Any:
        """The drafter after the target."""

        def load(*args: Any, **kwargs: Any) -> Any:
            loaded = original(*args, **kwargs)
            if self.path is not None:
                self.drafting = self.path.load(loaded[0]).having(stats=self.stats)
            return loaded

        return load

    def wrap_stream(self, original: Any) -> Any:
        """The drafter as a draft model."""

        def with_drafter(*args: Any, **kwargs: Any) -> Any:
            if self.drafting is not None:
                kwargs["draft_model"] = self.drafting
                kwargs["num_draft_tokens"] = self.number
            return original(*args, **kwargs)

        return with_drafter

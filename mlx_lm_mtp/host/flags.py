"""The flags that mlx-lm's commands gain, and how what they say travels.

Where mlx-lm has a draft model, its own code loads ``args.draft_model`` and hands the
result on. So the path is marked (``AssistantPath``), and what is handed on is the
drafter with the options that mlx-lm has no argument for (``Drafting``).
"""

import argparse
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Optional

log = logging.getLogger("mlx_lm_mtp")

Then = Callable[[argparse.Namespace], None]


@dataclass(frozen=True)
class Drafting:
    """A drafter and the options of ``mtp_generate_step`` it shall run with."""

    drafter: Any
    options: dict[str, Any] = field(default_factory=dict)

    def having(self, **options: Any) -> "Drafting":
        """The same with further options."""
        return replace(self, options={**self.options, **options})

    def make_cache(self) -> list[Any]:
        """What mlx-lm asks of a draft model: ours reads the target's cache."""
        return []


class AssistantPath(str):
    """What ``--mtp-assistant`` named, with the options given beside it."""

    quantize: Optional[int]
    options: dict[str, Any]

    @classmethod
    def of(
        cls, path: str, quantize: Optional[int] = None, **options: Any
    ) -> "AssistantPath":
        """A path with the bits to quantise to, and options of ``mtp_generate_step``."""
        self = cls(path)
        self.quantize = quantize
        self.options = options
        return self

    @classmethod
    def like(cls, other: Any, path: str) -> "AssistantPath":
        """Another path with the options of this one, if it is an assistant's.

        It is loaded as it is: it may be quantised already.
        """
        options = other.options if isinstance(other, AssistantPath) else {}
        return cls.of(path, **options)

    def load(self, model: Any) -> Drafting:
        """The drafter for a loaded target, with these options.

        Raises:
            MTPError: If it does not fit.
        """
        from ..pair import load_assistant

        drafter = load_assistant(str(self), model, self.quantize)
        return Drafting(drafter, self.options)


def tell_unused(stats: Any, pinned: Optional[int]) -> None:
    """Warn who asked for drafts and got none."""
    if pinned != 0 and not stats.drafted:
        log.warning(stats.unused())


def complain(reason: Any) -> None:
    """Tell a user's mistake: one line, no traceback."""
    print(f"mlx-lm-mtp: error: {reason}", file=sys.stderr)


def refuse(reason: Any) -> NoReturn:
    """End the command over a user's mistake."""
    complain(reason)
    sys.exit(2)


def wrap_main(original: Any) -> Any:
    """A command whose user's mistakes are one line."""

    def main(*args: Any, **kwargs: Any) -> Any:
        from ..rounds import MTPError

        try:
            return original(*args, **kwargs)
        except MTPError as e:
            refuse(e)

    return main


def wrap_parser(original: Any, then: Then = lambda parsed: None) -> Any:
    """A maker of parsers that have our flags; ``then`` as in ``add``."""

    def setup_arg_parser(*args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        add(parser, then)
        return parser

    return setup_arg_parser


def add(parser: argparse.ArgumentParser, then: Then = lambda parsed: None) -> None:
    """Add our flags to a parser of mlx-lm's.

    Args:
        parser: The parser.
        then: Told what was parsed, if an assistant was asked for.
    """
    known = parser._option_string_actions
    if "--mtp-assistant" in known:
        return
    _add_arguments(parser, "--num-draft-tokens" not in known)
    default = parser.get_default("num_draft_tokens")
    parser.set_defaults(num_draft_tokens=None)
    parse, error = parser.parse_known_args, parser.error

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = parse(args, namespace)
        if parsed.mtp_assistant is not None:
            parsed.draft_model = _checked(parsed)
            then(parsed)
        elif parsed.mtp_verification is not None:
            refuse("--mtp-verification needs --mtp-assistant beside it")
        elif parsed.mtp_quantize is not None:
            refuse("--mtp-quantize needs --mtp-assistant beside it")
        elif parsed.num_draft_tokens is None:
            parsed.num_draft_tokens = default
        elif "--draft-model" not in known:
            refuse("--num-draft-tokens needs --mtp-assistant beside it")
        return parsed, rest

    def one_line_error(message: str) -> NoReturn:
        ours = "--num-draft-tokens", "--mtp-"
        asked = any(a.startswith("--mtp-assistant") for a in sys.argv)
        if asked and any(flag in message for flag in ours):
            refuse(message)
        error(message)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    parser.error = one_line_error  # type: ignore[method-assign]


def _add_arguments(parser: argparse.ArgumentParser, number: bool) -> None:
    group = parser.add_argument_group("multi-token prediction (mlx-lm-mtp)")
    group.add_argument(
        "--mtp-assistant",
        metavar="PATH_OR_REPO",
        help="The Gemma 4 assistant (drafter) of this model: the same text, sooner. "
        "'auto' takes the official one of the model's size. "
        "--num-draft-tokens pins the number of drafts (0 drafts nothing).",
    )
    group.add_argument(
        "--mtp-verification",
        choices=("block", "token", "coupled"),
        help="How sampled drafts are verified; all keep the model's law. With "
        "'coupled' a seed gives the text it gives without the assistant. "
        "Default: block.",
    )
    group.add_argument(
        "--mtp-quantize",
        type=int,
        choices=(4, 8),
        metavar="BITS",
        help="Quantise the assistant to 4 or 8 bits on loading, its head too.",
    )
    if number:
        group.add_argument(
            "--num-draft-tokens", type=int, help="Number of drafts per round."
        )


def _checked(parsed: argparse.Namespace) -> AssistantPath:
    """Refuse what cannot work before the target is loaded."""
    from ..hub import AUTO, find_assistant, find_official, hidden_size_of
    from ..rounds import MTPError

    problem = _problem(parsed)
    if problem:
        refuse(problem)
    path = parsed.mtp_assistant
    try:
        if path != AUTO:
            path = str(find_assistant(path))
        elif parsed.model is not None:
            find_official(hidden_size_of(parsed.model))
    except MTPError as e:
        refuse(e)
    options = {}
    if parsed.mtp_verification is not None:
        options["verification"] = parsed.mtp_verification
    return AssistantPath.of(path, parsed.mtp_quantize, **options)


def _problem(parsed: argparse.Namespace) -> Optional[str]:
    import mlx.core as mx

    if getattr(parsed, "draft_model", None) is not None:
        return "--draft-model and --mtp-assistant exclude each other, give one"
    if (parsed.num_draft_tokens or 0) < 0:
        return (
            f"--num-draft-tokens is {parsed.num_draft_tokens}, it must be 0 (plain "
            "decoding) or more"
        )
    if getattr(parsed, "kv_bits", None) is not None:
        return (
            "--kv-bits does not go with --mtp-assistant: mlx-lm cannot quantise the "
            "sliding-window caches of Gemma 4"
        )
    if mx.distributed.init().size() > 1:
        return "--mtp-assistant runs on one machine: start it without mlx.launch"
    return None

"""The flags that mlx-lm's commands gain, and how what they say travels.

mlx-lm's ``main`` loads ``args.draft_model`` and hands the result on as ``draft_model``.
So the path is marked (``AssistantPath``), and what is handed on is the drafter with the
options that mlx-lm has no argument for (``Drafting``).
"""

import argparse
import sys
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Optional


@dataclass(frozen=True)
class Drafting:
    """A drafter and the options of ``mtp_generate_step`` it shall run with."""

    drafter: Any
    options: dict[str, Any] = field(default_factory=dict)

    def having(self, **options: Any) -> "Drafting":
        """The same with further options."""
        return replace(self, options={**self.options, **options})


class AssistantPath(str):
    """What ``--mtp-assistant`` named, with the options given beside it."""

    options: dict[str, Any]

    def drafting(self, drafter: Any) -> Drafting:
        """The loaded drafter with these options."""
        return Drafting(drafter, self.options)


def refuse(reason: Any) -> NoReturn:
    """End the command over a user's mistake: one line, no traceback."""
    print(f"mlx-lm-mtp: error: {reason}", file=sys.stderr)
    sys.exit(2)


def add(parser: argparse.ArgumentParser) -> None:
    """Add our flags to a parser of mlx-lm's that knows draft models."""
    if "--mtp-assistant" in parser._option_string_actions:
        return
    group = parser.add_argument_group("multi-token prediction (mlx-lm-mtp)")
    group.add_argument(
        "--mtp-assistant",
        metavar="PATH_OR_REPO",
        help="The Gemma 4 assistant (drafter) of this model: the same text, sooner. "
        "--num-draft-tokens pins the number of drafts (0 drafts nothing).",
    )
    group.add_argument(
        "--mtp-verification",
        choices=("block", "token", "coupled"),
        help="How sampled drafts are verified; all keep the model's law. With "
        "'coupled' a seed gives the text it gives without the assistant. "
        "Default: block.",
    )
    default = parser.get_default("num_draft_tokens")
    parser.set_defaults(num_draft_tokens=None)
    parse, error = parser.parse_known_args, parser.error

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = parse(args, namespace)
        if parsed.mtp_assistant is not None:
            parsed.draft_model = _checked(parsed)
        elif parsed.mtp_verification is not None:
            refuse("--mtp-verification needs --mtp-assistant beside it")
        elif parsed.num_draft_tokens is None:
            parsed.num_draft_tokens = default
        return parsed, rest

    def one_line_error(message: str) -> NoReturn:
        ours = "--num-draft-tokens", "--mtp-"
        asked = any(a.startswith("--mtp-assistant") for a in sys.argv)
        if asked and any(flag in message for flag in ours):
            refuse(message)
        error(message)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    parser.error = one_line_error  # type: ignore[method-assign]


def _checked(parsed: argparse.Namespace) -> AssistantPath:
    """Refuse what cannot work before the target is loaded."""
    from ..pair import find_assistant
    from ..rounds import MTPError

    problem: Optional[str] = None
    if parsed.draft_model is not None:
        problem = "--draft-model and --mtp-assistant exclude each other, give one"
    elif (parsed.num_draft_tokens or 0) < 0:
        problem = (
            f"--num-draft-tokens is {parsed.num_draft_tokens}, it must be 0 (plain "
            "decoding) or more"
        )
    elif getattr(parsed, "kv_bits", None) is not None:
        problem = (
            "--kv-bits does not go with --mtp-assistant: mlx-lm cannot quantise the "
            "sliding-window caches of Gemma 4"
        )
    if problem:
        refuse(problem)
    try:
        path = AssistantPath(find_assistant(parsed.mtp_assistant))
    except MTPError as e:
        refuse(e)
    path.options = {}
    if parsed.mtp_verification is not None:
        path.options["verification"] = parsed.mtp_verification
    return path

"""``python -m mlx_lm_mtp COMMAND``."""

import argparse
import importlib
import os
import sys

# Each module has add_arguments(parser) and main(args) -> exit status; the first line
# of help is here, because importing MLX for it would take a second.
COMMANDS = {
    "bench": (".bench", "how much faster MTP is here, at every number of drafts"),
    "demo": (".demo", "plain decoding and MTP side by side, on the pair in the box"),
    "doctor": (".doctor", "does a pair work here, how fast, and if not, why"),
    "throughput": (".throughput", "many sequences at once, with MTP and without"),
    "train": (".train", "distil a drafter onto a target"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; a mistake of the user's is one line, not a traceback."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:
        # Whoever read the output has enough. What is left must not fail at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="mlx_lm_mtp", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (home, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if argv[:1] == [name]:
            importlib.import_module(home, __package__).add_arguments(command)
    args = parser.parse_args(argv)
    module = importlib.import_module(COMMANDS[args.command][0], __package__)
    try:
        status = int(module.main(args))
        sys.stdout.flush()
        return status
    except ValueError as e:
        from .rounds import MTPError  # imports MLX

        if not isinstance(e, MTPError):
            raise
        print(f"mlx_lm_mtp {args.command}: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

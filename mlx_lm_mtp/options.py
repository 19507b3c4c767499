"""What the commands ask of their options."""

import argparse
from math import inf

from .rounds import MTPError


def check_least(args: argparse.Namespace, **least: int) -> None:
    """Refuse numbers that are too small; of several, the smallest counts.

    Raises:
        MTPError: Naming the option.
    """
    for name, bound in least.items():
        given = getattr(args, name)
        number = min(given) if isinstance(given, list) else given
        if not bound <= number < inf:  # nor is NaN a number
            flag = "--" + name.replace("_", "-")
            raise MTPError(f"{flag} is {number}, it must be at least {bound}")

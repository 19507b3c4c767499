"""What is kept about models from one generation to the next, while they live."""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Kept = TypeVar("Kept")

_kept: dict[tuple[Any, ...], Any] = {}


def kept(make: Callable[[], Kept], *models: Any) -> Kept:
    """What ``make`` made for these very models the first time.

    It must not refer to them, or they would never be freed.
    """
    key = make, *map(id, models)
    if key not in _kept:
        _kept[key] = make()
        for model in models:
            weakref.finalize(model, _kept.pop, key, None)
    return _kept[key]

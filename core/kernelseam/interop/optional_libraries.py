"""Libraries with which ours is registered: imported at a call of ``register``, and not before."""

from __future__ import annotations

import importlib
import re
from typing import Any

from kernelseam.errors import InvalidValue


def library(name: str, oldest: tuple[int, int], tested: str) -> Any:
    """The library of that name. Raises InvalidValue where it is missing or too old; ``tested``:
    versions, for the remedy."""
    least = ".".join(map(str, oldest))
    remedy = f"pip install '{name}>={least}' (tested with {tested})"
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise InvalidValue(name, None, "is not installed", remedy) from None
    numbers = re.match(r"(\d+)\.(\d+)", found.__version__)
    if numbers is None or tuple(map(int, numbers.groups())) < oldest:
        raise InvalidValue(name, found.__version__, f"must be {least} or later", remedy)
    return found

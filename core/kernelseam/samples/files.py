"""Functions of users in files."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

from kernelseam.errors import InvalidValue


def function_in(option: str, place: str, example: str) -> Callable[..., Any]:
    """The function of a place FILE:NAME. Raises InvalidValue, about the option."""
    file, _, name = place.rpartition(":")
    if not file or not name.isidentifier():
        raise InvalidValue(option, place, "must be FILE:NAME", f"For example {example}")
    try:
        found = runpy.run_path(file)
    except Exception as e:
        rule = f"the file does not run: {type(e).__name__}: {e}"
        raise InvalidValue(option, place, rule, "Correct the file or its path") from e
    if not callable(found.get(name)):
        names = ", ".join(n for n, x in found.items() if callable(x) and not n.startswith("_"))
        rule = f"the file has no function of that name, but {names or 'none'}"
        raise InvalidValue(option, place, rule, "Name one of these")
    function: Callable[..., Any] = found[name]
    return function

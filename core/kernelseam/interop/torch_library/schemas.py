"""Options in torch's schemas, from their records."""

from __future__ import annotations

import json

from kernelseam.descriptors.common.options import options_of
from kernelseam.dtypes import DType

CHOSEN = "str? backend=None, str? implementation=None"
_KINDS = {
    bool: "bool",
    float: "float",
    int: "SymInt",
    str: "str",
    float | None: "float?",
    int | None: "SymInt?",
    str | None: "str?",
    DType | str | None: "ScalarType?",
    tuple[int, int, int] | None: "SymInt[]?",
}
"""Types of options in torch's schemas."""


def schema_of(of: object, *names: str) -> str:
    """Options with the defaults that the record ``of`` has; a window by its sides. They must be
    those of the function that computes: torch leaves out what a call gives as the schema's
    default."""
    known = options_of(type(of))
    said = [
        f"{_KINDS[known[n].type]} {n}={json.dumps(x) if isinstance(x, str) else x}"
        if n != "window"
        else "SymInt? window_left=None, SymInt? window_right=None"
        for n in names
        for x in [getattr(of, n)]
    ]
    return ", ".join(said)

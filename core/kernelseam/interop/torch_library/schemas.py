"""Operands and options in torch's schemas: those by name, these from their records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

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


def tensors_of(*needed: str, optional: Sequence[str] = ()) -> str:
    """Operands of these names, in order."""
    return ", ".join((*(f"Tensor {n}" for n in needed), *(f"Tensor? {n}=None" for n in optional)))


def given_by(names: Sequence[str], tensors: Sequence[Any]) -> dict[str, Any]:
    """An operator's operands by name, as far as they are given."""
    return {n: x for n, x in zip(names, tensors, strict=False) if x is not None}


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

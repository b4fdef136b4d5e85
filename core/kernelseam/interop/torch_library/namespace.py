"""Where the operators are registered, and when: a module of operators is imported where one of them
is called or looked up first, since torch takes as long to register them as all else to import.
"""

from __future__ import annotations

import importlib
from threading import get_ident
from typing import Any

import torch

NAMESPACE = __name__.partition(".")[0]
"""The outermost package's name, "kernelseam": a copy that is loaded under another name has
operators of its own."""
_MODULES = (
    *("attention", "cache", "gemm", "gemm_epilogues", "grouped", "grouped_epilogues"),
    *("grouped_list", "merge", "projection"),
)
_defined_by: dict[str, int] = {}
"""Operator → the thread that defines it."""


def operator_of(name: str) -> Any:
    """The operator of a name, ``torch.ops.kernelseam.name``."""
    return getattr(getattr(torch.ops, NAMESPACE), name)


def defined(name: str) -> None:
    """Say that this thread defines an operator of this name: it imports no module to look it up.
    Another thread does, and so waits until the module that defines it is imported."""
    _defined_by[name] = get_ident()


def _look_up(name: str) -> Any:
    """``__getattr__`` of the module ``torch.ops.kernelseam``."""
    if not name.startswith("__") and _defined_by.get(name) != get_ident():
        for module in _MODULES:
            importlib.import_module(f"{__package__}.{module}")
    # what defined it has looked it up already: rules that torch keeps by operator are of that one
    return vars(_ours).get(name) or type(_ours).__getattr__(_ours, name)


_ours: Any = getattr(torch.ops, NAMESPACE)
_ours.__getattr__ = _look_up

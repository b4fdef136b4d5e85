"""ml_dtypes where it is installed; else its types are refused by name."""

from __future__ import annotations

import importlib
from typing import Any

from kernelseam.errors import InvalidValue


def __getattr__(name: str) -> Any:
    try:
        return getattr(importlib.import_module("ml_dtypes"), name)
    except ModuleNotFoundError as e:
        raise InvalidValue(
            "dtype",
            name,
            "is computed on the host by NumPy with ml_dtypes, which is not installed",
            "pip install ml_dtypes, or pass tensors of a GPU",
        ) from e

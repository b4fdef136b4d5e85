"""Where the operators are registered."""

from __future__ import annotations

from typing import Any

import torch

NAMESPACE = __name__.partition(".")[0]
"""The outermost package's name, "kernelseam": a copy that is loaded under another name has
operators of its own."""


def operator_of(name: str) -> Any:
    """The operator of a name, ``torch.ops.kernelseam.name``."""
    return getattr(getattr(torch.ops, NAMESPACE), name)

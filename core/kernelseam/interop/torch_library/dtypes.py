"""Dtypes by torch's names and by ours. Imports torch."""

from __future__ import annotations

from typing import Any

import torch

from kernelseam.dtypes import DType


def torch_dtype(dtype: Any) -> Any:
    """A dtype by any of its names as torch's own. Raises UnknownName."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    return getattr(torch, DType.of(dtype, "out_dtype").value)


def dtype_name(dtype: Any) -> Any:
    """torch's own dtype by its name; what is none of these as it is."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def accumulator(dtype: Any) -> Any:
    """torch's dtype that products of this one are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32

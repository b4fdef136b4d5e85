"""Dtypes by torch's names and by ours. Imports torch."""

from __future__ import annotations

from typing import Any

import torch

from kernelseam.dtypes import DType


def torch_dtype(dtype: Any, field: str = "out_dtype", fp8: bool = False) -> Any:
    """A floating-point dtype (``fp8``: of 8 bits, too) by any of its names as torch's own. Raises
    UnknownName."""
    return None if dtype is None else getattr(torch, DType.of(dtype, field, fp8=fp8).value)


def dtype_name(dtype: Any) -> Any:
    """torch's own dtype by its name; what is none of these as it is."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def result_dtype(a: Any, out_dtype: Any) -> Any:
    """torch's dtype of a product's result: ``out_dtype`` by any of its names, else what
    ``ops.gemm`` makes of a's. Raises UnknownName."""
    if out_dtype is not None:
        return torch_dtype(out_dtype, fp8=True)
    return torch.float32 if a.itemsize == 1 else a.dtype


def accumulator(dtype: Any) -> Any:
    """torch's dtype that products of this one are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32

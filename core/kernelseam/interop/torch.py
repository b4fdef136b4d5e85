"""torch tensors as views. torch is looked up where the caller has loaded it, and never imported.

Which device a tensor lies on is the caller's to say: the host's runtime passes its own device for CPU tensors,
a plugin passes the one that it found.

``attention`` and ``attention_varlen`` are what torch differentiates; the first use of either imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from kernelseam.contract import ArrayInfo, Device
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue

if TYPE_CHECKING:
    from kernelseam.interop.torch_autograd import attention, attention_varlen

__all__ = ["attention", "attention_varlen", "describe", "empty", "is_tensor", "words"]


def __getattr__(name: str) -> Any:
    if name not in ("attention", "attention_varlen"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kernelseam.interop import torch_autograd

    return getattr(torch_autograd, name)


def is_tensor(array: object) -> bool:
    """Whether it is a torch tensor, on any device."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(array, tensor)


def describe(tensor: Any, device: Device) -> ArrayInfo:
    """The view of a tensor that lies on ``device``.

    Raises UnknownName for its dtype, InvalidValue where it is not dense and where gradients or a lazy negation would
    be lost.
    """
    torch = sys.modules["torch"]
    dtype = _dtype(tensor.dtype)
    if tensor.layout is not torch.strided:
        raise InvalidValue("layout", tensor.layout, "must be torch.strided", "Pass tensor.to_dense()")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidValue(
            "requires_grad", True, "gradients do not flow through this call",
            "Call under torch.no_grad(), or pass tensor.detach() (attention with gradients: kernelseam.interop.torch)",
        )
    if tensor.is_neg():
        raise InvalidValue("is_neg", True, "memory holds other values than the tensor", "Pass tensor.resolve_neg()")
    return ArrayInfo(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), dtype, device, "torch", tensor)


def words(tensor: Any) -> object | None:
    """A tensor of 64-bit integers seen as float64, in the same memory; None for one of other elements."""
    torch = sys.modules["torch"]
    wide = tensor.dtype in (torch.int64, getattr(torch, "uint64", None))
    return tensor.view(torch.float64) if wide else None


def empty(shape: Sequence[int], dtype: DType, device: str) -> object:
    """An uninitialised row-major tensor on a device as torch names it."""
    torch = sys.modules["torch"]
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype.value), device=device)


@cache
def _dtype(dtype: object) -> DType:
    return DType.of(dtype, floating=False)

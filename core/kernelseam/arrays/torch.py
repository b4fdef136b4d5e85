"""torch tensors as views. torch is looked up where the caller has loaded it, and never imported.

Which device a tensor lies on is the caller's to say: the host's runtime passes its own device for
CPU tensors, a plugin passes the one that it found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, cast

from kernelseam.contract import ArrayInfo, Device
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue


def is_tensor(array: object) -> bool:
    """Whether it is a torch tensor, on any device."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(array, tensor)


def describe(tensor: Any, device: Device) -> ArrayInfo:
    """The view of a tensor that lies on ``device``.

    Raises UnknownName for its dtype, InvalidValue where it is not dense or has no memory, and where
    gradients, tangents or a lazy negation would be lost.
    """
    torch = sys.modules["torch"]
    dtype = _dtype(tensor.dtype)
    if tensor.layout is not torch.strided:
        _refuse_nested(tensor)
        raise InvalidValue(
            "layout", tensor.layout, "must be torch.strided", "Pass tensor.to_dense()"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidValue(
            "requires_grad",
            True,
            "gradients do not flow through this call",
            "Call under torch.no_grad(), or pass tensor.detach() (what has gradients: "
            "kernelseam.interop.torch)",
        )
    if tensor.is_neg():
        raise InvalidValue(
            "is_neg", True, "memory holds other values than the tensor", "Pass tensor.resolve_neg()"
        )
    if (
        forward := sys.modules.get("torch.autograd.forward_ad")
    ) is not None and forward._current_level >= 0:
        refuse_tangent("tangent", tensor)
    kind = type(tensor)
    try:
        if kind is not torch.Tensor and issubclass(kind, torch._subclasses.FakeTensor):
            raise RuntimeError("a fake tensor, of which torch warns when its address is asked for")
        pointer, shape, strides = tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
    except RuntimeError:
        _refuse_nested(tensor)
        pointer, shape, strides = 0, (1,), (1,)
    if not pointer and 0 not in shape:
        raise InvalidValue(
            "data_ptr",
            None,
            "has no memory, as tensors have that stand for others (fake ones, those of torch.func)",
            "Pass the tensor that it stands for",
        )
    return ArrayInfo(pointer, shape, strides, dtype, device, "torch", tensor)


def _refuse_nested(tensor: Any) -> None:
    if tensor.is_nested:
        raise InvalidValue(
            "is_nested",
            True,
            "must be one dense tensor",
            "Pack its rows one after the other with offsets (attention_varlen), or pad them "
            "(tensor.to_padded_tensor)",
        )


def refuse_tangent(field: str, tensor: Any) -> None:
    """Raise InvalidValue where forward-mode differentiation has a tangent for the tensor: it would
    be lost."""
    if sys.modules["torch"].autograd.forward_ad.unpack_dual(tensor).tangent is not None:
        raise InvalidValue(
            field,
            "given",
            "forward-mode derivatives do not flow through this call",
            "Pass the primal of torch.autograd.forward_ad.unpack_dual(tensor)",
        )


Reader = Callable[[Iterable[object], list[object]], list[int] | None]


def reader() -> Reader | None:
    """``read(arrays, lies)``: the addresses of tensors; all else of them that shapes a plan is
    appended to a list, to be part of a key.

    None for arrays of which some is no tensor, has no memory, is less than 16-byte aligned, or has
    gradients, a tangent or a lazy negation that a call would lose: ``describe`` says what is to be
    said of those. Where a tensor is contiguous, that stands for its strides: those of other axes
    than of one element follow from the shape, and nothing walks along the rest. There is no reader
    where torch is not loaded.
    """
    torch: Any = sys.modules.get("torch")
    forward: Any = sys.modules.get("torch.autograd.forward_ad")
    if torch is None or forward is None:
        return None
    tensor, parameter, grad_enabled = torch.Tensor, torch.nn.Parameter, torch.is_grad_enabled

    def read(arrays: Iterable[object], lies: list[object]) -> list[int] | None:
        if forward._current_level >= 0:
            return None
        pointers: list[int] = []
        together = 0
        x: Any
        try:
            for x in arrays:
                if (type(x) is not tensor and type(x) is not parameter) or x.is_neg():
                    return None
                if x.requires_grad and grad_enabled():
                    return None
                pointer = x.data_ptr()  # raises for every layout but torch.strided
                if not pointer:
                    return None
                together |= pointer
                pointers.append(pointer)
                lies += (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.device)
        except RuntimeError:
            return None
        return None if together & 15 else pointers

    return read


def maker(shape: tuple[int, ...], dtype: DType, like: Any) -> Callable[[], Any]:
    """``make()``: a tensor as ``empty`` makes it, on the device of the tensor ``like``."""
    torch = sys.modules["torch"]
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(shape[axis], 1)
    return partial(
        torch.empty_strided,
        shape,
        tuple(strides),
        dtype=getattr(torch, dtype.value),
        device=like.device,
    )


def teller() -> Callable[[tuple[Any, ...]], None]:
    """``tell_written`` without what torch puts around it, where this torch takes several tensors
    there."""
    quick: Any = getattr(sys.modules["torch"]._C, "_increment_version", None)
    try:
        quick(())
    except TypeError:
        return tell_written
    return cast(Callable[[tuple[Any, ...]], None], quick)


def tell_written(tensors: Sequence[Any]) -> None:
    """Count a write in the version of each tensor, as torch's own operations in place do."""
    increment = sys.modules["torch"].autograd.graph.increment_version
    for tensor in tensors:
        increment(tensor)


def words(tensor: Any) -> object | None:
    """A tensor of 64-bit integers seen as float64, in the same memory; None for one of other
    elements."""
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

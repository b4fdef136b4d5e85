"""torch tensors as views, using torch where the caller has loaded it, without importing it.

The caller passes the device that a tensor is on: the host's runtime for CPU tensors, a plugin for
its own devices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kernelseam.arrays.guards import compilers_own
from kernelseam.contract import ArrayInfo, Device
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue


def is_tensor(array: object) -> bool:
    """Whether it is a torch tensor, on any device."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(array, tensor)


def describe(tensor: Any, device: Device) -> ArrayInfo:
    """The view of a tensor on ``device``.

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
            "is_neg",
            True,
            "its memory holds the negated values (a lazy negation)",
            "Pass tensor.resolve_neg()",
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
            "has no memory (a fake tensor, or one of torch.func)",
            "Pass the underlying tensor",
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
    """Raise InvalidValue for a dual tensor of forward-mode differentiation: its tangent would be
    lost."""
    if sys.modules["torch"].autograd.forward_ad.unpack_dual(tensor).tangent is not None:
        raise InvalidValue(
            field,
            "given",
            "forward-mode derivatives do not flow through this call",
            "Pass the primal of torch.autograd.forward_ad.unpack_dual(tensor)",
        )


AddressReader = Callable[[Sequence[object]], list[int] | None]


def address_reader() -> AddressReader | None:
    """``addresses(arrays)``: those of tensors. It returns None where an array is no tensor or not
    strided, and while forward-mode derivatives are computed or a dispatch mode is active, which
    guards need not tell. None where torch is not loaded."""
    torch: Any = sys.modules.get("torch")
    forward: Any = sys.modules.get("torch.autograd.forward_ad")
    if torch is None or forward is None:
        return None
    plain, address = frozenset({torch.Tensor, torch.nn.Parameter}), torch.Tensor.data_ptr
    modes = torch._C._len_torch_dispatch_stack

    def addresses(arrays: Sequence[object]) -> list[int] | None:
        if forward._current_level >= 0 or modes():
            return None
        try:  # it raises for every layout but torch.strided
            return list(map(address, arrays)) if plain.issuperset(map(type, arrays)) else None
        except (RuntimeError, TypeError):  # a type that cannot be hashed
            return None

    return addresses


def layouts(tensors: Iterable[Any]) -> tuple[object, ...] | None:
    """Everything of tensors that a plan depends on but their addresses; None where one has
    gradients or a lazy negation that the call would lose: ``describe`` then raises the error.

    A contiguous tensor has True in place of the strides, which follow from the shape (but for axes
    of extent 1, whose strides do not matter).
    """
    grad_enabled = sys.modules["torch"].is_grad_enabled()
    read: list[object] = []
    for x in tensors:
        if x.is_neg() or (x.requires_grad and grad_enabled):
            return None
        read += (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.device)
    return tuple(read)


def allocator(like: Any) -> Callable[..., Any]:
    """``empty(shape, strides, dtype)``: an uninitialised tensor on the device of the tensor
    ``like``."""
    torch: Any = sys.modules["torch"]
    anywhere, device = torch.empty_strided, like.device
    # What torch's compiler calls takes half of the time, and allocates on the current device.
    here: Any = getattr(compilers_own(), f"_empty_strided_{device.type}", None)
    current = getattr(torch._C, f"_{device.type}_getDevice", None)
    index = device.index
    if here is not None and current is None and index is None:
        return cast(Callable[..., Any], here)

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
        if here is not None and current is not None and current() == index:
            return here(shape, strides, dtype)
        return anywhere(shape, strides, dtype=dtype, device=device)

    return empty


def copier(like: Any) -> Callable[[npt.NDArray[np.int64]], Any]:
    """``copied(host)``: a tensor on the device of the tensor ``like``, copied to it on torch's
    current stream, which waits for nothing; the host's array may change at once."""
    torch: Any = sys.modules["torch"]
    from_numpy, device = torch.from_numpy, like.device
    return lambda host: from_numpy(host).to(device, non_blocking=True)


@cache
def version_incrementer() -> Callable[[tuple[Any, ...]], None]:
    """The fastest form of ``increment_versions``: torch's internal function, where it accepts
    several tensors."""
    internal: Any = getattr(sys.modules["torch"]._C, "_increment_version", None)
    try:
        internal(())
    except TypeError:
        return increment_versions
    return cast(Callable[[tuple[Any, ...]], None], internal)


def increment_versions(tensors: Sequence[Any]) -> None:
    """Increment the version counter of each tensor, as torch's in-place operations do."""
    increment = sys.modules["torch"].autograd.graph.increment_version
    for tensor in tensors:
        increment(tensor)


def int64_as_float64(tensor: Any) -> object | None:
    """A view of a 64-bit integer tensor as float64; None for another element type."""
    torch = sys.modules["torch"]
    is_int64 = tensor.dtype in (torch.int64, getattr(torch, "uint64", None))
    return tensor.view(torch.float64) if is_int64 else None


def empty(shape: Sequence[int], dtype: DType, device: str) -> object:
    """An uninitialised row-major tensor on a device as torch names it."""
    torch = sys.modules["torch"]
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype.value), device=device)


@cache
def _dtype(dtype: object) -> DType:
    return DType.of(dtype, floating=False)


def clear(tensors: Sequence[Any]) -> None:
    """Set tensors of one device to 0: several take one launch."""
    if len(tensors) == 1:
        tensors[0].zero_()
    elif tensors:
        sys.modules["torch"]._foreach_zero_(tensors)


def lies_in_default_pool(tensor: Any) -> bool:
    """Whether torch's allocator took a tensor's memory from its own pool, not from one of a graph
    or of the user's; False where it does not say."""
    kind, address = tensor.device.type, tensor.data_ptr()
    if kind == "cpu":
        return True
    try:
        segments = getattr(sys.modules["torch"], kind).memory_snapshot()
    except (AttributeError, RuntimeError):  # of another allocator
        return False
    return any(
        s.get("segment_pool_id") == (0, 0)
        for s in segments
        if 0 <= address - s["address"] < s["total_size"]
    )

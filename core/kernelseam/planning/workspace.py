"""A plan's workspace: allocated here, or the caller's, which is checked."""

from __future__ import annotations

from dataclasses import replace

from kernelseam.arrays import describe
from kernelseam.contract import ArrayInfo, Device, OperandRule, Problem, Runtime
from kernelseam.descriptors.common.protocol import Descriptor, Resolved
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.overlap import proven_overlap


def allocate(size: int, device: Device, runtime: Runtime, like: ArrayInfo | None) -> ArrayInfo:
    """Allocate ``size`` bytes, rounded up to 4, on a device: by the library of the operand ``like``
    where given, so that its allocator knows of streams and graphs."""
    owner = runtime.empty((-(-size // 4),), DType.float32, device, like)
    info = runtime.describe(owner)
    assert info is not None
    return info


def workspace_address(workspace: object, size: int, device: Device) -> int:
    """The address of a caller's workspace: an array of at least ``size`` bytes on the device, or an
    address. Raises InvalidValue otherwise."""
    if isinstance(workspace, int):
        return workspace
    info = describe(workspace, "workspace", device.backend)
    if info.device != device:
        raise InvalidValue(
            "workspace",
            f"an array on {info.device}",
            f"must lie on {device}",
            "Allocate it there",
        )
    extent = info.dtype.itemsize
    for n, s in zip(reversed(info.shape), reversed(info.strides), strict=True):
        if (n > 1 and s * info.dtype.itemsize != extent) or not info.writable:
            raise InvalidValue(
                "workspace",
                f"strides {list(info.strides)}" if info.writable else "a read-only array",
                "must be contiguous and writable",
                "Allocate one, or leave it out",
            )
        extent *= n
    if extent < size:
        raise InvalidValue(
            "workspace",
            f"{extent} bytes",
            f"must have at least {size} bytes",
            "See plan.workspace_bytes",
        )
    return info.pointer


def check_workspace_address(address: int, size: int, alignment: int) -> None:
    """Raise InvalidValue for a workspace that is null or misaligned."""
    if size and (address <= 0 or address % alignment):
        raise InvalidValue(
            "workspace",
            hex(address),
            f"must be the address of memory, a multiple of {alignment} bytes",
            "Align it, or leave it out",
        )


def check_workspace(
    descriptor: Descriptor,
    problem: Problem,
    size: int,
    address: int,
    resolved: Resolved,
    runtime: Runtime | None,
) -> None:
    """Raise InvalidValue where the workspace provably overlaps an operand, or a matrix of an
    address list on the host; given a runtime, also of a list on the device."""
    rule_of_workspace = OperandRule("workspace", DType.boolean, (size,), (1,), 1, True)
    for rule in problem.operands:
        pointer = resolved.pointers.get(rule.name, 0)
        typed = rule if rule.dtype is not None else replace(rule, dtype=DType.float64)
        if pointer and rule.span and proven_overlap(address, rule_of_workspace, pointer, typed):
            raise InvalidValue(
                "workspace", hex(address), f"overlaps {rule.name}", "Give it memory of its own"
            )
    check_lists = getattr(descriptor, "check_beside", None)
    if check_lists is not None:
        try:
            check_lists(resolved, rule_of_workspace, address, runtime)
        except InvalidValue as e:
            raise InvalidValue(
                "workspace",
                hex(address),
                f"overlaps the matrix of {e.field}",
                "Give it memory of its own",
            ) from None

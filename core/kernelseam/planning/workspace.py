"""The memory that a plan's launches use beside their operands: allocated here, or the caller's own,
which is checked."""

from __future__ import annotations

from dataclasses import replace

from kernelseam.arrays import describe
from kernelseam.contract import ArrayInfo, Device, OperandRule, PlanParts, Runtime
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.overlap import proven_overlap
from kernelseam.planning.planned import Planned


def allocate(size: int, device: Device, runtime: Runtime, like: ArrayInfo | None) -> ArrayInfo:
    """``size`` bytes, rounded up to 4, on a device: of the operands' library, given one of them, so
    that its streams and graphs know of it."""
    owner = runtime.empty((-(-size // 4),), DType.float32, device, like)
    info = runtime.describe(owner)
    assert info is not None
    return info


def given_workspace(workspace: object, size: int, device: Device) -> int:
    """The address of a caller's workspace: of an array of ``size`` bytes or more on the device, or
    the address itself. Raises InvalidValue for any other."""
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


def check_workspace_address(address: int, parts: PlanParts) -> None:
    """Refuse a workspace that is null or misaligned."""
    if parts.workspace_bytes and (address <= 0 or address % parts.workspace_alignment):
        raise InvalidValue(
            "workspace",
            hex(address),
            f"must be the address of memory, a multiple of {parts.workspace_alignment} bytes",
            "Align it, or leave it out",
        )


def check_workspace(
    planned: Planned, address: int, resolved: Resolved, runtime: Runtime | None
) -> None:
    """Refuse a workspace that provably shares memory with an operand, or with a matrix of a list
    that the host knows; given a runtime, also of one on the device."""
    own = OperandRule("workspace", DType.boolean, (planned.workspace_bytes,), (1,), 1, True)
    for rule in planned.problem.operands:
        pointer = resolved.pointers.get(rule.name, 0)
        walked = rule if rule.dtype is not None else replace(rule, dtype=DType.float64)
        if pointer and rule.span and proven_overlap(address, own, pointer, walked):
            raise InvalidValue(
                "workspace", hex(address), f"overlaps {rule.name}", "Give it memory of its own"
            )
    beside = getattr(planned.descriptor, "check_beside", None)
    if beside is not None:
        try:
            beside(resolved, own, address, runtime)
        except InvalidValue as e:
            raise InvalidValue(
                "workspace",
                hex(address),
                f"overlaps the matrix of {e.field}",
                "Give it memory of its own",
            ) from None

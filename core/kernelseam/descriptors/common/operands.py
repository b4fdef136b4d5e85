"""Operands as the user gives them (an array, an address, or None), validated and converted to
addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from kernelseam import arrays
from kernelseam.contract import ArrayInfo, Device, OperandRule
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.descriptors.common.validation import AXES, address, check_walk, packed
from kernelseam.dtypes import OPERAND_DTYPES, DType
from kernelseam.errors import InvalidValue

T = TypeVar("T")


def is_address(value: object) -> bool:
    """Whether a value is an address: an integer that is no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def describe(field: str, value: object) -> ArrayInfo:
    """The ArrayInfo of an array; errors name the operand ``field``. An ArrayInfo is returned as it
    is."""
    info = value if isinstance(value, ArrayInfo) else arrays.describe(value, field)
    if any(s < 0 for s in info.strides) and 0 not in info.shape:
        raise InvalidValue(
            field, f"strides {info.strides}", "must not be negative", "Copy the array first"
        )
    return info


def describe_arrays(**operands: object) -> tuple[ArrayInfo, ...]:
    """The ArrayInfo of each array. Raises InvalidValue unless all are on one device."""
    infos = tuple(describe(name, value) for name, value in operands.items())
    for name, info in zip(operands, infos, strict=True):
        if info.device != infos[0].device:
            raise InvalidValue(
                name,
                f"an array on {info.device}",
                f"{next(iter(operands))} is on {infos[0].device}",
                "Move all arrays to one device",
            )
    return infos


def describe_all(operands: Mapping[str, object]) -> dict[str, ArrayInfo]:
    """The ArrayInfo of each operand that is an array, not an address. Raises InvalidValue unless
    all are on one device."""
    given = {n: v for n, v in operands.items() if v is not None and not is_address(v)}
    return dict(zip(given, describe_arrays(**given), strict=True))


def without_arrays(descriptor: T, infos: Mapping[str, ArrayInfo], **fields: object) -> T:
    """A copy of a validated descriptor over the addresses of its arrays, which keeps no memory
    alive; its problem is the same. ``fields``: further fields that were read from the arrays."""
    bare = object.__new__(type(descriptor))
    pointers = {name: info.pointer for name, info in infos.items()}
    vars(bare).update(vars(descriptor), **fields, **pointers, _arrays={})
    return bare


def pointer(field: str, value: object, infos: Mapping[str, ArrayInfo]) -> int | None:
    """An operand's address; None where ``bind`` will give it."""
    if value is None:
        return None
    return infos[field].pointer if field in infos else address(field, value)


def dtype_of(
    field: str,
    given: object,
    infos: Mapping[str, ArrayInfo],
    names: Sequence[str],
    fp8: bool = False,
) -> DType | None:
    """The dtype ``given``, else that of the arrays ``names``; None where there is neither. Raises
    InvalidValue where they differ. ``fp8``: whether it may have 8 bits."""
    dtype = None if given is None else DType.of(given, field, fp8=fp8)
    source = field
    for name in names:
        if name in infos:
            if dtype is None:
                dtype = DType.of(infos[name].dtype, f"{name}.dtype", fp8=fp8)
                source = name
            elif infos[name].dtype is not dtype:
                raise InvalidValue(
                    name,
                    f"an array of {infos[name].dtype}",
                    f"must be {dtype} as {source} is",
                    "Convert the array, or correct the dtype",
                )
    return dtype


def required(field: str, dtype: DType | None, names: str) -> DType:
    """The dtype. Raises InvalidValue for None."""
    if dtype is None:
        raise InvalidValue(
            field,
            None,
            f"must be named where {names} are no arrays",
            f"For example {field}='float16'",
        )
    return dtype


def axes(
    field: str, info: ArrayInfo, labels: str, known: Mapping[str, int], rows: bool = True
) -> tuple[int, ...]:
    """The extents of an array with one axis a label, in the labels' order, agreeing with those
    known.

    ``labels``: for example "B H S_q D". Raises for another rank, for other extents, and, with
    ``rows``, where the last axis is not contiguous.
    """
    names = labels.split()
    if len(info.shape) != len(names) or any(
        known.get(n, s) != s for n, s in zip(names, info.shape, strict=True)
    ):
        wanted = ", ".join(f"{n}={known[n]}" if n in known else n for n in names)
        raise InvalidValue(
            field,
            f"an array of shape {list(info.shape)}",
            f"must be [{wanted}]",
            "Check the order of the axes of all arrays",
        )
    if rows:
        check_rows(field, info)
    return info.shape


def check_rows(field: str, info: ArrayInfo) -> None:
    """Raise InvalidValue for an array whose last axis is not contiguous."""
    if info.shape[-1] > 1 and info.strides[-1] != 1 and 0 not in info.shape:
        raise InvalidValue(
            field,
            f"strides {list(info.strides)}",
            "the last axis must be contiguous (stride 1)",
            "Copy the array into a contiguous one",
        )


def canonical(info: ArrayInfo) -> tuple[int, ...]:
    """An array's strides, with those of a packed array on axes of extent 0 or 1, where strides have
    no meaning."""
    known = [s if n > 1 else None for n, s in zip(info.shape, info.strides, strict=True)]
    return packed(info.shape, known)


def left_out(strides: Mapping[str, Sequence[object]]) -> dict[str, bool]:
    """Operand → whether all its stride fields are None, for operands with a stride field left out.

    ``strides``: operand → its stride fields; of an operand without any the result is True.
    """
    return {
        name: all(s is None for s in given)
        for name, given in strides.items()
        if not given or None in given
    }


def check_array(rule: OperandRule, info: ArrayInfo, packed_strides: bool | None = None) -> None:
    """Raise InvalidValue for an array of another dtype, a read-only output, an array that is
    smaller than the strides reach, and one with other axes where strides were left out."""
    if rule.dtype is not None and info.dtype is not rule.dtype:
        remedy = "Convert the array" + ", or plan for its dtype" * (rule.name not in OPERAND_DTYPES)
        raise InvalidValue(rule.name, f"an array of {info.dtype}", f"must be {rule.dtype}", remedy)
    if rule.written and not info.writable:
        raise InvalidValue(rule.name, "a read-only array", "is written to", "Give a writable array")
    own = (
        0
        if 0 in info.shape
        else 1 + sum((n - 1) * s for n, s in zip(info.shape, info.strides, strict=True))
    )
    dense = bool(packed_strides)
    if dense and rule.span and canonical(info) != packed(info.shape, [None] * len(info.shape)):
        raise InvalidValue(
            rule.name,
            f"an array with strides {list(info.strides)}",
            "must be row-major without gaps where no strides are given",
            "Give the strides, or copy the array",
        )
    if rule.span > own:
        raise InvalidValue(
            rule.name,
            f"an array that spans {own} elements",
            f"the extents and strides walk over {rule.span}",
            "Make them smaller, or give a larger array (or an address, where more memory follows)",
        )
    if packed_strides is None or not rule.span or has_axes(rule, info, dense):
        return
    walked = sorted(
        ((n, s) for n, s in zip(rule.shape, rule.strides, strict=True) if s),
        key=lambda axis: -axis[1],
    )
    extents = [n for n, _ in walked]
    raise InvalidValue(
        rule.name,
        f"an array of shape {list(info.shape)}"
        + ("" if dense else f" with strides {list(info.strides)}"),
        f"must be {extents} where no strides are given"
        if dense
        else f"its axes are not {extents} with strides {[s for _, s in walked]}, those left out "
        "packed",
        "Check the order of the axes, or give all strides",
    )


Walk = list[tuple[int, int]]
"""(extent, stride) of axes, outermost in memory first."""


def _walk(shape: Sequence[int], strides: Sequence[int]) -> Walk:
    """The axes with an extent above 1 and a stride other than 0, outermost in memory first."""
    axes = [(n, s) for n, s in zip(shape, strides, strict=True) if n > 1 and s]
    return sorted(axes, key=lambda axis: -axis[1])


def has_axes(rule: OperandRule, info: ArrayInfo, whole: bool) -> bool:
    """Whether the axes along which an operand is walked are those of an array.

    Axes of extent 1 and those that repeat do not count. One axis of either may be several adjacent
    ones of the other, merged; not several of one be several of the other, so that [2, 3, 4] is
    [6, 4] and [2, 12], but not [3, 2, 4]. Unless ``whole``, where strides were given, they may be,
    the array may be longer along any axis, and one of a single axis holds any walk.
    """
    ours, theirs = _walk(rule.shape, rule.strides), _walk(info.shape, info.strides)
    if not whole and len(theirs) == 1:
        return True
    while ours:
        while theirs and theirs[-1][1] < ours[-1][1] and not whole:
            theirs.pop()  # one place along it
        if not theirs or theirs[-1][1] != ours[-1][1]:
            return False
        left = _merged([*ours], [*theirs], both=not whole) or (
            None if whole else _within(ours, theirs)
        )
        if left is None:
            return False
        ours, theirs = left
    return not (whole and theirs)


def _merged(x: Walk, y: Walk, both: bool) -> tuple[Walk, Walk] | None:
    """Merge the last axes of one walk until they equal the last axis of the other (with ``both``
    its merged last axes). Returns what is left of each; None where they differ."""
    (n, s), (m, _) = x.pop(), y.pop()
    merges = x if n < m else y
    while n != m:
        shorter, extent = (x, n) if n < m else (y, m)
        if not shorter or shorter[-1][1] != extent * s or not (both or shorter is merges):
            return None
        merged = extent * shorter.pop()[0]
        n, m = (merged, m) if shorter is x else (n, merged)
    return x, y


def _within(x: Walk, y: Walk) -> tuple[Walk, Walk] | None:
    """As ``_merged``, where the merged last axes of ``x`` are the beginning of the last axis of
    ``y``."""
    (n, s), (m, _) = x.pop(), y.pop()
    while n < m and x and x[-1][1] == n * s and n * x[-1][0] <= m:
        n *= x.pop()[0]
    return (x, y) if n < m else None


def check_layout(
    rules: Sequence[OperandRule],
    infos: Mapping[str, ArrayInfo],
    packed_strides: Mapping[str, bool],
    stride_fields: Callable[[str], Sequence[str]] | None = None,
) -> None:
    """Validate extents, strides and arrays of all operands together: sizes, outputs that overlap
    themselves, arrays' layouts. ``packed_strides``: the result of ``left_out``. ``stride_fields``:
    an operand's stride fields, outermost first, where they are not batch, head and row."""
    for rule in rules:
        named = [f"stride_{rule.name.lower()}_{axis}" for axis in (*AXES, "column")]
        if stride_fields is not None:
            named = [*stride_fields(rule.name), f"stride_{rule.name}_column"]
            named = [""] * (len(rule.shape) - len(named)) + named
        check_walk(rule, named[: len(rule.shape)])
        if rule.name in infos:
            check_array(rule, infos[rule.name], packed_strides.get(rule.name))


def known_names(rules: Sequence[OperandRule], operands: Mapping[str, object]) -> None:
    """Raise InvalidValue for a name that is no operand of the plan."""
    names = [r.name for r in rules]
    for name in operands:
        if name not in names:
            raise InvalidValue(
                name, "given", "is no operand of this plan", f"Its operands are {', '.join(names)}"
            )


def _laid_out_alike(info: ArrayInfo, other: ArrayInfo) -> bool:
    """Whether two arrays have the same dtype, device and layout, so that checks of one hold for the
    other."""
    return info is other or (
        info.shape == other.shape
        and info.strides == other.strides
        and info.dtype is other.dtype
        and info.writable == other.writable
    )


def resolve(
    rules: Sequence[OperandRule],
    operands: Mapping[str, object],
    planned: Mapping[str, ArrayInfo],
    packed_strides: Mapping[str, bool],
    device: Device,
) -> Resolved:
    """Addresses of the operands. An array in place of one that was planned with must have its shape
    and strides. ``packed_strides``: those of ``left_out``."""
    known_names(rules, operands)
    pointers: dict[str, int] = {}
    infos: list[ArrayInfo] = []
    for rule in rules:
        value = operands.get(rule.name)
        if value is None:
            continue
        if is_address(value):
            pointers[rule.name] = address(rule.name, value)
        else:
            info, before = describe(rule.name, value), planned.get(rule.name)
            if info.device != device:
                raise InvalidValue(
                    rule.name,
                    f"an array on {info.device}",
                    f"the plan is for {device}",
                    "Move it there, or plan for its device",
                )
            if before is None or not _laid_out_alike(info, before):
                check_array(rule, info, packed_strides.get(rule.name))
                if before is not None:
                    _check_same_walk(rule.name, info, before)
            pointers[rule.name] = info.pointer
            infos.append(info)
        size = 8 if rule.dtype is None else rule.dtype.itemsize
        if pointers[rule.name] + rule.span * size > 2**64:
            raise InvalidValue(
                rule.name,
                hex(pointers[rule.name]),
                f"a walk over {rule.span} elements leaves the 64-bit addresses",
                "Pass the memory's address",
            )
    return Resolved(pointers, tuple(operands.values()), tuple(infos))


def _check_same_walk(name: str, info: ArrayInfo, before: ArrayInfo) -> None:
    if info.shape != before.shape or canonical(info) != canonical(before):
        raise InvalidValue(
            name,
            f"an array of shape {list(info.shape)} with strides {list(info.strides)}",
            f"the plan is for shape {list(before.shape)} with strides {list(before.strides)}",
            "Plan again with this array, or give its address",
        )

"""Numbers in memory that an operation relies on: lengths, offsets, tables and indices, which point
into memory, and scales; copied to the host and refused by the entry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kernelseam.contract import ArrayInfo, Device, OperandRule, Runtime, host_copy
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]


def read_numbers(
    rules: Iterable[OperandRule],
    names: Sequence[str],
    resolved: Resolved,
    runtime: Runtime,
    device: Device,
) -> dict[str, Numbers]:
    """The operands of these names that have elements and are bound."""
    read: dict[str, Numbers] = {}
    for r in rules:
        if r.name in names and r.span and (address := resolved.pointers.get(r.name)):
            info = ArrayInfo(address, r.shape, r.strides, r.dtype or DType.int32, device, "", None)
            read[r.name] = host_copy(info, runtime)
    return read


def read_integers(*operands: Any) -> dict[str, Ints]:
    """``read_numbers``, as int64."""
    return {name: x.astype(np.int64) for name, x in read_numbers(*operands).items()}


def refuse(name: str, index: Sequence[int], value: float, rule: str, remedy: str) -> NoReturn:
    """Raise InvalidValue for an entry."""
    raise InvalidValue(f"{name}[{', '.join(map(str, index))}]", value, rule, remedy)


def first_of(bad: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    """The index of the first that is True."""
    return tuple(int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))


def refuse_any(name: str, x: Numbers, bad: npt.NDArray[np.bool_], rule: str, remedy: str) -> None:
    """Raise InvalidValue for the first bad entry, if there is one."""
    if bad.any():
        index = first_of(bad)
        refuse(name, index, x[index].item(), rule, remedy)


def check_rising(name: str, x: Ints) -> None:
    """Raise InvalidValue for offsets that begin below 0 or decrease."""
    if x[0] < 0:
        refuse(name, (0,), int(x[0]), "must not be negative", "Offsets start at 0")
    steps = np.diff(x)
    if (steps < 0).any():
        i = int((steps < 0).argmax()) + 1
        rule = f"must not be below its predecessor, {x[i - 1]}"
        refuse(name, (i,), int(x[i]), rule, "Offsets never decrease")

"""Lists of addresses: host sequences of arrays or addresses, and device arrays of 64-bit
integers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.arrays import torch as torch_arrays
from kernelseam.contract import ArrayInfo, Device, OperandRule, Runtime
from kernelseam.descriptors.common.operands import check_rows, describe, is_address
from kernelseam.descriptors.common.validation import address
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue, shown
from kernelseam.overlap import proven_overlap

Addresses = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
_SOLVED = 256  # pairs of interleaved matrices, at some microseconds each


class Words:
    """A device's array of 64-bit integers, seen as float64.

    The contract's arrays hold floating point only; this names eight bytes an entry by the one type
    of that size. The bits are moved, never computed with.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.owner.__cuda_array_interface__, "typestr": "<f8"}


@dataclass(frozen=True)
class Matrix:
    """What every matrix of one list is, and how many there are."""

    rows: int
    columns: int
    row_stride: int | None
    """None where the arrays are to tell."""
    dtype: DType | None
    """None where the arrays are to tell."""
    entries: int = 1
    counted: str = ""
    """The fields that ``entries`` is the product of."""
    written: bool = False
    ragged: bool = False
    """Whether a matrix may have fewer rows: those that there are is told in device memory."""
    vector: bool = False
    """Whether it is one row, whose arrays may have one axis alone."""
    may_be: str = ""
    """A written list of which each entry may be that of this one, where they are walked alike."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        assert self.dtype is not None
        return self.dtype.itemsize

    @property
    def span(self) -> int:
        """Bytes from the first element to one past the last."""
        return self.rule().span * self.itemsize

    def rule(self, name: str = "") -> OperandRule:
        """One matrix as it lies in memory."""
        assert self.row_stride is not None
        return OperandRule(
            name, self.dtype, (self.rows, self.columns), (self.row_stride, 1), 1, self.written
        )

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of that shape is such a matrix."""
        whole = shape == (self.rows, self.columns)
        return whole or (
            self.ragged and len(shape) == 2 and shape[0] <= self.rows and shape[1] == self.columns
        )


@dataclass(frozen=True)
class AddressList:
    """A list as it was given: its addresses if the host knows them, else the array on the
    device."""

    source: object
    """What was given; of a list on the device, its words seen as floating point."""
    addresses: Addresses | None
    words: ArrayInfo | None = None
    matrix: ArrayInfo | None = None
    """The first array in a host list of arrays."""
    row_stride: int | None = None
    """Of the arrays in the list; None where there are none of two rows or more."""
    rows: Ints | None = None
    """By entry those of its array, where matrices may have fewer than all; an address is taken to
    have all."""

    @property
    def device(self) -> Device | None:
        """Where the list's memory is, as far as arrays tell."""
        info = self.words or self.matrix
        return info.device if info else None

    @property
    def entries(self) -> int:
        """Its length."""
        if self.addresses is not None:
            return len(self.addresses)
        return math.prod(self.words.shape) if self.words else 0


def read_list(name: str, value: object, matrix: Matrix) -> AddressList:
    """Read a list, holding the arrays in it to one shape, dtype, row stride and device."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        value = value.tolist()
    if isinstance(value, list | tuple):
        return _host_list(name, value, matrix)
    source = _words(value)
    if source is None:
        raise InvalidValue(
            name,
            shown(value),
            "must be a list or tuple of arrays or addresses, or an array of 64-bit integers",
            "Pass list(…), or a one-dimensional array of int64 or uint64",
        )
    words = describe(name, source)
    if len(words.shape) != 1 or (words.shape[0] > 1 and words.strides[0] != 1):
        raise InvalidValue(
            name,
            f"an array of shape {list(words.shape)} with strides {list(words.strides)}",
            "a list of addresses has one contiguous axis",
            "Flatten it, batch-major",
        )
    return AddressList(source, None, words)


def _words(value: object) -> object | None:
    """An array of 64-bit integers in device memory seen as float64, or None for anything else."""
    if torch_arrays.is_tensor(value):
        return torch_arrays.words(value)
    interface = getattr(value, "__cuda_array_interface__", None)
    wide = isinstance(interface, Mapping) and interface.get("typestr") in ("<i8", "<u8")
    return Words(value) if wide else None


def _host_list(name: str, values: Sequence[object], want: Matrix) -> AddressList:
    addresses = np.zeros(len(values), np.uint64)
    rows = np.full(len(values), want.rows) if want.ragged else None
    first: ArrayInfo | None = None
    place, dtype, row_stride = "", want.dtype, want.row_stride
    for i, value in enumerate(values):
        item = f"{name}[{i}]"
        if is_address(value):
            addresses[i] = address(item, value)
            continue
        info = given = describe(item, value)
        if want.vector and len(info.shape) == 1:
            info = replace(info, shape=(1, *info.shape), strides=(0, *info.strides))
        if not want.takes(info.shape):
            most = "" if want.vector else "at most " * want.ragged + f"{want.rows}, "
            raise InvalidValue(
                item,
                f"an array of shape {list(given.shape)}",
                f"must be [{most}{want.columns}]",
                "One matrix an entry, as it lies in memory",
            )
        check_rows(item, given)
        if first is None:
            first, place = info, item
        if info.device != first.device:
            raise InvalidValue(
                item,
                f"an array on {info.device}",
                f"{place} is on {first.device}",
                "Move all arrays to one device",
            )
        if dtype is None:
            dtype = info.dtype
        if info.dtype is not dtype:
            raise InvalidValue(
                item,
                f"an array of {info.dtype}",
                f"must be {dtype} as all of a call are",
                "Convert it, or call once a dtype",
            )
        if info.shape[0] > 1 and want.columns:
            if row_stride is None:
                row_stride = info.strides[0]
            if info.strides[0] != row_stride:
                raise InvalidValue(
                    item,
                    f"row stride {info.strides[0]}",
                    f"must be {row_stride} as all of a call are",
                    "Copy it, or call once a row stride",
                )
        if want.written and not info.writable:
            raise InvalidValue(item, "a read-only array", "is written to", "Give a writable array")
        addresses[i] = info.pointer
        if rows is not None:
            rows[i] = info.shape[0]
    return AddressList(values, addresses, matrix=first, row_stride=row_stride, rows=rows)


def check_entries(
    lists: Mapping[str, Addresses], matrices: Mapping[str, Matrix], alignment: Mapping[str, int]
) -> None:
    """Refuse null, misaligned and far addresses, and written matrices that provably share memory
    with others, but with their own entry of a list that may be theirs."""
    for name, found in lists.items():
        m = matrices[name]
        span = m.span
        for bad, text, rule, remedy in (
            (
                found == 0,
                "null",
                "must be the address of a matrix",
                "Leave the entry out, or give it memory",
            ),
            (
                found % np.uint64(alignment[name]) != 0,
                "",
                f"must be a multiple of {alignment[name]} bytes",
                "Align the matrix"
                + f", or plan with alignment={m.itemsize}" * (alignment[name] > m.itemsize),
            ),
            (
                found > np.uint64(2**64 - span),
                "",
                f"a walk over {span} bytes leaves the 64-bit addresses",
                "Pass the memory's address",
            ),
        ):
            if bad.any():
                i = int(bad.argmax())
                raise InvalidValue(f"{name}[{i}]", text or hex(found[i]), rule, remedy)
    for output, written in lists.items():
        if not matrices[output].written:
            continue
        _check_outputs(output, written, matrices[output])
        for name, found in lists.items():
            # How many rows a ragged one has is not known here, nor then what it shares.
            if not matrices[name].written and not matrices[name].ragged:
                _check_against(name, found, matrices[name], output, written, matrices[output])


def _check_outputs(name: str, found: Addresses, m: Matrix) -> None:
    """Neighbours in memory must not share an element.

    At distance d they do where d = r·row_stride + c with 0 ≤ r < rows and |c| < columns.
    """
    assert m.row_stride is not None
    order = np.argsort(found, kind="stable")
    gaps = np.diff(found[order])
    size, step = np.uint64(m.itemsize), np.uint64(max(m.row_stride * m.itemsize, 1))
    rows, width = np.uint64(m.rows), np.uint64(m.columns) * size
    row, column = gaps // step, gaps % step
    shared = (row < rows) & (column < width) | (row + np.uint64(1) < rows) & (step - column < width)
    if m.rows == 1:
        shared = gaps < width
    if shared.any():
        place = int(shared.argmax())
        j, i = sorted((int(order[place]), int(order[place + 1])))
        how = "equals" if found[i] == found[j] else "overlaps the matrix of"
        raise InvalidValue(
            f"{name}[{i}]",
            hex(found[i]),
            f"{how} {name}[{j}]",
            "Give every output memory of its own",
        )


def _check_against(
    name: str, inputs: Addresses, read: Matrix, output: str, outputs: Addresses, written: Matrix
) -> None:
    """No written matrix may be an input, nor share an element with the nearest input on either side
    of it.

    Of matrices whose rows interleave only so many are solved for: what is refused is proven.
    """
    kept = np.arange(len(inputs))
    if read.may_be == output and read.rule().walks_as(written.rule()):
        # the others are outputs, which were held against each other
        kept = np.flatnonzero(outputs != inputs)
        inputs = inputs[kept]
    if not inputs.size:
        return
    same, where, other = np.intersect1d(outputs, inputs, return_indices=True)
    if same.size:
        raise InvalidValue(
            f"{output}[{where[0]}]",
            hex(same[0]),
            f"is also {name}[{kept[other[0]]}]",
            "Give the output memory of its own",
        )
    order = np.argsort(inputs, kind="stable")
    after = np.searchsorted(inputs[order], outputs)
    for near in (order[np.maximum(after, 1) - 1], order[np.minimum(after, len(order) - 1)]):
        first, last = np.minimum(outputs, inputs[near]), np.maximum(outputs, inputs[near])
        reach = np.where(outputs < inputs[near], np.uint64(written.span), np.uint64(read.span))
        for i in np.flatnonzero(last - first < reach)[:_SOLVED]:
            j = int(near[i])
            if proven_overlap(int(outputs[i]), written.rule(), int(inputs[j]), read.rule()):
                raise InvalidValue(
                    f"{output}[{i}]",
                    hex(outputs[i]),
                    f"overlaps the matrix of {name}[{kept[j]}]",
                    "Give the output memory of its own",
                )


def check_beside(
    lists: Mapping[str, Addresses],
    matrices: Mapping[str, Matrix],
    pointers: Mapping[str, int],
    rules: Sequence[OperandRule],
) -> None:
    """Refuse matrices that provably share memory with a strided operand of the same call, where one
    of them is written. Of those near it only so many are solved for."""
    for rule in rules:
        start = pointers.get(rule.name, 0)
        if rule.dtype is None or not rule.span or not start:
            continue
        end = start + rule.span * rule.dtype.itemsize
        for name, found in lists.items():
            m = matrices[name]
            if not (rule.written or m.written) or m.ragged:
                continue
            near = (found < np.uint64(min(end, 2**64 - 1))) & (
                found + np.uint64(m.span) > np.uint64(start)
            )
            for i in np.flatnonzero(near)[:_SOLVED]:
                if proven_overlap(int(found[i]), m.rule(), start, rule):
                    raise InvalidValue(
                        f"{name}[{i}]",
                        hex(found[i]),
                        f"overlaps {rule.name}",
                        "Give the output memory of its own",
                    )


def spacing(found: Addresses, itemsize: int) -> int | None:
    """The elements from each address to the next where they are evenly spaced, never backwards;
    else None.

    A list of one entry has the spacing 0.
    """
    if len(found) < 2:
        return 0
    step = int(found[1]) - int(found[0])
    even = step >= 0 and step % itemsize == 0 and bool((np.diff(found) == np.uint64(step)).all())
    return step // itemsize if even else None


def stage(found: Addresses, runtime: Runtime, device: Device) -> tuple[object, int]:
    """The addresses in device memory: the array that holds them, and where it is."""
    held = runtime.from_host(found.view(np.float64), device)
    info = runtime.describe(held)
    if info is None:
        raise TypeError(f"the runtime of {device} does not describe its own arrays")
    return held, info.pointer


def fetch(source: object, runtime: Runtime) -> Addresses:
    """A host copy of a list in device memory; synchronises."""
    return np.ascontiguousarray(runtime.to_host(source)).view(np.uint64).reshape(-1)

"""Lists of addresses: host sequences of arrays or addresses, and device arrays of 64-bit
integers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.arrays import torch as torch_arrays
from kernelseam.capture import refuse_capture
from kernelseam.contract import ArrayInfo, Device, OperandRule, Runtime
from kernelseam.descriptors.common.operands import check_rows, describe, is_address
from kernelseam.descriptors.common.validation import address
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue, format_value
from kernelseam.frozen import dataclass
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
    """The shape and layout of every matrix of one list, and their number."""

    rows: int
    columns: int
    row_stride: int | None
    """None: that of the arrays."""
    dtype: DType | None
    """None: that of the arrays."""
    entries: int = 1
    counted: str = ""
    """The fields that ``entries`` is the product of."""
    written: bool = False
    ragged: bool = False
    """Whether a matrix may have fewer rows; their number is in device memory."""
    vector: bool = False
    """Whether it is one row, whose arrays may have one axis alone."""
    may_alias: str = ""
    """A written list of which each entry may be that of this one, where they are walked alike."""

    @property
    def itemsize(self) -> int:
        assert self.dtype is not None
        return self.dtype.itemsize

    @property
    def span(self) -> int:
        """Bytes from the first element to one past the last."""
        return self.rule().span * self.itemsize

    def rule(self, name: str = "") -> OperandRule:
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
    """A list as given: the addresses of a host list, else the array on the device."""

    source: object
    """The given value; of a list on the device, its words as float64."""
    addresses: Addresses | None
    words: ArrayInfo | None = None
    matrix: ArrayInfo | None = None
    """The first array in a host list of arrays."""
    row_stride: int | None = None
    """Row stride of the arrays; None where none has two rows or more."""
    rows: Ints | None = None
    """Rows of each entry's array, where matrices may have fewer than all; an address counts as
    having all."""

    @property
    def device(self) -> Device | None:
        """The device of the list's arrays; None for addresses alone."""
        info = self.words or self.matrix
        return info.device if info else None

    @property
    def entries(self) -> int:
        if self.addresses is not None:
            return len(self.addresses)
        return math.prod(self.words.shape) if self.words else 0


def read_list(name: str, value: object, matrix: Matrix) -> AddressList:
    """Read a list. Its arrays must have one shape, dtype, row stride and device."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        value = value.tolist()
    if isinstance(value, list | tuple):
        return _host_list(name, value, matrix)
    source = _words(value)
    if source is None:
        raise InvalidValue(
            name,
            format_value(value),
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
        return torch_arrays.int64_as_float64(value)
    interface = getattr(value, "__cuda_array_interface__", None)
    wide = isinstance(interface, Mapping) and interface.get("typestr") in ("<i8", "<u8")
    return Words(value) if wide else None


def _host_list(name: str, values: Sequence[object], matrix: Matrix) -> AddressList:
    addresses = np.zeros(len(values), np.uint64)
    rows = np.full(len(values), matrix.rows) if matrix.ragged else None
    first: ArrayInfo | None = None
    place, dtype, row_stride = "", matrix.dtype, matrix.row_stride
    for i, value in enumerate(values):
        item = f"{name}[{i}]"
        if is_address(value):
            addresses[i] = address(item, value)
            continue
        info = given = describe(item, value)
        if matrix.vector and len(info.shape) == 1:
            info = replace(info, shape=(1, *info.shape), strides=(0, *info.strides))
        if not matrix.takes(info.shape):
            most = "" if matrix.vector else "at most " * matrix.ragged + f"{matrix.rows}, "
            raise InvalidValue(
                item,
                f"an array of shape {list(given.shape)}",
                f"must be [{most}{matrix.columns}]",
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
        if info.shape[0] > 1 and matrix.columns:
            if row_stride is None:
                row_stride = info.strides[0]
            if info.strides[0] != row_stride:
                raise InvalidValue(
                    item,
                    f"row stride {info.strides[0]}",
                    f"must be {row_stride} as all of a call are",
                    "Copy it, or call once a row stride",
                )
        if matrix.written and not info.writable:
            raise InvalidValue(item, "a read-only array", "is written to", "Give a writable array")
        addresses[i] = info.pointer
        if rows is not None:
            rows[i] = info.shape[0]
    return AddressList(values, addresses, matrix=first, row_stride=row_stride, rows=rows)


def check_entries(
    lists: Mapping[str, Addresses], matrices: Mapping[str, Matrix], alignment: Mapping[str, int]
) -> None:
    """Refuse null, misaligned and far addresses, and written matrices that provably share memory
    with others, except with the same entry of a list that ``may_be`` allows."""
    for name, addresses in lists.items():
        m = matrices[name]
        span = m.span
        for bad, text, rule, remedy in (
            (
                addresses == 0,
                "null",
                "must be the address of a matrix",
                "Leave the entry out, or give it memory",
            ),
            (
                addresses % np.uint64(alignment[name]) != 0,
                "",
                f"must be a multiple of {alignment[name]} bytes",
                "Align the matrix"
                + f", or plan with alignment={m.itemsize}" * (alignment[name] > m.itemsize),
            ),
            (
                addresses > np.uint64(2**64 - span),
                "",
                f"a walk over {span} bytes leaves the 64-bit addresses",
                "Pass the memory's address",
            ),
        ):
            if bad.any():
                i = int(bad.argmax())
                raise InvalidValue(f"{name}[{i}]", text or hex(addresses[i]), rule, remedy)
    for output, written in lists.items():
        if not matrices[output].written:
            continue
        _check_outputs(output, written, matrices[output])
        for name, addresses in lists.items():
            # The rows of a ragged matrix are not known here.
            if not matrices[name].written and not matrices[name].ragged:
                _check_against(name, addresses, matrices[name], output, written, matrices[output])


def _check_outputs(name: str, addresses: Addresses, m: Matrix) -> None:
    """Neighbours in memory must not share an element.

    At distance d they do where d = r·row_stride + c with 0 ≤ r < rows and |c| < columns.
    """
    assert m.row_stride is not None
    order = np.argsort(addresses, kind="stable")
    gaps = np.diff(addresses[order])
    size, step = np.uint64(m.itemsize), np.uint64(max(m.row_stride * m.itemsize, 1))
    rows, width = np.uint64(m.rows), np.uint64(m.columns) * size
    row, column = gaps // step, gaps % step
    shared = (row < rows) & (column < width) | (row + np.uint64(1) < rows) & (step - column < width)
    if m.rows == 1:
        shared = gaps < width
    if shared.any():
        place = int(shared.argmax())
        j, i = sorted((int(order[place]), int(order[place + 1])))
        how = "equals" if addresses[i] == addresses[j] else "overlaps the matrix of"
        raise InvalidValue(
            f"{name}[{i}]",
            hex(addresses[i]),
            f"{how} {name}[{j}]",
            "Give every output memory of its own",
        )


def _check_against(
    name: str, inputs: Addresses, read: Matrix, output: str, outputs: Addresses, written: Matrix
) -> None:
    """No written matrix may be an input, nor share an element with the nearest input on either side
    of it.

    Matrices whose rows interleave are compared up to ``_SOLVED`` pairs: each refusal is proven.
    """
    kept = np.arange(len(inputs))
    if read.may_alias == output and read.rule().same_layout_as(written.rule()):
        # the others are outputs, which were compared with each other
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
    of them is written. At most ``_SOLVED`` matrices near it are compared."""
    for rule in rules:
        start = pointers.get(rule.name, 0)
        if rule.dtype is None or not rule.span or not start:
            continue
        end = start + rule.span * rule.dtype.itemsize
        for name, addresses in lists.items():
            m = matrices[name]
            if not (rule.written or m.written) or m.ragged:
                continue
            near = (addresses < np.uint64(min(end, 2**64 - 1))) & (
                addresses + np.uint64(m.span) > np.uint64(start)
            )
            for i in np.flatnonzero(near)[:_SOLVED]:
                if proven_overlap(int(addresses[i]), m.rule(), start, rule):
                    raise InvalidValue(
                        f"{name}[{i}]",
                        hex(addresses[i]),
                        f"overlaps {rule.name}",
                        "Give the output memory of its own",
                    )


def spacing(addresses: Addresses, itemsize: int) -> int | None:
    """The elements between consecutive addresses where they are evenly spaced and ascending; else
    None.

    A list of one entry has the spacing 0.
    """
    if len(addresses) < 2:
        return 0
    step = int(addresses[1]) - int(addresses[0])
    even = (
        step >= 0 and step % itemsize == 0 and bool((np.diff(addresses) == np.uint64(step)).all())
    )
    return step // itemsize if even else None


def stage(addresses: Addresses, runtime: Runtime, device: Device) -> tuple[object, int]:
    """The addresses copied to device memory: the array and its address."""
    refuse_capture(
        runtime,
        device,
        "lists of addresses are copied to the device first, which synchronises",
        "Bind before the capture, over lists in device memory where they change",
    )
    array = runtime.from_host(addresses.view(np.float64), device)
    info = runtime.describe(array)
    if info is None:
        raise TypeError(f"the runtime of {device} does not describe its own arrays")
    return array, info.pointer


def fetch(source: object, runtime: Runtime) -> Addresses:
    """A host copy of a list in device memory; synchronises."""
    return np.ascontiguousarray(runtime.to_host(source)).view(np.uint64).reshape(-1)

"""Lists of matrices of shapes of their own: reading them, and what is checked of their
addresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kernelseam.contract import ArrayInfo, Device, OperandRule
from kernelseam.descriptors.common.address_lists import Addresses, AddressList, Matrix, read_list
from kernelseam.descriptors.common.operands import check_rows, describe, is_address
from kernelseam.descriptors.common.validation import address
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass
from kernelseam.overlap import proven_overlap

_SOLVED = 4096
"""Pairs of matrices whose extents in memory meet, at some microseconds each."""


@dataclass(frozen=True)
class MatrixList:
    """A list as given: on the host the address of each matrix, else an array on the device."""

    source: object
    addresses: Addresses | None
    rows: tuple[int | None, ...]
    """Row strides of the entries that are arrays of two rows or more."""
    matrix: ArrayInfo | None = None
    """The first array."""
    words: ArrayInfo | None = None
    """The array of addresses on the device."""

    @property
    def device(self) -> Device | None:
        """Of its arrays; None for addresses alone."""
        info = self.words or self.matrix
        return info.device if info else None


def read_matrices(
    name: str, value: object, shapes: Sequence[tuple[int, int]], written: bool = False
) -> MatrixList:
    """Read a list whose entry g is a matrix of ``shapes[g]``. Its arrays must have one dtype and
    one device."""
    count = len(shapes)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        value = value.tolist()
    if not isinstance(value, list | tuple):
        on_device: AddressList = read_list(name, value, Matrix(0, 0, 0, None))
        _check_count(name, on_device.entries, count)
        return MatrixList(on_device.source, None, (None,) * count, words=on_device.words)
    _check_count(name, len(value), count)
    addresses = np.zeros(count, np.uint64)
    rows: list[int | None] = [None] * count
    first: ArrayInfo | None = None
    place = ""
    for g, (entry, shape) in enumerate(zip(value, shapes, strict=True)):
        item = f"{name}[{g}]"
        if is_address(entry):
            addresses[g] = address(item, entry)
            continue
        info = describe(item, entry)
        if info.shape != shape:
            raise InvalidValue(
                item,
                f"an array of shape {list(info.shape)}",
                f"must be {list(shape)}",
                "One matrix a group, as it lies in memory",
            )
        check_rows(item, info)
        if written and not info.writable:
            raise InvalidValue(item, "a read-only array", "is written to", "Give a writable array")
        if first is None:
            first, place = info, item
        if info.device != first.device or info.dtype is not first.dtype:
            is_elsewhere = info.device != first.device
            raise InvalidValue(
                item,
                f"an array {f'on {info.device}' if is_elsewhere else f'of {info.dtype}'}",
                f"{place} is {f'on {first.device}' if is_elsewhere else f'of {first.dtype}'}",
                "Give all of a list on one device and of one dtype",
            )
        if info.shape[0] > 1:
            rows[g] = info.strides[0]
        addresses[g] = info.pointer
    return MatrixList(value, addresses, tuple(rows), first)


def _check_count(name: str, given: int, wanted: int) -> None:
    if given != wanted:
        raise InvalidValue(
            name,
            f"{given} entries",
            f"must have one for each of the {wanted} groups",
            "Give as many matrices as sizes",
        )


def aligned(
    addresses: Addresses | None, rules: Sequence[OperandRule], promise: int | None, width: int
) -> bool:
    """Whether all rows of all matrices begin at multiples of ``width`` bytes: by the addresses that
    the host can read, or by the promise where there is one."""
    if promise is None and addresses is None:
        return False
    for g, rule in enumerate(rules):
        if not rule.span or rule.dtype is None:
            continue
        if rule.shape[0] > 1 and rule.strides[0] * rule.dtype.itemsize % width:
            return False
        if promise is None and addresses is not None and int(addresses[g]) % width:
            return False
    return promise is None or promise % width == 0


def check_matrices(
    lists: Mapping[str, Addresses],
    rules: Mapping[str, Sequence[OperandRule]],
    alignment: Mapping[str, int],
) -> None:
    """Refuse null, misaligned and far addresses, and written matrices that provably share memory
    with another. Entries without elements are not looked at."""
    spans: list[_Span] = []
    for name, addresses in lists.items():
        for g, (at, rule) in enumerate(zip(addresses.tolist(), rules[name], strict=True)):
            if not rule.span or rule.dtype is None:
                continue
            item, size = f"{name}[{g}]", rule.span * rule.dtype.itemsize
            if at == 0:
                raise InvalidValue(
                    item, "null", "must be the address of a matrix", "Give it memory"
                )
            if at % alignment[name]:
                remedy = "Align the matrix"
                if alignment[name] > rule.dtype.itemsize:
                    remedy += f", or plan with alignment={rule.dtype.itemsize}"
                raise InvalidValue(
                    item, hex(at), f"must be a multiple of {alignment[name]} bytes", remedy
                )
            if at > 2**64 - size:
                raise InvalidValue(
                    item,
                    hex(at),
                    f"a walk over {size} bytes leaves the 64-bit addresses",
                    "Pass the memory's address",
                )
            spans.append(_Span(at, at + size, item, rule))
    for one, other in _meeting(spans):
        if proven_overlap(one.begin, one.rule, other.begin, other.rule):
            first, second = (one, other) if one.rule.written else (other, one)
            if first.rule.written and second.rule.written:
                first, second = sorted((one, other), key=lambda x: x.order, reverse=True)
            how = "equals" if first.begin == second.begin else "overlaps the matrix of"
            raise InvalidValue(
                first.item,
                hex(first.begin),
                f"{how} {second.item}",
                "Give every output memory of its own",
            )


@dataclass(frozen=True)
class _Span:
    """A matrix's bytes, from ``begin`` to ``end``."""

    begin: int
    end: int
    item: str
    rule: OperandRule

    @property
    def order(self) -> int:
        return int(self.item.partition("[")[2][:-1])


def _meeting(spans: Sequence[_Span]) -> Iterator[tuple[_Span, _Span]]:
    """Pairs of matrices, one of them written, whose bytes are not apart; at most ``_SOLVED``."""
    left = _SOLVED
    read: list[_Span] = []
    written: list[_Span] = []
    known = set[tuple[object, ...]]()  # what many products read meets others once
    for span in sorted(spans, key=lambda x: x.begin):
        if not span.rule.written:
            place = span.begin, span.rule.shape, span.rule.strides, span.rule.dtype
            if place in known:
                continue
            known.add(place)
        read, written = ([x for x in kept if x.end > span.begin] for kept in (read, written))
        for other in (*written, *(read if span.rule.written else ())):
            yield other, span
            left -= 1
            if left == 0:
                return
        (written if span.rule.written else read).append(span)


def first_arrays(lists: Mapping[str, MatrixList]) -> dict[str, ArrayInfo]:
    """List → its first array, for lists of arrays."""
    return {n: x.matrix for n, x in lists.items() if x.matrix is not None}


def one_device(lists: Mapping[str, MatrixList], device: Device | None = None) -> Device | None:
    """The device of all lists. Raises InvalidValue where they are on several."""
    for name, one in lists.items():
        device = device or one.device
        if one.device not in (None, device):
            raise InvalidValue(
                name, f"on {one.device}", f"the others are on {device}", "Move all to one device"
            )
    return device

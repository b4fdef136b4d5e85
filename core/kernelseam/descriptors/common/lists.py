"""The common part of descriptors over lists of addresses: reading, checking and staging lists, and
their conversion to strides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Generic, TypeVar, cast

from kernelseam.contract import ArrayInfo, Device, OperandRule, Problem, Runtime
from kernelseam.descriptors.common.address_lists import (
    Addresses,
    AddressList,
    Matrix,
    check_beside,
    check_entries,
    fetch,
    read_list,
    spacing,
    stage,
)
from kernelseam.descriptors.common.operands import known_names
from kernelseam.descriptors.common.protocol import Descriptor, Resolved
from kernelseam.descriptors.common.validation import (
    MAX_BYTES,
    WIDE,
    check_walk,
    integer,
    row_strides,
    vector_bytes,
)
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass

LINE = 128
"""Bytes of a line of a GPU's L2 cache."""
SPACED = "addresses are evenly spaced: the strided way is taken"


def plain(name: str) -> str:
    """The strided operand that a list stands for: "q" for "q_ptrs"."""
    return name.removesuffix("_ptrs")


def row_field(name: str) -> str:
    """The field of a list's row stride."""
    return f"stride_{plain(name).lower()}_row"


def given_row(name: str, value: object) -> int | None:
    """A list's row stride as given, or None; checked in bytes when the dtype is known."""
    return (
        None
        if value is None
        else integer(row_field(name), value, 0, MAX_BYTES, "Strides count elements, from 0")
    )


def read_lists(
    operands: Mapping[str, object], matrices: Mapping[str, Matrix], device: Device | None = None
) -> dict[str, AddressList]:
    """The lists among operands, of the right length and on one device."""
    lists = {
        n: read_list(n, v, matrices[n])
        for n, v in operands.items()
        if v is not None and n in matrices
    }
    for name, one in lists.items():
        m = matrices[name]
        if one.entries != m.entries:
            raise InvalidValue(
                name,
                f"{one.entries} entries",
                f"must have {m.counted} = {m.entries}",
                "Give one entry a matrix, batch-major",
            )
        device = device or one.device
        if one.device not in (None, device):
            raise InvalidValue(
                name, f"on {one.device}", f"the others are on {device}", "Move all to one device"
            )
    return lists


def first_arrays(lists: Mapping[str, AddressList]) -> dict[str, ArrayInfo]:
    """List → its first array, for lists of arrays."""
    return {n: one.matrix for n, one in lists.items() if one.matrix is not None}


def arrays_of(lists: Mapping[str, AddressList]) -> tuple[ArrayInfo, ...]:
    """One array of each list, whose library gives the current stream."""
    return tuple(info for one in lists.values() if (info := one.matrix or one.words))


def completed(name: str, blank: Matrix, given: AddressList | None, dtype: DType) -> Matrix:
    """A list's matrix with its dtype and row stride: the given one, else the arrays', else
    packed."""
    row = given.row_stride if blank.row_stride is None and given is not None else blank.row_stride
    shape = (blank.rows, blank.columns)
    (row,) = row_strides(plain(name).lower(), shape, [row], dtype, ("row",))
    matrix = replace(blank, row_stride=row, dtype=dtype)
    check_walk(matrix.rule(name), [row_field(name)])
    return matrix


def vector_of(matrix: Matrix, given: AddressList | None, promise: object) -> int:
    """Bytes of an access to a list's matrices: 16 where rows and addresses allow it, else the
    element size."""
    assert matrix.dtype is not None and matrix.row_stride is not None
    aligned = _alignment(given, matrix.dtype, promise)
    return vector_bytes(matrix.dtype, (matrix.rows, matrix.columns), (matrix.row_stride,), aligned)


def _alignment(given: AddressList | None, dtype: DType, promise: object) -> int:
    """The alignment that the plan may rely on: the promise, else that of the addresses that the
    host can read, else the element size."""
    if promise is not None:
        promised = integer(
            "alignment", promise, dtype.itemsize, 4096, "Give 16, or the element size"
        )
        if promised & (promised - 1):
            raise InvalidValue(
                "alignment", promised, "must be a power of two", "Give 16, or the element size"
            )
        return promised
    if given is None or given.addresses is None or (given.addresses % WIDE).any():
        return dtype.itemsize
    return WIDE


def begin_lines(
    given: Mapping[str, AddressList], names: Iterable[str], promise: int | None
) -> bool:
    """Whether the matrices of these lists begin at multiples of LINE: of lists that the host can
    read by their addresses, of others by the promise."""

    def begins(one: AddressList | None) -> bool:
        if one is None or one.addresses is None:
            return promise is not None and promise % LINE == 0
        return not (one.addresses % LINE).any()

    return all(begins(given.get(n)) for n in names)


@dataclass(frozen=True)
class Lists:
    """The lists of one descriptor: the matrices they must hold, and the given lists."""

    matrices: Mapping[str, Matrix]
    given: Mapping[str, AddressList]
    vectors: Mapping[str, int]
    """List → bytes of which its entries must be multiples."""
    live: tuple[str, ...]
    """The lists that a launch reads."""
    promised: bool
    """Whether the vectors rely on ``alignment``."""

    @classmethod
    def of(
        cls,
        problem: Problem,
        matrices: Mapping[str, Matrix],
        given: Mapping[str, AddressList],
        vectors: Mapping[str, int],
        promised: bool,
    ) -> Lists:
        """The lists of a problem; given ones are checked as far as the host can read them."""
        live = tuple(r.name for r in problem.operands if r.name in matrices and r.span)
        lists = cls(matrices, given, vectors, live, promised)
        lists.check(given)
        return lists

    @property
    def device(self) -> Device | None:
        """Where the arrays are; None where there are only addresses."""
        return next((d for one in self.given.values() if (d := one.device)), None)

    def check(self, lists: Mapping[str, AddressList], runtime: Runtime | None = None) -> None:
        """Check the entries that are read: those of host lists, and with a runtime those of device
        lists too."""
        check_entries(self.known(lists, runtime), self.matrices, self.vectors)

    def check_beside(
        self,
        lists: Mapping[str, AddressList],
        pointers: Mapping[str, int],
        rules: Sequence[OperandRule],
        runtime: Runtime | None = None,
    ) -> None:
        """Check the entries that are read against strided operands: those known as in ``check``."""
        check_beside(self.known(lists, runtime), self.matrices, pointers, rules)

    def check_device(self, lists: Mapping[str, AddressList], runtime: Runtime) -> bool:
        """Check lists in device memory as host lists are, if there are any; host lists never
        change."""
        on_device = any(one.addresses is None for one in lists.values())
        if on_device:
            self.check(lists, runtime)
        return on_device

    def known(
        self, lists: Mapping[str, AddressList], runtime: Runtime | None = None
    ) -> dict[str, Addresses]:
        """The entries that are read, by list: as in ``check``."""
        entries: dict[str, Addresses] = {}
        for name in self.live:
            if name not in lists or not self.matrices[name].rows * self.matrices[name].columns:
                continue
            addresses = lists[name].addresses
            if addresses is not None:
                entries[name] = addresses
            elif runtime is not None:
                entries[name] = fetch(lists[name].source, runtime)
        return entries

    def read(self, operands: Mapping[str, object], device: Device) -> dict[str, AddressList]:
        """The lists among operands, on a device, checked as far as the host can read them."""
        lists = read_lists(operands, self.matrices, device)
        self.check(lists)
        for name, one in lists.items():
            if (
                one.addresses is None
                and not self.promised
                and self.vectors[name] > self.matrices[name].itemsize
            ):
                raise InvalidValue(
                    name,
                    "a list on the device",
                    "the plan relies on 16-byte alignment, found from a host list",
                    "Plan with this list, or with alignment=16 to promise it",
                )
        return lists

    def stage(
        self, lists: Mapping[str, AddressList], runtime: Runtime, device: Device
    ) -> tuple[dict[str, int], list[object]]:
        """The lists' addresses in device memory, and the arrays that were allocated for them."""
        pointers: dict[str, int] = {}
        arrays: list[object] = []
        for name in self.live:
            if name in lists and (addresses := lists[name].addresses) is not None:
                array, pointers[name] = stage(addresses, runtime, device)
                arrays.append(array)
            elif name in lists:
                pointers[name] = cast(ArrayInfo, lists[name].words).pointer
        return pointers, arrays

    def steps(self) -> dict[str, int] | None:
        """List → elements between entries, where all lists that are read are host lists and evenly
        spaced; else None."""
        steps: dict[str, int] = {}
        for name in self.live:
            listed = self.given.get(name)
            if listed is None or listed.addresses is None:
                return None
            step = spacing(listed.addresses, self.matrices[name].itemsize)
            if step is None:
                return None
            steps[name] = step
        return steps or None

    def first(self, name: str) -> int:
        """The first entry of a host list."""
        return int(cast(Addresses, self.given[name].addresses)[0])


P = TypeVar("P", bound=Problem)


@dataclass(frozen=True, eq=False, kw_only=True)
class ListDescriptor(ABC, Generic[P]):
    """A frozen dataclass over lists, which may be computed as strided memory; ``__post_init__``
    sets ``_problem`` and ``_lists``."""

    _problem: P = field(init=False, repr=False)
    _lists: Lists = field(init=False, repr=False)

    def problem(self) -> P:
        """The hashable part, without pointers."""
        return self._problem

    @abstractmethod
    def operands(self) -> dict[str, object]:
        """The lists, and what else there is, as far as they are given."""

    def matrix(self, name: str) -> Matrix:
        """The shape and layout of a list's matrices."""
        return self._lists.matrices[name]

    def read(self, operands: Mapping[str, object], device: Device) -> dict[str, AddressList]:
        """Lists for this problem on a device, checked as far as the host can read them."""
        known_names(self._problem.operands, operands)
        return self._lists.read(operands, device)

    def check_beside(
        self, resolved: Resolved, rule: OperandRule, address: int, runtime: Runtime | None
    ) -> None:
        """Refuse matrices that share memory with the operand of ``rule`` at an address: those of
        host lists, and with a runtime those of device lists."""
        lists = cast(Mapping[str, AddressList], resolved.keep[0])
        self._lists.check_beside(lists, {rule.name: address}, (rule,), runtime)

    def simplified(self) -> tuple[Descriptor, str]:
        """The same problem over strided memory where all lists are host lists and evenly
        spaced."""
        steps = self._steps()
        if steps is None:
            return cast(Descriptor, self), ""
        return EvenlySpaced(self, self._as_strided(steps), steps), SPACED

    def _steps(self) -> dict[str, int] | None:
        """List → elements between its entries, where strides can describe them."""
        return self._lists.steps()

    @abstractmethod
    def _as_strided(self, steps: Mapping[str, int]) -> Descriptor:
        """Entries of a list as batches of heads."""


@dataclass(frozen=True, eq=False)
class EvenlySpaced:
    """Address lists computed as strided memory: bound by the lists' names, planned with strides."""

    lists: ListDescriptor[Any]
    strided: Descriptor
    steps: Mapping[str, int]
    """List → elements between entries."""

    def problem(self) -> Problem:
        """The strided problem."""
        return self.strided.problem()

    def operands(self) -> dict[str, object]:
        """The lists, and what else there is."""
        return self.lists.operands()

    def simplified(self) -> tuple[EvenlySpaced, str]:
        """Itself."""
        return self, ""

    def resolve(self, operands: Mapping[str, object], runtime: Runtime, device: Device) -> Resolved:
        """Addresses of the first entries. Raises InvalidValue for lists that are spaced
        otherwise."""
        lists = self.lists.read(operands, device)
        strided_operands: dict[str, object] = {n: x for n, x in operands.items() if n not in lists}
        for name, listed in lists.items():
            if name not in self.steps:
                continue
            step = (
                None
                if listed.addresses is None
                else spacing(listed.addresses, self.lists.matrix(name).itemsize)
            )
            if listed.addresses is None or step != self.steps[name]:
                raise InvalidValue(
                    name,
                    "a list on the device"
                    if listed.addresses is None
                    else "a list spaced otherwise",
                    f"the plan walks entries {self.steps[name]} elements apart, as the lists it "
                    "was made with",
                    "Plan again with this list",
                )
            strided_operands[plain(name)] = int(listed.addresses[0])
        below = self.strided.resolve(strided_operands, runtime, device)
        return Resolved(
            below.pointers, tuple(operands.values()), (*arrays_of(lists), *below.arrays)
        )

    def check_device(self, resolved: Resolved, runtime: Runtime, device: Device) -> None:
        """As the strided descriptor does; the lists were on the host."""
        if (deep := getattr(self.strided, "check_device", None)) is not None:
            deep(resolved, runtime, device)

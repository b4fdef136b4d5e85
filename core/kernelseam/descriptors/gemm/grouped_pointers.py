"""The grouped GEMM over lists: products of matrices of any sizes in one launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kernelseam.capture import refuse_capture
from kernelseam.contract import Device, OperandRule, Runtime
from kernelseam.descriptors.common.address_lists import Addresses, fetch
from kernelseam.descriptors.common.matrix_lists import (
    MatrixList,
    aligned,
    check_matrices,
    first_arrays,
    one_device,
    read_matrices,
)
from kernelseam.descriptors.common.operands import known_names
from kernelseam.descriptors.common.precision import precision_of
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.descriptors.common.validation import (
    WIDE,
    check_walk,
    extent,
    integer,
    stride,
)
from kernelseam.descriptors.gemm.fields import ProductFields, check_factors, gemm_dtypes
from kernelseam.descriptors.gemm.grouped_pointers_problem import (
    TABLE,
    GroupedGemmPointersProblem,
    GroupedGemmPointersSpec,
)
from kernelseam.descriptors.gemm.problem import GemmSpec
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass

LISTS = ("A_ptrs", "B_ptrs", "C_ptrs")
_MOST_ALIGNED = 4096


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupedGemmPointers(ProductFields):
    """C[g] = alpha·op(A[g])·op(B[g]) + beta·C[g] for each group g, matrices of any sizes, in one
    launch: what cuBLAS calls a grouped batch.

    ``M``, ``N`` and ``K`` have an entry a group, or are one int for all (not all three); a group
    may have no rows, no columns or nothing to sum. A[g] is M[g]×K[g] (K[g]×M[g] where
    ``a_transposed``), B[g] K[g]×N[g] (N[g]×K[g] where ``b_transposed``); columns are contiguous.

    ``A_ptrs``, ``B_ptrs`` and ``C_ptrs`` have a matrix a group: a list or tuple of two-dimensional
    arrays or of addresses, or a NumPy array of integers; or an array of 64-bit integers on the
    device; or None until ``bind``. ``stride_a_row``, … count elements, one a group or one for all;
    left out they are the arrays', else packed. ``bind`` copies host lists, and the groups' extents
    and strides, to the device in one piece and keeps it alive.

    Layouts, dtypes, alpha and beta are those of the launch. ``dtype`` (A and B) comes from the
    arrays where it is left out, ``dtype_c`` from C's, else it is ``dtype``, float32 for e4m3.
    beta = 0 never reads C. ``precision`` as in ``BatchedGemmStrided``, ``alignment`` as in
    ``BatchedGemmPointers``.

    Host lists are checked for null, misaligned and overlapping addresses; ``bind(check=True)``
    copies device lists to the host, and checks them too.

    Raises InvalidValue (naming field, group, value, rule and remedy) where no such problem exists.
    """

    M: Sequence[int] | int
    N: Sequence[int] | int
    K: Sequence[int] | int
    A_ptrs: object = field(default=None, repr=False)
    B_ptrs: object = field(default=None, repr=False)
    C_ptrs: object = field(default=None, repr=False)
    stride_a_row: Sequence[int] | int | None = None
    stride_b_row: Sequence[int] | int | None = None
    stride_c_row: Sequence[int] | int | None = None
    alignment: int | None = None
    _problem: GroupedGemmPointersProblem = field(init=False, repr=False)
    _lists: Mapping[str, MatrixList] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        check_factors(self)
        sizes = self._sizes()
        shapes = _shapes(sizes, self.a_transposed, self.b_transposed)
        lists = _read(self.operands(), shapes)
        one_device(lists)
        dtype, dtype_c, dtype_acc = gemm_dtypes(
            self.dtype,
            self.dtype_c,
            self.dtype_acc,
            first_arrays(lists),
            (LISTS[0], LISTS[1]),
            LISTS[2],
        )
        product = GemmSpec(
            dtype,
            dtype_c,
            dtype_acc,
            self.a_transposed,
            self.b_transposed,
            "pointers",
            precision=precision_of(self.precision, dtype, "A and B"),
        )
        rows = self._row_strides(shapes, lists, dtype, dtype_c)
        spec = GroupedGemmPointersSpec(product)
        problem = GroupedGemmPointersProblem(spec, sizes, rows, self.alpha, self.beta)
        promise, vectors = self._promise(dtype, dtype_c), list[int]()
        for name in LISTS:
            rules = _rules(problem, name)
            for g, rule in enumerate(rules):
                check_walk(replace(rule, name=f"{name}[{g}]"), [f"{_row_field(name)}[{g}]"])
            addresses = lists[name].addresses if name in lists else None
            kind = dtype_c if name == "C_ptrs" else dtype
            wide = aligned(addresses, rules, promise, WIDE)
            vectors.append(WIDE if wide else kind.itemsize)
        a, b, c = vectors
        spec = GroupedGemmPointersSpec(replace(product, vector_a=a, vector_b=b, vector_c=c))
        put(self, "_problem", replace(problem, spec=spec))
        put(self, "_lists", lists)
        self._check(lists)

    def _sizes(self) -> tuple[tuple[int, int, int], ...]:
        given = {n: getattr(self, n) for n in "MNK"}
        counts = {n: len(x) for n, x in given.items() if _is_sequence(x)}
        if not counts:
            raise InvalidValue(
                "M", self.M, "says no number of groups, nor do N and K", "Give a list, one a group"
            )
        first = next(iter(counts))
        for name, count in counts.items():
            if count != counts[first]:
                raise InvalidValue(
                    name,
                    f"{count} entries",
                    f"{first} has {counts[first]}",
                    "Give as many, one a group",
                )
        columns = [
            [extent(f"{n}[{g}]", x) for g, x in enumerate(given[n])]
            if n in counts
            else [extent(n, given[n])] * counts[first]
            for n in "MNK"
        ]
        for name, column in zip("MNK", columns, strict=True):
            object.__setattr__(self, name, tuple(column))
        m, n, k = columns
        return tuple(zip(m, n, k, strict=True))

    def _row_strides(
        self,
        shapes: Mapping[str, Sequence[tuple[int, int]]],
        lists: Mapping[str, MatrixList],
        dtype: DType,
        dtype_c: DType,
    ) -> tuple[tuple[int, int, int], ...]:
        """(A, B, C) of each group: the given ones, else the arrays', else packed."""
        columns = []
        for name in LISTS:
            kind, count = dtype_c if name == "C_ptrs" else dtype, len(shapes[name])
            of_arrays = lists[name].rows if name in lists else (None,) * count
            given, field_name = getattr(self, _row_field(name)), _row_field(name)
            if given is None:
                packed = [max(width, 1) for _, width in shapes[name]]
                columns.append(
                    [p if own is None else own for p, own in zip(packed, of_arrays, strict=True)]
                )
                continue
            if not _is_sequence(given):
                asked = [stride(field_name, given, kind)] * count
            elif len(given) == count:
                asked = [stride(f"{field_name}[{g}]", x, kind) for g, x in enumerate(given)]
            else:
                raise InvalidValue(
                    field_name,
                    f"{len(given)} entries",
                    f"must have one for each of the {count} groups",
                    "Give as many, or one for all",
                )
            _check_rows(name, of_arrays, asked, f"Leave {field_name} out")
            columns.append(asked)
        a, b, c = columns
        return tuple(zip(a, b, c, strict=True))

    def _promise(self, dtype: DType, dtype_c: DType) -> int | None:
        if self.alignment is None:
            return None
        least = max(dtype.itemsize, dtype_c.itemsize)
        promised = integer(
            "alignment", self.alignment, least, _MOST_ALIGNED, "Give 16, or the element size"
        )
        if promised & (promised - 1):
            raise InvalidValue(
                "alignment", promised, "must be a power of two", "Give 16, or the element size"
            )
        return promised

    @property
    def device(self) -> Device | None:
        """The device of the arrays; None where there are only addresses."""
        return one_device(self._lists)

    def problem(self) -> GroupedGemmPointersProblem:
        """The hashable part, without pointers."""
        return self._problem

    def operands(self) -> dict[str, object]:
        """The lists, as far as they are given."""
        return {n: v for n in LISTS if (v := getattr(self, n)) is not None}

    def simplified(self) -> tuple[GroupedGemmPointers, str]:
        """Itself: there is no simpler descriptor."""
        return self, ""

    def resolve(self, operands: Mapping[str, object], runtime: Runtime, device: Device) -> Resolved:
        """Lists in device memory, with the groups' table. Raises InvalidValue for lists that do not
        fit the problem."""
        p = self._problem
        known_names(tuple(r for r in p.operands if r.name != TABLE), operands)
        product = p.spec.product
        shapes = _shapes(p.sizes, product.a_transposed, product.b_transposed)
        lists = _read({n: x for n, x in operands.items() if x is not None}, shapes)
        one_device(lists, device)
        for name, one in lists.items():
            kind = product.dtype_c if name == "C_ptrs" else product.dtype
            if one.matrix is not None and one.matrix.dtype is not kind:
                raise InvalidValue(
                    name, f"arrays of {one.matrix.dtype}", f"must be {kind}", "Convert them"
                )
            planned = [rows[LISTS.index(name)] for rows in p.row_strides]
            _check_rows(name, one.rows, planned, "Plan with these arrays")
            wide = getattr(product, f"vector_{name[0].lower()}") > kind.itemsize
            if one.addresses is None and self.alignment is None and wide:
                raise InvalidValue(
                    name,
                    "a list on the device",
                    "the plan relies on 16-byte alignment, found from a host list",
                    "Plan with this list, or with alignment=16 to promise it",
                )
        self._check(lists)
        pointers, staged = _stage(p, lists, runtime, device)
        keep = (lists, *((staged,) if staged is not None else ()))
        arrays = tuple(i for x in lists.values() if (i := x.matrix or x.words) is not None)
        return Resolved(pointers, keep, arrays)

    def check_device(self, resolved: Resolved, runtime: Runtime, device: Device) -> None:
        """Check lists in device memory as host lists are; synchronises."""
        lists = cast(Mapping[str, MatrixList], resolved.keep[0])
        if any(x.addresses is None for x in lists.values()):
            self._check(lists, runtime)

    def _check(self, lists: Mapping[str, MatrixList], runtime: Runtime | None = None) -> None:
        """Check the addresses: of host lists, and with a runtime those of device lists."""
        known: dict[str, Addresses] = {}
        for name, one in lists.items():
            if one.addresses is not None:
                known[name] = one.addresses
            elif runtime is not None and self._problem.groups:
                known[name] = fetch(one.source, runtime)
        product = self._problem.spec.product
        check_matrices(
            known,
            {n: _rules(self._problem, n) for n in known},
            {n: getattr(product, f"vector_{n[0].lower()}") for n in known},
        )


def _check_rows(name: str, given: Sequence[int | None], wanted: Sequence[int], remedy: str) -> None:
    for g, (own, step) in enumerate(zip(given, wanted, strict=True)):
        if own not in (None, step):
            raise InvalidValue(
                f"{name}[{g}]", f"row stride {own}", f"rows are walked {step} apart", remedy
            )


def _is_sequence(value: object) -> bool:
    """Whether a value has an entry a group; one int is for all."""
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 1)


def _read(
    operands: Mapping[str, object], shapes: Mapping[str, Sequence[tuple[int, int]]]
) -> dict[str, MatrixList]:
    return {n: read_matrices(n, x, shapes[n], n == "C_ptrs") for n, x in operands.items()}


def _row_field(name: str) -> str:
    return f"stride_{name[0].lower()}_row"


def _shapes(
    sizes: Sequence[tuple[int, int, int]], a_transposed: bool, b_transposed: bool
) -> dict[str, list[tuple[int, int]]]:
    """(rows, columns) in memory of every matrix of a list."""
    return {
        "A_ptrs": [(k, m) if a_transposed else (m, k) for m, _, k in sizes],
        "B_ptrs": [(n, k) if b_transposed else (k, n) for _, n, k in sizes],
        "C_ptrs": [(m, n) for m, n, _ in sizes],
    }


def _rules(p: GroupedGemmPointersProblem, name: str) -> list[OperandRule]:
    return [p.rule(name[0], g) for g in range(p.groups)]


def table_of(p: GroupedGemmPointersProblem) -> npt.NDArray[np.int32]:
    """The operand TABLE on the host."""
    return p.table.astype(np.int32).reshape(-1)


def _stage(
    p: GroupedGemmPointersProblem,
    lists: Mapping[str, MatrixList],
    runtime: Runtime,
    device: Device,
) -> tuple[dict[str, int], object]:
    """Where lists and the table are in device memory; host lists and the table are copied there in
    one array, which comes with them."""
    live = {r.name for r in p.operands if r.span}
    pointers = {n: x.words.pointer for n, x in lists.items() if x.words and n in live}
    pieces: dict[str, Any] = {
        n: x.addresses for n, x in lists.items() if x.addresses is not None and n in live
    }
    if TABLE in live:
        pieces[TABLE] = table_of(p).view(np.uint64)
    if not pieces:
        return pointers, None
    refuse_capture(
        runtime,
        device,
        "the groups' sizes and lists of addresses are copied to the device first, which "
        "synchronises",
        "Bind before the capture, over lists in device memory where they change",
    )
    words = np.concatenate(list(pieces.values()))
    array = runtime.from_host(words.view(np.float64), device)
    info = runtime.describe(array)
    if info is None:
        raise TypeError(f"the runtime of {device} does not describe its own arrays")
    at = info.pointer
    for name, piece in pieces.items():
        pointers[name] = at
        at += 8 * len(piece)
    return pointers, array

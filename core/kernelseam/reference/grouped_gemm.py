"""Grouped GEMMs on the host: a group's blocks, one after the other, BLAS for the products."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kernelseam.contract import Device, PlanParts
from kernelseam.descriptors.gemm.grouped_pointers_problem import (
    GroupedGemmPointersProblem,
    GroupedGemmPointersSpec,
)
from kernelseam.descriptors.gemm.grouped_problem import GroupedGemmProblem, GroupedGemmSpec
from kernelseam.frozen import dataclass
from kernelseam.reference.epilogue import Epilogue
from kernelseam.reference.gemm_blocks import round_to_tf32
from kernelseam.reference.implementation import (
    NumpyImplementation,
    operand_array,
    operand_arrays,
    recorded,
)
from kernelseam.reference.products import product
from kernelseam.reference.scratch import carve, scratch_bytes, shaped
from kernelseam.reference.threads import share, threads_for

Array = npt.NDArray[Any]
_ROWS, _COLUMNS, _TERMS = 128, 1024, 1024
"""Of one block: rows and columns of C, and what is summed at once."""


class NumpyGroupedGemm(NumpyImplementation[GroupedGemmProblem]):
    """Groups along every axis, every dtype (8 and 16 bits computed in float32), any sizes and
    strides. "tf32" rounds A and B; "tf32x3" is computed in float32, which is within its bound."""

    operation = "grouped_gemm"

    def build(self, problem: GroupedGemmProblem, device: Device) -> PlanParts:
        step = _OffsetsStep(problem, device)
        return PlanParts((step,), step.threads * step.bytes)


class NumpyGroupedGemmPointers(NumpyImplementation[GroupedGemmPointersProblem]):
    """The same over lists of addresses, of matrices of any sizes."""

    operation = "grouped_gemm_pointers"

    def build(self, problem: GroupedGemmPointersProblem, device: Device) -> PlanParts:
        step = _ListsStep(problem, device)
        return PlanParts((step,), step.threads * step.bytes)


@dataclass(frozen=True)
class _Group:
    """The matrices of one group, op(A) [M, K], op(B) [K, N], C [M, N]: views. With indices of rows
    A or C is whole."""

    rows: int
    a: Array
    b: Array
    c: Array
    a_indices: Array | None = None
    c_indices: Array | None = None
    c_factors: Array | None = None
    a_scales: Array | None = None
    """[M], or of blocks [M, ⌈K/k⌉]."""
    b_scales: Array | None = None
    """[N], or of blocks [⌈N/n⌉, ⌈K/k⌉]."""
    epilogue: Epilogue | None = None
    number: int = 0
    """This and the next are what the epilogue is told of: the group, and its first row."""
    first_row: int = 0
    sums: Array | None = None
    """Where what the epilogue is of is written, as C."""


class _Problem(Protocol):
    """What is asked of either problem."""

    @property
    def spec(self) -> GroupedGemmSpec | GroupedGemmPointersSpec: ...
    @property
    def groups(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def beta(self) -> float: ...
    @property
    def reads_inputs(self) -> bool: ...
    @property
    def operations(self) -> int: ...


class _GroupedStep(ABC):
    """``most``: the largest M, N and K of a group, as far as is known; ``blocks``: about how many
    the C's have."""

    def __init__(
        self, problem: _Problem, most: tuple[int, int, int], blocks: int, device: Device
    ) -> None:
        self.problem: _Problem = problem
        m, n, k = (min(x, y) for x, y in zip(most, (_ROWS, _COLUMNS, _TERMS), strict=True))
        self.sizes = m * n, m * n, m * k, k * n
        self.bytes = scratch_bytes(self.sizes, problem.spec.product.dtype_acc)
        self.threads = min(threads_for(problem.operations, device), max(blocks // 2, 1))
        self.record = recorded("grouped_gemm", device, (problem.groups, 1, 1))

    @abstractmethod
    def groups(self, pointers: Mapping[str, int]) -> Callable[[], Iterator[_Group]]:
        """What gives the groups at each launch."""

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        acc, groups = self.problem.spec.product.dtype_acc, self.groups(pointers)
        scratch = [carve(workspace + i * self.bytes, self.sizes, acc) for i in range(self.threads)]

        def work(thread: int, tasks: Iterator[tuple[_Group, slice, slice]]) -> None:
            with np.errstate(all="ignore"):
                for group, rows, columns in tasks:
                    self._block(group, rows, columns, scratch[thread])

        return lambda stream: share(work, _blocks(groups()), self.threads)

    def _block(self, group: _Group, rows: slice, columns: slice, scratch: list[Array]) -> None:
        """alpha·op(A)·op(B) + beta·C of one block, and its epilogue, in the accumulator's dtype,
        rounded once."""
        written: Any = rows if group.c_indices is None else group.c_indices[rows]
        if (epilogue := group.epilogue) is None:
            group.c[written, columns] = self._sums(group, rows, columns, scratch)
            return
        parts = []
        for own in epilogue.columns(columns, 2 * group.c.shape[1]):
            parts.append(self._sums(group, rows, own, scratch).copy())
            if group.sums is not None:
                group.sums[written, own] = parts[-1]
        numbered = slice(group.first_row + rows.start, group.first_row + rows.stop)
        group.c[written, columns] = epilogue(parts, np.array(group.number), numbered, columns)

    def _sums(self, group: _Group, rows: slice, columns: slice, scratch: list[Array]) -> Array:
        """alpha·op(A)·op(B) + beta·C; beta = 0 never reads C."""
        p, spec = self.problem, self.problem.spec.product
        read: Any = rows if group.a_indices is None else group.a_indices[rows]
        written: Any = rows if group.c_indices is None else group.c_indices[rows]
        numbers = np.arange(columns.start, columns.stop, columns.step or 1)
        height, width = rows.stop - rows.start, len(numbers)
        total, part = (shaped(x, height, width) for x in scratch[:2])
        total[...] = 0
        for k in range(0, group.a.shape[1], _TERMS) if p.reads_inputs else ():
            terms = slice(k, min(k + _TERMS, group.a.shape[1]))
            left = shaped(scratch[2], height, terms.stop - k)
            right = shaped(scratch[3], terms.stop - k, width)
            np.copyto(left, group.a[read, terms])
            np.copyto(right, group.b[terms, columns])
            if spec.precision == "tf32":
                round_to_tf32(left)
                round_to_tf32(right)
            if spec.scale_block is not None:
                _, n, k_block = spec.scale_block
                of_k = np.arange(k, terms.stop) // k_block
                of_columns = numbers // n
                assert group.a_scales is not None and group.b_scales is not None
                left *= group.a_scales[rows][:, of_k]
                right *= group.b_scales[of_columns][:, of_k].T
            product(left, right, part)
            total += part
        if group.a_scales is not None and group.b_scales is not None and spec.scale_block is None:
            total *= group.a_scales[rows, None]
            total *= group.b_scales[None, columns]
        if p.alpha != 1 and p.reads_inputs:
            total *= p.alpha
        if group.c_factors is not None:
            total *= group.c_factors[rows, None]
        if p.beta:
            np.copyto(part, group.c[written, columns])
            part *= p.beta
            total += part
        return total


def _blocks(groups: Iterator[_Group]) -> Iterator[tuple[_Group, slice, slice]]:
    """The blocks of C of every group."""
    for group in groups:
        M, N = group.rows, group.c.shape[1]
        for i, j in itertools.product(range(0, M, _ROWS), range(0, N, _COLUMNS)):
            yield group, slice(i, min(i + _ROWS, M)), slice(j, min(j + _COLUMNS, N))


class _OffsetsStep(_GroupedStep):
    def __init__(self, problem: GroupedGemmProblem, device: Device) -> None:
        p = self.offsets_problem = problem
        blocks = p.groups * -(-p.M // _ROWS) * -(-p.N // _COLUMNS)
        super().__init__(p, (p.M, p.N, p.K), blocks, device)

    def groups(self, pointers: Mapping[str, int]) -> Callable[[], Iterator[_Group]]:
        arrays = operand_arrays(self.offsets_problem.operands, pointers)
        epilogue = Epilogue.bound(self.offsets_problem, pointers)

        def each() -> Iterator[_Group]:
            begin = 0
            for g, end in enumerate(arrays["offsets"].tolist()):
                yield replace(
                    self._group(arrays, g, slice(begin, end)),
                    epilogue=epilogue,
                    number=g,
                    first_row=begin,
                )
                begin = end

        return each

    def _group(self, arrays: Mapping[str, Array], g: int, part: slice) -> _Group:
        p, product = self.offsets_problem, self.offsets_problem.spec.product
        parts = {axis: part if axis == p.spec.along else slice(None) for axis in "mnk"}
        indices = {n: arrays[n][part] for n in p.spec.indices if arrays[n].size}

        def matrix(name: str, axes: str, transposed: bool) -> Array:
            whole = arrays[name]
            if not whole.size:
                return np.empty((0, 0), whole.dtype)
            one: Array = whole[g if p.matrices(name) > 1 else 0]
            of = "c" if name == "preactivation" else name.lower()
            rows = slice(None) if f"{of}_indices" in indices else parts[axes[0]]
            view: Array = (one.T if transposed else one)[rows, parts[axes[1]]]
            return view

        def scales(name: str, axis: str) -> Array | None:
            if (whole := arrays.get(name)) is None or not whole.size:
                return None
            one: Array = whole[g if len(whole) > 1 else 0]
            if axis == "m" and "a_indices" in indices:
                return one[indices["a_indices"]]
            return one[part] if axis == p.spec.along else one

        c = matrix("C", "mn", False)
        return _Group(
            part.stop - part.start if p.spec.indices else len(c),
            matrix("A", "mk", product.a_transposed),
            matrix("B", "kn", product.b_transposed),
            c,
            indices.get("a_indices"),
            indices.get("c_indices"),
            indices.get("c_factors"),
            scales("a_scales", "m"),
            scales("b_scales", "n"),
            sums=matrix("preactivation", "mn", False) if product.preactivation else None,
        )


class _ListsStep(_GroupedStep):
    def __init__(self, problem: GroupedGemmPointersProblem, device: Device) -> None:
        p = self.lists_problem = problem
        blocks = sum(-(-m // _ROWS) * -(-n // _COLUMNS) for m, n, _ in p.sizes)
        super().__init__(p, p.most, blocks, device)

    def groups(self, pointers: Mapping[str, int]) -> Callable[[], Iterator[_Group]]:
        """Addresses are read at each launch."""
        p, product = self.lists_problem, self.lists_problem.spec.product
        lists = operand_arrays([r for r in p.operands if r.dtype is None], pointers)

        def matrix(name: str, g: int) -> Array:
            rule = p.rule(name, g)
            return operand_array(rule, int(lists[f"{name}_ptrs"][g]) if rule.span else 0)

        def each() -> Iterator[_Group]:
            for g in filter(p.written, range(p.groups)):
                a, b, c = (matrix(name, g) for name in "ABC")
                if p.read(g):
                    a, b = a.T if product.a_transposed else a, b.T if product.b_transposed else b
                else:
                    a, b = np.empty((c.shape[0], 0), a.dtype), np.empty((0, c.shape[1]), b.dtype)
                yield _Group(c.shape[0], a, b, c)

        return each

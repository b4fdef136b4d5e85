"""Batched GEMM on the host: blocks of results, BLAS for the products."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.contract import Cost, Device, LaunchRecord, PlanParts, host_array
from kernelseam.descriptors.gemm_problem import GemmProblem
from kernelseam.dispatch import roofline
from kernelseam.dtypes import DType
from kernelseam.reference.scratch import carve, scratch_bytes, shaped

_SIDE = 1024  # rows, columns and summands of one block
_BLOCK = 3 * _SIDE * _SIDE  # elements of A, B and C together: 12 MiB of float32

Array = npt.NDArray[Any]


class NumpyGemm:
    """Strided and pointer lists, every dtype (16 bits computed in float32), any sizes and strides."""

    name, backend, operation = "numpy", "numpy", "gemm"

    def supports(self, problem: GemmProblem, device: Device) -> str | None:
        if problem.spec.dtype_acc not in (DType.float32, DType.float64):
            return f"accumulates in float32 or float64, not in {problem.spec.dtype_acc}"
        return None

    def cost(self, problem: GemmProblem, device: Device) -> Cost:
        return roofline(problem, device.limits, 0.5)

    def build(self, problem: GemmProblem, device: Device) -> PlanParts:
        step = _GemmStep(problem, device)
        return PlanParts((step,), scratch_bytes(step.blocks.sizes, problem.spec.dtype_acc))


class _GemmStep:
    def __init__(self, problem: GemmProblem, device: Device) -> None:
        self.problem = problem
        self.blocks = _Blocks(problem)
        self.record = LaunchRecord("numpy_gemm", (problem.matrices, 1, 1), (1, 1, 1), 0, device.arch)

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        p = self.problem
        scratch = carve(workspace, self.blocks.sizes, p.spec.dtype_acc)
        operands = self._listed(pointers) if p.spec.view == "pointers" else self._strided(pointers)

        def launch(stream: int) -> None:
            with np.errstate(all="ignore"):
                for a, b, c in operands():
                    self.blocks.run(a, b, c, scratch)

        return launch

    def _strided(self, pointers: Mapping[str, int]) -> Callable[[], Iterator[tuple[Array, Array, Array]]]:
        """One stack of matrices with axes (batch, head of B, head of A within it, row, column)."""
        p, group = self.problem, self.problem.b_head_group
        heads = p.num_heads // group
        a, b, c = (pointers.get(name, 0) for name in "ABC")
        reads = int(p.reads_inputs)
        views = (
            self._view(a, (p.batch * reads, heads, group), p.a_strides, p.a_shape, group),
            self._view(b, (p.batch * reads, heads, 1), p.b_strides, p.b_shape, 1),
            self._view(c, (p.batch, heads, group), p.c_strides, (p.M, p.N), group, p.spec.dtype_c),
        )
        return lambda: iter((views,))

    def _listed(self, pointers: Mapping[str, int]) -> Callable[[], Iterator[tuple[Array, Array, Array]]]:
        """The matrices one by one, their addresses read at each launch."""
        p = self.problem
        one, n = (1, 1, 1), p.matrices if p.M and p.N else 0
        reads = int(p.reads_inputs)
        lists = [
            host_array(pointers.get(name, 0), (n * used,), (1,), DType.float64).view(np.uint64)
            for name, used in (("A_ptrs", reads), ("B_ptrs", reads), ("C_ptrs", 1))
        ]

        def matrices() -> Iterator[tuple[Array, Array, Array]]:
            for i in range(n):
                a, b, c = (int(x[i]) if len(x) else 0 for x in lists)
                yield (
                    self._view(a, (reads, 1, 1), p.a_strides, p.a_shape, 1),
                    self._view(b, (reads, 1, 1), p.b_strides, p.b_shape, 1),
                    self._view(c, one, p.c_strides, (p.M, p.N), 1, p.spec.dtype_c),
                )

        return matrices

    def _view(
        self, pointer: int, stack: tuple[int, int, int], strides: tuple[int, int, int], matrix: tuple[int, int],
        group: int, dtype: DType | None = None,
    ) -> Array:
        batch, head, row = strides
        row = row if matrix[0] > 1 else matrix[1]
        return host_array(
            pointer, (*stack, *matrix), (batch, head * group, head, row, 1), dtype or self.problem.spec.dtype
        )


@dataclass(frozen=True)
class _Operand:
    """How blocks of A or B reach BLAS: where they lie, or through a copy in the accumulator's dtype."""

    transposed: bool
    copied: bool

    def take(self, memory: Array, stack: tuple[slice, ...], rows: slice, columns: slice, scratch: Array) -> Array:
        block = memory[(*stack, columns, rows)] if self.transposed else memory[(*stack, rows, columns)]
        if self.copied:
            copy = shaped(scratch, *block.shape)
            np.copyto(copy, block)
            block = copy
        return block.swapaxes(-1, -2) if self.transposed else block


class _Blocks:
    """C = alpha·op(A)·op(B) + beta·C over a stack of matrices, a bounded part of it at a time."""

    def __init__(self, problem: GemmProblem) -> None:
        p = self.problem = problem
        acc = p.spec.dtype_acc

        def blas(dtype: DType, shape: tuple[int, int], row: int) -> bool:
            return dtype is acc and (shape[0] <= 1 or row >= shape[1])

        self.a = _Operand(p.spec.a_transposed, not blas(p.spec.dtype, p.a_shape, p.a_strides[2]))
        self.b = _Operand(p.spec.b_transposed, not blas(p.spec.dtype, p.b_shape, p.b_strides[2]))
        in_place = blas(p.spec.dtype_c, (p.M, p.N), p.c_strides[2]) and p.alpha == 1 and p.beta == 0
        m, n = min(p.M, _SIDE), min(p.N, _SIDE)
        k = min(p.K, _SIDE) if self.a.copied or self.b.copied or not in_place else p.K
        # Half-open blocks of (batch, head of B, head of A within it), then of rows, columns and summands.
        heads = p.num_heads // p.b_head_group
        room = max(_BLOCK // max(m * n + (m + n) * k, 1), 1)
        group = min(p.b_head_group, room)
        kv = min(heads, max(room // max(group, 1), 1))
        batch = min(p.batch, max(room // max(group * kv, 1), 1))
        self.extents = (p.batch, heads, p.b_head_group, p.M, p.N)
        self.steps = (batch, kv, group, m, n)
        self.k = k
        self.in_place = in_place and k == p.K
        stack = batch * kv * group
        c = 0 if self.in_place else stack * m * n
        self.sizes = (c, c, stack * m * k * self.a.copied, batch * kv * k * n * self.b.copied)

    def run(self, a: Array, b: Array, c: Array, scratch: list[Array]) -> None:
        p = self.problem
        for starts in itertools.product(*(range(0, n, s or 1) for n, s in zip(c.shape, self.steps, strict=True))):
            at = tuple(slice(i, min(i + s, n)) for i, s, n in zip(starts, self.steps, c.shape, strict=True))
            out = c[at]
            if not p.reads_inputs:
                self._store(None, out, scratch)
                continue
            part = out if self.in_place else shaped(scratch[0], *out.shape)
            more = shaped(scratch[1], *out.shape) if self.k < p.K else part
            stack, rows, columns = at[:3], at[3], at[4]
            for k in range(0, p.K, self.k):
                inner = slice(k, min(k + self.k, p.K))
                left = self.a.take(a, stack, rows, inner, scratch[2])
                right = self.b.take(b, (*stack[:2], slice(None)), inner, columns, scratch[3])
                np.matmul(left, right, out=more if k else part)
                if k:
                    part += more
            if not self.in_place:
                self._store(part, out, scratch)

    def _store(self, part: Array | None, out: Array, scratch: list[Array]) -> None:
        """out = alpha·part + beta·out in the accumulator's dtype, rounded once; beta = 0 never reads ``out``."""
        p = self.problem
        if part is not None and p.alpha != 1:
            part *= p.alpha
        if p.beta:
            old = shaped(scratch[1], *out.shape)
            np.copyto(old, out)
            old *= p.beta
            part = old if part is None else np.add(part, old, out=part)
        out[...] = 0 if part is None else part

"""Blocks of a GEMM's result on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.dtypes import LARGEST, DType
from kernelseam.frozen import dataclass
from kernelseam.reference.epilogue import Epilogue
from kernelseam.reference.products import product
from kernelseam.reference.reductions import Reductions
from kernelseam.reference.scratch import shaped

_SIDE = 1024  # rows, columns and summands of one block
_BLOCK = 3 * _SIDE * _SIDE  # elements of A, B and C together: 12 MiB of float32

ROWS = 128  # of one block where threads share the blocks of few matrices
_FEW = 32
"""Matrices that are fewer than this are cut, so that every thread has blocks."""

_CUT = 1 << 26
"""Multiply-adds of a matrix up to which threads share blocks. BLAS's own threads wait for one
another at each product: many small ones then take twice the time, and ten times where a core is
shared."""

Array = npt.NDArray[Any]
Store = Callable[[Array, int, slice, slice], None]
"""Of a block of a matrix's rows and columns, with the matrix's number."""


def is_cut(p: GemmProblem) -> bool:
    """Whether threads share a matrix's blocks; larger ones are left to BLAS and its threads."""
    return p.M * p.N * p.K <= _CUT and p.K <= _SIDE


def round_to_tf32(x: Array) -> None:
    """Round float32 numbers, whose rows are contiguous, in place to TF32: 10 bits of mantissa, ties
    away from zero. NaN and infinities are kept."""
    bits, finite = x.view(np.uint32), np.isfinite(x)
    np.add(bits, np.uint32(0x1000), out=bits, where=finite)
    np.bitwise_and(bits, np.uint32(0xFFFFE000), out=bits, where=finite)


@dataclass(frozen=True)
class Stack:
    """C, [batch, group of heads that share one B, head within it, row, column], with bias,
    residual, what the epilogue is of, and the sums of op(A)'s rows."""

    c: Array
    bias: Array | None
    residual: Array | None
    sums: Array | None
    row_sums: Array | None
    numbers: Array
    """Of C's, by the first three axes."""
    products: Callable[[], Iterator[tuple[Array, Array]]]
    """A and B, with the same axes, of each product that is summed into C."""
    scales: tuple[Array, Array] | None = None
    """Of rows, with one column, and of columns, with one head within the group and one row; those
    of blocks with an axis of blocks of k behind that of rows or columns."""


def _matmul(a: Array, b: Array, out: Array) -> None:
    np.matmul(a, b, out=out)


def _of_blocks(scales: Array, rows: slice, of_rows: int, inner: slice, of_k: int) -> Array:
    """The scale of each element of a block of A or B, whose last axes are rows or columns and k."""
    i, k = (np.arange(s.start, s.stop) // n for s, n in ((rows, of_rows), (inner, of_k)))
    result: Array = scales[..., i[:, None], k]
    return result


@dataclass(frozen=True)
class _Operand:
    """How blocks of A or B are passed to BLAS: in place, or as a copy in the accumulator's
    dtype."""

    transposed: bool
    copied: bool
    tf32: bool
    """Whether the copy is rounded to TF32."""

    def take(
        self, memory: Array, stack: tuple[slice, ...], rows: slice, columns: slice, scratch: Array
    ) -> Array:
        block = (
            memory[(*stack, columns, rows)] if self.transposed else memory[(*stack, rows, columns)]
        )
        if self.copied:
            copy = shaped(scratch, *block.shape)
            np.copyto(copy, block)
            if self.tf32:
                round_to_tf32(copy)
            block = copy
        return block.swapaxes(-1, -2) if self.transposed else block


class Blocks:
    """C = alpha·Σ op(A)·op(B) + beta·C + bias + residual over a stack of matrices, in blocks of
    bounded size."""

    def __init__(self, problem: GemmProblem, cut: bool, most: int) -> None:
        """``cut``: products are computed on the calling thread. ``most``: matrices of a block."""
        p = self.problem = problem
        acc = p.spec.dtype_acc

        def blas(dtype: DType, shape: tuple[int, int], row: int) -> bool:
            return dtype is acc and (shape[0] <= 1 or row >= shape[1])

        tf32 = p.spec.precision == "tf32"
        self.a = _Operand(
            p.spec.a_transposed, tf32 or not blas(p.spec.dtype, p.a_shape, p.a_strides[2]), tf32
        )
        self.b = _Operand(
            p.spec.b_transposed, tf32 or not blas(p.spec.dtype, p.b_shape, p.b_strides[2]), tf32
        )
        in_place = (
            blas(p.spec.dtype_c, (p.M, p.N), p.c_strides[2])
            and p.spec.plain
            and p.alpha == 1
            and p.beta == 0
        )
        self.multiply = product if cut else _matmul
        m, n = min(p.M, ROWS if cut and p.matrices < _FEW else _SIDE), min(p.c_columns, _SIDE)
        if p.heads is not None:  # columns that are rotated together are in one block
            n = min(p.N, max(_SIDE // p.heads.head_dim, 1) * p.heads.head_dim)
        k = min(p.K, _SIDE) if self.a.copied or self.b.copied or not in_place else p.K
        # Half-open blocks of (batch, head of B, head of C within it), then of rows, columns and
        # summands.
        within = max(p.b_head_group // p.c_head_group, 1)
        heads = p.num_heads // p.c_head_group // within
        room = max(min(_BLOCK // max(m * n + (m + n) * k, 1), most), 1)
        group = min(within, room)
        kv = min(heads, max(room // max(group, 1), 1))
        batch = min(p.batch // p.c_batch_group, max(room // max(group * kv, 1), 1))
        self.steps = (batch, kv, group, m, n)
        self.k = k
        self.in_place = in_place and k == p.K
        stack = batch * kv * group
        c = 0 if self.in_place else stack * m * n
        self.sizes = (c, c, stack * m * k * self.a.copied, batch * kv * k * n * self.b.copied)

    def of(self, stack: Stack) -> Iterator[tuple[slice, ...]]:
        """The blocks of C."""
        extents = stack.c.shape
        for starts in itertools.product(
            *(range(0, n, s or 1) for n, s in zip(extents, self.steps, strict=True))
        ):
            yield tuple(
                slice(i, min(i + s, n)) for i, s, n in zip(starts, self.steps, extents, strict=True)
            )

    def run(
        self,
        stack: Stack,
        at: tuple[slice, ...],
        scratch: list[Array],
        epilogue: Epilogue | None,
        reductions: Reductions | None,
        store: Store | None = None,
    ) -> None:
        """Compute one block. ``store``: of a C whose columns are heads."""
        out, acc = stack.c[at], self.problem.spec.dtype_acc.numpy
        if self.in_place:
            self._multiply(out, stack, at, scratch)
            return
        sums = list[Array]()
        for columns in [at[4]] if epilogue is None else epilogue.columns(at[4], self.problem.N):
            own = (*at[:4], columns)
            part = shaped(scratch[0], *out.shape) if not sums else np.empty(out.shape, acc)
            self._multiply(part, stack, own, scratch)
            self._add(part, stack, own, scratch[1])
            if stack.sums is not None:
                stack.sums[own] = self._saturated(part)
            sums.append(part)
        if epilogue is not None:
            sums = [epilogue(sums, stack.numbers[at[:3]], at[3], at[4], reductions)]
        if store is not None:
            for b, rows in enumerate(sums[0][:, 0, 0], at[0].start):
                store(rows, b, at[3], at[4])
        else:
            out[...] = self._saturated(sums[0])

    def _saturated(self, part: Array) -> Array:
        """What a result's dtype of 8 bits, which has no infinity, can hold of it."""
        if not (dtype := self.problem.spec.dtype_c).is_fp8:
            return part
        bound = part.dtype.type(LARGEST[dtype])
        return np.clip(part, -bound, bound)

    def _multiply(
        self, part: Array, stack: Stack, at: tuple[slice, ...], scratch: list[Array]
    ) -> None:
        """The sum of a block's products; beside its first columns those of A's rows."""
        p, more = self.problem, part
        if sums_rows := stack.row_sums is not None and at[4].start == 0:
            row_sums = np.zeros(part.shape[:4], part.dtype)
        for a, b in stack.products() if p.reads_inputs else ():  # K may be 0, and lists missing
            for k in range(0, p.K, self.k):
                inner = slice(k, min(k + self.k, p.K))
                left = self.a.take(a, at[:3], at[3], inner, scratch[2])
                right = self.b.take(b, (*at[:2], slice(None)), inner, at[4], scratch[3])
                if p.spec.scale_block is not None and stack.scales is not None:
                    of_rows, of_columns = stack.scales
                    m, n, k_block = p.spec.scale_block
                    left *= _of_blocks(of_rows[at[:3]], at[3], m, inner, k_block)
                    columns = of_columns[(*at[:2], slice(None))]
                    right *= _of_blocks(columns, at[4], n, inner, k_block).swapaxes(-1, -2)
                self.multiply(left, right, more)
                if sums_rows:
                    row_sums += left.sum(-1)
                if more is not part:
                    part += more
                elif not self.in_place:
                    more = shaped(scratch[1], *part.shape)
        if not p.reads_inputs:
            part[...] = 0
        if sums_rows and stack.row_sums is not None:
            stack.row_sums[at[:4]] = row_sums

    def _add(self, part: Array, stack: Stack, at: tuple[slice, ...], scratch: Array) -> None:
        """alpha·scaled part + beta·C + bias + residual, in the accumulator's dtype; beta = 0 never
        reads C."""
        p, old = self.problem, shaped(scratch, *part.shape)
        if stack.scales is not None and p.reads_inputs and p.spec.scale_block is None:
            by_row, by_column = stack.scales
            part *= by_row[at[:4]]
            part *= by_column[(*at[:2], slice(None), slice(None), at[4])]
        if p.alpha != 1 and p.reads_inputs:
            part *= p.alpha
        if p.beta:
            np.copyto(old, stack.c[at])
            old *= p.beta
            part += old
        for x in (
            None if stack.bias is None else stack.bias[(*at[:3], slice(None), at[4])],
            None if stack.residual is None else stack.residual[at],
        ):
            if x is not None:
                np.copyto(old, x)
                part += old

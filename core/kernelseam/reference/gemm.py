"""Batched GEMM on the host: blocks of results, BLAS for the products."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.contract import Device, OperandRule, PlanParts, host_array
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.dtypes import LARGEST, DType
from kernelseam.reference.epilogue import Epilogue
from kernelseam.reference.implementation import NumpyImplementation, operand_arrays, recorded
from kernelseam.reference.products import product
from kernelseam.reference.reductions import Reductions, reduction_arrays
from kernelseam.reference.scratch import carve, scratch_bytes, shaped
from kernelseam.reference.threads import most_threads, share, threads_for

_SIDE = 1024  # rows, columns and summands of one block
_BLOCK = 3 * _SIDE * _SIDE  # elements of A, B and C together: 12 MiB of float32

_ROWS = 128  # of one block where threads share the blocks of few matrices
_FEW = 32
"""Matrices that are fewer than this are cut, so that every thread has blocks."""
_CUT = 1 << 26
"""Multiply-adds of a matrix up to which threads share blocks. BLAS's own threads wait for one
another at each product: many small ones then take twice the time, and ten times where a core is
shared."""

Array = npt.NDArray[Any]


def round_to_tf32(x: Array) -> None:
    """Round float32 numbers, whose rows are contiguous, in place to TF32: 10 bits of mantissa, ties
    away from zero. NaN and infinities are kept."""
    bits, finite = x.view(np.uint32), np.isfinite(x)
    np.add(bits, np.uint32(0x1000), out=bits, where=finite)
    np.bitwise_and(bits, np.uint32(0xFFFFE000), out=bits, where=finite)


class NumpyGemm(NumpyImplementation[GemmProblem]):
    """Strided and pointer lists, every dtype (8 and 16 bits computed in float32), any sizes and
    strides.
    "tf32" rounds A and B; "tf32x3" is computed in float32, which is within its bound."""

    operation = "gemm"

    def supports(self, problem: GemmProblem, device: Device) -> str | None:
        spec = problem.spec
        if spec.dtype_acc not in (DType.float32, DType.float64):
            return f"accumulates in float32 or float64, not in {spec.dtype_acc}"
        if spec.row_sums or spec.segmented or spec.heads:
            return "has no row sums, segments or heads, which are a projection's"
        return None

    def build(self, problem: GemmProblem, device: Device) -> PlanParts:
        step = _GemmStep(problem, device)
        return PlanParts((step,), step.threads * step.bytes)


@dataclass(frozen=True)
class _Stack:
    """C, [batch, group of heads that share one B, head within it, row, column], with bias,
    residual and what the epilogue is of."""

    c: Array
    bias: Array | None
    residual: Array | None
    sums: Array | None
    numbers: Array
    """Of C's, by the first three axes."""
    products: Callable[[], Iterator[tuple[Array, Array]]]
    """A and B, with the same axes, of each product that is summed into C."""
    scales: tuple[Array, Array] | None = None
    """Of rows, with one column, and of columns, with one head within the group and one row; those
    of blocks with an axis of blocks of k behind that of rows or columns."""


class _GemmStep:
    def __init__(self, problem: GemmProblem, device: Device) -> None:
        p = self.problem = problem
        blocks = p.matrices * -(-p.M // _ROWS)
        # larger ones are left to BLAS and its threads
        self.cut = p.M * p.N * p.K <= _CUT and p.K <= _SIDE
        most = max(blocks // 2, 1) if self.cut else 1
        self.threads = sharing = min(threads_for(p.operations, device), most)
        if p.spec.reductions:  # a block adds its matrices up: in the same blocks on any device
            sharing = min(most_threads(p.operations), most)
        self.blocks = _Blocks(p, self.cut, max(p.matrices // (2 * sharing), 1))
        self.bytes = scratch_bytes(self.blocks.sizes, p.spec.dtype_acc)
        self.record = recorded("gemm", device, (problem.matrices, 1, 1))

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        p = self.problem
        scratch = [
            carve(workspace + i * self.bytes, self.blocks.sizes, p.spec.dtype_acc)
            for i in range(self.threads)
        ]
        operands = (
            self._by_address(pointers) if p.spec.view == "pointers" else self._strided(pointers)
        )

        epilogue = Epilogue.bound(p, pointers)
        reduced = reduction_arrays(p, pointers)

        def work(
            reductions: Reductions | None,
            thread: int,
            tasks: Iterator[tuple[_Stack, tuple[slice, ...]]],
        ) -> None:
            with np.errstate(all="ignore"):
                for stack, at in tasks:
                    self.blocks.run(stack, at, scratch[thread], epilogue, reductions)

        def launch(stream: int) -> None:
            reductions = Reductions(p, reduced) if reduced else None
            share(
                partial(work, reductions),
                ((stack, at) for stack in operands() for at in self.blocks.of(stack)),
                self.threads,
            )
            if reductions is not None:
                reductions.write()

        return launch

    def _strided(self, pointers: Mapping[str, int]) -> Callable[[], Iterator[_Stack]]:
        """All C in one stack; where the head groups of C and B do not nest, a stack for each
        head."""
        p = self.problem
        named = ("A", "B", "C", "bias", "residual", "preactivation", "a_scales", "b_scales")
        arrays = {
            r.name: _memory(pointers.get(r.name, 0), r) for r in p.operands if r.name in named
        }
        a, b, c = (arrays[n] for n in "ABC")
        added = [arrays.get(n) for n in ("bias", "residual", "preactivation")]
        numbers = np.arange(c.shape[0] * c.shape[1]).reshape(c.shape[:2])
        summed, shared = p.c_head_group, p.b_head_group
        if p.reads_inputs:
            a, b = (_split(x, 0, p.c_batch_group) for x in (a, b))
        if summed % shared == 0 or shared % summed == 0:
            stack = self._stack(a, b, c, added, numbers)
            if p.spec.scales:
                by_row, by_column = arrays["a_scales"], arrays["b_scales"][:, :, None]
                if p.spec.scale_block is None:
                    by_row, by_column = by_row[..., None], by_column[:, :, :, None]
                by_row = _split(by_row, 1, shared)
                stack = replace(stack, scales=(by_row, by_column))
            return lambda: iter((stack,))

        def one_per_head() -> Iterator[_Stack]:
            for h in range(c.shape[1]):
                first, last = h * summed, (h + 1) * summed - 1
                of, of_b = slice(h, h + 1), slice(first // shared, last // shared + 1)
                yield self._stack(
                    a[:, :, first : last + 1],
                    b[:, :, of_b],
                    c[:, of],
                    [None if x is None else x[:, of] for x in added],
                    numbers[:, of],
                    first % shared,
                )

        return one_per_head

    def _stack(
        self,
        a: Array,
        b: Array,
        c: Array,
        added: Sequence[Array | None],
        numbers: Array,
        offset: int = 0,
    ) -> _Stack:
        """``a`` and ``b``: [batch of C, batch within it, head, …]. The first head of A is its B's
        ``offset``-th. ``added``: bias, residual and what the epilogue is of."""
        p = self.problem
        summed, shared = p.c_head_group, p.b_head_group
        within = max(shared // summed, 1) if shared % summed == 0 else 1
        c, numbers = _split(c, 1, within), _split(numbers, 1, within)
        bias, residual, sums = (None if x is None else _split(x, 1, within) for x in added)
        if not p.reads_inputs or not c.size:
            return _Stack(c, bias, residual, sums, numbers, lambda: iter(()))
        left = _split(_split(a, 2, summed), 2, within)
        right = _split(b, 2, b.shape[2] // c.shape[1])[:, :, :, None]

        def products() -> Iterator[tuple[Array, Array]]:
            for i, j in itertools.product(range(p.c_batch_group), range(summed)):
                yield left[:, i, :, :, j], right[:, i, :, :, (offset + j) // shared]

        return _Stack(c, bias, residual, sums, numbers, products)

    def _by_address(self, pointers: Mapping[str, int]) -> Callable[[], Iterator[_Stack]]:
        """One matrix at a time; addresses are read at each launch."""
        p, spec = self.problem, self.problem.spec
        lists = operand_arrays([r for r in p.operands if r.dtype is None], pointers)
        vector = ((1, p.N), 0)
        strides = {
            "A": (spec.dtype, p.a_shape, p.a_strides[2]),
            "B": (spec.dtype, p.b_shape, p.b_strides[2]),
            "C": (spec.dtype_c, (p.M, p.c_columns), p.c_strides[2]),
            "preactivation": (spec.dtype_c, (p.M, p.N), p.preactivation_strides[2]),
            "bias": (spec.bias, *vector),
            "residual": (spec.residual, (p.M, p.N), p.residual_strides[2]),
            "a_scales": (DType.float32, (p.M, 1), 1),
            "b_scales": (DType.float32, (1, p.N), 0),
        }

        def matrix(name: str, i: int) -> Array:
            dtype, shape, row = strides[name]
            rule = OperandRule(name, dtype, (1, 1, 1, *shape), (0, 0, 0, row, 1), 1)
            return _memory(int(lists[f"{name}_ptrs"][i]), rule)

        def stacks() -> Iterator[_Stack]:
            for i in range(len(lists["C_ptrs"])):
                c, bias, residual, sums = (
                    matrix(n, i) if f"{n}_ptrs" in lists else None
                    for n in ("C", "bias", "residual", "preactivation")
                )
                assert c is not None
                scales = None
                if spec.scales and p.reads_inputs:
                    scales = matrix("a_scales", i), matrix("b_scales", i)
                factors = partial(products, *divmod(i, p.num_heads // p.c_head_group))
                yield _Stack(c, bias, residual, sums, np.full((1, 1, 1), i), factors, scales)

        def products(b: int, h: int) -> Iterator[tuple[Array, Array]]:
            for j, k in itertools.product(range(p.c_batch_group), range(p.c_head_group)):
                i = (b * p.c_batch_group + j) * p.num_heads + h * p.c_head_group + k
                yield matrix("A", i), matrix("B", i)

        return stacks


def _matmul(a: Array, b: Array, out: Array) -> None:
    np.matmul(a, b, out=out)


def _memory(pointer: int, rule: OperandRule) -> Array:
    """An operand by the shape and strides of its rule; a bias as a matrix of one row."""
    assert rule.dtype is not None
    shape, strides = rule.shape, rule.strides
    if rule.name == "bias" and len(shape) == 3:
        shape, strides = (*shape[:2], 1, shape[2]), (*strides[:2], 0, 1)
    if shape[-2] <= 1 and not rule.name.endswith("_scales"):
        strides = (*strides[:-2], shape[-1], 1)
    return host_array(pointer, shape, strides, rule.dtype)


def _split(x: Array, axis: int, inner: int) -> Array:
    """An axis as two, the second ``inner`` long; a view."""
    n, stride = x.shape[axis], x.strides[axis]
    shape = (*x.shape[:axis], n // inner, inner, *x.shape[axis + 1 :])
    strides = (*x.strides[:axis], stride * inner, stride, *x.strides[axis + 1 :])
    return np.lib.stride_tricks.as_strided(x, shape, strides)


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


class _Blocks:
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
        m, n = min(p.M, _ROWS if cut and p.matrices < _FEW else _SIDE), min(p.c_columns, _SIDE)
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

    def of(self, stack: _Stack) -> Iterator[tuple[slice, ...]]:
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
        stack: _Stack,
        at: tuple[slice, ...],
        scratch: list[Array],
        epilogue: Epilogue | None,
        reductions: Reductions | None,
    ) -> None:
        """Compute one block."""
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
        out[...] = self._saturated(sums[0])

    def _saturated(self, part: Array) -> Array:
        """What a result's dtype of 8 bits, which has no infinity, can hold of it."""
        if not (dtype := self.problem.spec.dtype_c).is_fp8:
            return part
        bound = part.dtype.type(LARGEST[dtype])
        return np.clip(part, -bound, bound)

    def _multiply(
        self, part: Array, stack: _Stack, at: tuple[slice, ...], scratch: list[Array]
    ) -> None:
        """The sum of a block's products."""
        p, more = self.problem, part
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
                if more is not part:
                    part += more
                elif not self.in_place:
                    more = shaped(scratch[1], *part.shape)
        if not p.reads_inputs:
            part[...] = 0

    def _add(self, part: Array, stack: _Stack, at: tuple[slice, ...], scratch: Array) -> None:
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

"""Batched GEMM on the host: blocks of results, BLAS for the products."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.contract import Device, OperandRule, PlanParts, host_array
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.dtypes import DType
from kernelseam.reference.epilogue import Epilogue
from kernelseam.reference.gemm_blocks import ROWS, Blocks, Stack, Store, is_cut
from kernelseam.reference.implementation import NumpyImplementation, operand_arrays, recorded
from kernelseam.reference.reductions import Reductions, reduction_arrays
from kernelseam.reference.scratch import carve, scratch_bytes
from kernelseam.reference.threads import most_threads, share, threads_for

Array = npt.NDArray[Any]


class NumpyGemm(NumpyImplementation[GemmProblem]):
    """Strided and pointer lists, every dtype (8 and 16 bits computed in float32), any sizes and
    strides.
    "tf32" rounds A and B; "tf32x3" is computed in float32, which is within its bound."""

    operation = "gemm"

    def supports(self, problem: GemmProblem, device: Device) -> str | None:
        spec = problem.spec
        if spec.dtype_acc not in (DType.float32, DType.float64):
            return f"accumulates in float32 or float64, not in {spec.dtype_acc}"
        return "has no heads, which are a projection's" if spec.heads else None

    def build(self, problem: GemmProblem, device: Device) -> PlanParts:
        step = GemmStep(problem, device)
        return PlanParts((step,), step.threads * step.bytes)


class GemmStep:
    """One product of a batch. ``heads``: makes, of the operands' addresses, what stores a C whose
    columns are heads."""

    def __init__(
        self,
        problem: GemmProblem,
        device: Device,
        heads: Callable[[Mapping[str, int]], Store] | None = None,
    ) -> None:
        p, self.heads = problem, heads
        self.problem = p
        blocks = p.matrices * -(-p.M // ROWS)
        cut = is_cut(p)
        most = max(blocks // 2, 1) if cut else 1
        self.threads = sharing = min(threads_for(p.operations, device), most)
        if p.spec.reductions:  # a block adds its matrices up: in the same blocks on any device
            sharing = min(most_threads(p.operations), most)
        self.blocks = Blocks(p, cut, max(p.matrices // (2 * sharing), 1))
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
        store = None if self.heads is None else self.heads(pointers)

        def work(
            reductions: Reductions | None,
            thread: int,
            tasks: Iterator[tuple[Stack, tuple[slice, ...]]],
        ) -> None:
            with np.errstate(all="ignore"):
                for stack, at in tasks:
                    self.blocks.run(stack, at, scratch[thread], epilogue, reductions, store)

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

    def _strided(self, pointers: Mapping[str, int]) -> Callable[[], Iterator[Stack]]:
        """All C in one stack; where the head groups of C and B do not nest, a stack for each head;
        where the heads of A are in several places, and none are summed, one for each place."""
        p = self.problem
        named = ("A", "B", "C", "bias", "residual", "preactivation", "a_scales", "b_scales")
        arrays = {
            r.name: _memory(pointers.get(r.name, 0), r) for r in p.operands if r.name in named
        }
        b, c = arrays["B"], arrays["C"]
        factors = self._segments(pointers) if p.segments else [arrays["A"]]
        added = [arrays.get(n) for n in ("bias", "residual", "preactivation")]
        added.append(self._row_sums(pointers, c.shape))
        numbers = np.arange(c.shape[0] * c.shape[1]).reshape(c.shape[:2])
        summed, shared = p.c_head_group, p.b_head_group
        if p.reads_inputs:
            b, *factors = (_split(x, 0, p.c_batch_group) for x in (b, *factors))

        def of_heads(of: slice, of_b: slice, a: Sequence[Array], offset: int = 0) -> Stack:
            more = [None if x is None else x[:, of] for x in added]
            return self._stack(a, b[:, :, of_b], c[:, of], more, numbers[:, of], offset)

        if p.segments and summed == 1:
            ends = list(itertools.accumulate(s.heads for s in p.segments))
            places = [slice(e - s.heads, e) for e, s in zip(ends, p.segments, strict=True)]
            return lambda: (of_heads(of, of, [a]) for of, a in zip(places, factors, strict=True))
        if summed % shared == 0 or shared % summed == 0:
            stack = self._stack(factors, b, c, added, numbers)
            if p.spec.scales:
                by_row, by_column = arrays["a_scales"], arrays["b_scales"][:, :, None]
                if p.spec.scale_block is None:
                    by_row, by_column = by_row[..., None], by_column[:, :, :, None]
                by_row = _split(by_row, 1, shared)
                stack = replace(stack, scales=(by_row, by_column))
            return lambda: iter((stack,))

        def one_per_head() -> Iterator[Stack]:
            (a,) = factors
            for h in range(c.shape[1]):
                first, last = h * summed, (h + 1) * summed - 1
                of, of_b = slice(h, h + 1), slice(first // shared, last // shared + 1)
                yield of_heads(of, of_b, [a[:, :, first : last + 1]], first % shared)

        return one_per_head

    def _segments(self, pointers: Mapping[str, int]) -> list[Array]:
        """The places of A's heads."""
        p = self.problem
        return [
            host_array(
                pointers.get(name, 0),
                (p.batch * p.reads_inputs, s.heads, *p.a_shape),
                (*s.strides, 1),
                p.spec.dtype,
            )
            for name, s in zip(("A", "a1", "a2"), p.segments, strict=True)
        ]

    def _row_sums(self, pointers: Mapping[str, int], c: tuple[int, ...]) -> Array | None:
        p = self.problem
        if p.spec.row_sums is None:
            return None
        return host_array(pointers["sums"], (*c[:2], p.M), (*p.sums_strides, 1), p.spec.row_sums)

    def _stack(
        self,
        a: Sequence[Array],
        b: Array,
        c: Array,
        added: Sequence[Array | None],
        numbers: Array,
        offset: int = 0,
    ) -> Stack:
        """``a``, by places, and ``b``: [batch of C, batch within it, head, …]. The first head of A
        is its B's ``offset``-th. ``added``: bias, residual, what the epilogue is of, and the sums
        of A's rows."""
        p = self.problem
        summed, shared = p.c_head_group, p.b_head_group
        within = max(shared // summed, 1) if shared % summed == 0 else 1
        heads = c.shape[1]
        c, numbers = _split(c, 1, within), _split(numbers, 1, within)
        more = (None if x is None else _split(x, 1, within) for x in added)
        bias, residual, sums, row_sums = more
        if not p.reads_inputs or not c.size:
            return Stack(c, bias, residual, sums, row_sums, numbers, lambda: iter(()))
        left = [_split(_split(x, 2, x.shape[2] // heads), 2, within) for x in a]
        right = _split(b, 2, b.shape[2] // c.shape[1])[:, :, :, None]

        def products() -> Iterator[tuple[Array, Array]]:
            for i in range(p.c_batch_group):
                ones = (x[:, i, :, :, j] for x in left for j in range(x.shape[4]))
                for j, one in enumerate(ones, offset):
                    yield one, right[:, i, :, :, j // shared]

        return Stack(c, bias, residual, sums, row_sums, numbers, products)

    def _by_address(self, pointers: Mapping[str, int]) -> Callable[[], Iterator[Stack]]:
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

        def stacks() -> Iterator[Stack]:
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
                yield Stack(c, bias, residual, sums, None, np.full((1, 1, 1), i), factors, scales)

        def products(b: int, h: int) -> Iterator[tuple[Array, Array]]:
            for j, k in itertools.product(range(p.c_batch_group), range(p.c_head_group)):
                i = (b * p.c_batch_group + j) * p.num_heads + h * p.c_head_group + k
                yield matrix("A", i), matrix("B", i)

        return stacks


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

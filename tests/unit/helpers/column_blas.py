"""What a BLAS that stores columns computes, on host memory and in float64: the vendors' libraries
in tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from kernelseam.blas import BatchedGemm
from kernelseam.contract import Device, host_array
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import FLOATING, DType

Array = np.ndarray[Any, Any]
SQUARE = GemmProblem(
    GemmSpec(DType.float32, DType.float32, DType.float32),
    4,
    4,
    4,
    1,
    1,
    (0, 0, 4),
    (0, 0, 4),
    (0, 0, 4),
)


@dataclass(frozen=True)
class Columns:
    """Matrices as such a library is told of them: ``lead`` elements from column to column,
    ``stride`` from matrix to matrix. Where the stride is None, ``pointer`` is that of a list of
    addresses."""

    pointer: int
    dtype: DType
    lead: int
    stride: int | None
    transposed: bool = False

    def matrix(self, i: int, rows: int, columns: int) -> Array:
        """Matrix i, as it lies in memory; of ``transposed`` ones the rows and columns are those
        after it."""
        if self.transposed:
            rows, columns = columns, rows
        if self.stride is None:
            start = int(host_array(self.pointer, (i + 1,), (1,), DType.float64).view(np.uint64)[i])
        else:
            start = self.pointer + i * self.stride * self.dtype.itemsize
        assert self.lead >= max(rows, 1), "columns must not overlap"
        result = host_array(start, (rows, columns), (1, self.lead), self.dtype)
        return result.T if self.transposed else result


ARGUMENTS = (
    *("turn_a", "turn_b", "m", "n", "k", "alpha", "a", "kind_a", "lda", "stride_a"),
    *("b", "kind_b", "ldb", "stride_b", "beta", "c", "kind_c", "ldc", "stride_c", "count"),
    *("compute", "algorithm"),
)
"""Of a strided batch's product; lists have no strides, one product no count either."""


def multiply_as_told(
    given: Sequence[Any],
    batch: str,
    kinds: Mapping[Any, DType],
    turned: Callable[[Any], bool],
    wide: Callable[[Any], bool],
) -> dict[str, Any]:
    """The product that a library is asked for: a "strided" batch, "lists" or "one". Scalars are
    float64 where the kind of sums is ``wide``. Returns the arguments by name."""
    left_out = {"strided": (), "lists": ("stride",), "one": ("stride", "count")}[batch]
    x = dict(zip((n for n in ARGUMENTS if not n.startswith(left_out or "-")), given, strict=True))
    none = None if batch == "lists" else 0
    first, second, result = (
        Columns(
            *(x[n], kinds[x[f"kind_{n}"]], x[f"ld{n}"], x.get(f"stride_{n}", none)),
            n != "c" and turned(x[f"turn_{n}"]),
        )
        for n in "abc"
    )
    scalar = ctypes.c_double if wide(x["compute"]) else ctypes.c_float
    alpha, beta = (scalar.from_address(x[n]).value for n in ("alpha", "beta"))
    multiply(x["m"], x["n"], x["k"], x.get("count", 1), first, second, result, alpha, beta)
    return x


def multiply(
    m: int,
    n: int,
    k: int,
    count: int,
    first: Columns,
    second: Columns,
    result: Columns,
    alpha: float,
    beta: float,
    added: Columns | None = None,
    bias: Columns | None = None,
) -> None:
    """result[m×n] = alpha·op(first)·op(second) + beta·added + bias, by rows. ``added`` is the
    result if None."""
    for i in range(count):
        out = result.matrix(i, m, n)
        x = alpha * (
            first.matrix(i, m, k).astype(np.float64) @ second.matrix(i, k, n).astype(np.float64)
        )
        if beta != 0:
            x += beta * (added or result).matrix(i, m, n).astype(np.float64)
        if bias is not None:
            x += bias.matrix(i, m, 1).astype(np.float64)
        out[...] = x


def integers(dtype: DType, *shape: int) -> Any:
    """Values whose products are exact in every dtype."""
    return np.random.default_rng(sum(shape)).integers(-4, 5, shape).astype(dtype.numpy)


def scattered(dtype: DType, count: int, rows: int, columns: int) -> tuple[list[Any], Any]:
    """Matrices in any order in memory, of which one is unused, and the list of their
    addresses."""
    created = integers(dtype, count + 1, rows, columns)
    results = [created[i] for i in np.random.default_rng(rows).permutation(count + 1)[:count]]
    return results, np.array([x.ctypes.data for x in results], np.uint64)


def check_lists_that_are_not_read(gemm: BatchedGemm, device: Device) -> None:
    """Where alpha is 0, lists of A and B need not be there."""
    c, c_list = scattered(DType.float32, 2, 4, 4)
    expected = [3 * x for x in c]
    spec = GemmSpec(DType.float32, DType.float32, DType.float32, view="pointers")
    strides = (0, 0, 4)
    problem = GemmProblem(spec, 4, 4, 4, 2, 1, strides, strides, strides, alpha=0.0, beta=3.0)
    (step,) = gemm.build(problem, device).steps
    step.bind({"A_ptrs": 0, "C_ptrs": c_list.ctypes.data}, 0)(0)
    assert all(np.array_equal(x, y) for x, y in zip(c, expected, strict=True))


class Product(NamedTuple):
    """Of which kind the factors are, and what is added to."""

    dtype: DType
    a_transposed: bool
    b_transposed: bool
    beta: float


PRODUCTS = [Product(*x) for x in product(FLOATING, (False, True), (False, True), (0.0, 2.0))]


def check_products(gemm: BatchedGemm, device: Device, of: Product) -> None:
    """Six products of matrices with gaps between their rows, on stream 77: exact, and nothing else
    is written."""
    batch, heads, M, N, K = 2, 3, 5, 7, 6
    dtype, a_transposed, b_transposed, beta = of
    a = integers(dtype, batch, heads, *((K, M + 2) if a_transposed else (M, K + 2)))
    b = integers(dtype, batch, heads, *((N, K) if b_transposed else (K, N)))
    c = integers(dtype, batch, heads, M, N + 1)
    spec = GemmSpec(dtype, dtype, dtype.accumulator, a_transposed, b_transposed)
    a_steps, b_steps, c_steps = (
        (n, h, row) for n, h, row, _ in ([s // x.itemsize for s in x.strides] for x in (a, b, c))
    )
    problem = GemmProblem(
        spec, M, N, K, batch, heads, a_steps, b_steps, c_steps, alpha=0.5, beta=beta
    )
    left = (a[..., :M].swapaxes(2, 3) if a_transposed else a[..., :K]).astype(np.float64)
    right = (b.swapaxes(2, 3) if b_transposed else b).astype(np.float64)
    expected = 0.5 * left @ right + beta * c[..., :N].astype(np.float64)
    edge = c[..., N:].copy()
    (step,) = gemm.build(problem, device).steps
    step.bind({"A": a.ctypes.data, "B": b.ctypes.data, "C": c.ctypes.data}, 0)(77)
    assert np.array_equal(c[..., :N], expected.astype(dtype.numpy))
    assert np.array_equal(c[..., N:], edge)


def check_products_of_lists(gemm: BatchedGemm, device: Device, kernel: str, of: Product) -> None:
    """Four products of matrices with gaps between their rows, on stream 77: exact, and nothing else
    is written."""
    batch, heads, M, N, K = 2, 2, 5, 7, 6
    dtype, a_transposed, b_transposed, beta = of
    a, a_list = scattered(dtype, 4, *((K, M + 2) if a_transposed else (M, K + 2)))  # rows with gaps
    b, b_list = scattered(dtype, 4, *((N, K) if b_transposed else (K, N)))
    c, c_list = scattered(dtype, 4, M, N + 1)
    spec = GemmSpec(dtype, dtype, dtype.accumulator, a_transposed, b_transposed, "pointers")
    steps_a, steps_b, steps_c = ((0, 0, x[0].shape[1]) for x in (a, b, c))
    problem = GemmProblem(
        spec, M, N, K, batch, heads, steps_a, steps_b, steps_c, alpha=0.5, beta=beta
    )
    old = [x.astype(np.float64) for x in c]
    (step,) = gemm.build(problem, device).steps
    assert (step.record.kernel, step.record.kind) == (kernel, "library")
    step.bind(
        {"A_ptrs": a_list.ctypes.data, "B_ptrs": b_list.ctypes.data, "C_ptrs": c_list.ctypes.data},
        0,
    )(77)
    for A, B, C, before in zip(a, b, c, old, strict=True):
        left = (A[:, :M].T if a_transposed else A[:, :K]).astype(np.float64)
        right = (B.T if b_transposed else B).astype(np.float64)
        expected = 0.5 * left @ right + beta * before[:, :N]
        assert np.array_equal(C[:, :N], expected.astype(dtype.numpy))
        assert np.array_equal(C[:, N:], before[:, N:].astype(dtype.numpy))

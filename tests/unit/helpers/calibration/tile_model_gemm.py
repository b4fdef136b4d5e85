"""The matrix products of the tile kernel's model in NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from kernelseam.contract import host_array
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.dtypes import DType
from kernelseam.oracle.formulas import Array

K_STEP = 16
"""Summands of one matrix instruction."""

GEMM_FAULTS = {
    "unmasked-k-tail": "K is rounded up to a step without masking what lies there",
    "dropped-last-k": "the last summand is left out",
    "beta-read-at-0": "C is read and multiplied by a beta of 0",
    "alpha-0-multiplies": "A and B are read and multiplied by an alpha of 0",
    "wrong-b-head": "the head of A is taken for that of B",
    "half-sums": "partial sums are rounded to the inputs' dtype",
    "truncates": "the result is cut off where it should be rounded",
    "short-inputs": "float32 inputs are rounded to 10 bits (as TF32 is)",
    "shorter-tf32": "operands in TF32 are cut off after 7 bits (where bfloat16 ends)",
    "unsplit-tf32x3": "of the parts that float32 is split into the smaller is left out",
    "one-cross-term": "of split numbers the large part of A never meets the small one of B",
    "infinite-parts": "of an infinity the smaller part, NaN, is added",
    "writes-past-end": "one more row is written",
    "no-batch-stride": "the batch stride of A is ignored",
    "bias-by-row": "the bias is added to every column",
    "wrong-bias-head": "the bias of the first head is added to all",
    "scaled-residual": "alpha multiplies the residual too",
    "residual-walked-as-c": "the residual is read with the strides of C",
    "residual-after-rounding": "the residual is added to the rounded result",
    "dropped-last-product": "the last product of a sum is left out",
    "first-head-of-b": "all products of a sum take the B of its first head",
    "interleaved-sums": "every n-th batch is summed, in place of n in a row",
}


def gemm(
    a: Array,
    b: Array,
    out: DType,
    alpha: float,
    old: Array | None,
    beta: float,
    *,
    added: Sequence[Array] = (),
    fault: str = "",
    precision: str | None = None,
) -> Array:
    """alpha·A·B + beta·C + what is added of [M,K] and [K,N], summed in steps as a matrix unit
    does."""
    acc = DType.of(a.dtype).accumulator.numpy
    total = np.zeros((a.shape[0], b.shape[1]), acc)
    A, B = a.astype(acc), b.astype(acc)
    if fault == "short-inputs" and DType.of(a.dtype) is DType.float32:
        A, B = (_short(x) for x in (A, B))
    if precision == "tf32":
        A, B = (_short(x) for x in (A, B))
        if fault == "shorter-tf32":
            A, B = ((x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for x in (A, B))
    for k in range(0, A.shape[1], K_STEP):
        left, right = A[:, k : k + K_STEP], B[k : k + K_STEP]
        total += _split(left, right, fault) if precision == "tf32x3" else left @ right
        if fault == "half-sums":
            total = total.astype(a.dtype).astype(acc)
    result = np.asarray(alpha, acc) * total
    if old is not None:
        result = result + np.asarray(beta, acc) * old.astype(acc)
    for x in added:
        if fault == "residual-after-rounding":
            result = result.astype(out.numpy).astype(acc)
        result = result + x.astype(acc) * np.asarray(
            alpha if fault == "scaled-residual" else 1, acc
        )
    rounded = result.astype(out.numpy)
    if fault == "truncates":
        bits = rounded.view(f"u{out.itemsize}")
        # sign-magnitude: one less is nearer to 0
        bits -= np.abs(rounded.astype(acc)) > np.abs(result)
    return rounded


def _short(x: Array) -> Array:
    """float32 rounded to 10 mantissa bits."""
    y = ((np.ascontiguousarray(x).view(np.uint32) + 0x1000) & np.uint32(0xFFFFE000)).view(
        np.float32
    )
    return np.where(np.isfinite(x), y, x)


def _split(left: Array, right: Array, fault: str) -> Array:
    """A slab of products of numbers split into two parts of 10 mantissa bits, without the product
    of the small parts. Sums are truncated like in tensor cores, after 8 products and an
    accumulator."""

    def cut(x: npt.NDArray[np.float64]) -> Array:
        y = x.astype(np.float32)
        return np.where(np.abs(y) > np.abs(x), np.nextafter(y, np.float32(0)), y)

    def products(sums: Array, a: Array, b: Array) -> Array:
        for k in range(0, a.shape[1], 8):
            sums = cut(
                sums.astype(np.float64)
                + a[:, k : k + 8].astype(np.float64) @ b[k : k + 8].astype(np.float64)
            )
        return sums

    (a, a_small), (b, b_small) = (
        (large, _short(x - large)) for x in (left, right) for large in (_short(x),)
    )
    zero = np.zeros((left.shape[0], right.shape[1]), np.float32)
    large, small = products(zero, a, b), products(zero, a_small, b)
    if fault != "one-cross-term":
        small = products(small, a, b_small)
    if fault == "unsplit-tf32x3":
        small = zero
    return large + (
        small if fault == "infinite-parts" else np.where(np.isfinite(small), small, np.float32(0))
    )


def compute(p: GemmProblem, at: Mapping[str, int], fault: str) -> None:
    """A strided problem over host memory."""
    s, M, N = p.spec, p.M, p.N
    K = (
        -(-p.K // K_STEP) * K_STEP
        if fault == "unmasked-k-tail"
        else p.K - (fault == "dropped-last-k" and p.K > 0)
    )
    reads = p.reads_inputs or (fault == "alpha-0-multiplies" and p.K > 0)
    a_shape, b_shape = (K, M) if s.a_transposed else (M, K), (N, K) if s.b_transposed else (K, N)

    def matrix(
        name: str,
        shape: tuple[int, int],
        strides: tuple[int, int, int],
        dtype: DType,
        i: int,
        j: int,
    ) -> Array:
        first = at[name] + (i * strides[0] + j * strides[1]) * dtype.itemsize
        return host_array(first, shape, (strides[2], 1), dtype)

    if not M * N:
        return
    for b, h in np.ndindex(p.batch // p.c_batch_group, p.num_heads // p.c_head_group):
        A, B = [np.zeros((M, 0), s.dtype.numpy)], [np.zeros((0, N), s.dtype.numpy)]
        for i, j, g in _products(p, b, h, fault) if reads else ():
            left = matrix(
                "A", a_shape, p.a_strides, s.dtype, 0 if fault == "no-batch-stride" else i, j
            )
            right = matrix("B", b_shape, p.b_strides, s.dtype, i, g)
            A.append(left.T if s.a_transposed else left)
            B.append(right.T if s.b_transposed else right)
        C = matrix("C", (M + (fault == "writes-past-end"), N), p.c_strides, s.dtype_c, b, h)
        added = []
        if s.bias:
            walk = (*p.bias_strides, 0)
            x = matrix("bias", (1, N), walk, s.bias, b, 0 if fault == "wrong-bias-head" else h)
            added.append(np.resize(x, (M, 1)) if fault == "bias-by-row" else x)
        if s.residual:
            walk = p.c_strides if fault == "residual-walked-as-c" else p.residual_strides
            added.append(matrix("residual", (M, N), walk, s.residual, b, h))
        old = C[:M] if p.beta != 0 or fault == "beta-read-at-0" else None
        left, right = np.concatenate(A, axis=1), np.concatenate(B)
        C[:M] = gemm(
            left,
            right,
            s.dtype_c,
            p.alpha,
            old,
            p.beta,
            added=added,
            fault=fault,
            precision=s.precision,
        )
        C[M:] = 0


def _products(p: GemmProblem, b: int, h: int, fault: str) -> Iterator[tuple[int, int, int]]:
    """(batch, head of A, head of B) of the products that one C sums."""
    summed = list(np.ndindex(p.c_batch_group, p.c_head_group))
    for k, n in summed[: -1 if fault == "dropped-last-product" else None]:
        batch = (
            k * (p.batch // p.c_batch_group) + b
            if fault == "interleaved-sums"
            else b * p.c_batch_group + k
        )
        head = h * p.c_head_group + n
        of_b = (h * p.c_head_group if fault == "first-head-of-b" else head) // p.b_head_group
        yield batch, head, head if fault == "wrong-b-head" else of_b

"""A vendor library's batched GEMM as an implementation: what such libraries do not support, and how
problems map to column-major arguments.

Libraries are column-major: Cᵀ = op(B)ᵀ·op(A)ᵀ, so that B comes first and M and N are exchanged. A
plugin adds how its library is loaded and called.
"""

from __future__ import annotations

import ctypes
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kernelseam.contract import (
    ABSENT,
    EMULATED,
    Coefficients,
    Cost,
    Device,
    DeviceLimits,
    LaunchRecord,
    LibraryRate,
    PlanParts,
)
from kernelseam.costs import Work, predicted, roofline
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.dtypes import DType
from kernelseam.forking import new_lock
from kernelseam.frozen import dataclass
from kernelseam.kernels.elements import divide_up
from kernelseam.kernels.gemm.cost import end_bytes

LIMIT = 2**31 - 1
"""Libraries take extents and row strides as 32-bit integers."""

EXTRAS = {
    "scales": "scales of A and B",
    "bias": "a bias",
    "residual": "a residual",
    "summed": "products summed into one C",
    "row_sums": "sums of A's rows",
    "segmented": "a segmented A",
    "heads": "a segmented C",
    "joined": "heads joined along an axis",
    "epilogue": "an epilogue",
    "preactivation": "a second result",
}
"""Features beyond a plain product, by field of the spec."""

_FEW, _MATRIX = 8, 1 << 14
"""Up to so many rows of each of a batch, of matrices of at least so many elements, take a library
as long as one row: its kernels wait for memory."""
_OF_SEVERAL = 0.9
"""Of the bandwidth at which it reads one such matrix, what it reaches with more (H200: 384 ×
1×512×128 in 15.6 µs, 64 × 1×4096×128 in 21.8)."""
_NARROWEST, _MOST_PARTS, _FEWEST_K = 32, 32, 128
"""Rows and columns of the narrowest tile that libraries are taken to have, parts that they cut K
in, and values of K in a part."""
_STEP_BYTES = 128
"""Of a row of a factor, that come at once."""


@dataclass(frozen=True)
class BlasMatrix:
    """A column-major operand of a batched product: ``lead`` is its leading dimension, ``stride``
    the elements between matrices. Where the stride is None, ``address`` is that of a list of matrix
    addresses."""

    address: int
    dtype: DType
    transposed: bool
    lead: int
    stride: int | None


@dataclass(frozen=True)
class ColumnMajorGemm:
    """``count`` products of column-major matrices: result[m×n] =
    alpha·op(first)[m×k]·op(second)[k×n] + beta·result."""

    m: int
    n: int
    k: int
    count: int
    first: BlasMatrix
    second: BlasMatrix
    result: BlasMatrix
    accumulator_dtype: DType
    precision: str | None = None
    """The spec's."""


def column_major_gemm(p: GemmProblem, pointers: Mapping[str, int]) -> ColumnMajorGemm:
    """The problem in the library's order, over addresses by operand name. Where A and B are not
    read, k is 0 and their addresses are C's."""
    s, listed = p.spec, p.spec.view == "pointers"
    strides = (None, None, None) if listed else p.matrix_strides
    assert strides is not None
    leads = (max(rows[2], 1) for rows in (p.a_strides, p.b_strides, p.c_strides))
    suffix = "_ptrs" if listed else ""
    c = pointers["C" + suffix]
    a, b = (pointers.get(name + suffix) or c for name in "AB")
    kinds = ((a, s.dtype, s.a_transposed), (b, s.dtype, s.b_transposed), (c, s.dtype_c, False))
    A, B, C = (
        BlasMatrix(*kind, lead, stride)
        for kind, lead, stride in zip(kinds, leads, strides, strict=True)
    )
    return ColumnMajorGemm(
        p.N, p.M, p.K if p.reads_inputs else 0, p.matrices, B, A, C, s.dtype_acc, s.precision
    )


def scalars(p: GemmProblem) -> tuple[Any, Any]:
    """alpha and beta in host memory, in the library's scalar type."""
    kind = ctypes.c_double if p.spec.dtype_acc is DType.float64 else ctypes.c_float
    return kind(p.alpha if p.reads_inputs else 0.0), kind(p.beta)


class Handles:
    """A library's handle for each device, created at first use, with a lock."""

    def __init__(self, create: Callable[[], Any]) -> None:
        """``create()``: a handle for the current device."""
        self._create = create
        self._handles: dict[int, tuple[Any, threading.Lock]] = {}
        self._lock = new_lock()

    def of(self, device: Device) -> tuple[Any, threading.Lock]:
        """The handle of a device, which must be current, and its lock."""
        with self._lock:
            if device.index not in self._handles:
                self._handles[device.index] = self._create(), new_lock()
            return self._handles[device.index]


class LibraryGemm(ABC):
    """Base of implementations over one function of a vendor's library; subclasses add ``build``."""

    name: str
    backend: str
    operation = "gemm"
    view = "strided"
    """How it takes batches: "strided", by one stride, or "pointers", by lists of addresses."""
    extras: frozenset[str] = frozenset()
    """The features of ``EXTRAS`` that it supports."""
    precisions: frozenset[str] = frozenset()
    """Precisions of float32 products that it supports, other than IEEE."""
    function: str
    """The function's name in the library."""

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why the library cannot be used here, or None."""

    @abstractmethod
    def build(self, problem: GemmProblem, device: Device) -> PlanParts: ...

    def coefficients(self, arch: str) -> Coefficients | None:
        """The arch's cost coefficients; None where the vendor's table has none."""
        return None

    def refuse(self, problem: GemmProblem) -> str | None:
        """A reason of this function's own not to support the problem, or None."""
        return None

    def supports(self, problem: GemmProblem, device: Device) -> str | None:
        spec = problem.spec
        if device.evidence == EMULATED:
            return "runs on real devices only"
        if spec.view != self.view:
            view = "strided batches" if self.view == "strided" else "lists of addresses"
            return f"takes {view} only"
        if spec.dtype.is_fp8:
            return f"has no {spec.dtype} products"
        if more := [
            text for name, text in EXTRAS.items() if getattr(spec, name) and name not in self.extras
        ]:
            return f"does not take {', '.join(more)}"
        if spec.precision and spec.precision not in self.precisions:
            return f"has no {spec.precision} products"
        if spec.dtype_c not in (spec.dtype, spec.dtype_acc):
            return f"has no {spec.dtype} product with a {spec.dtype_c} result"
        if spec.dtype_acc is not spec.dtype.accumulator:
            return f"does not sum {spec.dtype} products in {spec.dtype_acc}"
        if self.view == "strided" and problem.matrix_strides is None:
            return "takes one stride over all matrices, and batch and head are not evenly spaced"
        rows = (problem.a_strides[2], problem.b_strides[2], problem.c_strides[2])
        if max(problem.M, problem.N, problem.K, problem.matrices, *rows) > LIMIT:
            return f"takes extents and row strides up to {LIMIT}"
        widths = (problem.a_shape[1], problem.b_shape[1], problem.N)
        if any(row < width for row, width in zip(rows, widths, strict=True)):
            return "takes rows that do not overlap: a row stride is smaller than its row"
        if reason := self.refuse(problem):
            return reason
        return None if device.evidence == ABSENT else self.unavailable()

    def cost(self, problem: GemmProblem, device: Device) -> Cost:
        """By the cost model where the arch's row has the library's rate, else by the roofline."""
        p, known = problem, self.coefficients(device.arch)
        rate = known.libraries.get(self.name, {}).get(p.spec.dtype) if known else None
        if known is None or rate is None:
            return roofline(p, device.limits)
        # The library's instructions, not those of the shared kernels.
        coefficients = replace(known, multiply={})
        works_of = _few_rows_works if _few_rows(p) else _tile_works
        works = works_of(p, rate, device.limits)
        seconds = min(predicted(w, coefficients, device.limits) for w in works)
        return Cost(p.bytes_moved, p.operations, seconds + known.call_seconds)

    def function_of(self, problem: GemmProblem) -> str:
        """The library's function that computes a problem."""
        return self.function

    def record(self, problem: GemmProblem, device: Device) -> LaunchRecord:
        """A call of the function."""
        return LaunchRecord(
            self.function_of(problem), (1, 1, 1), (1, 1, 1), 0, device.arch, "library"
        )

    def records(
        self, problem: GemmProblem, device: Device, variant: str = ""
    ) -> tuple[LaunchRecord, ...]:
        """One record for the call; the kernels that the library launches are unknown."""
        return (self.record(problem, device),)


class BatchedGemm(LibraryGemm):
    """A library function that needs no workspace from the caller."""

    @abstractmethod
    def bind(
        self, problem: GemmProblem, device: Device, pointers: Mapping[str, int]
    ) -> Callable[[int], None]:
        """``launch(stream)`` of one product over these addresses, by operand name."""

    def build(self, problem: GemmProblem, device: Device) -> PlanParts:
        if empty(problem):
            return PlanParts(())
        return PlanParts((_Step(self, problem, device),))


def empty(problem: GemmProblem) -> bool:
    """Whether there is nothing to compute."""
    return 0 in (problem.M, problem.N, problem.matrices)


def single_stride(problem: GemmProblem, batch: int, head: int) -> int | None:
    """The single stride over all batch·num_heads matrices with strides ``batch`` and ``head``; None
    where they are not evenly spaced."""
    if problem.num_heads == 1:
        return batch
    return head if problem.batch == 1 or batch == head * problem.num_heads else None


@dataclass(frozen=True)
class _Step:
    """One call of the library."""

    gemm: BatchedGemm
    problem: GemmProblem
    device: Device

    @property
    def record(self) -> LaunchRecord:
        return self.gemm.record(self.problem, self.device)

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        return self.gemm.bind(self.problem, self.device, pointers)


def _few_rows(p: GemmProblem) -> bool:
    """Whether reading the longer factor bounds a product: of one row or column, or of a batch that
    has few of them. A batch that sums little is computed by tiles, as others are (H200, 54 ×
    1×528×16 of halves: 5.2 µs, where reading takes 2.3)."""
    few, many = sorted((p.M, p.N))
    if p.matrices == 1:
        return few == 1
    return _steps(p) >= 1 and (few == 1 or (few <= _FEW and many * p.K >= _MATRIX))


def _few_rows_works(p: GemmProblem, rate: LibraryRate, limits: DeviceLimits) -> Iterator[Work]:
    """Bound by reading the longer factor, and by the latency of its sums."""
    bandwidth = rate.few_rows * (1.0 if p.matrices == 1 else _OF_SEVERAL)
    waiting = _steps(p) * rate.few_step_seconds
    waiting += (divide_up(p.matrices, max(limits.compute_units, 1)) - 1) * rate.few_wave_seconds
    yield Work(
        round(p.bytes_moved / bandwidth),
        waiting=waiting + (rate.few_seconds if min(p.M, p.N) > 1 else 0.0),
    )


def _tile_works(p: GemmProblem, rate: LibraryRate, limits: DeviceLimits) -> Iterator[Work]:
    """Of every tile and number of parts of K that a library may choose from."""
    units = max(limits.compute_units, 1)
    for m in _sides(p.M, rate.block):
        for n in _sides(p.N, rate.block):
            blocks = p.matrices * divide_up(p.M, m) * divide_up(p.N, n)
            yield _tile_work(p, rate, m, n, blocks, 1, units)
            parts, most = 2, min(_MOST_PARTS, units // max(blocks, 1), p.K // _FEWEST_K)
            while rate.split_seconds is not None and parts <= most:
                yield _tile_work(p, rate, m, n, blocks * parts, parts, units)
                parts *= 2


def _sides(extent: int, widest: int) -> Iterator[int]:
    """Powers of two, up to the first that holds the extent."""
    side = min(_NARROWEST, widest)
    yield side
    while side < min(extent, widest):
        side *= 2
        yield side


def _tile_work(
    p: GemmProblem, rate: LibraryRate, m: int, n: int, blocks: int, parts: int, units: int
) -> Work:
    area, k = m * n, p.K * p.reads_inputs / parts
    once = rate.start_seconds * math.sqrt(area) / rate.block
    if parts > 1:
        once += rate.split_seconds or 0.0
    if blocks > units and _steps(p) <= 1:
        result = p.M * p.N * p.spec.dtype_c.itemsize
        once += rate.thin_seconds * (min(result / _THIN_BYTES, 1.0) if p.matrices == 1 else 1.0)
    return Work(
        p.bytes_moved + end_bytes(p, n),
        blocks,
        2.0 * area * k,
        dtype=p.spec.dtype,
        rate=rate.rate
        * (rate.tf32 if p.spec.precision else 1.0)
        * (area / (area + rate.edge * (m + n))),
        block_seconds=rate.block_seconds + once / max(divide_up(blocks, units), 1),
        alone=_steps(p) / parts * rate.step_seconds,
    )


_THIN_BYTES = 1.6e7
"""Of a single result, from which on a thin product waits for all of ``thin_seconds`` (H200, µs,
cuBLAS over the rest: 24×38464×24 0.6, 73×22944×16 1, 129×28072×24 1.2, 244×36864×40 2.5)."""


def _steps(p: GemmProblem) -> float:
    return p.K * p.reads_inputs * p.spec.dtype.itemsize / _STEP_BYTES

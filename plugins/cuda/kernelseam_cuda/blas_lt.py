"""cuBLASLt as a further implementation of the strided batched GEMM, with a bias or a residual in
its epilogue.

The library's heuristic chooses the algorithm when a problem is first queried, so that a plan knows
its workspace. It ranks several, and the first is not always the fastest: they are the
implementation's variants.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache

from kernelseam.blas import (
    LIMIT,
    BlasMatrix,
    Handles,
    LibraryGemm,
    column_major_gemm,
    empty,
    scalars,
    single_stride,
)
from kernelseam.contract import ABSENT, Coefficients, Device, LaunchRecord, PlanParts, Runtime
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.errors import DeviceError
from kernelseam.frozen import dataclass
from kernelseam.variants import Variant

from kernelseam_cuda import archs, cublaslt
from kernelseam_cuda.blas import PRECISIONS, TYPES, compute_type
from kernelseam_cuda.cublaslt import Attribute, LtDescriptor

_MAX_WORKSPACE = 32 << 20
"""What the vendor recommends for its newer archs."""
_CALL_ALIGNMENT = 16
"""Bytes: the alignment of every call's workspace."""
_ALIGNED = 16
"""Bytes: what a plan takes the address of a bias for a multiple of. The heuristic looks at that
address; for one at a multiple of the element size alone it gives algorithms that are ten times
slower."""


_VARIANTS = 8
"""Algorithms that a problem's variants are taken from, the heuristic's first."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm that the heuristic returned."""

    data: tuple[int, ...]
    """cublasLtMatmulAlgo_t."""
    workspace_bytes: int

    @property
    def name(self) -> str:
        """The same in every process: a digest of the library's description."""
        return hashlib.sha256(struct.pack("<8Q", *self.data)).hexdigest()[:12]

    @property
    def padded_bytes(self) -> int:
        """Of a workspace within which one of these bytes can be aligned."""
        padding = cublaslt.WORKSPACE_ALIGNMENT - _CALL_ALIGNMENT
        return self.workspace_bytes + padding if self.workspace_bytes else 0


class CublasLtGemm(LibraryGemm):
    """kernelseam.contract.Implementation over cublasLtMatmul."""

    name, backend, function = "cublaslt", "cuda", "cublasLtMatmul"
    extras = frozenset({"bias", "residual"})
    precisions = PRECISIONS

    def __init__(self, runtime: Runtime) -> None:
        """``runtime``: that of the backend, which makes a device current."""
        self._runtime = runtime
        self._heuristics = lru_cache(maxsize=1024)(self._heuristic)

    def unavailable(self) -> str | None:
        return cublaslt.unavailable()

    def coefficients(self, arch: str) -> Coefficients | None:
        return archs.COSTS.get(arch)

    def refuse(self, problem: GemmProblem) -> str | None:
        p, spec = problem, problem.spec
        if not p.reads_inputs:
            return "always multiplies, and where alpha or K is 0 A and B are not to be read"
        for name, dtype, strides in (
            ("bias", spec.bias, p.bias_strides),
            ("residual", spec.residual, p.residual_strides[:2]),
        ):
            if dtype and dtype is not spec.dtype_c:
                return f"takes a {name} of C's dtype, {spec.dtype_c}, and it is {dtype}"
            if dtype and single_stride(p, *strides) is None:
                return (
                    f"takes one stride over all of a {name}, and batch and head are not "
                    "evenly spaced"
                )
        if spec.bias and (spec.residual or p.beta != 0) and spec.dtype_c is not spec.dtype_acc:
            other = "a residual" if spec.residual else "beta·C"
            return f"rounds to {spec.dtype_c} between adding a bias and adding {other}"
        if spec.residual and p.beta != 0:
            return "adds one matrix to a product, and there are beta·C and a residual"
        if spec.residual and not p.N <= p.residual_strides[2] <= LIMIT:
            return f"takes rows of a residual that do not overlap, with a row stride up to {LIMIT}"
        return None

    def supports(self, problem: GemmProblem, device: Device) -> str | None:
        reason = super().supports(problem, device)
        if reason or empty(problem) or device.evidence == ABSENT:
            return reason
        for aligned in (True, False) if problem.spec.bias else (True,):
            algorithms = self._heuristics(problem, device, 1, aligned)
            if isinstance(algorithms, str):
                return algorithms
        return None

    def build(self, problem: GemmProblem, device: Device) -> PlanParts:
        if empty(problem):
            return PlanParts(())
        return self._parts(problem, device, self._first(problem, device))

    def _first(self, problem: GemmProblem, device: Device, aligned: bool = True) -> Algorithm:
        algorithms = self._heuristics(problem, device, 1, aligned)
        if isinstance(algorithms, str):
            raise DeviceError(f"{self.function} {algorithms}")
        return algorithms[0]

    def variants(self, problem: GemmProblem, device: Device) -> tuple[Variant, ...]:
        """The heuristic's first algorithms, all predicted to take what the library takes."""
        return tuple(
            Variant(name, self.cost(problem, device)) for name in self._by_name(problem, device)
        )

    def build_variant(self, problem: GemmProblem, device: Device, variant: str) -> PlanParts:
        return self._parts(problem, device, self._by_name(problem, device)[variant])

    def _by_name(self, problem: GemmProblem, device: Device) -> dict[str, Algorithm]:
        if empty(problem):
            return {}
        # more may rank another first
        first, more = (self._heuristics(problem, device, n, True) for n in (1, _VARIANTS))
        return {
            a.name: a
            for algorithms in (first, more)
            if not isinstance(algorithms, str)
            for a in algorithms
        }

    def _parts(self, problem: GemmProblem, device: Device, algorithm: Algorithm) -> PlanParts:
        bias = problem.spec.bias is not None
        unaligned = self._first(problem, device, aligned=False) if bias else algorithm
        operation = None if bias else _operation(problem, 0)
        step = _Step(self, problem, device, algorithm, unaligned, _layouts(problem), operation)
        return PlanParts((step,), max(algorithm.padded_bytes, unaligned.padded_bytes))

    def _heuristic(
        self, problem: GemmProblem, device: Device, max_count: int, aligned: bool
    ) -> tuple[Algorithm, ...] | str:
        """The heuristic's best algorithms, or why there is none. ``aligned``: for a bias at a
        multiple of 16 bytes; else of its element size."""
        p, spec = problem, problem.spec
        c_alignment = spec.vector_r if spec.residual else spec.vector_c
        preference = LtDescriptor(
            "MatmulPreference",
            attributes={
                cublaslt.MAX_WORKSPACE: _MAX_WORKSPACE,
                cublaslt.REDUCTIONS: cublaslt.CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE,
                cublaslt.ALIGNMENT_A: spec.vector_b,
                cublaslt.ALIGNMENT_B: spec.vector_a,
                cublaslt.ALIGNMENT_C: c_alignment,
                cublaslt.ALIGNMENT_D: spec.vector_c,
            },
        )
        # Of a bias the heuristic looks at the address, for its alignment.
        alignment = 0
        if spec.bias:
            alignment = _ALIGNED if aligned else spec.bias.itemsize
        operation = _operation(p, alignment)
        layouts, results, count = (
            _layouts(p),
            (cublaslt.HeuristicResult * max_count)(),
            ctypes.c_int(),
        )
        with self._runtime.activate(device):
            handle, _ = _handles.of(device)
            status = cublaslt.library().cublasLtMatmulAlgoGetHeuristic(
                handle,
                operation.handle,
                *[x.handle for x in layouts],
                preference.handle,
                max_count,
                ctypes.byref(results),
                ctypes.byref(count),
            )
        status = status or (results[0].state if count.value else 0)
        if status in cublaslt.NO_ALGORITHM:
            return f"has no algorithm for it ({cublaslt.status_name(status)})"
        cublaslt.check("cublasLtMatmulAlgoGetHeuristic", status)
        usable = [r for r in results[: count.value] if not r.state]
        return (
            tuple(Algorithm(tuple(r.algorithm), r.workspace_bytes) for r in usable)
            or "has no algorithm for it"
        )


def _layouts(p: GemmProblem) -> tuple[LtDescriptor, LtDescriptor, LtDescriptor, LtDescriptor]:
    """The layouts of the library's A, B, C (the addend) and D (the result)."""
    x = column_major_gemm(p, dict.fromkeys("ABC", 0))

    def layout(f: BlasMatrix, rows: int, columns: int, stride: int | None) -> LtDescriptor:
        assert stride is not None
        if f.transposed:
            rows, columns = columns, rows
        return LtDescriptor(
            "MatrixLayout",
            TYPES[f.dtype],
            rows,
            columns,
            f.lead,
            attributes={
                cublaslt.BATCH_COUNT: x.count,
                cublaslt.BATCH_STRIDE: stride,
            },
        )

    c, stride = x.result, x.result.stride
    if p.spec.residual:
        batch, head, row = p.residual_strides
        c, stride = BlasMatrix(0, p.spec.residual, False, row, None), single_stride(p, batch, head)
    return (
        layout(x.first, x.m, x.k, x.first.stride),
        layout(x.second, x.k, x.n, x.second.stride),
        layout(c, x.m, x.n, stride),
        layout(x.result, x.m, x.n, x.result.stride),
    )


def _operation(p: GemmProblem, bias: int) -> LtDescriptor:
    """The product, with the address of its bias. By rows of the library's D is by columns of C."""
    attributes: dict[Attribute, int] = {
        cublaslt.TRANSPOSE_A: p.spec.b_transposed,
        cublaslt.TRANSPOSE_B: p.spec.a_transposed,
    }
    if p.spec.bias:
        stride = single_stride(p, *p.bias_strides)
        assert stride is not None
        attributes |= {
            cublaslt.EPILOGUE: cublaslt.CUBLASLT_EPILOGUE_BIAS,
            cublaslt.BIAS_ADDRESS: bias,
            cublaslt.BIAS_STRIDE: stride,
        }
    compute = compute_type(p.spec.dtype, p.spec.precision)
    return LtDescriptor("MatmulDesc", compute, TYPES[p.spec.dtype_acc], attributes=attributes)


@dataclass(frozen=True)
class _Step:
    """One call of the library."""

    gemm: CublasLtGemm
    problem: GemmProblem
    device: Device
    algorithm: Algorithm
    unaligned: Algorithm
    """Where the bias lies at no multiple of 16 bytes."""
    layouts: tuple[LtDescriptor, LtDescriptor, LtDescriptor, LtDescriptor]
    operation: LtDescriptor | None
    """None where there is a bias, whose address is part of it."""

    @property
    def record(self) -> LaunchRecord:
        return self.gemm.record(self.problem, self.device)

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        p = self.problem
        aligned = not p.spec.bias or pointers["bias"] % _ALIGNED == 0
        chosen = self.algorithm if aligned else self.unaligned
        need = chosen.workspace_bytes
        x, (alpha, beta) = column_major_gemm(p, pointers), scalars(p)
        c_address = x.result.address
        if p.spec.residual:
            c_address, beta.value = pointers["residual"], 1
        operation = self.operation or _operation(p, pointers["bias"])
        a, b, c, d = (layout.handle for layout in self.layouts)
        algorithm = (ctypes.c_uint64 * 8)(*chosen.data)
        padded = (
            -(-workspace // cublaslt.WORKSPACE_ALIGNMENT) * cublaslt.WORKSPACE_ALIGNMENT
            if need
            else None
        )
        run = cublaslt.library().cublasLtMatmul
        arguments = (
            _handles.of(self.device)[0],
            operation.handle,
            ctypes.addressof(alpha),
            x.first.address,
            a,
            x.second.address,
            b,
            ctypes.addressof(beta),
            c_address,
            c,
            x.result.address,
            d,
            ctypes.addressof(algorithm),
            padded,
            need,
        )

        def launch(
            stream: int, keep_alive: object = (self, operation, alpha, beta, algorithm)
        ) -> None:
            if status := run(*arguments, stream):
                cublaslt.check("cublasLtMatmul", status)

        return launch


_handles = Handles(cublaslt.create)

"""cuBLAS as a second way to compute a strided batched GEMM: a partner for parity, and often the fastest."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kernelseam.contract import Cost, Device, LaunchRecord, PlanParts
from kernelseam.descriptors.problems import GemmProblem
from kernelseam.dispatch import roofline
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError
from kernelseam_cuda import bindings

# cudaDataType and cublasComputeType_t, library_types.h and cublas_api.h. PEDANTIC: IEEE float32, never TF32.
_TYPES = {DType.float16: 2, DType.bfloat16: 14, DType.float32: 0, DType.float64: 1}
_COMPUTE = {DType.float16: 68, DType.bfloat16: 68, DType.float32: 69, DType.float64: 70}
_ALGORITHM, _TRANSPOSE = -1, {False: 0, True: 1}
_LIMIT = 2**31 - 1


class CublasGemm:
    """kernelseam.contract.Implementation over cublasGemmStridedBatchedEx."""

    name, backend, operation = "cublas", "cuda", "gemm"

    def supports(self, problem: GemmProblem, device: Device) -> str | None:
        spec = problem.spec
        if spec.view != "strided":
            return "takes strided batches only"
        if spec.dtype_c not in (spec.dtype, spec.dtype_acc):
            return f"has no {spec.dtype} product with a {spec.dtype_c} result"
        if spec.dtype_acc is not spec.dtype.accumulator:
            return f"does not sum {spec.dtype} products in {spec.dtype_acc}"
        if batch_strides(problem) is None:
            return "takes one stride over all matrices, and batch and head are not evenly spaced"
        rows = (problem.a_strides[2], problem.b_strides[2], problem.c_strides[2])
        if max(problem.M, problem.N, problem.K, problem.matrices, *rows) > _LIMIT:
            return f"takes extents and row strides up to {_LIMIT}"
        widths = (problem.a_shape[1], problem.b_shape[1], problem.N)
        if any(row < width for row, width in zip(rows, widths, strict=True)):
            return "takes rows that do not overlap: a row stride is smaller than its row"
        return None

    def cost(self, problem: GemmProblem, device: Device) -> Cost:
        return roofline(problem, device.limits, efficiency=0.75)

    def build(self, problem: GemmProblem, device: Device) -> PlanParts:
        if 0 in (problem.M, problem.N, problem.matrices):
            return PlanParts(())
        return PlanParts((_Step(problem, device),))


@dataclass(frozen=True)
class _Step:
    """One call of the library."""

    problem: GemmProblem
    device: Device

    @property
    def record(self) -> LaunchRecord:
        return LaunchRecord("cublasGemmStridedBatchedEx", (1, 1, 1), (1, 1, 1), 0, self.device.arch, "library")

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        p, s = self.problem, self.problem.spec
        strides = batch_strides(p)
        assert strides is not None
        scalar = ctypes.c_double if s.dtype_acc is DType.float64 else ctypes.c_float
        scalars = scalar(p.alpha if p.reads_inputs else 0.0), scalar(p.beta)
        alpha, beta = (ctypes.addressof(x) for x in scalars)
        # The library stores columns: the transpose of our row-major C is op(B)ᵀ·op(A)ᵀ.
        leading = [max(rows, 1) for rows in (p.b_strides[2], p.a_strides[2], p.c_strides[2])]
        kind, kind_c = _TYPES[s.dtype], _TYPES[s.dtype_c]
        c = pointers["C"]
        arguments = (
            _TRANSPOSE[s.b_transposed], _TRANSPOSE[s.a_transposed], p.N, p.M, p.K if p.reads_inputs else 0,
            alpha, pointers.get("B") or c, kind, leading[0], strides[1], pointers.get("A") or c, kind, leading[1], strides[0],
            beta, c, kind_c, leading[2], strides[2], p.matrices, _COMPUTE[s.dtype], _ALGORITHM,
        )
        cublas = bindings.module("cupy_backends.cuda.libs.cublas")
        handle, lock = _handle(self.device.index)
        gemm, set_stream = cublas.gemmStridedBatchedEx, cublas.setStream

        def launch(stream: int, keep: object = scalars) -> None:
            with lock:  # the stream is a property of the handle
                try:
                    set_stream(handle, stream)
                    gemm(handle, *arguments)
                except cublas.CUBLASError as e:
                    raise DeviceError(f"cublasGemmStridedBatchedEx failed: {e}") from e

        return launch


def batch_strides(p: GemmProblem) -> tuple[int, int, int] | None:
    """One stride over batch·num_heads matrices for A, B and C, or None where there is none."""
    found = []
    for (batch, head, _), group in ((p.a_strides, 1), (p.b_strides, p.b_head_group), (p.c_strides, 1)):
        if group == p.num_heads:
            head = 0  # every head shares one matrix
        elif group != 1:
            return None
        if p.num_heads == 1:
            found.append(batch)
        elif p.batch == 1 or batch == head * p.num_heads:
            found.append(head)
        else:
            return None
    return found[0], found[1], found[2]


_handles: dict[int, tuple[Any, threading.Lock]] = {}
_handles_lock = threading.Lock()


def _handle(index: int) -> tuple[Any, threading.Lock]:
    """The process's handle of a device, which is current, and the lock that guards it."""
    with _handles_lock:
        if index not in _handles:
            _handles[index] = bindings.module("cupy_backends.cuda.libs.cublas").create(), threading.Lock()
        return _handles[index]

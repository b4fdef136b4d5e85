"""Acme's batched GEMM: matrix by matrix, summed in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from kernelseam.contract import Cost, Device, LaunchRecord, PlanParts, host_array
from kernelseam.costs import roofline
from kernelseam.descriptors import GemmProblem
from kernelseam.dtypes import DType


class AcmeGemm:
    """Strided memory and pointer lists, 16 and 32 bits."""

    name, backend, operation = "acme-gemm", "acme", "gemm"

    def supports(self, problem: GemmProblem, device: Device) -> str | None:
        if not problem.spec.plain:
            return "Acme multiplies, and adds nothing"
        return "Acme has no float64" if problem.spec.dtype is DType.float64 else None

    def cost(self, problem: GemmProblem, device: Device) -> Cost:
        return roofline(problem, device.limits)

    def build(self, problem: GemmProblem, device: Device) -> PlanParts:
        return PlanParts((_Step(problem, device),), workspace_bytes=64)


class _Step:
    def __init__(self, problem: GemmProblem, device: Device) -> None:
        self.problem = problem
        self.record = LaunchRecord(
            "acme_gemm", (max(problem.matrices, 1), 1, 1), (1, 1, 1), 0, device.arch
        )

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        p, spec = self.problem, self.problem.spec

        def launch(stream: int) -> None:
            # its own memory, whoever gave it
            host_array(workspace, (16,), (1,), DType.float32)[0] = stream
            for a, b, c in self._places(pointers):
                out = host_array(c, (p.M, p.N), (p.c_strides[2], 1), spec.dtype_c)
                result = np.float64(p.beta) * out if p.beta else np.zeros((p.M, p.N))
                if p.reads_inputs:
                    x = host_array(a, p.a_shape, (p.a_strides[2], 1), spec.dtype).astype(np.float64)
                    y = host_array(b, p.b_shape, (p.b_strides[2], 1), spec.dtype).astype(np.float64)
                    result += p.alpha * (
                        (x.T if spec.a_transposed else x) @ (y.T if spec.b_transposed else y)
                    )
                out[...] = result

        return launch

    def _places(self, pointers: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
        """The addresses of A, B and C of each matrix, batch-major."""
        p, spec = self.problem, self.problem.spec
        if spec.view == "pointers":
            lists = [
                host_array(
                    pointers.get(n, 0), (p.matrices * (n in pointers),), (1,), DType.float64
                ).view(np.uint64)
                for n in ("A_ptrs", "B_ptrs", "C_ptrs")
            ]
            for i in range(p.matrices):
                yield tuple(int(x[i]) if len(x) else 0 for x in lists)
            return
        for b in range(p.batch):
            for h in range(p.num_heads):
                yield (
                    pointers.get("A", 0)
                    + (b * p.a_strides[0] + h * p.a_strides[1]) * spec.dtype.itemsize,
                    pointers.get("B", 0)
                    + (b * p.b_strides[0] + h // p.b_head_group * p.b_strides[1])
                    * spec.dtype.itemsize,
                    pointers["C"]
                    + (b * p.c_strides[0] + h * p.c_strides[1]) * spec.dtype_c.itemsize,
                )

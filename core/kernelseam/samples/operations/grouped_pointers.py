"""The grouped GEMM over lists."""

from __future__ import annotations

from typing import Any

from kernelseam.descriptors.gemm.grouped_pointers import GroupedGemmPointers
from kernelseam.oracle import check, formulas
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import GemmResult
from kernelseam.samples.data import grouped_pointers as data
from kernelseam.samples.data.descriptors import listed
from kernelseam.samples.grouped_pointers_case import GroupedPointersCase
from kernelseam.samples.operations.operation import Arrays, Operation, Placed


class GroupedPointers(Operation[GroupedPointersCase, list[GemmResult]]):
    """alpha·op(A[g])·op(B[g]) + beta·C[g] of groups of sizes of their own."""

    name, data = "grouped_gemm_pointers", data

    def outputs(self, case: GroupedPointersCase) -> tuple[str, ...]:
        return tuple(f"C[{g}]" for g in range(len(case.sizes)))

    def repeatable(self, case: GroupedPointersCase) -> bool:
        return super().repeatable(case) and case.beta == 0

    def describe(self, case: GroupedPointersCase, placed: Placed) -> GroupedGemmPointers:
        fields: dict[str, Any] = {}
        for name in "ABC":
            of = [f"{name}[{g}]" for g in range(len(case.sizes))]
            fields[f"{name}_ptrs"] = listed(
                case.view, [placed.addresses[n] for n in of], placed.runtime, placed.device
            )
            fields[f"stride_{name.lower()}_row"] = [
                placed.layout.placements[n].strides[0] for n in of
            ]
        m, n, k = ([x[axis] for x in case.sizes] for axis in range(3))
        if case.view == "device":
            fields["alignment"] = 16 if case.aligned else case.out_dtype.itemsize
        return GroupedGemmPointers(
            M=m,
            N=n,
            K=k,
            **fields,
            **case.product,
        )

    def expected(self, case: GroupedPointersCase, inputs: Arrays) -> list[GemmResult]:
        def one(g: int) -> GemmResult:
            a, b, c = (inputs.get(f"{n}[{g}]") for n in "ABC")
            assert a is not None and b is not None
            return formulas.gemm(
                a[None, None],
                b[None, None],
                None if c is None else c[None, None],
                case.alpha,
                case.beta,
                case.a_transposed,
                case.b_transposed,
            )

        return [one(g) for g in range(len(case.sizes))]

    def verdict(
        self,
        case: GroupedPointersCase,
        expected: list[GemmResult],
        results: Arrays,
        flushed: bool = False,
    ) -> Verdict:
        return check.worst_of(
            check.gemm_verdict(
                expected[g],
                k,
                case.dtype,
                results[f"C[{g}]"],
                (m,),
                None,
                flushed=flushed,
                **case.judged,
            )
            for g, (m, _, k) in enumerate(case.sizes)
        )

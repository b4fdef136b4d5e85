"""The grouped GEMM."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from kernelseam.descriptors.gemm.grouped import GroupedGemm
from kernelseam.descriptors.gemm.grouped_problem import STACKED
from kernelseam.oracle import check
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import Array, GemmResult
from kernelseam.oracle.grouped import grouped_gemm
from kernelseam.samples.data import captured
from kernelseam.samples.data import grouped as data
from kernelseam.samples.epilogues import for_oracle
from kernelseam.samples.grouped_case import GroupedCase
from kernelseam.samples.operations.operation import Arrays, Operation, Placed

_AXES = {
    **dict.fromkeys("ABC", ("group", "row")),
    "a_scales": ("group", "row", "k"),
    "b_scales": ("group", "column", "k"),
}


class Grouped(Operation[GroupedCase, GemmResult]):
    """alpha·op(A_g)·op(B_g) + beta·C_g of groups that offsets divide, and its epilogue."""

    name, data = "grouped_gemm", data

    def outputs(self, case: GroupedCase) -> tuple[str, ...]:
        return ("C", "preactivation") if case.preactivation else ("C",)

    def repeatable(self, case: GroupedCase) -> bool:
        return super().repeatable(case) and case.beta == 0

    def describe(self, case: GroupedCase, placed: Placed) -> GroupedGemm:
        layout, addresses = placed.layout, placed.addresses
        m, n, k = case.extents.values()
        strides: dict[str, Any] = {
            f"stride_{name.lower()}_{axis}": step
            for name, p in layout.placements.items()
            for axis, step in zip(_AXES.get(name, ()), p.strides, strict=False)
            if not (axis == "group" and name in "ABC" and name not in STACKED[case.along])
        }
        rows: dict[str, Any] = {
            f"{n.lower()}_rows": layout.placements[n].shape[1]
            for n in "AC"
            if f"{n.lower()}_indices" in case.indices
        }
        options: dict[str, Any] = {}
        if (expression := data.expression(case)) is not None:
            addresses, arrays = captured.views(layout, addresses, placed.device)
            options["epilogue"] = replace(expression, arrays=arrays)
        if case.preactivation:
            options["stride_preactivation_row"] = layout.placements["preactivation"].strides[1]
        return GroupedGemm(
            groups=len(case.sizes),
            M=m,
            N=n,
            K=k,
            along=case.along,
            **addresses,
            **strides,
            **case.product,
            scale_block=case.scale_block,
            **rows,
            **options,
        )

    def expected(self, case: GroupedCase, inputs: Arrays) -> GemmResult:
        a, b, old = inputs["A"], inputs["B"], inputs.get("C")
        if old is not None and case.along != "k":
            old = old[0]
        if old is not None and "c_indices" in case.indices:
            old = old[inputs["c_indices"]]
        result = grouped_gemm(
            a.swapaxes(1, 2) if case.a_transposed else a,
            b.swapaxes(1, 2) if case.b_transposed else b,
            case.offsets,
            case.along,
            old,
            alpha=case.alpha,
            beta=case.beta,
            a_scales=inputs.get("a_scales"),
            b_scales=inputs.get("b_scales"),
            scale_block=case.scale_block,
            a_indices=inputs.get("a_indices"),
            c_factors=inputs.get("c_factors"),
        )
        if "c_indices" not in case.indices:
            return result
        order = np.argsort(inputs["c_indices"])
        return replace(
            result, **{f.name: getattr(result, f.name)[order] for f in fields(GemmResult)}
        )

    def verdict(
        self, case: GroupedCase, expected: GemmResult, results: Arrays, flushed: bool = False
    ) -> Verdict:
        out = results["C"] if case.along == "k" else results["C"][0]
        preactivation = results.get("preactivation")
        return check.gemm_verdict(
            expected,
            case.terms,
            case.dtype,
            out,
            out.shape[:-1],
            None,
            flushed=flushed,
            **case.judged,
            epilogue=for_oracle(data.epilogue(case)) if case.epilogue else None,
            preactivation=None if preactivation is None else preactivation[0],
            places=self._places(case) if case.epilogue else None,
        )

    def _places(self, case: GroupedCase) -> tuple[Array, Array]:
        """Of each row of C the product's row that it is of, and its group."""
        rows = np.arange(case.end)
        if "c_indices" in case.indices:
            rows = np.argsort(self.values(case)["c_indices"])
        return rows, np.searchsorted(case.offsets, rows, side="right")

"""The batched GEMM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernelseam.descriptors import BatchedGemmPointers, BatchedGemmStrided
from kernelseam.expressions.reductions import reduction
from kernelseam.oracle import check, formulas
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import GemmResult
from kernelseam.samples.data import captured
from kernelseam.samples.data import gemm as data
from kernelseam.samples.data.descriptors import strides
from kernelseam.samples.epilogues import for_oracle
from kernelseam.samples.gemm_case import GemmCase
from kernelseam.samples.operations.operation import Arrays, Operation, Placed

_ROWS = {f"stride_{n}_row" for n in ("a", "b", "c", "residual", "preactivation")}


class Gemm(Operation[GemmCase, GemmResult]):
    """alpha·Σ op(A)·op(B) + beta·C + bias + residual, and its epilogue."""

    name, data = "gemm", data

    def outputs(self, case: GemmCase) -> tuple[str, ...]:
        reductions = map(reduction, range(len(case.reductions)))
        return ("C", *["preactivation"] * case.preactivation, *reductions)

    def repeatable(self, case: GemmCase) -> bool:
        return super().repeatable(case) and case.beta == 0 and not case.in_place

    def lead(self, case: GemmCase) -> tuple[int, ...]:
        return *case.lead, case.M

    def describe(self, case: GemmCase, placed: Placed) -> BatchedGemmStrided | BatchedGemmPointers:
        layout, addresses = placed.layout, placed.addresses
        options: dict[str, Any] = {
            **case.fields("M", "N", "K", "batch", "num_heads", "c_batch_group", "c_head_group"),
            **case.product,
            "dtype_bias": case.bias,
            "dtype_residual": case.residual,
        }
        steps = {
            n: s
            for n, s in strides(layout).items()
            if n not in ("stride_bias_row", "stride_bias_column")
        }
        if (expression := data.expression(case)) is not None:
            addresses, arrays = captured.views(layout, addresses, placed.device)
            addresses, results = captured.views(layout, addresses, placed.device, "reduction_")
            options["epilogue"] = replace(expression, arrays=arrays, results=results)
        if case.view == "strided":
            return BatchedGemmStrided(
                **addresses,
                **steps,
                **options,
                b_head_group=case.b_head_group,
                scale_block=case.scale_block,
            )
        rows: dict[str, Any] = {n: s for n, s in steps.items() if n in _ROWS}
        for name in addresses:
            options[name + "_ptrs"] = placed.listed(case.view, name)
        if case.view == "device":
            widest = max(p.dtype.itemsize for p in layout.placements.values())
            options["alignment"] = 16 if all(at % 16 == 0 for at in addresses.values()) else widest
        return BatchedGemmPointers(**rows, **options)

    def expected(self, case: GemmCase, inputs: Arrays) -> GemmResult:
        return formulas.gemm(
            inputs["A"],
            inputs["B"],
            inputs.get("C"),
            case.alpha,
            case.beta,
            case.a_transposed,
            case.b_transposed,
            self.rows(case),
            bias=inputs["bias"][:, :, 0] if case.bias else None,
            residual=inputs.get("residual"),
            batch_group=case.c_batch_group,
            head_group=case.c_head_group,
            **data.element_scales(case, inputs),
        )

    def verdict(
        self, case: GemmCase, expected: GemmResult, results: Arrays, flushed: bool = False
    ) -> Verdict:
        return check.gemm_verdict(
            expected,
            case.terms,
            case.dtype,
            results["C"],
            results["C"].shape[:-1],
            self.rows(case),
            flushed=flushed,
            **case.judged,
            epilogue=None if (given := data.epilogue(case)) is None else for_oracle(given),
            preactivation=results.get("preactivation"),
            reductions=[results[reduction(i)] for i in range(len(case.reductions))],
        )

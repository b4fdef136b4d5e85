"""Merged states."""

from __future__ import annotations

from kernelseam.descriptors.attention.merge import MergeStates
from kernelseam.oracle import check, formulas
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import MergeResult
from kernelseam.samples.data import merge as data
from kernelseam.samples.data.descriptors import strides
from kernelseam.samples.merge_case import MergeCase
from kernelseam.samples.operations.operation import Arrays, Operation, Placed


class Merge(Operation[MergeCase, MergeResult]):
    """Partial attentions of the same queries, merged by their LSEs."""

    name, data = "merge_states", data

    def outputs(self, case: MergeCase) -> tuple[str, ...]:
        return ("out", "lse") if case.lse else ("out",)

    def describe(self, case: MergeCase, placed: Placed) -> MergeStates:
        own = case.fields("parts", "batch", "num_heads", "rows", "value_dim", "dtype", "dtype_out")
        return MergeStates(**placed.addresses, **strides(placed.layout), **own)

    def expected(self, case: MergeCase, inputs: Arrays) -> MergeResult:
        return formulas.merge_states(inputs["outs"], inputs["lses"])

    def verdict(
        self, case: MergeCase, expected: MergeResult, results: Arrays, flushed: bool = False
    ) -> Verdict:
        return check.merge_verdict(
            expected, case.parts, case.dtype, results["out"], results.get("lse"), flushed=flushed
        )

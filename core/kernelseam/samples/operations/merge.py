"""Merged states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernelseam.contract import Device, Runtime
from kernelseam.descriptors.attention.merge import MergeStates
from kernelseam.oracle import check, formulas
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import Array, MergeResult
from kernelseam.samples.data import merge as data
from kernelseam.samples.data.descriptors import strides
from kernelseam.samples.data.memory import Layout, Placement
from kernelseam.samples.merge_case import MergeCase
from kernelseam.samples.operations.operation import Operation


class Merge(Operation[MergeCase, MergeResult]):
    """Partial attentions of the same queries, merged by their LSEs."""

    name = "merge_states"

    def draw(self, case: MergeCase, rng: np.random.Generator) -> dict[str, Array]:
        return data.values(case, rng)

    def placements(self, case: MergeCase) -> dict[str, Placement]:
        return data.placements(case)

    def outputs(self, case: MergeCase) -> tuple[str, ...]:
        return ("out", "lse") if case.lse else ("out",)

    def describe(
        self,
        case: MergeCase,
        layout: Layout,
        addresses: Mapping[str, Any],
        runtime: Runtime,
        device: Device,
    ) -> MergeStates:
        return MergeStates(
            **addresses,
            **strides(layout),
            parts=case.parts,
            batch=case.batch,
            num_heads=case.num_heads,
            rows=case.rows,
            value_dim=case.value_dim,
            dtype=case.dtype,
            dtype_out=case.dtype_out,
        )

    def expected(self, case: MergeCase, inputs: Mapping[str, Array]) -> MergeResult:
        return formulas.merge_states(inputs["outs"], inputs["lses"])

    def verdict(
        self,
        case: MergeCase,
        expected: MergeResult,
        results: Mapping[str, Array],
        *,
        flushed: bool = False,
    ) -> Verdict:
        return check.merge_verdict(
            expected, case.parts, case.dtype, results["out"], results.get("lse"), flushed=flushed
        )

"""An attention's gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernelseam.contract import Device, Runtime
from kernelseam.descriptors import AttentionBwd
from kernelseam.oracle import check
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import Array
from kernelseam.oracle.gradients import Gradient
from kernelseam.samples.attention_bwd_case import BackwardCase
from kernelseam.samples.data import attention_bwd as data
from kernelseam.samples.data.descriptors import strides
from kernelseam.samples.data.memory import Layout, Placement
from kernelseam.samples.operations.attention import describe_strided, packed
from kernelseam.samples.operations.operation import Operation

OWN = {"dout": "out", "dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dsinks": "sinks"}
"""A backward's own operand → the forward's operand of the same layout."""


class AttentionGradients(Operation[BackwardCase, dict[str, Gradient]]):
    """dq, dk, dv, dbias and dsinks."""

    name = "attention_bwd"

    def draw(self, case: BackwardCase, rng: np.random.Generator) -> dict[str, Array]:
        return data.inputs(case, rng)

    def derived(self, case: BackwardCase, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return data.results(case, inputs)

    def placements(self, case: BackwardCase) -> dict[str, Placement]:
        return data.placements(case)

    def outputs(self, case: BackwardCase) -> tuple[str, ...]:
        return data.outputs(case)

    def repeatable(self, case: BackwardCase) -> bool:
        return case.deterministic

    def describe(
        self,
        case: BackwardCase,
        layout: Layout,
        addresses: Mapping[str, Any],
        runtime: Runtime,
        device: Device,
    ) -> AttentionBwd:
        own = {n: p for n, p in layout.placements.items() if n in OWN}
        rest = {n: at for n, at in addresses.items() if n not in OWN}
        forward = describe_strided(
            case.forward, Layout({n: layout.placements[n] for n in rest}), rest, device
        )
        given: dict[str, Any] = {n: addresses[n] for n in own}
        given |= strides(Layout(own), {n for n in own if OWN[n] in packed(case.forward)})
        return AttentionBwd(forward=forward, **given, deterministic=case.deterministic)

    def expected(self, case: BackwardCase, inputs: Mapping[str, Array]) -> dict[str, Gradient]:
        return data.expected(case, inputs)

    def verdict(
        self,
        case: BackwardCase,
        expected: dict[str, Gradient],
        results: Mapping[str, Array],
        *,
        flushed: bool = False,
    ) -> Verdict:
        return check.attention_bwd(
            expected, case.dtype, results, flushed=flushed, precision=case.forward.precision
        )

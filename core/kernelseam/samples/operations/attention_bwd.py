"""An attention's gradients."""

from __future__ import annotations

from typing import Any

from kernelseam.descriptors import AttentionBwd
from kernelseam.oracle import check
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import Array
from kernelseam.oracle.gradients import Gradient
from kernelseam.samples.attention_bwd_case import BackwardCase
from kernelseam.samples.data import attention_bwd as data
from kernelseam.samples.data.descriptors import strides
from kernelseam.samples.data.memory import Layout
from kernelseam.samples.operations.attention import describe_strided, packed
from kernelseam.samples.operations.operation import Arrays, Operation, Placed

OWN = {"dout": "out", "dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dsinks": "sinks"}
"""A backward's own operand → the forward's operand of the same layout."""


class AttentionGradients(Operation[BackwardCase, dict[str, Gradient]]):
    """dq, dk, dv, dbias and dsinks."""

    name, data = "attention_bwd", data

    def derived(self, case: BackwardCase, inputs: Arrays) -> dict[str, Array]:
        return data.results(case, inputs)

    def repeatable(self, case: BackwardCase) -> bool:
        return case.deterministic

    def describe(self, case: BackwardCase, placed: Placed) -> AttentionBwd:
        layout, addresses = placed.layout, placed.addresses
        own = {n: p for n, p in layout.placements.items() if n in OWN}
        rest = {n: at for n, at in addresses.items() if n not in OWN}
        forward = describe_strided(
            case.forward, Layout({n: layout.placements[n] for n in rest}), rest, placed.device
        )
        given: dict[str, Any] = {n: addresses[n] for n in own}
        given |= strides(Layout(own), {n for n in own if OWN[n] in packed(case.forward)})
        return AttentionBwd(forward=forward, **given, deterministic=case.deterministic)

    def expected(self, case: BackwardCase, inputs: Arrays) -> dict[str, Gradient]:
        return data.expected(case, inputs)

    def verdict(
        self,
        case: BackwardCase,
        expected: dict[str, Gradient],
        results: Arrays,
        flushed: bool = False,
    ) -> Verdict:
        return check.attention_bwd(
            expected, case.dtype, results, flushed=flushed, precision=case.forward.precision
        )

"""An implementation on the host that computes another problem than the one that it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kernelseam.contract import Cost, Device, PlanParts
from kernelseam.reference.attention import NumpyAttention
from kernelseam.reference.gemm import NumpyGemm

REFERENCE: dict[str, Any] = {"gemm": NumpyGemm(), "attention": NumpyAttention()}
GEMM: dict[str, Callable[[Any], Any]] = {
    "dropped-last-k": lambda p: replace(p, K=p.K - 1),
    "unmasked-k-tail": lambda p: replace(p, K=p.K + 1),
    "no-batch-stride": lambda p: replace(p, a_strides=(0, *p.a_strides[1:])),
    "wrong-b-head": lambda p: replace(p, b_head_group=1),
    "beta-read-at-0": lambda p: replace(p, beta=1.0),
    "right": lambda p: p,
}
ATTENTION: dict[str, Callable[[Any], Any]] = {
    "dropped-last-key": lambda p: replace(p, S_k=p.S_k - 1),
    "not-causal": lambda p: replace(p, spec=replace(p.spec, causal=False)),
    "wrong-kv-head": lambda p: replace(p, kv_heads=1),
    "wrong-scale": lambda p: replace(p, scale=1.01 * p.scale),
    "right": lambda p: p,
}


@dataclass(frozen=True)
class WrongProblem:
    """contract.Implementation: a fault of ``GEMM`` or ``ATTENTION``, and what it says it takes."""

    operation: str
    fault: str
    cost_us: float = 1e3
    backend: str = "numpy"

    @property
    def name(self) -> str:
        return f"wrong-{self.fault}"

    def supports(self, problem: Any, device: Device) -> str | None:
        refusal: str | None = REFERENCE[self.operation].supports(problem, device)
        return refusal

    def cost(self, problem: Any, device: Device) -> Cost:
        return Cost(0, 0, self.cost_us)

    def build(self, problem: Any, device: Device) -> PlanParts:
        change = {"gemm": GEMM, "attention": ATTENTION}[self.operation][self.fault]
        parts: PlanParts = REFERENCE[self.operation].build(change(problem), device)
        return parts

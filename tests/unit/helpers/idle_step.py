"""An implementation that computes nothing, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kernelseam.contract import Cost, Device, LaunchRecord, PlanParts


class IdleStep:
    record = LaunchRecord("idle", (1, 1, 1), (1, 1, 1), 0, "cpu")

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        return lambda stream: None


IDLE = PlanParts((IdleStep(),))


@dataclass
class IdleImplementation:
    """An implementation that takes every problem, for its ``refusal``, in as many seconds as it is
    told."""

    name: str
    seconds: float = 1.0
    refusal: str | None = None
    backend: str = "numpy"
    operation: str = "gemm"
    parts: PlanParts = IDLE

    def supports(self, problem: Any, device: Device) -> str | None:
        return self.refusal

    def cost(self, problem: Any, device: Device) -> Cost:
        return Cost(0, 0, self.seconds)

    def build(self, problem: Any, device: Device) -> PlanParts:
        return self.parts

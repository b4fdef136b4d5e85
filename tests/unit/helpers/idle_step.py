"""What an implementation returns that computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kernelseam.contract import LaunchRecord, PlanParts


class IdleStep:
    record = LaunchRecord("idle", (1, 1, 1), (1, 1, 1), 0, "cpu")

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        return lambda stream: None


IDLE = PlanParts((IdleStep(),))

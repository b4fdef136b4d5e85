"""Implementations, and the launches that they build."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kernelseam.contract.devices import Device
from kernelseam.contract.problems import Cost
from kernelseam.frozen import dataclass

WORKSPACE_ALIGNMENT = 16
"""Bytes: of every workspace, unless its plan needs more."""


@dataclass(frozen=True)
class LaunchRecord:
    """One launch as ``kernelseam.trace()`` records it."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arch: str
    kind: str = "kernel"
    """"kernel", "library" (a vendor call that launches what it likes) or "memset"."""
    evidence: str = "measured"
    """The device's."""
    cluster: tuple[int, int, int] = (1, 1, 1)
    programmatic: bool = False


class Step(Protocol):
    """One launch of a plan, not yet bound to memory."""

    @property
    def record(self) -> LaunchRecord: ...

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        """``launch(stream)`` over these addresses, which may run any number of times. ``bind`` may
        pack arguments and encode tensor maps; it must not launch or read device memory, whose
        contents may change before each launch."""


@dataclass(frozen=True)
class PlanParts:
    """An implementation's launches in order, and the workspace that they share."""

    steps: tuple[Step, ...]
    workspace_bytes: int = 0
    workspace_alignment: int = WORKSPACE_ALIGNMENT
    """Bytes that the workspace's address must be a multiple of, a power of two."""
    zeroed_bytes: int = 0
    """The workspace's first bytes that must be 0 before a call's first run, and that each run
    leaves 0, such as counters that reset themselves. Binding sets them."""


class Implementation(Protocol):
    """One way to compute a family of problems on a family of devices. One with ``last_resort =
    True`` is asked where no other takes the problem, or where it is named or tuned."""

    @property
    def name(self) -> str: ...

    @property
    def backend(self) -> str: ...

    @property
    def operation(self) -> str: ...

    def supports(self, problem: Any, device: Device) -> str | None:
        """None if it supports the problem, else the reason, for the caller to read."""

    def cost(self, problem: Any, device: Device) -> Cost: ...

    def build(self, problem: Any, device: Device) -> PlanParts: ...

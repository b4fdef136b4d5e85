"""What binding asks of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kernelseam.contract import WORKSPACE_ALIGNMENT, Device, PlanParts, Problem, Runtime, Step
from kernelseam.descriptors.common.protocol import Descriptor, Resolved
from kernelseam.memset import MemsetStep


@dataclass(frozen=True)
class Planned:
    """Launches in order over one workspace, for one problem on one device."""

    descriptor: Descriptor
    problem: Problem
    device: Device
    parts: PlanParts

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that a call needs beside its operands."""
        return self.parts.workspace_bytes

    @property
    def workspace_room(self) -> int:
        """Bytes to allocate, aligned to 16, so that an aligned workspace lies among them: see
        ``workspace_in``."""
        need, alignment = self.parts.workspace_bytes, self.parts.workspace_alignment
        return need + alignment - WORKSPACE_ALIGNMENT if need else 0

    def workspace_in(self, address: int) -> int:
        """The workspace's address in ``workspace_room`` bytes from an address on."""
        alignment = self.parts.workspace_alignment
        return -(-address // alignment) * alignment

    @property
    def zeroing(self) -> Step | None:
        """What sets the workspace's first bytes to 0, where the launches want that."""
        size = self.parts.zeroed_bytes
        return MemsetStep(self.device, 0, size) if size else None

    def contents_check(self, resolved: Resolved, runtime: Runtime) -> Callable[[], None] | None:
        """What reads the addresses, lengths, offsets and block tables in memory, and raises
        InvalidValue where they leave it; None where a problem has none of them."""
        check = getattr(self.descriptor, "check_device", None)
        return None if check is None else partial(check, resolved, runtime, self.device)

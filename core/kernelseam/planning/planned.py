"""The part of a plan that binding uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kernelseam.contract import WORKSPACE_ALIGNMENT, Device, PlanParts, Problem, Runtime, Step
from kernelseam.descriptors.common.protocol import Descriptor, Resolved
from kernelseam.known_problems import KnownLaunches
from kernelseam.memset import MemsetStep


@dataclass(frozen=True)
class BindablePlan:
    """Launches in order over one workspace, for one problem on one device."""

    descriptor: Descriptor
    problem: Problem
    device: Device
    parts: PlanParts

    @property
    def implementation(self) -> str:
        """The chosen implementation's name."""
        raise NotImplementedError

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that a call needs in addition to its operands."""
        return self.parts.workspace_bytes

    @property
    def workspace_alignment(self) -> int:
        """Bytes that the workspace's address is a multiple of."""
        return self.parts.workspace_alignment

    @property
    def zeroed_bytes(self) -> int:
        """Of the workspace, how many must be zero before the first call."""
        return self.parts.zeroed_bytes

    @property
    def allocation_bytes(self) -> int:
        """Bytes to allocate, at a multiple of 16, to hold an aligned workspace: see
        ``align_workspace``."""
        need, alignment = self.workspace_bytes, self.workspace_alignment
        return need + alignment - WORKSPACE_ALIGNMENT if need else 0

    def align_workspace(self, address: int) -> int:
        """The aligned workspace within ``allocation_bytes`` bytes from an address on."""
        alignment = self.workspace_alignment
        return -(-address // alignment) * alignment

    @property
    def zeroing(self) -> Step | None:
        """The memset of the workspace's first bytes to 0, where the launches need it."""
        size = self.zeroed_bytes
        return MemsetStep(self.device, 0, size) if size else None

    @property
    def known(self) -> KnownLaunches | None:
        """Its launches as a function of addresses, where problems like it were planned."""
        return None

    def contents_check(self, resolved: Resolved, runtime: Runtime) -> Callable[[], None] | None:
        """A check of the addresses, lengths, offsets and block tables in memory, which raises
        InvalidValue where they point outside of it; None where the problem has none."""
        check = getattr(self.descriptor, "check_device", None)
        return None if check is None else partial(check, resolved, runtime, self.device)

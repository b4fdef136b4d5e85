"""A memset of workspace memory as one step of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kernelseam.contract import Device, LaunchRecord
from kernelseam.frozen import dataclass
from kernelseam.plugins import plugins


@dataclass(frozen=True)
class MemsetStep:
    """Sets ``size`` bytes of the workspace, from ``offset``, to ``value`` by the device's
    runtime."""

    device: Device
    offset: int
    size: int
    value: int = 0

    @property
    def record(self) -> LaunchRecord:
        d = self.device
        return LaunchRecord("memset", (1, 1, 1), (1, 1, 1), 0, d.arch, "memset", d.evidence)

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        runtime = plugins().backend(self.device.backend).runtime
        return runtime.prepare_memset(workspace + self.offset, self.value, self.size, self.device)

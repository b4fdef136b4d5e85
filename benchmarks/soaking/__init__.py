"""Stages of a soak: what each did, and what was wrong with it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kernelseam.contract import HOST, Device, Runtime
from kernelseam.plugins import plugins

PIECE = 2 << 20
"""Bytes: a driver takes and gives device memory in pieces of that size."""
MODULES = 256 << 20
"""Bytes of device memory that a stage may keep which loads many kernels."""


@dataclass
class Soaked:
    """What became of a stage."""

    name: str
    figures: dict[str, int | float | str] = field(default_factory=dict)
    """What was counted and measured, by name."""
    wrong: list[str] = field(default_factory=list)
    """Everything that should not have happened, in words."""
    absent: str = ""
    """Why there is nothing to do here; "" where there is."""
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """ "passed", "failed" or "not run"."""
        return "failed" if self.wrong else "not run" if self.absent else "passed"


@dataclass(frozen=True)
class Clock:
    """When a stage has to be done."""

    end: float

    @property
    def left(self) -> float:
        """Seconds."""
        return max(self.end - time.monotonic(), 0.0)

    @property
    def over(self) -> bool:
        return self.left == 0

    @staticmethod
    def of(seconds: float) -> Clock:
        return Clock(time.monotonic() + seconds)

    def within(self, seconds: float) -> Clock:
        """The same, but no later than so many seconds from now."""
        return Clock(min(self.end, time.monotonic() + seconds))


def runtime_of(device: Device) -> Runtime:
    return plugins().backend(device.backend).runtime


def is_host(device: Device) -> bool:
    """Whether the device is the host itself, whose memory others use and whose errors do not
    stick."""
    return device.evidence == HOST


def free_bytes(device: Device) -> int | None:
    """Free device memory, after the array library's pool has released its blocks; None where the
    device has no memory of its own or it is unknown."""
    if is_host(device) or device.backend != "cuda":
        return None
    import cupy

    gc.collect()
    runtime = runtime_of(device)
    with runtime.activate(device):
        runtime.synchronize(device)
        cupy.get_default_memory_pool().free_all_blocks()
        return int(cupy.cuda.runtime.memGetInfo()[0])


def streams(device: Device, count: int) -> list[tuple[int, Any]]:
    """So many streams, each as its handle and what keeps it; on the host the only one again and
    again."""
    if is_host(device) or device.backend != "cuda":
        return [(0, None)] * count
    import cupy

    with runtime_of(device).activate(device):
        created = [cupy.cuda.Stream(non_blocking=True) for _ in range(count)]
    return [(int(s.ptr), s) for s in created]


def stage(
    name: str,
    device: Device,
    work: Callable[[Soaked], None],
    keeps: int = PIECE,
    settle: float = 0.0,
) -> Soaked:
    """Do a stage's work. What it raises is wrong with it; so is more than ``keeps`` bytes less of
    free device memory afterwards. ``settle``: seconds that a driver has to take back what ended
    processes held."""
    soaked, start = Soaked(name), time.monotonic()
    try:
        before = free_bytes(device)
        work(soaked)
        after = free_bytes(device)
        while before is not None and after is not None and before - after > keeps and settle > 0:
            time.sleep(0.5)
            settle -= 0.5
            after = free_bytes(device)
        if before is not None and after is not None and not soaked.absent:
            soaked.figures |= {"free bytes before": before, "free bytes after": after}
            if before - after > keeps:
                soaked.wrong.append(f"{before - after} bytes of device memory are gone")
    except Exception as e:
        soaked.wrong.append(f"{type(e).__name__}: {e}")
    soaked.seconds = time.monotonic() - start
    return soaked

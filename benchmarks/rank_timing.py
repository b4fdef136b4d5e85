"""What the benchmarks of several ranks share: one process group, ways in turns, the slowest rank's
times."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from kernelseam import distributed


@dataclass
class Side:
    """One way, and what was measured of it."""

    name: str
    forward: Callable[[], tuple[Any, Callable[[], None]]]
    """Returns the result, and what walks it back."""
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    waited: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    memory: int = 0
    error: str = ""


def begin() -> Any:
    """This rank's device: a GPU of its own, else the host. Initialises torch.distributed."""
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() > local
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    return device


def walk(out: Any, dout: Any, *inputs: Any) -> None:
    for x in inputs:
        x.grad = None
    out.backward(dout)


def measure(side: Side, device: Any, counted: bool) -> None:
    dist.barrier()
    settle(device)
    if device.type != "cpu":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    try:
        walk: Callable[[], object] | None = None
        for i in range(2):
            with distributed.measured() as transfers:
                start = time.perf_counter()
                if walk is None:
                    _, walk = side.forward()
                else:
                    walk()
                settle(device)
                seconds = time.perf_counter() - start
            if counted:
                side.seconds[i].append(seconds)
                side.waited[i].append(transfers.waited)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        side.error = f"{type(error).__name__}: {error}".replace("\n", " ")
        return
    if device.type != "cpu":
        side.memory = max(side.memory, torch.cuda.max_memory_allocated() - held)


def settle(device: Any) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize()


def slowest(value: float, device: Any) -> float:
    """The largest of all ranks."""
    x = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return float(x)

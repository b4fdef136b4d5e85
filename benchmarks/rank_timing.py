"""What the benchmarks of several ranks share: one process group, ways in turns, the slowest rank's
times."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from kernelseam import distributed

PATIENCE = timedelta(seconds=20)
"""How long a rank that failed waits for the others to fail as well."""


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


@dataclass
class Ranks:
    """The ranks of a benchmark, as one of them sees them."""

    store: Any
    rank: int
    size: int
    measured: int = 0
    """Measurements so far, the same on every rank."""

    def all_failed(self, patience: timedelta = PATIENCE) -> bool:
        """Whether every rank says of this measurement what this one now says: that it failed. By
        the store, since ranks that wait for a transfer of this one take part in none."""
        self.store.set(f"{self.measured}/{self.rank}", "failed")
        try:
            self.store.wait([f"{self.measured}/{i}" for i in range(self.size)], patience)
        except RuntimeError:  # DistStoreError: one did not say so in time
            return False
        return True


def begin() -> tuple[Any, Ranks]:
    """This rank's device, a GPU of its own, else the host; and the ranks. Initialises
    torch.distributed."""
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() > local
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=size,
        device_id=device if on_gpu else None,
    )
    return device, Ranks(dist.PrefixStore("benchmark", store), rank, size)


def walk(out: Any, dout: Any, *inputs: Any) -> None:
    for x in inputs:
        x.grad = None
    out.backward(dout)


def measure(side: Side, device: Any, ranks: Ranks, counted: bool) -> None:
    """An error of every rank is the side's. One of a single rank is raised: the others may wait for
    that rank, and ``torchrun`` ends them when its process ends."""
    ranks.measured += 1
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
        if not ranks.all_failed():
            raise
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

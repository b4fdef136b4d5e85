"""No memory left on the device: said by an error of ours, survived by calls that need none, and
over when it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import kernelseam as ks
import numpy as np
from kernelseam.contract import Device
from kernelseam.dtypes import DType
from kernelseam.errors import OutOfDeviceMemory

from benchmarks.soaking import Clock, Soaked, free_bytes, is_host, runtime_of

ROUNDS = 3
_PEBIBYTE = (1 << 24, 1 << 24)
_FIRST, _LAST = 1 << 30, 1 << 20
"""Bytes of the pieces that memory is taken in."""


@contextmanager
def nothing_left(device: Device) -> Iterator[int]:
    """All but crumbs of the device's memory is taken: so many bytes."""
    runtime, allocations, size, total = runtime_of(device), list[object](), _FIRST, 0
    free_bytes(device)
    while size >= _LAST:
        try:
            allocations.append(runtime.empty((size // 4,), DType.float32, device))
            total += size
        except OutOfDeviceMemory:
            size //= 2
    try:
        yield total
    finally:
        allocations.clear()
        free_bytes(device)


def run(soaked: Soaked, device: Device, implementation: str, clock: Clock) -> None:
    """A result larger than any memory, then a full device, again and again."""
    runtime, rng = runtime_of(device), np.random.default_rng(0)
    x = rng.standard_normal((4, 256, 256)).astype(np.float32)
    a, c = runtime.from_host(x, device), runtime.from_host(x * 0, device)
    descriptor = ks.BatchedGemmStrided(A=a, B=a, C=c, M=256, N=256, K=256, batch=4)
    bound = ks.plan(descriptor, device=device, implementation=implementation).bind()
    long = runtime.from_host(rng.standard_normal((1, 8, 2048, 64)).astype(np.float32), device)

    def attention() -> object:
        return ks.attention(long, long, long, implementation=implementation)

    attention()
    bound()
    expected, refusals = runtime.to_host(c), 0

    def refused(what: str, work: Callable[[], object]) -> None:
        nonlocal refusals
        try:
            work()
        except OutOfDeviceMemory:
            refusals += 1
        except Exception as e:
            soaked.wrong.append(f"{what} raised {type(e).__name__}: {e}")
        else:
            soaked.wrong.append(f"{what} found memory where there is none")

    def goes_on(when: str) -> None:
        bound()
        if not np.array_equal(runtime.to_host(c), expected):
            soaked.wrong.append(f"{when} a bound call computes something else")

    for _ in range(ROUNDS):
        refused("a pebibyte", lambda: runtime.empty(_PEBIBYTE, DType.float32, device))
        goes_on("after a pebibyte was refused")
        if is_host(device):
            continue
        with nothing_left(device) as allocated:
            soaked.figures["bytes taken"] = allocated
            refused("an attention on a full device", attention)
            refused(
                "a new array on a full device",
                lambda: runtime.empty((1 << 22,), DType.float32, device),
            )
            goes_on("on a full device")
        attention()
        goes_on("after memory was given back")
        if clock.over:
            soaked.wrong.append("there was no time for all rounds")
            break
    soaked.figures["times that memory ran out"] = refusals
    if is_host(device):
        soaked.figures["full device"] = "not tried: the host's memory is others', too"

"""One call a million times, and functions on arrays by the ten thousand: neither leaves
anything."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import kernelseam as ks
import numpy as np
from kernelseam.contract import Device

from benchmarks.soaking import Clock, Soaked, free_bytes, runtime_of

BETWEEN = 10_000
"""Launches from one synchronisation to the next."""
GROWTH = 500
"""Blocks of Python's memory that may be there more."""
WARM = 2000


def launches(soaked: Soaked, device: Device, implementation: str, count: int, clock: Clock) -> None:
    """One bound product, launched again and again."""
    runtime, rng = runtime_of(device), np.random.default_rng(0)
    a, b = (rng.standard_normal((1, 16, 16)).astype(np.float32) for _ in "ab")
    x: dict[str, Any] = {
        "A": runtime.from_host(a, device),
        "B": runtime.from_host(b, device),
        "C": runtime.from_host(a * 0, device),
    }
    call = ks.plan(
        ks.BatchedGemmStrided(**x, M=16, N=16, K=16), device=device, implementation=implementation
    ).bind()
    stream = runtime.current_stream(device)

    def once() -> None:
        call(stream)

    done, took = _repeated(soaked, device, once, count, clock)
    soaked.figures |= {"launches": done, "microseconds each": round(took / max(done, 1) * 1e6, 2)}
    actual = runtime.to_host(x["C"])
    if not np.allclose(actual, a @ b, atol=1e-4):
        soaked.wrong.append(f"the last product is off by {np.abs(actual - a @ b).max():.3g}")


def operations(
    soaked: Soaked, device: Device, implementation: str, count: int, clock: Clock
) -> None:
    """Products and attentions on arrays, each with a new result."""
    runtime, rng = runtime_of(device), np.random.default_rng(0)
    x = rng.standard_normal((2, 4, 33, 32)).astype(np.float32)
    array = runtime.from_host(x, device)
    results: list[object] = [None, None]

    def once() -> None:
        results[0] = ks.bmm(array, array, b_transposed=True, implementation=implementation)
        results[1] = ks.attention(array, array, array, causal=True, implementation=implementation)

    once()
    expected = [runtime.to_host(y) for y in results]
    done, took = _repeated(soaked, device, once, count, clock)
    soaked.figures |= {
        "operations": 2 * done,
        "microseconds each": round(took / max(2 * done, 1) * 1e6, 2),
    }
    if not all(
        np.array_equal(runtime.to_host(y), want) for y, want in zip(results, expected, strict=True)
    ):
        soaked.wrong.append("the last results are not the first ones")


def _repeated(
    soaked: Soaked, device: Device, once: Callable[[], None], count: int, clock: Clock
) -> tuple[int, float]:
    """How often it was done, and the seconds that took; what it left is wrong."""
    runtime, done = runtime_of(device), 0
    for _ in range(min(WARM, count)):
        once()
    runtime.synchronize(device)
    gc.collect()
    before, blocks, start = free_bytes(device), sys.getallocatedblocks(), time.monotonic()
    while done < count and not clock.over:
        for _ in range(min(BETWEEN, count - done)):
            once()
        done = min(done + BETWEEN, count)
        runtime.synchronize(device)
    took = time.monotonic() - start
    gc.collect()
    grown, after = sys.getallocatedblocks() - blocks, free_bytes(device)
    soaked.figures["blocks of Python's more"] = grown
    if grown > GROWTH:
        soaked.wrong.append(f"{grown} blocks of Python's memory are left over")
    if before is not None and after is not None and after < before:
        soaked.wrong.append(f"{before - after} bytes of device memory are gone")
    if done < count:
        soaked.wrong.append(f"only {done} of {count} were done in the time there was")
    return done, took

"""The NumPy implementation beside torch's CPU kernels: both on every core that the process has, by
the clock; on one core (taskset -c 0) by the thread's CPU time, which other programs hardly change.

Ways take turns, a call each, so that what else the machine does meets both; the median counts. BLAS
keeps the threads that it was started with: unset OMP_NUM_THREADS and its like for figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import kernelseam as ks
import torch
import torch.nn.functional as functional
from kernelseam.descriptors.common.protocol import Descriptor

from benchmarks.comparing.results import HOST, OURS, PEER, Record, Timed
from benchmarks.comparing.rows import Session
from benchmarks.comparing.timing import Run

SECONDS, FEWEST, MOST = 2.0, 5, 200
"""Of a row: its time, and how often each way is called."""


@dataclass(frozen=True)
class CpuRow:
    """``make()``: ours and torch's. ``least``: what torch's time over ours must not be below."""

    name: str
    make: Callable[[], tuple[Run, Run]]
    least: float
    suite: str = "host-cpu"

    def planned(self, session: Session) -> Iterable[Descriptor]:
        return ()

    def measure(self, session: Session) -> Record:
        threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
        torch.set_num_threads(cores)
        clock = time.perf_counter if cores > 1 else time.thread_time
        try:
            with torch.enable_grad():
                times = in_turns(dict(zip((OURS, "torch"), self.make(), strict=True)), clock)
        finally:
            torch.set_num_threads(threads)
        record = Record(self.suite, self.name, least=self.least)
        record.timed = [
            Timed(n, OURS if n == OURS else PEER, us={HOST: us}) for n, us in times.items()
        ]
        return record


def in_turns(
    runs: dict[str, Run], clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """µs of each call by ``clock``, in seconds, by name; the first two calls do not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    for count in range(MOST + 2):
        for name, run in runs.items():
            start = clock()
            run()
            times[name].append(round((clock() - start) * 1e6, 1))
        if count >= FEWEST + 1 and time.perf_counter() - begin > SECONDS:
            break
    return {name: us[2:] for name, us in times.items()}


def _attention(
    sizes: tuple[int, int, int, int, int, int], causal: bool = False, dtype: str = "float32"
) -> Callable[[], tuple[Run, Run]]:
    """``sizes``: batch, query heads, KV heads, S_q, S_k, head dim."""
    batch, heads, kv_heads, S_q, S_k, d = sizes

    def make() -> tuple[Run, Run]:
        kind = getattr(torch, dtype)
        q = torch.randn(batch, heads, S_q, d).to(kind)
        k, v = (torch.randn(batch, kv_heads, S_k, d).to(kind) for _ in range(2))
        own: list[Any] = [q, k, v] if dtype == "bfloat16" else [x.numpy() for x in (q, k, v)]
        return (
            lambda: ks.attention(*own, causal=causal),
            lambda: functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=heads != kv_heads
            ),
        )

    return make


def _gradients(batch: int, heads: int, S: int, d: int, causal: bool) -> tuple[Run, Run]:
    """Forward and backward."""
    x = [torch.randn(batch, heads, S, d) for _ in range(4)]
    q, k, v, dout = (t.numpy() for t in x)
    x_q, x_k, x_v = (t.clone().requires_grad_() for t in x[:3])

    def ours() -> None:
        out, lse = ks.attention(q, k, v, causal=causal, return_lse=True)
        ks.attention_bwd(dout, q, k, v, out, lse, causal=causal)

    def peer() -> None:
        result = functional.scaled_dot_product_attention(x_q, x_k, x_v, is_causal=causal)
        torch.autograd.grad(result, (x_q, x_k, x_v), x[3])

    return ours, peer


def _products(count: int, side: int) -> tuple[Run, Run]:
    a, b = torch.randn(count, side, side), torch.randn(count, side, side)
    x, y = a.numpy(), b.numpy()
    return lambda: ks.bmm(x, y), lambda: torch.bmm(a, b)


def cpu_rows() -> list[CpuRow]:
    def gradients(*sizes: Any) -> Callable[[], tuple[Run, Run]]:
        return lambda: _gradients(*sizes)

    def products(count: int, side: int) -> Callable[[], tuple[Run, Run]]:
        return lambda: _products(count, side)

    large, small = (1, 8, 8, 2048, 2048), (8, 12, 12, 128, 128, 64)
    return [
        CpuRow("attention B1 H8 S2048 D64 causal", _attention((*large, 64), True), 0.7),
        CpuRow("attention B1 H8 S2048 D64", _attention((*large, 64)), 0.7),
        CpuRow("attention B1 H8 S2048 D128 causal", _attention((*large, 128), True), 0.7),
        CpuRow("attention B8 H12 S128 D64", _attention(small), 0.5),
        CpuRow("attention B8 H12 S128 D64 causal", _attention(small, True), 0.5),
        CpuRow(
            "attention B4 H32/8 1 query 1024 keys D128", _attention((4, 32, 8, 1, 1024, 128)), 0.5
        ),
        CpuRow("attention B16 H8 1 query 512 keys D64", _attention((16, 8, 8, 1, 512, 64)), 0.5),
        CpuRow(
            "attention float16 B1 H8 S1024 D64 causal",
            _attention((1, 8, 8, 1024, 1024, 64), True, "float16"),
            0.4,
        ),
        CpuRow("attention bfloat16 B8 H12 S128 D64", _attention(small, dtype="bfloat16"), 0.2),
        CpuRow("gradients B1 H8 S1024 D64 causal", gradients(1, 8, 1024, 64, True), 0.5),
        CpuRow("gradients B8 H12 S128 D64", gradients(8, 12, 128, 64, False), 0.5),
        CpuRow("bmm 64 of 256³", products(64, 256), 0.7),
        CpuRow("bmm 512 of 64³", products(512, 64), 0.5),
    ]

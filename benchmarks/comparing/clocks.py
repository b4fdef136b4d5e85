"""The clocks: a GPU's, by torch's events; the host's, which serves where there is none and for host
times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.comparing.timing import Run

INFINITY_CACHE = 256 << 20
"""Bytes of the cache behind the L2 cache on an MI300X, AMD's largest; no property of a device's has
its size."""


class GpuClock:
    """Times by device events. A flush zeroes a buffer of eight times the L2 cache, on AMD's devices
    of twice the Infinity Cache: that also keeps the device busy until the host has handed over the
    launch, which takes some of torch's calls more than 50 µs."""

    def __init__(self, device: str = "cuda") -> None:
        size = 8 * torch.cuda.get_device_properties(device).L2_cache_size
        if torch.version.hip:
            size = max(size, 2 * INFINITY_CACHE)
        self._flushed = torch.empty(max(size, 1 << 20), dtype=torch.uint8, device=device)
        self._capturing = torch.cuda.Stream(device)

    def burst(self, run: Run, count: int) -> float:
        first, last = _event(), _event()
        first.record()
        for _ in range(count):
            run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3

    def flushed(self, run: Run, count: int) -> list[float]:
        pairs = [(_event(), _event()) for _ in range(count)]
        for first, last in pairs:
            self._flushed.zero_()
            first.record()
            run()
            last.record()
        torch.cuda.synchronize()
        return [float(first.elapsed_time(last)) * 1e-3 for first, last in pairs]

    def captured(self, run: Run, count: int) -> Run | None:
        graph = torch.cuda.CUDAGraph()
        try:
            # torch.cuda.graph would give all cached memory back first, and stay on its stream where
            # a capture fails.
            torch.cuda.synchronize()
            with torch.cuda.stream(self._capturing):
                run()  # libraries take their workspace of this stream now
                torch.cuda.synchronize()
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    for _ in range(count):
                        run()
                finally:
                    graph.capture_end()
            graph.replay()
            torch.cuda.synchronize()
        except Exception:  # what cannot be captured is launched
            _leave_capture()
            return None
        replay: Callable[[], object] = graph.replay
        return replay


class HostClock:
    """Wall time, for what runs on the host: tests of rows on small problems."""

    def burst(self, run: Run, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            run()
        return time.perf_counter() - start

    def flushed(self, run: Run, count: int) -> list[float]:
        return [self.burst(run, 1) for _ in range(count)]

    def captured(self, run: Run, count: int) -> Run | None:
        return None


def _leave_capture() -> None:
    """A capture that fails leaves torch's generator in it, which draws no more: it gets the state
    of a new one."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(torch.Generator("cuda").graphsafe_get_state())


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)

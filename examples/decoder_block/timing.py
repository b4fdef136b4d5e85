"""Times of runs that take turns, graphs, and the tables that are printed."""

from __future__ import annotations

import time
from typing import Any

import torch
from block import Run, on_gpu


def milliseconds(runs: dict[str, Run], repeats: int) -> dict[str, float]:
    """Medians of so many rounds, in which all take turns, after one that is not timed."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            spent = _device_time(run) if on_gpu else _host_time(run)
            if turn:
                times[name].append(spent)
    return {name: sorted(x)[repeats // 2] for name, x in times.items()}


def _device_time(run: Run) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _host_time(run: Run) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def captured(run: Run, pool: Any = None) -> Run:
    """Its replay from a CUDA graph; on the CPU itself."""
    if not on_gpu:
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return lambda: graph.replay()


def table(title: str, names: list[str], rows: dict[str, list[float]], tokens: int) -> None:
    """A column an implementation; the last row is of the whole."""
    print(f"\n| {title}, ms | {' | '.join(names)} |")
    print("|---" * (len(names) + 1) + "|")
    for part, row in rows.items():
        print(f"| {part} | {' | '.join(f'{x:.3f}' for x in row)} |")
    print(f"| tokens/s | {' | '.join(f'{tokens / x * 1e3:.0f}' for x in rows['whole'])} |")

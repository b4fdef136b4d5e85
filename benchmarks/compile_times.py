"""What it takes to compile the kernels of one arch, and to find them in the cache. Needs no GPU.

    python benchmarks/compile_times.py
    python benchmarks/compile_times.py --arch sm_90a --implementation sm90 --json times.json

Cold: a bundle to a cubin, past nvrtc's own cache and past ours, the compiler loaded (an empty kernel is compiled
before). CPU seconds are the process's own, which another's work stretches less than the clock's. Disk hit: a bundle's
binary from our cache's file, checked, in a process that does not know it. Its key is of the sources' text: what putting
them together takes is shown beside it. Exit status 1 where something is over its budget.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernelseam.compilation import build, compiled
from kernelseam.compilation.folder import VARIABLE
from kernelseam.contract import SourceBundle, Toolchain
from kernelseam.kernels import Covered, covering
from kernelseam.kernels.kernel import bundle
from kernelseam.plugins import plugins

BUDGET = {"attention": 1.5, "gemm": 2.5}
"""Seconds, cold, of one kernel of an operation on two idle cores."""
DISK_HIT = 1e-3
"""Seconds."""


@dataclass(frozen=True)
class Times:
    """One binary's, in seconds."""

    kernel: str
    tile: str
    operation: str
    cpu: float
    """Cold, of the process's CPUs."""
    wall: float
    """Cold, by the clock."""
    bundle: float
    """Its sources put together."""
    disk: float
    """Loaded from the cache's file, the fastest of some."""


def measured(covered: Covered, tile: Any, toolchain: Toolchain, arch: str, repeats: int = 5) -> Times:
    """Compile into the cache's folder as it is set, and load from there. The binary must not be there yet."""
    start = time.perf_counter()
    made = bundle(covered.half, covered.spec, tile, toolchain, arch)
    put_together = time.perf_counter() - start
    build.forget()
    cpu, wall = time.process_time(), time.perf_counter()
    first = compiled(toolchain, made, arch)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    hits = []
    for _ in range(repeats):
        build.forget()
        start = time.perf_counter()
        again = compiled(toolchain, made, arch)
        hits.append(time.perf_counter() - start)
        assert again.path == first.path is not None and again.data == first.data
    name, operation = str(getattr(tile, "name", tile)), covered.half.operation
    return Times(str(covered), name, operation, cpu, wall, put_together, min(hits))


def fast(arch: str, implementation: str, backend: str = "cuda") -> list[tuple[Covered, Any]]:
    """The covering kernels, with their tiles, of implementations whose name starts so."""
    found = plugins().backend(backend)
    assert found.toolchain is not None
    row = found.toolchain.arch_row(arch)
    return [
        (c, tile) for c in covering(found.kernels) if c.half.name.startswith(implementation)
        and (not c.half.archs or arch in c.half.archs) for tile in c.tiles(row)
    ]


def warm_up(toolchain: Toolchain, arch: str) -> None:
    """Have the compiler loaded, and its version asked for."""
    toolchain.compiler()
    toolchain.compile(SourceBundle("k", "k.cu", (("k.cu", 'extern "C" __global__ void k() {}'),), ()), arch)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--implementation", default="sm90", help="those whose name starts so. [sm90]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results here")
    arguments = parser.parse_args(given)
    toolchain, found = plugins().backend("cuda").toolchain, list[Times]()
    assert toolchain is not None
    warm_up(toolchain, arguments.arch)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[VARIABLE] = folder
        for covered, tile in fast(arguments.arch, arguments.implementation):
            found.append(measured(covered, tile, toolchain, arguments.arch))
            print(_row(found[-1]) if len(found) > 1 else f"{_HEAD}\n{_row(found[0])}", flush=True)
    over = [t for t in found if t.cpu > BUDGET.get(t.operation, float("inf")) or t.disk > DISK_HIT]
    budgets = f"{BUDGET} s cold, {DISK_HIT} s from disk"
    print(f"\n{len(found)} binaries by {toolchain.compiler()}; {len(over)} over their budgets: {budgets}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(t) for t in found], indent=1), encoding="utf-8")
    return int(bool(over) or not found)


_HEAD = "| kernel | tile | cold, CPU s | cold, wall s | bundle ms | disk hit ms |\n|---|---|---|---|---|---|"


def _row(t: Times) -> str:
    return f"| {t.kernel} | {t.tile} | {t.cpu:.2f} | {t.wall:.2f} | {t.bundle * 1e3:.2f} | {t.disk * 1e3:.2f} |"


if __name__ == "__main__":
    sys.exit(main())

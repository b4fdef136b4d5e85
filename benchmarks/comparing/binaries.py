"""What it takes to compile a kernel, and to find it in the cache. Needs neither a GPU nor torch.

Cold: a bundle to a cubin, past nvrtc's own cache and past ours, the compiler loaded. CPU seconds
are the process's own, which another's work stretches less than the clock's. Disk hit: a bundle's
binary from our cache's file, checked, in a process that does not know it. Its key is of the
sources' text: what putting them together takes is apart.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from compile_matrix import Covered, compile_matrix
from kernelseam.compilation import build, bundled, compiled
from kernelseam.contract import SourceBundle, Toolchain
from kernelseam.kernels.kernel import bundle
from kernelseam.plugins import plugins

BUDGET = {
    "attention": 1.5,
    "attention_bwd": 1.8,
    "gemm": 2.5,
    "grouped_gemm": 2.5,
    "grouped_gemm_pointers": 2.5,
}
"""Seconds, cold, of one kernel of an operation on two idle cores."""
DISK_HIT = 1e-3
"""Seconds."""


@dataclass(frozen=True)
class Times:
    """One binary's, in seconds."""

    cpu: float
    """Cold, of the process's CPUs."""
    wall: float
    """Cold, by the clock."""
    bundle: float
    """Its sources put together."""
    disk: tuple[float, ...]
    """Loaded from the cache's file."""


def measured(
    covered: Covered, tile: Any, toolchain: Toolchain, arch: str, repeats: int = 5
) -> Times:
    """Compile into the cache's folder as it is set, and load from there. The binary must not be
    there yet."""
    start = time.perf_counter()
    source = bundle(covered.kernel, covered.spec, tile, toolchain, arch)
    put_together = time.perf_counter() - start
    build.forget()
    cpu, wall = time.process_time(), time.perf_counter()
    first = compiled(toolchain, source, arch)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    hits = []
    for _ in range(repeats):
        build.forget()
        bundled.installed_bundles()  # looked for once a process
        start = time.perf_counter()
        again = compiled(toolchain, source, arch)
        hits.append(time.perf_counter() - start)
        assert again.path == first.path is not None and again.data == first.data
    return Times(cpu, wall, put_together, tuple(hits))


def kernels(arch: str, implementation: str, backend: str = "cuda") -> list[tuple[Covered, Any]]:
    """The compile matrix's kernels, with their tiles, of implementations whose name starts so."""
    registered = plugins().backend(backend)
    assert registered.toolchain is not None
    row = registered.toolchain.arch_row(arch)
    return [
        (c, tile)
        for c in compile_matrix(registered.kernels)
        if c.kernel.name.startswith(implementation)
        and (not c.kernel.archs or arch in c.kernel.archs)
        for tile in c.tiles(row)
    ]


def warm_up(toolchain: Toolchain, arch: str) -> None:
    """Have the compiler loaded, and its version asked for."""
    toolchain.compiler()
    toolchain.compile(
        SourceBundle("k", "k.cu", (("k.cu", 'extern "C" __global__ void k() {}'),), ()), arch
    )

"""The time of a binary: from the compiler, into an empty cache, and from the cache on disk. Needs
no GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from compile_matrix import Covered
from kernelseam import compilation
from kernelseam.compilation.folder import VARIABLE
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.plugins import plugins

from benchmarks.comparing.binaries import BUDGET, DISK_HIT, kernels, measured, warm_up
from benchmarks.comparing.results import COLD, DISK, OURS, WALL, Record, Timed
from benchmarks.comparing.rows import Session

DISK_READS = 21
TIMED = (("sm_90a", "sm90"),)
"""Archs, and how implementations are called whose kernels are compiled for them."""


@dataclass(frozen=True)
class CompileRow:
    """One kernel in one tile."""

    covered: Covered
    tile: Any
    arch: str
    suite: str = "compile"

    @property
    def name(self) -> str:
        return f"{self.arch} {self.covered} {getattr(self.tile, 'name', self.tile)}"

    def planned(self, session: Session) -> Iterable[Descriptor]:
        return ()

    def measure(self, session: Session) -> Record:
        toolchain = plugins().backend("cuda").toolchain
        assert toolchain is not None
        warm_up(toolchain, self.arch)
        with _empty_cache():
            times = measured(self.covered, self.tile, toolchain, self.arch, DISK_READS)
        us = {COLD: [times.cpu], WALL: [times.wall], DISK: times.disk}
        rounded = {way: [round(s * 1e6, 1) for s in seconds] for way, seconds in us.items()}
        timed = Timed(OURS, OURS, self.covered.kernel.name, rounded)
        limits = {COLD: BUDGET[self.covered.kernel.operation] * 1e6, DISK: DISK_HIT * 1e6}
        return Record(self.suite, self.name, limits=limits, timed=[timed])


@contextmanager
def _empty_cache() -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        os.environ[VARIABLE] = folder
        try:
            yield
        finally:
            compilation.forget()
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before


def compile_rows() -> list[CompileRow]:
    """None where kernelseam-cuda is not installed."""
    backend = plugins().registry.backends.get("cuda")
    if backend is None or backend.toolchain is None:
        return []
    return [
        CompileRow(kernel, tile, arch)
        for arch, start in TIMED
        for kernel, tile in kernels(arch, start)
    ]

"""The time of a binary: from the compiler, into an empty cache, and from the cache on disk. Needs no GPU."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import kernelseam as ks
from benchmarks.comparing.results import COLD, DISK, OURS, Record, Timed
from benchmarks.comparing.rows import BASE, Session
from kernelseam import compilation
from kernelseam.compilation.folder import VARIABLE
from kernelseam.contract import Device
from kernelseam.dispatch import consider
from kernelseam.errors import Unsupported
from kernelseam.kernels.kernel import KernelImplementation, build
from kernelseam.planning import Descriptor
from kernelseam.plugins import plugins

COLD_MICROSECONDS = {"attention": 1.5e6, "gemm": 2.5e6}
DISK_MICROSECONDS = 1e3
DISK_READS = 21
ARCH = "sm_90a"


@dataclass(frozen=True)
class CompileRow:
    """What a fresh process compiles for one problem, by a named implementation."""

    name: str
    descriptor: Descriptor
    implementation: str
    suite: str = "compile"

    def planned(self, session: Session) -> Iterable[Descriptor]:
        return ()

    def measure(self, session: Session) -> Record:
        """Raises Unsupported where the implementation does not take the problem on the arch."""
        problem, device = self.descriptor.problem(), Device("cuda", 0, ARCH, ARCH)
        found = next((c for c in consider(problem, device) if c.implementation.name == self.implementation), None)
        assert found is not None, f"no implementation {self.implementation} of {problem.operation}"
        if found.refusal is not None:
            raise Unsupported(problem, [ks.errors.Refusal(self.implementation, found.refusal)])
        assert isinstance(found.implementation, KernelImplementation)
        toolchain = plugins().backend("cuda").toolchain
        assert toolchain is not None
        toolchain.compiler()  # loads the library
        units = [(x.half, x.problem.spec, x.tile) for x in found.implementation.launches(problem, device).kernels]

        def took() -> float:
            compilation.forget()
            start = time.perf_counter()
            for half, spec, tile in units:
                build(half, spec, tile, toolchain, ARCH)
            return (time.perf_counter() - start) * 1e6

        limits = {COLD: COLD_MICROSECONDS[problem.operation] * len(units), DISK: DISK_MICROSECONDS * len(units)}
        timed = Timed(OURS, OURS, self.implementation)
        with _empty_cache():
            timed.us = {COLD: [round(took(), 1)], DISK: [round(took(), 1) for _ in range(DISK_READS)]}
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


def _attention(D: int, causal: bool, D_v: int | None = None, **options: Any) -> Descriptor:
    return ks.Attention(
        batch=4, num_heads=16, S_q=4096, S_k=4096, head_dim=D, value_dim=D_v, causal=causal, dtype="bfloat16",
        **dict.fromkeys(("q", "k", "v", "out"), BASE), **options,
    )


def _gemm(M: int, N: int, K: int, dtype: str, b_transposed: bool = False, batch: int = 64) -> Descriptor:
    return ks.BatchedGemmStrided(
        M=M, N=N, K=K, batch=batch, dtype=dtype, b_transposed=b_transposed, **dict.fromkeys("ABC", BASE)
    )


def compile_rows() -> list[CompileRow]:
    """Each head dim of Hopper's attention; products of every kind of tile, by Hopper's kernel and the shared one."""
    found = []
    for D, D_v in ((64, None), (96, None), (128, None), (192, 128), (256, None)):
        for causal in (False, True):
            name = f"attention sm90 D{D}" + (f"/{D_v}" if D_v else "") + " causal" * causal
            found.append(CompileRow(name, _attention(D, causal, D_v), "sm90"))
    found.append(CompileRow("attention sm90 D128 window softcap", _attention(
        128, False, window=(1023, 0), softcap=30.0), "sm90"))
    for D in (64, 128):
        found.append(CompileRow(f"attention shared D{D} causal", _attention(D, True), "shared"))
    products = {
        "512×512×64 f16 NT": _gemm(512, 512, 64, "float16", True),
        "2048×128×2048 f16 NN": _gemm(2048, 128, 2048, "float16"),
        "8192³ bf16 NT": _gemm(8192, 8192, 8192, "bfloat16", True, 1), "32³ f16 NT": _gemm(32, 32, 32, "float16", True),
        "1024³ f32 NN": _gemm(1024, 1024, 1024, "float32"), "1024³ f64 NN": _gemm(1024, 1024, 1024, "float64"),
    }
    known = {i.name for i in plugins().registry.implementations if i.operation == "gemm" and i.backend == "cuda"}
    for way in ("sm90", "shared"):
        if way in known:
            found += [CompileRow(f"product {way} {name}", d, way) for name, d in products.items()]
    return found

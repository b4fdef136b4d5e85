"""Large products by NVIDIA's libraries as dispatch calls them, beside torch.bmm, on one GPU: which function, which
algorithm.

Ways take turns: torch, cublas, each algorithm of cublaslt, and again, so that a GPU that lowers its clock under power
slows them all. A round is 150 ms of each after a warm-up; µs are medians over the rounds, by device events, without
clearing the L2 cache between launches. `bmm / this` over 1 is faster than torch. What is looked for: whether one matrix
is served better by cublasGemmEx, as torch calls it, than by the batched function with a batch of one; whether the first
algorithm that cublasLt's heuristic ranks is the fastest; and what a workspace of the caller's changes.

    python benchmarks/libraries_vs_torch.py [--report FILE.md] [--repeat-ms 150]
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelseam.blas import column_product, scalars
from kernelseam_cuda import blas
from kernelseam_cuda.blas import CublasGemm

SHAPES = (
    (1, 8192, 8192, 8192, "bfloat16", False), (64, 1024, 1024, 1024, "float16", False),
    (1, 16384, 6144, 4096, "bfloat16", True), (1, 512, 6144, 4096, "bfloat16", True),
)
"""Matrices, M, N, K, dtype, whether B has K last as a linear layer's weight."""
ROUNDS = 2
"""After one that is thrown away."""
WORKSPACE = 32 << 20
FULL = 16
"""CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION, as dispatch has it; torch allows them."""


class Batched(CublasGemm):
    """The batched function, whatever the count."""

    name, single = "cublas, batched", ""


@dataclass
class Way:
    name: str
    run: Callable[[], object]
    workspace_bytes: int = 0
    us: list[float] = field(default_factory=list)


def timed(run: Callable[[], object], repeat_ms: int) -> float:
    """µs of one launch among others of its kind, back to back."""
    import torch

    def pair() -> Any:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def span(count: int) -> float:
        first, last = pair()
        first.record()
        for _ in range(count):
            run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / count

    once = span(2)
    count = max(int(repeat_ms / 5 / once), 1)
    return statistics.median(span(count) for _ in range(5)) * 1e3


def ways(count: int, m: int, n: int, k: int, dtype: str, b_transposed: bool) -> tuple[list[Way], Any, Any]:
    """Those of one product, over the same memory; torch's is the first."""
    import torch

    import kernelseam as ks
    from kernelseam.planning import Plan
    from kernelseam.plugins import plugins
    from kernelseam.variants import variants_of

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    a = torch.randn(count, m, k, device="cuda", dtype=kind)
    b = torch.randn(count, *((n, k) if b_transposed else (k, n)), device="cuda", dtype=kind)
    c, wanted = (torch.empty(count, m, n, device="cuda", dtype=kind) for _ in range(2))
    turned = b.transpose(1, 2) if b_transposed else b
    gemm = ks.BatchedGemmStrided(A=a, B=b, C=c, M=m, N=n, K=k, batch=count, b_transposed=b_transposed)
    stream = torch.cuda.current_stream().cuda_stream

    def of(name: str, plan: Plan) -> Way:
        launch = plan.bind().launcher()
        return Way(name, lambda: launch(stream), plan.workspace_bytes)

    plan = ks.plan(gemm, implementation="cublas")
    lt = next(i for i in plugins().registry.implementations if i.name == "cublaslt")
    found = [Way("torch.bmm", lambda: torch.bmm(a, turned, out=wanted)), of("cublas", plan)]
    if count == 1:
        parts = Batched().build(plan.problem, plan.device)
        found.append(of(Batched.name, Plan(gemm, plan.problem, plan.device, plan.choice, parts)))
    pointers = {"A": a.data_ptr(), "B": b.data_ptr(), "C": c.data_ptr()}
    for mode, said in ((FULL, ""), (0, ", partial sums as narrow as C")):
        for space in (0, WORKSPACE):
            name = f"cublas, {space >> 20} MiB given{said}"
            found.append(Way(name, direct(plan.problem, pointers, stream, mode=mode, workspace=space), space))
    for i, v in enumerate(variants_of(lt, plan.problem, plan.device)):
        found.append(of(f"cublaslt {i} {v.name}", ks.plan(gemm, implementation=f"cublaslt:{v.name}")))
    found.append(of(f"by dispatch: {(chosen := ks.plan(gemm)).implementation}", chosen))
    return found, c, wanted


def direct(problem: Any, pointers: dict[str, int], stream: int, *, mode: int, workspace: int) -> Callable[[], object]:
    """cuBLAS on a handle of its own, with a math mode and a workspace of ours (0: the handle's own)."""
    import torch

    library, handle, held = blas.library(), ctypes.c_void_p(), scalars(problem)
    batched = problem.matrices != 1
    gemm = getattr(library, CublasGemm.function if batched else CublasGemm.single)
    packed = blas.arguments(column_product(problem, pointers), *map(ctypes.addressof, held), batched=batched)
    memory = torch.empty(max(workspace, 1), device="cuda", dtype=torch.uint8)
    for status in (
        library.cublasCreate_v2(ctypes.byref(handle)), library.cublasSetMathMode(handle, ctypes.c_int(mode)),
        library.cublasSetStream_v2(handle, ctypes.c_void_p(stream)),
        workspace and library.cublasSetWorkspace_v2(
            handle, ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(workspace)
        ),
    ):
        assert not status, status

    def run(keep: object = (held, memory)) -> None:
        if status := gemm(handle, *packed):
            raise RuntimeError(f"status {status}")

    return run


def lines(repeat_ms: int) -> Iterator[str]:
    import peers
    import torch

    properties = torch.cuda.get_device_properties(0)
    yield f"{properties.name}, torch {torch.__version__}, CUDA {torch.version.cuda}; in turns, {ROUNDS} rounds"
    yield ""
    yield "| product | way | µs | TFLOP/s | bmm / this | workspace MiB | rel. difference |"
    yield "|" + "---|" * 7
    for shape in SHAPES:
        count, m, n, k, dtype, _ = shape
        found, c, wanted = ways(*shape)
        errors = {}
        found[0].run()
        for way in found[1:]:
            c.fill_(float("nan"))
            way.run()
            errors[way.name] = peers.relative_error(c, wanted)
        for turn in range(ROUNDS + 1):
            for way in found:
                us = timed(way.run, repeat_ms)
                way.us += [us] * (turn > 0)
        base = statistics.median(found[0].us)
        for way in found:
            us = statistics.median(way.us)
            yield (
                f"| {count} × {m}×{n}×{k} {dtype} | {way.name} | {us:.1f} | {2 * count * m * n * k / us / 1e6:.0f} "
                f"| {base / us:.3f} | {way.workspace_bytes / 2**20:.1f} | {errors.get(way.name, 0):.1e} |"
            )
    yield ""
    yield f"Loaded: {', '.join(sorted(loaded()))}"


def loaded() -> set[str]:
    """Files of cuBLAS in this process: two of them would be two versions."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line.split()[-1] for line in maps if "libcublas" in line}


if __name__ == "__main__":
    import peers

    peers.command(__doc__, lines)

"""Tiles for a batched GEMM, each timed on one GPU beside cuBLAS: what rows of the arch's table are
chosen by.

Times are medians of device events. `error` is |x − y| / |y| against torch's product; more than 1e-2
means that a tile computes something else.

    python -m benchmarks.gemm_tiles [--kind bfloat16] [--report FILE.md] [--repeat-ms 30]
    python -m benchmarks.gemm_tiles --compile sm_90a     registers and spills alone; no GPU needed

Kinds: bfloat16, float32, float64, and float32 in tf32 or tf32x3, beside cuBLAS's TF32 or float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kernelseam.contract import ArchRow, Device, Toolchain
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.kernels import GemmTile, KernelImplementation, build_binary
from kernelseam.kernels.gemm.host import GemmDefinition
from kernelseam.plugins import plugins

from benchmarks.precompile import toolchain_of

HALF_PRECISION = frozenset({DType.float16, DType.bfloat16})
LINEAR = [
    (1, 16384, 6144, 4096, True),
    (1, 512, 6144, 4096, True),
    (64, 1024, 1024, 1024, True),
    (256, 2048, 2048, 128, True),
]
"""Matrices, M, N, K, and whether B lies K last, as a linear layer and keys have it. A lies K
last."""
WIDE = [
    (384, 512, 512, 64, True),
    (384, 512, 64, 512, False),
    (256, 2048, 2048, 128, True),
    (256, 2048, 128, 2048, False),
    (8192, 32, 32, 32, False),
    (4096, 64, 64, 64, False),
    (64, 1024, 1024, 1024, False),
]


def tile(
    bm: int, bn: int, bk: int, warps_m: int, warps_n: int, stages: int, min_blocks: int = 1
) -> GemmTile:
    return GemmTile(HALF_PRECISION, bm, bn, bk, warps_m, warps_n, stages, min_blocks)


def wide(
    bm: int,
    bn: int,
    bk: int,
    warps_m: int,
    warps_n: int,
    stages: int,
    min_blocks: int,
    *,
    dtype: DType,
    persistent: bool = False,
    precision: str | None = None,
) -> GemmTile:
    return GemmTile(
        frozenset({dtype}),
        bm,
        bn,
        bk,
        warps_m,
        warps_n,
        stages,
        min_blocks,
        persistent,
        precision=precision,
    )


single, double = partial(wide, dtype=DType.float32), partial(wide, dtype=DType.float64)
# The first is the one that NVIDIA's table has for large matrices.
HALF = (
    tile(128, 128, 64, 2, 2, 2, 2),
    tile(128, 128, 32, 2, 2, 3, 2),
    tile(128, 128, 32, 2, 2, 4, 2),
    tile(128, 128, 64, 2, 4, 2, 1),
    tile(128, 128, 64, 2, 4, 3, 1),
    tile(128, 128, 32, 2, 4, 4, 1),
    tile(128, 256, 32, 2, 4, 3),
    tile(128, 256, 32, 2, 4, 4),
    tile(128, 256, 64, 2, 4, 2),
    tile(128, 256, 64, 2, 4, 3),
    tile(256, 128, 32, 4, 2, 4),
    tile(256, 128, 64, 4, 2, 2),
    tile(256, 128, 64, 4, 2, 3),
    tile(128, 64, 64, 2, 2, 3, 2),
    tile(64, 128, 64, 2, 2, 3, 2),
)


@dataclass(frozen=True)
class Kind:
    """What is multiplied, of which shapes, by which tiles."""

    dtype: DType
    shapes: list[tuple[int, int, int, int, bool]]
    tiles: tuple[GemmTile, ...]
    precision: str | None = None


KINDS = {
    "bfloat16": Kind(DType.bfloat16, LINEAR, HALF),
    "float32": Kind(
        DType.float32,
        WIDE,
        (
            single(128, 128, 16, 2, 2, 3, 2),
            single(128, 128, 16, 2, 4, 3, 2),
            single(128, 128, 16, 2, 4, 3, 1),
            single(128, 64, 16, 2, 2, 3, 3),
            single(128, 64, 16, 2, 2, 3, 4),
            single(128, 64, 16, 2, 2, 4, 3),
            single(128, 64, 16, 2, 2, 3, 3, persistent=True),
            single(64, 128, 16, 1, 4, 3, 3),
            single(64, 64, 16, 2, 2, 3, 3, persistent=True),
            single(64, 64, 16, 2, 2, 3, 4, persistent=True),
            single(64, 64, 16, 1, 2, 3, 6),
            single(64, 32, 16, 1, 1, 3, 8),
            single(32, 32, 16, 2, 2, 3, 5, persistent=True),
            single(32, 32, 16, 1, 1, 3, 12),
            single(32, 32, 32, 1, 1, 2, 12),
        ),
    ),
    "float64": Kind(
        DType.float64,
        WIDE,
        (
            double(128, 128, 16, 4, 2, 3, 1),
            double(128, 64, 16, 2, 2, 3, 2),
            double(128, 64, 16, 4, 2, 3, 1),
            double(64, 64, 16, 2, 2, 3, 2),
            double(64, 64, 16, 2, 2, 4, 2),
            double(32, 32, 16, 2, 2, 3, 4),
        ),
    ),
    "tf32": Kind(
        DType.float32,
        WIDE,
        tuple(
            single(*shape, precision="tf32")
            for shape in (
                (128, 128, 32, 2, 2, 3, 2),
                (128, 128, 32, 2, 4, 3, 1),
                (128, 64, 32, 2, 2, 3, 2),
                (64, 64, 32, 2, 2, 3, 3),
                (32, 32, 32, 1, 2, 2, 8),
            )
        ),
        "tf32",
    ),
    "tf32x3": Kind(
        DType.float32,
        WIDE,
        tuple(
            single(*shape, precision="tf32x3")
            for shape in (
                (128, 64, 32, 4, 2, 3, 1),
                (64, 64, 32, 2, 2, 3, 2),
                (64, 64, 32, 2, 4, 3, 1),
                (32, 32, 32, 1, 2, 2, 6),
            )
        ),
        "tf32x3",
    ),
}


def named(t: GemmTile) -> str:
    blocks = f", {t.min_blocks} blocks" * (t.min_blocks > 1) + ", a tile each" * (not t.persistent)
    return f"{t.bm}×{t.bn}×{t.bk}, {t.warps_m}×{t.warps_n} warps, {t.stages} stages{blocks}"


@dataclass(frozen=True)
class OneTile(GemmDefinition):
    """The product with a tile of ours."""

    of_ours: GemmTile

    def tiles(self, spec: GemmSpec, row: ArchRow) -> tuple[GemmTile, ...]:
        return (self.of_ours,) * (self.of_ours.shared_bytes(spec) <= row.shared_bytes_per_block)

    def tile(self, problem: GemmProblem, row: ArchRow, device: Device) -> GemmTile:
        return self.of_ours


def facts(toolchain: Toolchain, arch: str, spec: GemmSpec, t: GemmTile) -> str:
    """Registers, spills and shared memory as cells of a table."""
    if not OneTile(t).tiles(spec, toolchain.arch_row(arch)):
        return f"does not fit | – | {t.shared_bytes(spec) >> 10}"
    (facts_of_tile,) = build_binary(toolchain, spec, arch, t, OneTile(t))[1].values()
    return (
        f"{facts_of_tile.registers} | {facts_of_tile.spills} | {facts_of_tile.shared_bytes >> 10}"
    )


def compiled(arch: str, name: str, kind: Kind) -> Iterator[str]:
    """What the compiler makes of each."""
    toolchain = toolchain_of(arch)
    acc = kind.dtype.accumulator
    spec = GemmSpec(kind.dtype, kind.dtype, acc, b_transposed=True, precision=kind.precision)
    yield from (
        f"{arch}, {name}",
        "",
        "| tile | registers | spills | shared KiB |",
        "|" + "---|" * 4,
    )
    yield from (f"| {named(t)} | {facts(toolchain, arch, spec, t)} |" for t in kind.tiles)


def timed(kind: Kind, repeat_ms: int) -> Iterator[str]:
    """Each tile's time and error beside cuBLAS."""
    import kernelseam as ks
    import torch

    from benchmarks import peers

    torch.backends.cuda.matmul.allow_tf32 = kind.precision == "tf32"
    dtype = getattr(torch, kind.dtype.value)
    yield (
        "| product | tile | µs | TFLOP/s | cuBLAS / this | error | registers | spills | shared "
        "KiB |"
    )
    yield "|" + "---|" * 9
    for count, m, n, k, k_last in kind.shapes:
        torch.manual_seed(0)
        a = torch.randn(count, m, k, device="cuda", dtype=dtype)
        b = torch.randn(count, *((n, k) if k_last else (k, n)), device="cuda", dtype=dtype)
        c, peer_c = (torch.empty(count, m, n, device="cuda", dtype=dtype) for _ in range(2))
        name, flops = f"{count} × {m}×{n}×{k}", 2 * count * m * n * k
        b_matrix = b.transpose(1, 2) if k_last else b

        def peer(a: object = a, b: object = b_matrix, out: object = peer_c) -> None:
            torch.bmm(a, b, out=out)

        base = peers.median_ms(peer, repeat_ms)
        yield (
            f"| {name} | cuBLAS | {base * 1e3:.0f} | {flops / base / 1e9:.0f} | 1 | 0 | – | – | – |"
        )
        gemm = ks.BatchedGemmStrided(
            A=a, B=b, C=c, M=m, N=n, K=k, batch=count, b_transposed=k_last, precision=kind.precision
        )
        plan = ks.plan(gemm, implementation="shared")
        toolchain = plugins().backend(plan.device.backend).toolchain
        assert toolchain is not None and isinstance(plan.problem.spec, GemmSpec)
        for t in kind.tiles:
            cells = facts(toolchain, plan.device.arch, plan.problem.spec, t)
            if cells.startswith("does not fit"):
                continue
            c.fill_(float("nan"))
            parts = KernelImplementation(OneTile(t), toolchain).build(plan.problem, plan.device)
            ms = peers.median_ms(replace(plan, parts=parts).bind(), repeat_ms)
            error = peers.relative_error(c, peer_c)
            yield (
                f"| {name} | {named(t)} | {ms * 1e3:.0f} | {flops / ms / 1e9:.0f} | "
                f"{base / ms:.2f} | {error:.1e} "
                f"| {cells} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=KINDS, default="bfloat16")
    parser.add_argument("--compile", metavar="ARCH")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--repeat-ms", type=int, default=30)
    arguments = parser.parse_args()
    if arguments.compile:
        for line in compiled(arguments.compile, arguments.kind, KINDS[arguments.kind]):
            print(line, flush=True)
    else:
        from benchmarks import peers

        peers.write(timed(KINDS[arguments.kind], arguments.repeat_ms), arguments.report)


if __name__ == "__main__":
    main()

"""Tiles for an attention's gradients, each timed on one GPU: what a row of the arch's table is
chosen by.

Times are medians of device events over all launches of a call; TFLOP/s count 2.5 × the forward's
operations, a causal mask half. A head dim's first line is the deterministic way with the table's
tile. `error` is the largest |x − y| / |y| of dq, dk and dv against that; more than 1e-2 means that
a tile computes something else.

    python -m benchmarks.backward_tiles [--dim 128] [--causal] [--report FILE.md] [--repeat-ms 60]
    python -m benchmarks.backward_tiles --compile sm_90a     registers and spills; no GPU needed
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernelseam.contract import ArchRow, Device, Toolchain
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.descriptors.attention.problem import AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.kernels import BackwardTile, KernelImplementation, build_binary
from kernelseam.kernels.attention.backward import AttentionBwdDefinition
from kernelseam.planning import Plan
from kernelseam.plugins import plugins

from benchmarks.precompile import toolchain_of

HALF_PRECISION = frozenset({DType.float16, DType.bfloat16})
SHAPES = {64: (4, 32, 4096), 128: (4, 16, 4096), 256: (4, 8, 4096)}
"""Head dim → batch, heads, S."""


def _tile(
    dim: int,
    warps: int,
    rows: int,
    step: int,
    column_warps: int,
    score_rows: int,
    query_rows: int = 0,
    stages: int = 2,
    **more: Any,
) -> BackwardTile:
    return BackwardTile(
        HALF_PRECISION,
        dim,
        warps,
        rows,
        step,
        stages,
        column_warps,
        score_rows=score_rows,
        query_rows=query_rows,
        **{"unroll": 2, **more},
    )


def _in_order(*shape: int, **more: Any) -> BackwardTile:
    """Deterministic, the scores handed on as well: none is computed by two warps of a block."""
    return replace(_tile(*shape, **more), apart=True)


# The first of each head dim is the row with atomics that NVIDIA's table has. What the others try:
CANDIDATES = {
    64: (
        # twice the atomics, but two others compute while one waits
        _tile(64, 4, 32, 64, 2, 32, 32, min_blocks=3),
        _tile(64, 4, 32, 64, 2, 32, 32, unroll=1, min_blocks=3),
        _tile(64, 4, 32, 64, 2, 32, 32, min_blocks=2),
        _tile(64, 8, 32, 64, 2, 32, 16),
        _tile(64, 8, 32, 64, 2, 32, 16, unroll=4),
        _tile(64, 8, 32, 64, 2, 32, 16, resident=True),  # K and V in registers: fewer loads
        _tile(64, 8, 32, 128, 2, 32, 32),  # fewer barriers, fewer loads a product
        _tile(64, 8, 32, 64, 2, 32, 16, stages=3),
        _tile(64, 8, 32, 32, 2, 16, 16),
        _tile(64, 16, 16, 64, 2, 16, 16),  # twice the warps, half the registers
        _in_order(64, 8, 32, 64, 2, 32),
        _in_order(64, 8, 32, 64, 2, 32, resident=True),
        _in_order(64, 4, 32, 64, 2, 32, min_blocks=2),
        _in_order(64, 4, 32, 64, 2, 32, min_blocks=3),
    ),
    128: (
        _tile(128, 8, 32, 64, 2, 32, 32),
        _tile(128, 8, 32, 64, 2, 32, 32, unroll=4),
        _tile(128, 8, 32, 64, 2, 16, 32),
        _tile(128, 8, 32, 64, 2, 32, 16),
        _tile(128, 8, 32, 32, 2, 16, 16),
        _tile(128, 8, 32, 32, 2, 16, 16, stages=3),
        _tile(128, 8, 32, 32, 2, 32, 16, unroll=4),
        _tile(128, 16, 32, 64, 4, 16, 16),
        _tile(128, 4, 32, 32, 2, 16, 16, min_blocks=2),
        _tile(128, 4, 32, 64, 2, 32, 32, min_blocks=2),
        _in_order(128, 8, 32, 64, 2, 32),
        _in_order(128, 4, 32, 64, 2, 32, min_blocks=2),
    ),
    256: (
        _tile(256, 8, 32, 64, 4, 32, 32),
        _tile(256, 8, 32, 64, 4, 16, 32),
        _tile(256, 8, 32, 64, 4, 16, 32, unroll=1),
        _tile(256, 8, 32, 32, 4, 16, 16, unroll=1),
        _tile(256, 8, 32, 32, 4, 16, 16),
        _tile(256, 8, 32, 32, 4, 16, 32),
        _tile(256, 16, 32, 64, 8, 16, 32),
        _in_order(256, 8, 32, 64, 4, 16),
        _in_order(256, 8, 32, 32, 4, 16),
    ),
}


def named(tile: BackwardTile) -> str:
    """A tile in words: what it owns, a step, and what each warp makes of the three kinds of
    products."""
    t, dim = tile, tile.max_dim
    columns = t.own * t.step // t.warps // t.score_rows
    products = f"scores {t.score_rows}×{columns}, gradients {t.rows}×{dim // t.column_warps}"
    if t.query_rows:
        products += f", dq {t.query_rows}×{dim // t.query_column_warps}"
    parts = [
        f"{t.warps} warps own {t.own}, {t.step} a step, {t.stages} stages",
        products,
        f"unroll {t.unroll}",
    ]
    parts += ["resident"] * t.resident + [f"{t.min_blocks} blocks"] * (t.min_blocks > 1)
    return "; ".join(parts + ["in order"] * (not t.query_rows))


@dataclass(frozen=True)
class OneTile(AttentionBwdDefinition):
    """The gradients with a tile of ours."""

    of_ours: BackwardTile

    def tiles(self, spec: AttentionBwdSpec, row: ArchRow) -> tuple[BackwardTile, ...]:
        return (self.of_ours,) * (self.of_ours.shared_bytes(spec) <= row.shared_bytes_per_block)

    def tile(self, problem: AttentionBwdProblem, row: ArchRow, device: Device) -> BackwardTile:
        return self.of_ours


def facts(toolchain: Toolchain, arch: str, spec: AttentionBwdSpec, tile: BackwardTile) -> str:
    """Registers, spills and shared memory of a tile's binaries as cells of a table."""
    if not OneTile(tile).tiles(spec, toolchain.arch_row(arch)):
        return f"does not fit | – | {tile.shared_bytes(spec) >> 10}"
    compiled = [
        build_binary(toolchain, spec, arch, replace(tile, role=r), OneTile(tile))[1]
        for r in tile.roles
    ]
    all_facts = [f for kernels in compiled for f in kernels.values()]
    spills, shared = sum(f.spills for f in all_facts), max(f.shared_bytes for f in all_facts) >> 10
    return f"{', '.join(str(f.registers) for f in all_facts)} | {spills} | {shared}"


def compiled(arch: str, dims: list[int], causal: bool) -> Iterator[str]:
    """What the compiler makes of each."""
    toolchain = toolchain_of(arch)
    yield from (
        f"{arch}, bf16",
        "",
        "| D | tile | registers | spills | shared KiB |",
        "|" + "---|" * 5,
    )
    for dim in dims:
        spec = AttentionBwdSpec(
            AttentionSpec(DType.bfloat16, dim, dim, causal, lse=True), deterministic=False
        )
        for tile in CANDIDATES[dim]:
            yield f"| {dim} | {named(tile)} | {facts(toolchain, arch, spec, tile)} |"


def timed(dims: list[int], causal: bool, repeat_ms: int, device: str = "cuda") -> Iterator[str]:
    """Each tile's time and error beside those of the deterministic way."""
    import kernelseam as ks
    import torch

    from benchmarks import peers

    yield "| D | tile | µs | TFLOP/s | first / this | error | registers | spills | shared KiB |"
    yield "|" + "---|" * 9
    for dim in dims:
        batch, heads, s = SHAPES[dim]
        torch.manual_seed(0)
        q, k, v, dout, out, *grads = (
            torch.randn(batch, heads, s, dim, device=device, dtype=torch.bfloat16) for _ in range(8)
        )
        forward = ks.Attention.from_arrays(
            q, k, v, out, torch.empty(batch, heads, s, device=device), causal=causal
        )
        ks.plan(forward).bind()()
        gradients = dict(zip(("dq", "dk", "dv"), grads, strict=True))
        flops = 10 * batch * heads * s * s * dim * (0.5 if causal else 1.0)
        ordered = ks.plan(ks.AttentionBwd(forward=forward, dout=dout, **gradients))
        call = ordered.bind()
        base = peers.median_ms(call, repeat_ms)
        expected = [x.clone() for x in grads]
        yield (
            f"| {dim} | the table's, in order | {base * 1e3:.0f} | {flops / base / 1e9:.0f} | "
            "1 | 0 | – | – | – |"
        )
        free = ks.plan(
            ks.AttentionBwd(forward=forward, dout=dout, **gradients, deterministic=False)
        )
        toolchain = plugins().backend(free.device.backend).toolchain
        assert toolchain is not None and isinstance(free.problem.spec, AttentionBwdSpec)
        for tile in CANDIDATES[dim]:
            cells = facts(toolchain, free.device.arch, free.problem.spec, tile)
            if cells.startswith("does not fit"):
                continue
            implementation = KernelImplementation(OneTile(tile), toolchain)
            for x in grads:
                x.fill_(float("nan"))
            built = free.choice, implementation.build(free.problem, free.device)
            call = Plan(free.descriptor, free.problem, free.device, built).bind()
            ms = peers.median_ms(call, repeat_ms)
            error = max(peers.relative_error(x, y) for x, y in zip(grads, expected, strict=True))
            yield (
                f"| {dim} | {named(tile)} | {ms * 1e3:.0f} | {flops / ms / 1e9:.0f} | "
                f"{base / ms:.2f} | {error:.1e} "
                f"| {cells} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, action="append", choices=sorted(CANDIDATES))
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--compile", metavar="ARCH")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--repeat-ms", type=int, default=60)
    arguments = parser.parse_args()
    dims = arguments.dim or sorted(CANDIDATES)
    if arguments.compile:
        for line in compiled(arguments.compile, dims, arguments.causal):
            print(line, flush=True)
    else:
        from benchmarks import peers

        peers.write(timed(dims, arguments.causal, arguments.repeat_ms), arguments.report)


if __name__ == "__main__":
    main()

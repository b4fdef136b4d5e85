"""Tiles for the shared attention forward, each timed on one GPU beside FlashAttention-2 (torch's
flash backend): what rows of the arch's table are chosen by.

Times are medians of device events, in turns. `error` is |x − y| / |y| against FlashAttention-2's
output; more than 1e-2 means that a tile computes something else.

    python -m benchmarks.attention_tiles [--dim 128] [--report FILE.md] [--repeat-ms 30]
    python -m benchmarks.attention_tiles --compile sm_80     registers and spills; no GPU needed
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernelseam.contract import ArchRow, Device, Toolchain
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.kernels import AttentionTile, KernelImplementation, build_binary
from kernelseam.kernels.attention.host import AttentionDefinition
from kernelseam.plugins import plugins

from benchmarks.precompile import toolchain_of

HALF_PRECISION = frozenset({DType.float16, DType.bfloat16})
SHAPES = {64: (4, 32, 4096), 128: (4, 16, 4096), 256: (4, 8, 4096)}
"""Head dim → batch, heads, S."""


def _tile(dim: int, warps: int, rows: int, bn: int, stages: int = 2, **more: Any) -> AttentionTile:
    return AttentionTile(
        HALF_PRECISION, dim, warps, rows, bn, stages, plain=True, **{"sections": True, **more}
    )


# The first of each head dim is the row that NVIDIA's table has.
CANDIDATES = {
    64: (
        _tile(64, 4, 32, 64),
        _tile(64, 4, 32, 64, score_unroll=2),
        _tile(64, 4, 32, 64, score_unroll=1),
        _tile(64, 4, 32, 80),
        _tile(64, 4, 32, 96),
        _tile(64, 4, 32, 128),  # spills
        _tile(64, 4, 16, 64, q_resident=True, min_blocks=3),
    ),
    128: (
        _tile(128, 4, 32, 64, 1, min_blocks=2, score_unroll=1, in_turns=True),
        _tile(128, 4, 32, 64, 1, min_blocks=2, score_unroll=2, in_turns=True),
        _tile(128, 4, 32, 48, min_blocks=2, score_unroll=1),  # sm_86's and sm_89's
        _tile(128, 4, 32, 48, min_blocks=2, score_unroll=2),
        _tile(128, 4, 32, 48, min_blocks=2),  # spills
        _tile(128, 4, 32, 32, min_blocks=2),
        _tile(128, 4, 32, 64, min_blocks=2),  # spills
        _tile(128, 4, 16, 64, q_resident=True, min_blocks=2),
        _tile(128, 8, 16, 64, q_resident=True),
    ),
    256: (
        _tile(256, 4, 16, 64, 1, min_blocks=2, score_unroll=8, in_turns=True),
        _tile(256, 4, 16, 64, 1, min_blocks=2, in_turns=True),
        _tile(256, 8, 16, 64, score_unroll=1),
        _tile(256, 8, 16, 64, score_unroll=2),
        _tile(256, 8, 16, 64),  # more shared memory than sm_80 has
        _tile(256, 8, 16, 48),  # than sm_86 and sm_89 have
        _tile(256, 8, 16, 32),
    ),
}


def named(tile: AttentionTile) -> str:
    blocks = f", {tile.min_blocks} blocks" * (tile.min_blocks > 1)
    return f"{tile.name}{blocks}, unroll {tile.score_unroll}"


@dataclass(frozen=True)
class OneTile(AttentionDefinition):
    """The forward with a tile of ours."""

    of_ours: AttentionTile

    def tiles(self, spec: AttentionSpec, row: ArchRow) -> tuple[AttentionTile, ...]:
        return (self.of_ours,) * (self.of_ours.shared_bytes(spec) <= row.shared_bytes_per_block)

    def tile(self, problem: AttentionProblem, row: ArchRow, device: Device) -> AttentionTile:
        return self.of_ours


def facts(toolchain: Toolchain, arch: str, spec: AttentionSpec, tile: AttentionTile) -> str:
    """Registers, spills and shared memory of a tile's binary as cells of a table."""
    if not OneTile(tile).tiles(spec, toolchain.arch_row(arch)):
        return f"does not fit | – | {tile.shared_bytes(spec) >> 10}"
    (kernel,) = build_binary(toolchain, spec, arch, tile, OneTile(tile))[1].values()
    return f"{kernel.registers} | {kernel.spills} | {kernel.shared_bytes >> 10}"


def compiled(arch: str, dims: list[int]) -> Iterator[str]:
    """What the compiler makes of each."""
    toolchain = toolchain_of(arch)
    yield from (
        f"{arch}, bf16",
        "",
        "| D | tile | registers, spills, shared KiB: full | causal |",
        "|" + "---|" * 8,
    )
    for dim in dims:
        for tile in CANDIDATES[dim]:
            cells = [
                facts(toolchain, arch, AttentionSpec(DType.bfloat16, dim, dim, causal), tile)
                for causal in (False, True)
            ]
            yield f"| {dim} | {named(tile)} | {' | '.join(cells)} |"


def timed(dims: list[int], repeat_ms: int, device: str = "cuda") -> Iterator[str]:
    """Each tile's time and error beside FlashAttention-2."""
    import kernelseam as ks
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from benchmarks import peers

    names = ("D", "mask", "tile", "µs", "TFLOP/s", "FA2 / this", "error", "registers", "spills")
    yield f"| {' | '.join(names)} | shared KiB |"
    yield "|" + "---|" * 10
    for dim in dims:
        batch, heads, s = SHAPES[dim]
        torch.manual_seed(0)
        shape = (batch, heads, s, dim)
        q, k, v, out = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for _ in range(4))
        for causal in (False, True):

            def flash(q: Any = q, k: Any = k, v: Any = v, causal: bool = causal) -> Any:
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                    return torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=causal
                    )

            flops = 4 * batch * heads * s * s * dim * (0.5 if causal else 1.0)
            expected = flash()
            planned = ks.plan(ks.Attention.from_arrays(q, k, v, out, causal=causal))
            toolchain = plugins().backend(planned.device.backend).toolchain
            assert toolchain is not None and isinstance(planned.problem.spec, AttentionSpec)
            for tile in CANDIDATES[dim]:
                cells = facts(toolchain, planned.device.arch, planned.problem.spec, tile)
                if cells.startswith("does not fit"):
                    continue
                implementation = KernelImplementation(OneTile(tile), toolchain)
                out.fill_(float("nan"))
                parts = implementation.build(planned.problem, planned.device)
                call = replace(planned, parts=parts).bind()
                spent = peers.in_turns({"ours": call, "FA2": flash}, repeat_ms)
                error = peers.relative_error(out, expected)
                yield (
                    f"| {dim} | {'causal' if causal else 'full'} | {named(tile)} "
                    f"| {spent['ours'] * 1e3:.0f} | {flops / spent['ours'] / 1e9:.0f} "
                    f"| {spent['FA2'] / spent['ours']:.2f} | {error:.1e} | {cells} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, action="append", choices=sorted(CANDIDATES))
    parser.add_argument("--compile", metavar="ARCH")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--repeat-ms", type=int, default=30)
    arguments = parser.parse_args()
    dims = arguments.dim or sorted(CANDIDATES)
    if arguments.compile:
        for line in compiled(arguments.compile, dims):
            print(line, flush=True)
    else:
        from benchmarks import peers

        peers.write(timed(dims, arguments.repeat_ms), arguments.report)


if __name__ == "__main__":
    main()

"""Kernel definition of hip_kernels/gfx950/attention.h: which tile, which constants, which
arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernelseam.contract import ArchRow, Device
from kernelseam.costs import Work
from kernelseam.descriptors.attention.options import ANY_VIEW, SpecOption
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.kernels.attention.arguments import (
    MATRICES,
    OPERANDS,
    PAGES,
    SEQUENCES,
    VIEWS,
    forward_values,
    matrices,
    page_values,
    row_values,
)
from kernelseam.kernels.attention.cost import tile_keys
from kernelseam.kernels.attention.forward_arguments import spec_constants
from kernelseam.kernels.attention.ragged import expected_tiles, typical
from kernelseam.kernels.attention.refusals import refuse_but_half_precision, refuse_mixed_views
from kernelseam.kernels.attention.scores import score_values
from kernelseam.kernels.config import Constants
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.elements import divide_up, refuse_row_strides
from kernelseam.kernels.signature import Signature, Structure

from kernelseam_rocm.toolchain import sources

SUPPORTED = ANY_VIEW | SpecOption.causal | SpecOption.window | SpecOption.dtype_out
"""The options that the kernel has. Not ``batch_invariant``: beside a kernel that shorter problems
get, a row's bits would depend on how many there are."""
DIMS = (64, 128)
WAVES, ROWS, STAGES = 8, 32, 3
_PAGE_ROWS = 16
"""A wave's part of a tile lies in one page: 16 rows of 64 columns, 8 of 128."""
BM = WAVES * ROWS
RATE = 0.5
"""Of the peak, estimated as that of the shared kernel (0.4), of whose matrix instructions a unit is
busy with fewer by count: 81 % of the cycles at head dim 128, where this kernel has 100."""

_COUNT = ("q_tiles", "batch", "num_heads", "head_group")
_SIGNATURE = Signature(
    (
        *((name, matrices(name)) for name in MATRICES),
        ("lse", row_values("lse")),
        ("sequences", SEQUENCES),
        ("pages", PAGES),
        (
            "count",
            Structure(tuple((n, "i32") for n in _COUNT), ("q_tiles", "batch", "heads", _COUNT[3])),
        ),
        ("left", "i32"),
        ("right", "i32"),
        ("scale_log2", "f32"),
    ),
    flat=True,
)


@dataclass(frozen=True)
class Gfx950AttentionTile:
    """``bn`` keys a step for a head dim; a block owns 256 queries."""

    head_dim: int
    bn: int

    @property
    def name(self) -> str:
        """Rows×keys, waves, stages."""
        return f"{BM}x{self.bn}-{WAVES}w-{STAGES}"

    @property
    def shared_bytes(self) -> int:
        """The rings of K and V; before them, behind V's first tile, the queries; later the
        output."""
        return max(2 * STAGES * self.bn, (STAGES + 1) * self.bn + BM) * self.head_dim * 2


TILES = (Gfx950AttentionTile(64, 128), Gfx950AttentionTile(128, 64))


class Gfx950Attention(KernelDefinition):
    """Attention forward in half precision for head dims of 64 and 128, 256 queries a block."""

    operation = "attention"
    name = "gfx950"
    archs = ("gfx950",)
    entry = "attention_forward_gfx950"
    source = "gfx950/attention.h"
    any_tile = True
    multiplies = True
    operands = OPERANDS

    def sources(self) -> Mapping[str, str]:
        return sources()

    def refuse(self, problem: AttentionProblem, row: ArchRow) -> str | None:
        p, spec = problem, problem.spec
        if reason := refuse_but_half_precision(spec, SUPPORTED):
            return reason
        if spec.head_dim != spec.value_dim or spec.head_dim not in DIMS:
            return f"head dims {spec.dims}: it takes {' and '.join(map(str, DIMS))}"
        if spec.kv_view == "paged":
            if spec.q_view == "pointers":
                return "queries pointers with keys paged: it takes strided and packed ones"
            if p.page_size % _PAGE_ROWS:
                return f"page_size = {p.page_size}: it takes multiples of {_PAGE_ROWS}"
        elif reason := refuse_mixed_views(spec):
            return reason
        if spec.vector < 16:
            return f"rows at multiples of {spec.vector} bytes: its copies take multiples of 16"
        if p.scale <= 0:
            return f"scale = {p.scale}: it takes more than 0"
        if (total := p.S_q + p.S_k) >= 2**30:
            return f"S_q + S_k = {total}: it takes less than 2**30"
        for name, stride in (("k", p.k_strides[2]), ("v", p.v_strides[2])):
            if not 0 <= stride < 2**22:
                return (
                    f"stride_{name}_row = {stride}: it takes 0 to 2**22 - 1, as offsets within a "
                    "tile have 32 bits"
                )
        return refuse_row_strides(stride_q_row=p.q_strides[2], stride_out_row=p.out_strides[2])

    def tiles(self, spec: AttentionSpec, row: ArchRow) -> tuple[Gfx950AttentionTile, ...]:
        return tuple(t for t in TILES if t.head_dim == spec.head_dim == spec.value_dim)

    def constants(self, spec: AttentionSpec, tile: Gfx950AttentionTile, row: ArchRow) -> Constants:
        return {
            **spec_constants(spec),
            "OUT_VIEW": VIEWS[spec.q_view],
            "LSE": spec.lse,
            "BN": tile.bn,
            "SHARED_BYTES": tile.shared_bytes,
        }

    def signature(self, spec: AttentionSpec) -> Signature:
        return _SIGNATURE

    def grid(self, problem: AttentionProblem, tile: Gfx950AttentionTile, device: Device) -> int:
        return divide_up(problem.S_q, BM) * problem.batch * problem.num_heads

    def threads(self, tile: Gfx950AttentionTile, row: ArchRow) -> int:
        return row.warp_size * WAVES

    def shared_bytes(self, spec: AttentionSpec, tile: Gfx950AttentionTile) -> int:
        return tile.shared_bytes

    def values(
        self, problem: AttentionProblem, tile: Gfx950AttentionTile, device: Device
    ) -> dict[str, int | float]:
        p, score = problem, score_values(problem)
        return {
            **forward_values(p),
            **page_values(p),
            "q_tiles": divide_up(p.S_q, BM),
            "batch": p.batch,
            "num_heads": p.num_heads,
            "head_group": p.head_group,
            **{n: score[n] for n in ("left", "right", "scale_log2")},
        }

    def work(self, problem: AttentionProblem, tile: Gfx950AttentionTile, device: Device) -> Work:
        """A tile's queries meet the keys visible to its middle one, and half a block and half a
        tile more."""
        p = problem
        keys, longest = tile_keys(p, BM, tile.bn)
        step = 2.0 * BM * (p.spec.head_dim + p.spec.value_dim)
        blocks = expected_tiles(p, BM, 1)
        moved = typical(p).bytes_moved
        return Work(moved, blocks, step * keys, step * longest, p.spec.dtype, RATE)


KERNELS = (Gfx950Attention(),)

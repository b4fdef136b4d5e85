"""Host side of forward.h, FlashAttention-2's forward: tiles, constants, arguments, and split-KV."""

from __future__ import annotations

from functools import lru_cache

from kernelseam.contract import ArchRow, Device, Launch, Launches
from kernelseam.costs import Work
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.frozen import changed
from kernelseam.kernels.attention.arguments import OPERANDS, VIEWS
from kernelseam.kernels.attention.cost import forward_work, least_seconds
from kernelseam.kernels.attention.forward_arguments import (
    SUPPORTED,
    forward_signature,
    no_tile,
    refuse_dims,
    refuse_strides,
    shared_constants,
    shared_values,
)
from kernelseam.kernels.attention.fp8 import refuse_fp8
from kernelseam.kernels.attention.parts import FEWEST_KEYS, MOST_PARTS, in_parts, part_strides
from kernelseam.kernels.attention.tile import AttentionTile, is_plain
from kernelseam.kernels.config import Constants, members
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.elements import (
    INT32,
    TF32_PRODUCTS,
    divide_up,
    pad,
    refuse_dtype,
    refuse_precision,
)
from kernelseam.kernels.signature import Signature, Structure
from kernelseam.symbolic import least, most, recorded

SECTION_BYTES = 32 << 20
"""Most keys and values that a section's blocks read: less than the L2 of archs with sections."""

_PARTS = Structure(
    (
        ("out_split", "i64"),
        ("lse_split", "i64"),
        *((n, "i32") for n in ("q_tiles", "splits", "together", "matrices")),
    ),
    ("out", "lse", "q_tiles", "splits", "together", "matrices"),
)


class AttentionDefinition(KernelDefinition):
    """A block computes a tile of ``bm`` queries of one head (of one KV head's group, where
    ``grouped``); one grid covers all heads of a batch."""

    operation = "attention"
    entry = "attention_forward"
    source = "attention/forward.h"
    any_tile = True
    multiplies = True
    operands = OPERANDS

    def refuse(self, problem: AttentionProblem, row: ArchRow) -> str | None:
        spec = problem.spec
        if reason := spec.refused_by(SUPPORTED):
            return reason
        if spec.dtype is DType.float64:
            return "it has no float64"
        reason = refuse_dims(spec) or refuse_dtype(spec.dtype, row) or refuse_fp8(problem, row)
        if reason:
            return reason
        if reason := refuse_precision(spec.precision, row.tiles.get(self.operation, ()), row):
            return f"it {reason}"
        if not self.tiles(spec, row):
            return no_tile(spec, row)
        reach = problem.S_q * problem.head_group + problem.S_k
        if reach >= 2**30 and (spec.options or problem.head_group > 1):
            return f"S_q·heads of a group + S_k = {reach}: it takes less than 2**30"
        return refuse_strides(problem)

    def tiles(self, spec: AttentionSpec, row: ArchRow) -> tuple[AttentionTile, ...]:
        return _tiles(spec, row)

    def tile(self, problem: AttentionProblem, row: ArchRow, device: Device) -> AttentionTile:
        """The tile with the lowest predicted time, of those whose grid is below 2³¹ blocks.

        Query heads that share a KV head are packed into one tile where that takes fewer blocks. The
        keys are split over blocks (split-KV) where the grid would fill at most half of a wave. A
        batch-invariant spec has one tile, whatever the extents.
        """
        tiles = self.tiles(problem.spec, row)
        if problem.spec.batch_invariant:
            return tiles[0]
        offered = [self._split(problem, self._grouped(problem, t), row, device) for t in tiles]
        launched = [t for t in offered if self.grid(problem, t, device) < INT32]
        if not launched:
            launched = [min(offered, key=lambda t: self.grid(problem, t, device))]
        return least_seconds(self, problem, launched, row, device)

    def variants(
        self, problem: AttentionProblem, row: ArchRow, device: Device
    ) -> dict[str, AttentionTile]:
        """Every tile that takes the problem, with as many splits of the keys as ``tile`` would
        choose, half as many, and one; the choice of ``tile`` first. A batch-invariant spec has
        one."""
        first = self.tile(problem, row, device)
        by_name = {first.name: first}
        for tile in () if problem.spec.batch_invariant else self.tiles(problem.spec, row):
            whole = self._split(problem, self._grouped(problem, tile), row, device)
            parted = [
                changed(whole, splits=n) for n in (whole.splits, max(whole.splits // 2, 1), 1)
            ]
            by_name |= {t.name: t for t in parted if t.name not in by_name}
        return by_name

    def _grouped(self, problem: AttentionProblem, tile: AttentionTile) -> AttentionTile:
        group = problem.head_group
        apart, together = (
            group * divide_up(problem.S_q, tile.bm),
            divide_up(problem.S_q * group, tile.bm),
        )
        shares = problem.spec.q_view != "pointers" and together < apart
        return tile.sharing(group if shares else 1)

    def _split(
        self, problem: AttentionProblem, tile: AttentionTile, row: ArchRow, device: Device
    ) -> AttentionTile:
        splits = self._splits(problem, tile, device)
        if splits == 1:
            return tile
        fits = tile.shared_bytes(problem.spec.part) <= row.shared_bytes_per_block
        return changed(tile, splits=splits) if fits else tile

    def _blocks_of_a_group(self, problem: AttentionProblem, tile: AttentionTile) -> int:
        rows = problem.S_q * (problem.head_group if tile.grouped else 1)
        return divide_up(rows, tile.bm) * (1 if tile.grouped else problem.head_group)

    def _splits(self, problem: AttentionProblem, tile: AttentionTile, device: Device) -> int:
        blocks = self._blocks_of_a_group(problem, tile) * problem.kv_heads * problem.batch
        at_once = device.limits.compute_units * max(tile.min_blocks, 1)
        keys = problem.S_k if problem.left is None else min(problem.S_k, problem.left + problem.S_q)
        if not blocks or 2 * blocks > at_once:
            return 1
        return max(min(at_once // blocks, keys // FEWEST_KEYS, MOST_PARTS), 1)

    def launches(self, problem: AttentionProblem, tile: AttentionTile, device: Device) -> Launches:
        """The forward, and after split keys the merge of their partial results."""
        if tile.splits == 1:
            return Launches((Launch(self, problem, tile),))
        return in_parts(self, problem, tile, tile.splits)

    def constants(self, spec: AttentionSpec, tile: AttentionTile, row: ArchRow) -> Constants:
        return {
            **shared_constants(spec),
            "PRECISION": TF32_PRODUCTS[spec.precision],
            "OUT_VIEW": VIEWS[
                "strided" if tile.splits > 1 and spec.q_view == "pointers" else spec.q_view
            ],
            "GROUPED": tile.grouped,
            "LSE": spec.lse or tile.splits > 1,
            **members(tile, "warps", "column_warps", "rows", "bn", "stages"),
            **members(tile, "q_resident", "q_returned"),
            "UNROLL": tile.score_unroll,
            "MIN_BLOCKS": tile.min_blocks,
            "SHARED_BYTES": tile.shared_bytes(spec),
            "SHARED_STAGE": tile.shared_stage,
            "SECTIONS": tile.sections and spec.causal,
        }

    def signature(self, spec: AttentionSpec) -> Signature:
        return forward_signature(_PARTS, spec)

    def grid(self, problem: AttentionProblem, tile: AttentionTile, device: Device) -> int:
        return (
            self._blocks_of_a_group(problem, tile) * problem.kv_heads * problem.batch * tile.splits
        )

    def values(
        self, problem: AttentionProblem, tile: AttentionTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        out_split, lse_split = part_strides(p)
        q_tiles = divide_up(p.S_q * (p.head_group if tile.grouped else 1), tile.bm)
        return {
            **shared_values(p),
            "out_split": out_split,
            "lse_split": lse_split,
            "q_tiles": q_tiles,
            "splits": tile.splits,
            "together": _together(p, tile, q_tiles, device),
            "matrices": _matrices(p, tile),
        }

    def pointers(self, spec: AttentionSpec) -> dict[str, str]:
        views = {"q": spec.q_view, "k": spec.kv_view, "v": spec.kv_view, "out": spec.q_view}
        lists = {name: f"{name}_ptrs" for name, view in views.items() if view == "pointers"}
        return super().pointers(spec) | lists

    def work(self, problem: AttentionProblem, tile: AttentionTile, device: Device) -> Work:
        return forward_work(problem, tile, device)


@lru_cache(512)
def _tiles(spec: AttentionSpec, row: ArchRow) -> tuple[AttentionTile, ...]:
    dim, plain = (
        max(pad(spec.head_dim), pad(spec.value_dim)),
        is_plain(spec) and spec.kv_view == "strided",
    )
    fit = [
        t
        for t in row.tiles.get("attention", ())
        if spec.dtype in t.dtypes
        and spec.dtype_kv is t.dtype_kv
        and spec.precision == t.precision
        and dim <= t.max_dim
        and (plain or not t.plain)
        and t.shared_bytes(spec) * (t.min_blocks if t.shared_stage else 1)
        <= row.shared_bytes_per_block
    ]
    narrowest = min((t.max_dim for t in fit), default=0)
    return tuple(t for t in fit if t.max_dim == narrowest)


def _together(problem: AttentionProblem, tile: AttentionTile, q_tiles: int, device: Device) -> int:
    """Heads in a section, whose blocks start with the longest: enough for two waves, unless their
    keys and values exceed what L2 keeps. Somewhat fewer, where the last section would be less than
    half of the others."""
    spec = problem.spec
    row = (pad(spec.head_dim) + pad(spec.value_dim)) * spec.kv.itemsize
    heads = 1 if tile.grouped else problem.head_group  # that share keys
    kept = SECTION_BYTES // max(problem.S_k * row, 1) * heads
    at_once = device.limits.compute_units * max(tile.min_blocks, 1)
    fitting = most(least(divide_up(2 * at_once, max(q_tiles, 1)), kept), 1)
    return _even(_matrices(problem, tile), fitting)


@recorded
@lru_cache(512)
def _even(matrices: int, fitting: int) -> int:
    """The section size: ``fitting``, or somewhat less, so that the last section is at least half
    full."""
    even = (n for n in range(fitting, fitting // 2, -1) if 2 * (matrices % n or n) >= n)
    return next(even, fitting)


def _matrices(problem: AttentionProblem, tile: AttentionTile) -> int:
    return problem.batch * (problem.kv_heads if tile.grouped else problem.num_heads)

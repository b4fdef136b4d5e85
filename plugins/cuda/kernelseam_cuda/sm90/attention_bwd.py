"""Kernel definitions of cuda_kernels/sm90/attention/backward.h and backward_wide.h, and what they
launch with the two kernels before and after them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kernelseam.contract import ArchRow, Device, Launch, Launches, TensorMap
from kernelseam.costs import Work
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.kernels.attention.arguments import (
    SEQUENCES,
    matrices,
)
from kernelseam.kernels.attention.row_kernels import (
    ROW_DELTA,
    SINK_GRADIENT,
    DeltaProblem,
    DeltaSpec,
    RowTile,
    SinkProblem,
    SinkSpec,
)
from kernelseam.kernels.attention.scores import SCORES, with_expression
from kernelseam.kernels.config import Constants
from kernelseam.kernels.elements import divide_up
from kernelseam.kernels.signature import Signature, Structure
from kernelseam.symbolic import least

from kernelseam_cuda.sm90.attention_blocks import has_mask_mod
from kernelseam_cuda.sm90.attention_bwd_cost import (
    BackwardTile,
    gradient_work,
    tile_count,
    total_blocks,
)
from kernelseam_cuda.sm90.attention_bwd_heads import (
    can_stagger,
    for_problem,
    takes_parts,
    takes_staggered,
    with_parts,
)
from kernelseam_cuda.sm90.attention_bwd_rows import (
    BLOCKS,
    PART_SUMS,
    QUERY_GRADIENT,
    ROW_VALUES,
    WORKSPACE,
    HopperBackwardKernel,
    row_extents,
    row_map,
)
from kernelseam_cuda.sm90.attention_bwd_tiles import BACKWARD_REGISTERS, HopperWideBackwardTile
from kernelseam_cuda.sm90.attention_query_lists import LISTS, list_values
from kernelseam_cuda.sm90.attention_query_lists import steps as query_list_steps
from kernelseam_cuda.sm90.attention_score_gradient import steps as score_gradient_steps
from kernelseam_cuda.sm90.tiles import PANEL

_CONSUMERS = 2
"""Of a block; each adds to a piece of its own of the sums: sums.h."""
_STORE_ROWS = 16
_COUNTERS_BYTES = 256

_MAPS = {
    "q_map": "q",
    "dout_map": "dout",
    "k_map": "k",
    "v_map": "v",
    "dk_map": "dk",
    "dv_map": "dv",
}
_TILE_COUNT = (
    "key_tiles",
    "total",
    "section",
    "section_tiles",
    "cycle",
    "batch",
    "kv_heads",
    "head_group",
    "head_parts",
)
_COUNT = Structure((*((n, "i32") for n in _TILE_COUNT), ("blocks", BLOCKS)))
_LISTED_COUNT = Structure((*LISTS, *_COUNT.members))
_SIGNATURE = Signature(
    (
        *((m, "tensor_map") for m in _MAPS),
        (
            "operands",
            Structure(
                (
                    ("dk", matrices("dk")),
                    ("dv", matrices("dv")),
                    *((p, "pointer") for p in (*WORKSPACE, "counter")),
                ),
                ("dk", "dv", "lse", *WORKSPACE[1:], "counter"),
            ),
        ),
        ("sequences", SEQUENCES),
        ("count", _COUNT),
        ("score", SCORES),
        ("scale", "f32"),
    )
)


class HopperAttentionBwd(HopperBackwardKernel):
    """Attention's gradients in half precision, a persistent block a multiprocessor."""

    entry = "attention_backward_sm90"
    source = "sm90/attention/backward.h"
    any_tile = True
    multiplies = True

    def main(self, tile: BackwardTile) -> HopperBackwardKernel:
        """The kernel that multiplies."""
        return WIDE if isinstance(tile, HopperWideBackwardTile) else self

    def takes(
        self, problem: AttentionBwdProblem, tile: BackwardTile, row: ArchRow, device: Device
    ) -> bool:
        return takes_parts(problem, tile) and takes_staggered(problem, tile, device)

    def as_launched(self, spec: AttentionBwdSpec, tile: BackwardTile) -> tuple[BackwardTile, ...]:
        return (tile, replace(tile, staggered=1)) if can_stagger(spec, tile) else (tile,)

    def accumulators(self, spec: AttentionBwdSpec, tile: BackwardTile) -> Iterable[int]:
        """Scores, gradients of keys and values, in parts of at most 192 columns, and pieces of dq,
        of 64 columns or of what is left of them."""
        columns = tile.columns(spec.forward)
        parts = (2 * PANEL if n > 3 * PANEL else n for n in columns)
        return tile.step, PANEL, *parts, columns[0] % PANEL or PANEL

    def launches(
        self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device
    ) -> Launches:
        """Values of the rows, and sums set to zero; the gradients; dq of its sums; the sinks'
        gradient."""
        p, spec = problem.forward, problem.spec.forward
        blocks = total_blocks(problem, tile)
        rows = blocks * tile.step
        workspace, size = dict[str, int](), _COUNTERS_BYTES
        for name, needed in (
            ("lse_base2", 4 * rows),
            ("delta", 4 * rows),
            ("sums", 4 * rows * tile.columns(spec)[0]),
            ("semaphores", 4 * _CONSUMERS * tile.cluster * blocks * tile.in_order),
        ):
            workspace[name] = size
            size += divide_up(needed, 256) * 256
        sums = {"sums": workspace["sums"]}
        split, parts, size = with_parts(problem, tile, size)
        of_parts = parts | {f"{n}_map": at for n, at in parts.items()}
        of_lists, lists, size = query_list_steps(problem, tile, size)
        steps = [
            *of_lists,
            Launch(ROW_VALUES, problem, tile, workspace),
            Launch(self.main(tile), split, tile, {**workspace, **of_parts, **lists, "counter": 0}),
            Launch(QUERY_GRADIENT, problem, tile, sums),
        ]
        if parts:
            added = {f"{n}_parts": at for n, at in parts.items()}
            steps.append(Launch(PART_SUMS, problem, tile, added))
        of_scores, size = score_gradient_steps(problem, tile.step, workspace, size)
        steps += of_scores
        if problem.spec.sink_gradient:
            packed = spec.q_view == "packed"
            if packed:  # the sums' blocks are the sequences': their rows are laid out anew
                entries, length, delta = 1, p.total_q, (0, p.total_q)
                plain = DeltaProblem(
                    DeltaSpec(spec.dtype, spec.value_dim, packed),
                    entries,
                    p.num_heads,
                    length,
                    problem.dout_strides,
                    p.out_strides,
                    delta,
                    p.batch,
                )
                steps.append(Launch(ROW_DELTA, plain, RowTile(), {"delta": size, "zeros": size}))
                at, size = size, size + divide_up(4 * p.num_heads * length, 256) * 256
            else:
                entries, length, at = p.batch, p.S_q, workspace["delta"]
                padded = divide_up(p.S_q, tile.step) * tile.step
                delta = (p.num_heads * padded, padded)
            sinks = SinkProblem(
                SinkSpec(packed), entries, p.num_heads, length, p.lse_strides, delta, p.batch
            )
            steps.append(Launch(SINK_GRADIENT, sinks, RowTile(), {"delta": at}))
        return Launches(tuple(steps), size, zeroed_bytes=_COUNTERS_BYTES)

    def constants(self, spec: AttentionBwdSpec, tile: BackwardTile, row: ArchRow) -> Constants:
        producer, consumer = BACKWARD_REGISTERS
        return {
            **super().constants(spec, tile, row),
            "STAGES": tile.stages,
            "O_STAGES": tile.o_stages,
            **self.own_constants(tile),
            "STAGGERED": tile.staggered > 0,
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
            "SHARED_BYTES": tile.shared_bytes,
        }

    def own_constants(self, tile: Any) -> Constants:
        return {"KV_STAGES": tile.kv_stages}

    def signature(self, spec: AttentionBwdSpec) -> Signature:
        own = with_expression(_SIGNATURE, spec.forward)
        if not has_mask_mod(spec.forward):
            return own
        parameters = tuple((n, _LISTED_COUNT if n == "count" else k) for n, k in own.parameters)
        return replace(own, parameters=parameters)

    def own_values(self, problem: AttentionBwdProblem, tile: Any) -> dict[str, int | float]:
        p = problem.forward
        return list_values(p, tile) if has_mask_mod(p.spec) else {}

    def grid(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> int:
        clusters = max(device.limits.compute_units // tile.cluster, 1)
        return least(tile_count(problem, tile)["total"], clusters) * tile.cluster

    def threads(self, tile: BackwardTile, row: ArchRow) -> int:
        return 384

    def cooperative(self, tile: BackwardTile) -> bool:
        return tile.staggered > 0

    def shared_bytes(self, spec: AttentionBwdSpec, tile: BackwardTile) -> int:
        return tile.shared_bytes

    def tensor_maps(
        self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device
    ) -> dict[str, TensorMap]:
        p, s = problem.forward, problem.spec.forward
        queries, keys, entries = row_extents(p)
        of_queries, of_keys = (queries, p.num_heads), (keys, p.kv_heads // tile.head_parts)
        of_sums = keys, p.kv_heads
        shapes = {
            "q_map": (s.head_dim, of_queries, p.q_strides, tile.step),
            "dout_map": (s.value_dim, of_queries, problem.dout_strides, tile.step),
            "k_map": (s.head_dim, of_keys, p.k_strides, tile.block_keys),
            "v_map": (s.value_dim, of_keys, p.v_strides, tile.block_keys),
            "dk_map": (s.head_dim, of_sums, problem.dk_strides, _STORE_ROWS),
            "dv_map": (s.value_dim, of_sums, problem.dv_strides, _STORE_ROWS),
        }
        return {
            name: row_map(_MAPS[name], s.dtype, (columns, *rows, entries), strides, box)
            for name, (columns, rows, strides, box) in shapes.items()
        }

    def variants(
        self, problem: AttentionBwdProblem, row: ArchRow, device: Device
    ) -> dict[str, BackwardTile]:
        tiles = self.tiles(problem.spec, row)
        return {t.name: t for t in (*(for_problem(problem, t, device) for t in tiles), *tiles)}

    def work(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> Work:
        return gradient_work(problem, tile)


class HopperWideAttentionBwd(HopperAttentionBwd):
    """The same where the gradients of 64 keys fill a block's registers, by clusters of two
    blocks."""

    entry = "attention_backward_wide_sm90"
    source = "sm90/attention/backward_wide.h"

    def own_constants(self, tile: Any) -> Constants:
        return {}

    def cluster(self, tile: Any) -> int:
        return int(tile.cluster)


WIDE = HopperWideAttentionBwd()

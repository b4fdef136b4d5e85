"""Kernel definition of cuda_kernels/sm90/attention/backward/query_lists.h: which blocks of queries
each tile of keys meets under a mask_mod."""

from __future__ import annotations

from kernelseam.contract import Device, Launch
from kernelseam.costs import Work
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.kernels.attention.arguments import SEQUENCES
from kernelseam.kernels.elements import divide_up
from kernelseam.kernels.signature import Signature

from kernelseam_cuda.sm90.attention_blocks import (
    VISIBLE_BLOCKS,
    blocks_bytes,
    has_mask_mod,
    mask_axes,
    visited_values,
)
from kernelseam_cuda.sm90.attention_bwd_cost import BackwardTile
from kernelseam_cuda.sm90.attention_bwd_rows import HopperBackwardKernel
from kernelseam_cuda.sm90.attention_tiles import HopperAttentionTile

_WARPS = 4
LISTS = (("lists", "pointer"), ("lists_batch", "i64"), ("lists_tile", "i64"))
"""What a kernel is given of the lists."""


class QueryLists(HopperBackwardKernel):
    """A warp a tile of keys."""

    entry = "attention_backward_lists_sm90"
    source = "sm90/attention/backward/query_lists.h"
    _signature = Signature(
        (
            *(("blocks", "pointer"), ("blocks_batch", "i64"), ("blocks_tile", "i32")),
            ("words", "i32"),
            *LISTS,
            ("sequences", SEQUENCES),
            *(("key_tiles", "i32"), ("total", "i32")),
        )
    )

    def signature(self, spec: AttentionBwdSpec) -> Signature:
        return self._signature

    def grid(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> int:
        return divide_up(_lists(problem.forward, tile), _WARPS)

    def threads(self, tile: BackwardTile, row: object) -> int:
        return 32 * _WARPS

    def values(
        self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device
    ) -> dict[str, int | float]:
        p = problem.forward
        visited = visited_values(p, _blocks_tile(tile))
        return {
            **{n: visited[n] for n in ("blocks_batch", "blocks_tile", "words")},
            **list_values(p, tile),
            "S_q": p.S_q,
            "S_k": p.S_k,
            "key_tiles": divide_up(p.S_k, tile.keys),
            "total": _lists(p, tile),
        }

    def work(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> Work:
        return Work(0, waiting=4e-6)


QUERY_LISTS = QueryLists()


def steps(
    problem: AttentionBwdProblem, tile: BackwardTile, size: int
) -> tuple[list[Launch], dict[str, int], int]:
    """The launches that make the lists, the workspace's part that they are in, and its bytes with
    theirs, from ``size`` on."""
    p = problem.forward
    if not has_mask_mod(p.spec):
        return [], {}, size
    tiles = _blocks_tile(tile)
    lists = size + divide_up(blocks_bytes(p, tiles), 256) * 256
    launches = [
        Launch(VISIBLE_BLOCKS, p, tiles, {"blocks": size, "counter": 0}),
        Launch(QUERY_LISTS, problem, tile, {"blocks": size, "lists": lists}),
    ]
    end = lists + divide_up(4 * _lists(p, tile) * _length(p, tile), 256) * 256
    return launches, {"lists": lists}, end


def list_values(p: AttentionProblem, tile: BackwardTile) -> dict[str, int | float]:
    """``LISTS`` but their address."""
    length, (entries, _) = _length(p, tile), mask_axes(p)
    return {
        "lists_batch": divide_up(p.S_k, tile.keys) * length if entries else 0,
        "lists_tile": length,
    }


def _length(p: AttentionProblem, tile: BackwardTile) -> int:
    """From a list to the next: their number of blocks, and these."""
    return 1 + divide_up(p.S_q, tile.step)


def _lists(p: AttentionProblem, tile: BackwardTile) -> int:
    return (p.batch if mask_axes(p)[0] else 1) * divide_up(p.S_k, tile.keys)


def _blocks_tile(tile: BackwardTile) -> HopperAttentionTile:
    """Blocks of a step's queries and a tile's keys, as the forward's definition names them; in no
    order of theirs."""
    own = (tile.head_dim, tile.value_dim, tile.step // 64, tile.keys)
    return HopperAttentionTile(*own, 1, 1, 1, False, False, 0, in_cluster=True)

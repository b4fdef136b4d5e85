"""Kernel definition of cuda_kernels/sm90/attention/score_gradient.h: the gradient of a bias."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from kernelseam.contract import ArchRow, Device, Launch, TensorMap
from kernelseam.costs import Work
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.kernels.attention.arguments import SEQUENCES, STRIDES, planes
from kernelseam.kernels.attention.cost import keys_met
from kernelseam.kernels.attention.forward_arguments import spec_constants
from kernelseam.kernels.attention.row_kernels import SUM_AXES, RowTile, SumProblem
from kernelseam.kernels.attention.scores import SCORES, score_values, with_expression
from kernelseam.kernels.config import Constants
from kernelseam.kernels.elements import DEVICE_TYPE, divide_up
from kernelseam.kernels.signature import Signature, Structure
from kernelseam.symbolic import least

from kernelseam_cuda.sm90.attention_bwd_cost import head_blocks
from kernelseam_cuda.sm90.attention_bwd_rows import HopperBackwardKernel, row_extents, row_map
from kernelseam_cuda.sm90.tiles import CONTROL_BYTES, PANEL, SHARED_BYTES, columns_of, panels_of

_SIDE = 128
"""Queries, and keys, of a tile."""
_WARPS, _WARP_ROWS = 8, 16
_REGISTERS = 40, 232
"""Of threads that load, which compute whose keys a step sees, and of those that multiply."""
_MOST_STAGES = 6
_LEAST_ROWS = 64
"""Of a block of the rows' values."""
_FEWEST_TILES = 132
"""Of a launch that sums in registers: of fewer, most multiprocessors would wait for the others, and
entries and heads are summed by a launch of their own."""
_ROWS = ("lse_base2", "delta")
_COUNT = (
    *("q_tiles", "key_tiles", "total", "kept_heads", "entries", "heads"),
    *("head_group", "num_heads", "padded_rows"),
)
_STRIDE_NAMES = tuple(f"dbias_{axis}" for axis in (*STRIDES, "column"))
_MAPS = ("q", "dout", "k", "v")
_SIGNATURE = Signature(
    (
        *((f"{m}_map", "tensor_map") for m in _MAPS),
        ("operands", Structure(tuple((p, "pointer") for p in _ROWS), ("lse", "delta"))),
        ("dbias", planes("dbias")),
        ("sequences", SEQUENCES),
        ("count", Structure(tuple((n, "i32") for n in _COUNT))),
        ("score", SCORES),
    )
)


@dataclass(frozen=True)
class ScoreGradientTile:
    """128 queries × 128 keys; ``stages`` of q and k, or dout and v. ``rows``: of a block of the
    rows' values. ``dtype``: of what is written. ``summed``: whether entries, and heads, that share
    an element are summed in registers."""

    stages: int
    shared_bytes: int
    rows: int
    dtype: DType
    summed: tuple[bool, bool]
    cluster: int
    """Blocks that own neighbouring queries, and share the loads of keys and values."""
    rate: float = 0.45
    """The part of the arch's product rate that the loop reaches."""

    @property
    def name(self) -> str:
        """Queries×keys, stages."""
        return f"{_SIDE}x{_SIDE}-{self.stages}-{self.cluster}together"


class ScoreGradient(HopperBackwardKernel):
    """Two products a tile and entry: scores, and what their weights are multiplied by."""

    entry = "attention_backward_scores_sm90"
    source = "sm90/attention/score_gradient.h"
    multiplies = True

    def tiles(self, spec: AttentionBwdSpec, row: ArchRow) -> tuple[Any, ...]:
        """Of a bias that entries share."""
        return (_tile(spec, _LEAST_ROWS, (True, False), True),)

    def constants(self, spec: AttentionBwdSpec, tile: Any, row: ArchRow) -> Constants:
        s = spec.forward
        producer, consumer = _REGISTERS
        return {
            **spec_constants(s),
            "TO": DEVICE_TYPE[tile.dtype],
            "Q_SCALES": False,
            "GROUP_HEADS": 1,
            "IN_PARTS": False,
            "IN_CLUSTER": False,
            "QK_COLUMNS": columns_of(s.head_dim),
            "V_COLUMNS": columns_of(s.value_dim),
            "STAGES": tile.stages,
            "CLUSTER": tile.cluster,
            "STEP": tile.rows,
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
            "SHARED_BYTES": tile.shared_bytes,
        }

    def signature(self, spec: AttentionBwdSpec) -> Signature:
        return with_expression(_SIGNATURE, spec.forward)

    def grid(self, problem: AttentionBwdProblem, tile: Any, device: Device) -> int:
        cluster: int = tile.cluster
        clusters = max(device.limits.compute_units // cluster, 1)
        return least(_count(problem, tile)["total"], clusters) * cluster

    def threads(self, tile: Any, row: ArchRow) -> int:
        return 384

    def shared_bytes(self, spec: AttentionBwdSpec, tile: Any) -> int:
        return int(tile.shared_bytes)

    def cluster(self, tile: Any) -> int:
        return int(tile.cluster)

    def values(
        self, problem: AttentionBwdProblem, tile: Any, device: Device
    ) -> dict[str, int | float]:
        p = problem.forward
        return {
            **dict(zip(_STRIDE_NAMES, _strides(problem, tile), strict=True)),
            "S_q": p.S_q,
            "S_k": p.S_k,
            **_count(problem, tile),
            **score_values(p),
        }

    def tensor_maps(
        self, problem: AttentionBwdProblem, tile: Any, device: Device
    ) -> dict[str, TensorMap]:
        p, s = problem.forward, problem.spec.forward
        queries, keys, entries = row_extents(p)
        of_queries, of_keys = (queries, p.num_heads), (keys, p.kv_heads)
        shapes = {
            "q": (s.head_dim, of_queries, p.q_strides, _SIDE),
            "dout": (s.value_dim, of_queries, problem.dout_strides, _SIDE),
            "k": (s.head_dim, of_keys, p.k_strides, _SIDE // tile.cluster),
            "v": (s.value_dim, of_keys, p.v_strides, _SIDE // tile.cluster),
        }
        return {
            f"{name}_map": row_map(name, s.dtype, (columns, *rows, entries), strides, box)
            for name, (columns, rows, strides, box) in shapes.items()
        }

    def work(self, problem: AttentionBwdProblem, tile: Any, device: Device) -> Work:
        p = problem.forward
        keys, most = keys_met(p, _SIDE, _SIDE, p.S_q, p.S_k)
        operations = 2.0 * _SIDE * (columns_of(p.spec.head_dim) + columns_of(p.spec.value_dim))
        heads = p.batch * p.num_heads * divide_up(p.S_q, _SIDE)
        size = tile.dtype.itemsize * math.prod(_extents(problem, tile))
        return Work(
            size + problem.bytes_moved,
            heads,
            operations * keys,
            operations * most,
            p.spec.dtype,
            tile.rate,
            1e-6,
        )


SCORE_GRADIENT = ScoreGradient()


def tile_of(problem: AttentionBwdProblem, rows: int) -> ScoreGradientTile:
    """The tile of a problem, of whose rows' values a block has ``rows``."""
    spec, ways = problem.spec, summed(problem)
    direct = _kept(problem, ways) == problem.dbias_shape
    tile = _tile(spec, rows, ways, direct)
    return tile if problem.forward.S_q > _SIDE else replace(tile, cluster=1)


def _tile(
    spec: AttentionBwdSpec, rows: int, ways: tuple[bool, bool], direct: bool
) -> ScoreGradientTile:
    """``direct``: what is written is the gradient itself, not what a launch behind sums."""
    s = spec.forward
    assert s.bias is not None
    dtype = s.bias if direct else DType.float32
    columns = max(columns_of(s.head_dim), columns_of(s.value_dim))
    stage = 2 * _SIDE * 2 * PANEL * panels_of(columns)
    own = CONTROL_BYTES + _WARPS * _WARP_ROWS * (_SIDE * s.bias.itemsize + 16)
    stages = min((SHARED_BYTES - own) // stage, _MOST_STAGES)
    # Of two stages none hides a wait for the other block.
    return ScoreGradientTile(stages, own + stages * stage, rows, dtype, ways, 1 + (stages > 2))


def steps(
    problem: AttentionBwdProblem, rows: int, workspace: dict[str, int], size: int
) -> tuple[list[Launch], int]:
    """The launches that make the gradient, where there is one, and the workspace's bytes with
    theirs, from ``size`` on; ``workspace``: of the rows' values."""
    if not problem.spec.bias_gradient:
        return [], size
    tile, own = tile_of(problem, rows), {n: workspace[n] for n in _ROWS}
    p, extents = problem.forward, _extents(problem, tile)
    if extents == problem.dbias_shape:
        return [Launch(SCORE_GRADIENT, problem, tile, own)], size
    assert p.spec.bias is not None
    plane = _row_major(extents)
    sums = SumProblem.of(p.spec.bias, extents, problem.dbias_shape, plane, problem.dbias_strides)
    launches = [
        Launch(SCORE_GRADIENT, problem, tile, {**own, "dbias": size}),
        Launch(SUM_AXES, sums, RowTile(), {"x": size}),
    ]
    return launches, size + divide_up(4 * math.prod(extents), 256) * 256


def _kept(problem: AttentionBwdProblem, ways: tuple[bool, bool]) -> tuple[int, int, int, int]:
    p = problem.forward
    entries, heads = (1 if s else n for s, n in zip(ways, (p.batch, p.num_heads), strict=True))
    return entries, heads, p.S_q, p.S_k


def _extents(problem: AttentionBwdProblem, tile: ScoreGradientTile) -> tuple[int, int, int, int]:
    """Of what the kernel writes."""
    return _kept(problem, tile.summed)


def summed(problem: AttentionBwdProblem) -> tuple[bool, bool]:
    """Whether entries, and heads, are summed in registers: those that share elements, as far as
    enough tiles are left."""
    p = problem.forward
    entries, heads, *_ = problem.dbias_shape
    planes = divide_up(p.S_q, _SIDE) * divide_up(p.S_k, _SIDE)
    shared = entries == 1 and p.batch > 1, heads == 1 and p.num_heads > 1
    for ways in (shared, (shared[0], False), (False, shared[1])):
        kept_entries, kept_heads, *_ = _kept(problem, ways)
        if kept_entries * kept_heads * planes >= _FEWEST_TILES:
            return ways
    return False, False


def _strides(problem: AttentionBwdProblem, tile: ScoreGradientTile) -> tuple[int, int, int, int]:
    extents = _extents(problem, tile)
    return problem.dbias_strides if extents == problem.dbias_shape else _row_major(extents)


def _row_major(extents: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    b, h, i, j = (math.prod(extents[n + 1 :]) for n in range(4))
    return b, h, i, j


def _count(problem: AttentionBwdProblem, tile: ScoreGradientTile) -> dict[str, int]:
    p = problem.forward
    entries, heads, *_ = _extents(problem, tile)
    q_tiles, key_tiles = divide_up(p.S_q, _SIDE * tile.cluster), divide_up(p.S_k, _SIDE)
    return {
        "q_tiles": q_tiles,
        "key_tiles": key_tiles,
        "total": entries * heads * q_tiles * key_tiles,
        "kept_heads": heads,
        "entries": p.batch // entries,
        "heads": p.num_heads // heads,
        "head_group": p.head_group,
        "num_heads": p.num_heads,
        "padded_rows": head_blocks(p, tile.rows) * tile.rows,
    }

"""Kernel definition of cuda_kernels/sm90/attention/forward.h: which tile, which constants, which
tensor maps and arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from kernelseam.contract import (
    ArchRow,
    Device,
    Launch,
    Launches,
    TensorMap,
)
from kernelseam.costs import Work
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.forking import cached_property
from kernelseam.frozen import changed
from kernelseam.kernels.attention.arguments import (
    OPERANDS,
    SEQUENCES,
    VIEWS,
    forward_values,
    matrices,
    row_values,
)
from kernelseam.kernels.attention.cost import least_seconds
from kernelseam.kernels.attention.parts import in_parts, part_strides
from kernelseam.kernels.attention.refusals import refuse_but_half_precision, refuse_mixed_views
from kernelseam.kernels.attention.scores import (
    SCORES,
    score_constants,
    score_values,
    with_expression,
)
from kernelseam.kernels.config import Constants, members
from kernelseam.kernels.elements import DEVICE_TYPE, divide_up, refuse_row_strides
from kernelseam.kernels.signature import Signature, Structure
from kernelseam.symbolic import least

from kernelseam_cuda.sm90.attention_blocks import (
    VISITED,
    is_banded,
    rows_may_share,
    usable,
    visited_values,
    with_blocks,
)
from kernelseam_cuda.sm90.attention_cost import forward_work
from kernelseam_cuda.sm90.attention_few import (
    fits,
    fitting,
    for_few,
    grouped_rows,
    has_clusters,
)
from kernelseam_cuda.sm90.attention_pages import (
    PAGED_KEYS,
    forms,
    page_map,
    page_values,
    refuse_pages,
    rows_at_once,
    together,
)
from kernelseam_cuda.sm90.attention_refusals import (
    FORWARD_MAX_DIM,
    SUPPORTED,
    refuse_dims,
    refuse_rows_of_any_view,
    refuse_scores,
)
from kernelseam_cuda.sm90.attention_sections import tile_count
from kernelseam_cuda.sm90.attention_softcap import SMALL_CAP, small_cap
from kernelseam_cuda.sm90.attention_tiles import (
    ATTENTION,
    FEW_QUERIES,
    HopperAttentionTile,
)
from kernelseam_cuda.sm90.kernel import HopperKernel
from kernelseam_cuda.sm90.tiles import PANEL, columns_of, panel_bytes, promotion

SHORT_SEQUENCE = 2048
"""Below this number of keys the tiles for short sequences are used."""
_STORE_ROWS, _QUERY_ROWS = 16, 64
_COUNTERS_BYTES = 16
_LINE_BYTES = 128
"""Of the L2 cache: where results of parts begin, so that a row's pieces are whole sectors of it."""

_MAPS = ("q_map", "k_map", "v_map", "out_map")
_TILE_COUNT = (
    *("q_tiles", "total", "section", "last_section", "batch"),
    *("tile_heads", "tile_head_group", "parts"),
)
_KEYS = Structure(tuple((m, matrices(m)) for m in ("k", "v")))


def _signature(keys: Structure) -> Signature:
    """Of operands whose keys and values are such."""
    return Signature(
        (
            *((m, "tensor_map") for m in _MAPS),
            (
                "operands",
                Structure(
                    (
                        ("q", matrices("q")),
                        ("keys", keys),
                        ("out", matrices("out")),
                        ("lse", row_values("lse")),
                        *((f"{n}_part", "i64") for n in ("out", "lse")),
                        ("sinks", "pointer"),
                        ("counter", "pointer"),
                        ("num_heads", "i32"),
                        ("zero", "i32"),
                    )
                ),
            ),
            ("sequences", SEQUENCES),
            (
                "count",
                Structure(
                    tuple((n, "i32") for n in _TILE_COUNT),
                    (*_TILE_COUNT[:-3], "heads", "head_group", "parts"),
                ),
            ),
            ("score", SCORES),
            ("small_cap", SMALL_CAP),
        ),
        generated=True,
        optional=("visited", "scales"),
    )


_SIGNATURE, _PAGED_SIGNATURE = _signature(_KEYS), _signature(PAGED_KEYS)


class HopperAttention(HopperKernel):
    """Attention forward in half precision, a persistent block a multiprocessor."""

    operation = "attention"
    name = "sm90"
    entry = "attention_forward_sm90"
    source = "sm90/attention/forward.h"
    early = True
    """Its blocks set up their barriers while the kernel before it ends."""
    multiplies = True
    known_tiles: tuple[HopperAttentionTile, ...] = ATTENTION
    few_queries: tuple[HopperAttentionTile, ...] = FEW_QUERIES
    """Tiles for few queries, whose heads may share tiles and whose keys may be in parts; (): those
    are not treated apart."""
    supported = SUPPORTED
    operands = OPERANDS

    @cached_property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """Head dims of queries and keys, and of values, up to which its tiles are, the narrowest
        first."""
        return tuple(dict.fromkeys((t.head_dim, t.value_dim) for t in self.known_tiles))

    def refuse(self, problem: AttentionProblem, row: ArchRow) -> str | None:
        p, spec = problem, problem.spec
        if reason := refuse_but_half_precision(spec, self.supported):
            return reason
        if reason := self.refuse_dims(spec):
            return reason
        views = refuse_pages(p) if _paged(spec) else refuse_mixed_views(spec)
        return (
            views
            or refuse_rows_of_any_view(p)
            or refuse_scores(p)
            or refuse_row_strides(
                stride_q_row=p.q_strides[2],
                stride_k_row=p.k_strides[2],
                stride_v_row=p.v_strides[2],
                stride_out_row=p.out_strides[2],
            )
        )

    def refuse_dims(self, spec: AttentionSpec) -> str | None:
        return refuse_dims(spec, FORWARD_MAX_DIM)

    def tiles(self, spec: AttentionSpec, row: ArchRow) -> tuple[HopperAttentionTile, ...]:
        """Those of the narrowest width that holds the head dims. Only parts of keys have a result
        of float32."""
        if spec.out is DType.float32:
            few = _fitting(self, spec, True)
            wide = (replace(t, parts=2) for t in _fitting(self, spec, False))
            return (*wide, *(replace(t, parts=2, in_cluster=has_clusters(t)) for t in few))
        return _fitting(self, spec, False)

    def tiles_of(self, problem: AttentionProblem, row: ArchRow) -> tuple[HopperAttentionTile, ...]:
        """The spec's tiles, of as many rows of a page as its size allows; those for few queries
        last."""
        tiles = self.tiles(problem.spec, row)
        if rows_may_share(problem.spec) and not problem.spec.batch_invariant:
            tiles += fitting(problem, _fitting(self, problem.spec, True))
        if not _paged(problem.spec):
            return tiles
        of_pages = (changed(t, page_rows=rows_at_once(problem)) for t in tiles)
        return tuple(dict.fromkeys(of_pages))

    def has_mask(self, spec: AttentionSpec) -> bool:
        """Whether it takes the tiles of specs that hide keys."""
        return spec.causal or spec.window or not is_banded(spec)

    def tile(self, problem: AttentionProblem, row: ArchRow, device: Device) -> HopperAttentionTile:
        """That of the least predicted time, of those for short sequences where they are, and for
        few queries. A batch-invariant result does not depend on it."""
        tiles = self.tiles_of(problem, row)
        if problem.spec.batch_invariant:
            return tiles[0]
        short = problem.S_k < SHORT_SEQUENCE
        wide, few = ([t for t in tiles if bool(t.most_rows) is x] for x in (False, True))
        tiles = (*([t for t in wide if t.short is short] or wide), *few)
        if self.few_queries and rows_may_share(problem.spec):
            tiles = for_few(problem, tiles, device)
        return least_seconds(self, problem, tiles, row, device)

    def takes(
        self, problem: AttentionProblem, tile: HopperAttentionTile, row: ArchRow, device: Device
    ) -> bool:
        of_pages = not _paged(problem.spec) or tile.page_rows == rows_at_once(problem)
        return of_pages and fits(problem, tile)

    def launches(
        self, problem: AttentionProblem, tile: HopperAttentionTile, device: Device
    ) -> Launches:
        """The kernel alone, or by parts of the keys and the merge of these. Where tiles differ in
        length a counter in the workspace hands them out; the last block leaves it 0."""
        counter = _COUNTERS_BYTES if _counted(problem.spec, tile) else 0
        counted = {"counter": 0} if counter else {}
        if tile.parts > 1 and not tile.in_cluster:
            behind = _LINE_BYTES if counter else 0
            launches = in_parts(self, problem, tile, tile.parts, behind)
            first, *others = launches.kernels
            first = changed(first, workspace={**first.workspace, **counted})
            launches = changed(launches, steps=(first, *others), zeroed_bytes=counter)
        else:
            steps = (Launch(self, problem, tile, counted),)
            launches = Launches(steps, counter, zeroed_bytes=counter)
        return launches if is_banded(problem.spec) else with_blocks(launches, problem, tile)

    def accumulators(self, spec: AttentionSpec, tile: HopperAttentionTile) -> Iterable[int]:
        if tile.value_parts == 1:
            return tile.bn, columns_of(spec.value_dim)
        return tile.bn, divide_up(spec.value_dim, PANEL * tile.value_parts) * PANEL

    def constants(self, spec: AttentionSpec, tile: HopperAttentionTile, row: ArchRow) -> Constants:
        producer, consumer = tile.registers
        return {
            "T": DEVICE_TYPE[spec.q],
            "TO": DEVICE_TYPE[spec.out],
            "Q_SCALES": spec.q_scales is not None,
            **members(tile, "v_stages", "sum_blocks"),
            "DQK": spec.head_dim,
            "DV": spec.value_dim,
            **score_constants(spec),
            "Q_VIEW": VIEWS[spec.q_view],
            "KV_VIEW": VIEWS[spec.kv_view],
            **members(spec, "lengths", "lse"),
            **members(tile, "bn", "groups", "blocks", "value_parts"),
            **members(tile, "stages", "q_stages", "out_stages", "group_heads"),
            "IN_PARTS": tile.parts > 1,
            "IN_CLUSTER": tile.in_cluster,
            "PING_PONG": tile.ping_pong,
            **members(tile, "early", "ahead"),
            "RECOMPUTE_NAN_ROWS": tile.recompute_nan,
            "DYNAMIC": _counted(spec, tile),
            "LATE": tile.late or spec.q_view == "packed",
            "PAGE_ROWS": tile.page_rows or 1,
            "K_TOGETHER": tile.page_rows > 1 and together(spec.kv.itemsize, spec.head_dim),
            "V_TOGETHER": tile.page_rows > 1
            and together(spec.kv.itemsize, spec.value_dim, tile.value_parts),
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
            "SHARED_BYTES": tile.shared_bytes,
        }

    def signature(self, spec: AttentionSpec) -> Signature:
        plain = with_expression(_PAGED_SIGNATURE if _paged(spec) else _SIGNATURE, spec)
        if is_banded(spec):
            return plain
        return replace(plain, parameters=(*plain.parameters, VISITED))

    def grid(self, problem: AttentionProblem, tile: HopperAttentionTile, device: Device) -> int:
        tiles = tile_count(problem, tile).total * tile.parts
        if tile.in_cluster:
            return tiles
        return least(tiles, max(device.limits.compute_units, 1) * tile.blocks)

    def cluster(self, tile: HopperAttentionTile) -> int:
        return tile.parts if tile.in_cluster else 1

    def threads(self, tile: HopperAttentionTile, row: ArchRow) -> int:
        return 128 * (tile.groups + 1)

    def values(
        self, problem: AttentionProblem, tile: HopperAttentionTile, device: Device
    ) -> dict[str, int | float]:
        p, count, scores = problem, tile_count(problem, tile), score_values(problem)
        visited = {} if is_banded(p.spec) else visited_values(p, tile)
        out_part, lse_part = part_strides(p)
        return {
            **forward_values(p),
            "out_part": out_part,
            "lse_part": lse_part,
            "counter": 0,
            "num_heads": p.num_heads,
            "zero": 0,
            "q_tiles": count.q_tiles,
            "total": count.total,
            "section": count.section,
            "last_section": count.last_section,
            "batch": p.batch,
            "tile_heads": p.num_heads // tile.group_heads,
            "tile_head_group": p.head_group // tile.group_heads,
            "parts": tile.parts,
            **scores,
            **visited,
            **small_cap(scores["cap"], scores["cap_inverse"]),
            **(page_values(p) if _paged(p.spec) else {}),
        }

    def tensor_maps(
        self, problem: AttentionProblem, tile: HopperAttentionTile, device: Device
    ) -> dict[str, TensorMap]:
        """Axes column, row, head, batch; packed rows are of one entry. Boxes are panels of 128
        bytes of columns, of e4m3 also whole rows of 64. A row ends with its head: a box's columns
        beyond it are read as zeros, and not written. Pages have maps of their own."""
        p, s = problem, problem.spec
        packed = s.q_view == "packed"
        batch = 1 if packed else p.batch
        queries, keys = (p.total_q, p.total_k) if packed else (p.S_q, p.S_k)

        def map_of(
            operand: str, width: int, rows: int, heads: int, strides: tuple[int, int, int], box: int
        ) -> TensorMap:
            dtype = s.out if operand == "out" else s.q
            panel = panel_bytes(dtype.itemsize, width)
            return TensorMap(
                operand,
                dtype,
                (width, rows, heads, batch),
                (1, *reversed(strides)),
                (panel // dtype.itemsize, box, 1, 1),
                swizzle=panel,
                l2_promotion=promotion(width * dtype.itemsize),
            )

        def keys_of(
            operand: str, width: int, strides: tuple[int, int, int], parts: int = 1
        ) -> TensorMap:
            if tile.page_rows == 1:  # not used: threads copy rows
                return q_map
            if _paged(s):
                return page_map(p, operand, width, strides, tile.page_rows, parts)
            return map_of(operand, width, keys, p.kv_heads, strides, tile.bn)

        q_map = map_of("q", s.head_dim, queries, p.num_heads, p.q_strides, _QUERY_ROWS)
        if tile.group_heads > 1:
            q_map = grouped_rows(q_map, tile)
        by_rows = tile.group_heads > 1 or tile.parts > 1  # whose results are not stored by TMA
        return {
            "q_map": q_map,
            "k_map": keys_of("k", s.head_dim, p.k_strides),
            "v_map": keys_of("v", s.value_dim, p.v_strides, tile.value_parts),
            "out_map": q_map
            if by_rows
            else map_of("out", s.value_dim, queries, p.num_heads, p.out_strides, _STORE_ROWS),
        }

    def variants(
        self, problem: AttentionProblem, row: ArchRow, device: Device
    ) -> dict[str, HopperAttentionTile]:
        first, known = self.tile(problem, row, device), self.tiles_of(problem, row)
        if problem.spec.batch_invariant:
            return {first.name: first}
        whole = not (self.few_queries and rows_may_share(problem.spec))
        few = () if whole else for_few(problem, known, device)
        return {t.name: t for t in (first, *known, *few)}

    def work(self, problem: AttentionProblem, tile: HopperAttentionTile, device: Device) -> Work:
        return forward_work(problem, tile, device)


def _counted(spec: AttentionSpec, tile: HopperAttentionTile) -> bool:
    """Whether tiles differ in length, so that they are scheduled by an atomic counter. A cluster
    has one tile."""
    if tile.in_cluster:
        return False
    return spec.causal or spec.window or is_ragged(spec) or not is_banded(spec)


def is_ragged(spec: AttentionSpec) -> bool:
    """Whether other data may follow a sequence's last key in memory."""
    return spec.lengths or spec.q_view == "packed" or _paged(spec)


@lru_cache(512)
def _fitting(
    kernel: HopperAttention, spec: AttentionSpec, few: bool
) -> tuple[HopperAttentionTile, ...]:
    """``few``: those for few queries alone."""
    has_mask, known = kernel.has_mask(spec), usable(spec, kernel.known_tiles)
    dims = {(t.head_dim, t.value_dim) for t in known}
    width = next(
        w for w in kernel.widths if w in dims and spec.head_dim <= w[0] and spec.value_dim <= w[1]
    )
    return tuple(
        replace(t, page_rows=rows)
        for rows in forms(spec)
        for t in (usable(spec, kernel.few_queries) if few else known)
        if (t.head_dim, t.value_dim) == width
        and t.has_mask in (None, has_mask)
        and (spec.causal or not t.late)
    )


def _paged(spec: AttentionSpec) -> bool:
    return spec.kv_view == "paged"

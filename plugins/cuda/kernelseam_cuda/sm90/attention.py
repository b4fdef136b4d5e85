"""Kernel definition of cuda_kernels/sm90/attention/forward.h: which tile, which constants, which
tensor maps and arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kernelseam.contract import ArchRow, Device, Launch, Launches, TensorMap
from kernelseam.costs import Work, predicted
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.forking import cached_property
from kernelseam.kernels.attention.arguments import (
    SEQUENCE_POINTERS,
    SEQUENCES,
    matrices,
    row_values,
    walk_values,
)
from kernelseam.kernels.attention.cost import keys_met
from kernelseam.kernels.attention.host import VIEWS
from kernelseam.kernels.attention.refusals import refuse_but_half_precision, refuse_mixed_views
from kernelseam.kernels.attention.scores import score_defines, score_values
from kernelseam.kernels.covered import Covered
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.elements import DEVICE_TYPE, divide_up, refuse_row_strides
from kernelseam.kernels.signature import Signature, Structure

from kernelseam_cuda.sm90.attention_pages import (
    MOST_ROWS,
    PAGED_KEYS,
    page_map,
    page_values,
    refuse_pages,
    rows_at_once,
    together,
)
from kernelseam_cuda.sm90.attention_softcap import SMALL_CAP, small_cap
from kernelseam_cuda.sm90.attention_tiles import ATTENTION, HopperAttentionTile
from kernelseam_cuda.sm90.tiles import panel_bytes, promotion
from kernelseam_cuda.toolchain import sources

OPTIONS = frozenset(
    {
        "causal",
        "window",
        "softcap",
        "sinks",
        "q_view",
        "kv_view",
        "lengths",
        "dtype_out",
        "batch_invariant",
    }
)
"""The options that the kernel has."""

SHORT_SEQUENCE = 2048
"""Below this number of keys the tiles for short sequences are used."""
MAX_SEQUENCE = 2**30
"""Queries and keys of one sequence, together."""
DIM_STEP, MAX_DIM = 8, 256
"""Head dims are multiples of the 16 bytes that TMA takes, up to those of the widest tiles."""
COVERED_DIMS = (
    (8, 24),
    (40, 40),
    (64, 128),
    (80, 72),
    (112, 112),
    (160, 160),
    (136, 184),
    (232, 200),
)
"""Of the head dims that do not fill their tiles, those that every check compiles."""
_STORE_ROWS, _QUERY_ROWS = 16, 64
_SECTION_BYTES = 8 << 20
"""Keys and values of the heads of a section, whose tiles are scheduled together: as much as stays
in the L2 cache beside the rest."""
_LAST_SECTION_TILES = 512
"""Tiles of the last section, about four a multiprocessor: enough short ones to fill the launch's
end."""
_LAST_SECTION_BYTES, _LAST_SECTION_HEADS = 32 << 20, 16
"""No more of its keys and values, or of its heads, whichever is more heads, where blocks ask late
for tiles, so that they end together with fewer of them."""
_COUNTERS_BYTES = 8

_MAPS = ("q_map", "k_map", "v_map", "out_map")
_MATRICES = ("q", "k", "v", "out")
_POINTERS = (*_MATRICES, "lse", "sinks", *SEQUENCE_POINTERS)
_FLOATS = ("scale_log2", "cap", "cap_inverse")
_TILE_COUNT = ("q_tiles", "total", "section", "last_section", "batch", "num_heads", "head_group")
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
                    (*_TILE_COUNT[:-2], "heads", "head_group"),
                ),
            ),
            ("left", "i32"),
            ("right", "i32"),
            *((f, "f32") for f in _FLOATS),
            ("small_cap", SMALL_CAP),
        )
    )


_SIGNATURE, _PAGED_SIGNATURE = _signature(_KEYS), _signature(PAGED_KEYS)
_OPERANDS = {
    "lengths": "kv_lengths",
    "q_offsets": "cu_seqlens_q",
    "k_offsets": "cu_seqlens_k",
    "table": "block_table",
}


@dataclass(frozen=True)
class _TileCount:
    """The number of a launch's tiles; tiles.h has their order."""

    q_tiles: int
    total: int
    section: int
    last_section: int


def refuse_dims(spec: AttentionSpec) -> str | None:
    """Why neither the forward nor the gradients take these head dims, or None."""
    if all(0 < d <= MAX_DIM and d % DIM_STEP == 0 for d in (spec.head_dim, spec.value_dim)):
        return None
    return f"head dims {spec.dims}: it takes multiples of {DIM_STEP} up to {MAX_DIM}"


def refuse_rows(p: AttentionProblem) -> str | None:
    """Why neither the forward nor the gradients take such rows of queries and keys, or None."""
    return refuse_mixed_views(p.spec) or _refuse_rows(p)


def _refuse_rows(p: AttentionProblem) -> str | None:
    """The same whatever their views."""
    if p.spec.vector < 16:
        return f"rows at multiples of {p.spec.vector} bytes: TMA takes multiples of 16"
    if p.scale <= 0:
        return f"scale = {p.scale}: it takes more than 0"
    if not (p.batch and p.num_heads and p.S_q and p.S_k):
        return "there is nothing to multiply"
    if (total := p.S_q + p.S_k) >= MAX_SEQUENCE:
        return f"S_q + S_k = {total}: it takes less than 2**30"
    return None


class HopperAttention(KernelDefinition):
    """Attention forward in half precision, a persistent block a multiprocessor."""

    operation = "attention"
    name = "sm90"
    archs = ("sm_90a",)
    entry = "attention_forward_sm90"
    source = "sm90/attention/forward.h"
    multiplies = True
    known_tiles: tuple[HopperAttentionTile, ...] = ATTENTION
    options = OPTIONS

    @cached_property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """Head dims of queries and keys, and of values, up to which its tiles are, the narrowest
        first."""
        return tuple(dict.fromkeys((t.head_dim, t.value_dim) for t in self.known_tiles))

    def sources(self) -> Mapping[str, str]:
        return sources()

    def refuse(self, problem: AttentionProblem, row: ArchRow) -> str | None:
        p, spec = problem, problem.spec
        if reason := refuse_but_half_precision(spec, self.options):
            return reason
        if reason := self.refuse_dims(spec):
            return reason
        views = refuse_pages(p) if _paged(spec) else refuse_mixed_views(spec)
        return (
            views
            or _refuse_rows(p)
            or refuse_row_strides(
                stride_q_row=p.q_strides[2],
                stride_k_row=p.k_strides[2],
                stride_v_row=p.v_strides[2],
                stride_out_row=p.out_strides[2],
            )
        )

    def refuse_dims(self, spec: AttentionSpec) -> str | None:
        return refuse_dims(spec)

    def tiles(self, spec: AttentionSpec, row: ArchRow) -> tuple[HopperAttentionTile, ...]:
        """Those of the narrowest width that holds the head dims."""
        hides = self.hides(spec)
        width = next(w for w in self.widths if spec.head_dim <= w[0] and spec.value_dim <= w[1])
        return tuple(
            replace(t, page_rows=MOST_ROWS * _paged(spec))
            for t in self.known_tiles
            if (t.head_dim, t.value_dim) == width
            and t.hides in (None, hides)
            and (spec.causal or not t.late)
        )

    def tiles_of(self, problem: AttentionProblem, row: ArchRow) -> tuple[HopperAttentionTile, ...]:
        """The spec's tiles, of as many rows of a page as its size allows."""
        tiles = self.tiles(problem.spec, row)
        if not _paged(problem.spec):
            return tiles
        return tuple(replace(t, page_rows=rows_at_once(problem.page_size)) for t in tiles)

    def hides(self, spec: AttentionSpec) -> bool:
        """Whether it takes the tiles of specs that hide keys."""
        return spec.causal or spec.window

    def tile(self, problem: AttentionProblem, row: ArchRow, device: Device) -> HopperAttentionTile:
        """That of the least predicted time, of those for short sequences where they are. A
        batch-invariant result does not depend on it."""
        tiles = self.tiles_of(problem, row)
        if problem.spec.batch_invariant:
            return tiles[0]
        short = problem.S_k < SHORT_SEQUENCE
        return min(
            [t for t in tiles if t.short is short] or tiles,
            key=lambda t: predicted(self.work(problem, t, device), row.costs, device.limits),
        )

    def launches(
        self, problem: AttentionProblem, tile: HopperAttentionTile, device: Device
    ) -> Launches:
        """The kernel alone. Where tiles differ in length a counter in the workspace hands them out;
        the last block leaves it 0."""
        if not _counted(problem.spec):
            return Launches((Launch(self, problem, tile),))
        return Launches(
            (Launch(self, problem, tile, {"counter": 0}),),
            _COUNTERS_BYTES,
            zeroed_bytes=_COUNTERS_BYTES,
        )

    def defines(
        self, spec: AttentionSpec, tile: HopperAttentionTile, row: ArchRow
    ) -> dict[str, object]:
        producer, consumer = tile.registers
        return {
            "T": DEVICE_TYPE[spec.q],
            "TO": DEVICE_TYPE[spec.out],
            "Q_SCALES": spec.q_scales is not None,
            "V_STAGES": tile.v_stages,
            "SUM_BLOCKS": tile.sum_blocks,
            "DQK": spec.head_dim,
            "DV": spec.value_dim,
            **score_defines(spec),
            "Q_VIEW": VIEWS[spec.q_view],
            "KV_VIEW": VIEWS[spec.kv_view],
            "LENGTHS": spec.lengths,
            "LSE": spec.lse,
            "BN": tile.bn,
            "GROUPS": tile.groups,
            "STAGES": tile.stages,
            "Q_STAGES": tile.q_stages,
            "OUT_STAGES": tile.out_stages,
            "TURNS": tile.turns,
            "EARLY": tile.early,
            "AHEAD": tile.ahead,
            "REMAKE": tile.remake,
            "DYNAMIC": _counted(spec),
            "LATE": tile.late,
            "PAGE_ROWS": tile.page_rows or 1,
            "K_TOGETHER": _paged(spec) and together(spec.kv.itemsize, spec.head_dim),
            "V_TOGETHER": _paged(spec) and together(spec.kv.itemsize, spec.value_dim),
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
            "SHARED_BYTES": tile.shared_bytes,
        }

    def signature(self, spec: AttentionSpec) -> Signature:
        return _PAGED_SIGNATURE if _paged(spec) else _SIGNATURE

    def grid(self, problem: AttentionProblem, tile: HopperAttentionTile, device: Device) -> int:
        return min(_tiles(problem, tile).total, max(device.limits.compute_units, 1))

    def threads(self, tile: HopperAttentionTile, row: ArchRow) -> int:
        return 128 * (tile.groups + 1)

    def shared_bytes(self, spec: AttentionSpec, tile: HopperAttentionTile) -> int:
        return tile.shared_bytes

    def values(
        self, problem: AttentionProblem, tile: HopperAttentionTile, device: Device
    ) -> dict[str, int | float]:
        p, count, scores = problem, _tiles(problem, tile), score_values(problem)
        walks = (p.q_strides, p.k_strides, p.v_strides, p.out_strides)
        return {
            **walk_values(_MATRICES, walks),
            "lse_batch": p.lse_strides[0],
            "lse_head": p.lse_strides[1],
            "counter": 0,
            "num_heads": p.num_heads,
            "zero": 0,
            "S_q": p.S_q,
            "S_k": p.S_k,
            "q_tiles": count.q_tiles,
            "total": count.total,
            "section": count.section,
            "last_section": count.last_section,
            "batch": p.batch,
            "head_group": p.head_group,
            **{name: scores[name] for name in ("left", "right", *_FLOATS)},
            **small_cap(scores["cap"], scores["cap_inverse"]),
            **(page_values(p) if _paged(p.spec) else {}),
        }

    def pointers(self, spec: AttentionSpec) -> dict[str, str]:
        pages = ("table",) if _paged(spec) else ()
        return {p: _OPERANDS.get(p, p) for p in (*_POINTERS, *pages)}

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

        def keys_of(operand: str, width: int, strides: tuple[int, int, int]) -> TensorMap:
            if _paged(s):
                return page_map(p, operand, width, strides, tile.page_rows)
            return map_of(operand, width, keys, p.kv_heads, strides, tile.bn)

        return {
            "q_map": map_of("q", s.head_dim, queries, p.num_heads, p.q_strides, _QUERY_ROWS),
            "k_map": keys_of("k", s.head_dim, p.k_strides),
            "v_map": keys_of("v", s.value_dim, p.v_strides),
            "out_map": map_of("out", s.value_dim, queries, p.num_heads, p.out_strides, _STORE_ROWS),
        }

    def variants(
        self, problem: AttentionProblem, row: ArchRow, device: Device
    ) -> dict[str, HopperAttentionTile]:
        tiles = (self.tile(problem, row, device), *self.tiles_of(problem, row))
        return {t.name: t for t in (tiles[:1] if problem.spec.batch_invariant else tiles)}

    def work(self, problem: AttentionProblem, tile: HopperAttentionTile, device: Device) -> Work:
        """A tile's queries meet the keys visible to its middle one, and half a block and half a
        tile more."""
        p = problem
        keys, longest = keys_met(p, tile.bm, tile.bn, p.S_q, p.S_k)
        step = 2.0 * tile.bm * tile.columns(p.spec.head_dim, p.spec.value_dim)
        tiles = _tiles(p, tile).total
        return Work(
            p.bytes_moved,
            tiles,
            step * keys,
            step * longest,
            p.spec.dtype,
            tile.rate,
            tile.block_seconds,
        )

    def covering(self) -> Iterable[Covered]:
        """Every dtype and width of tiles with and without a causal mask; head dims that do not fill
        them; every option; packed sequences."""
        f16, bf16 = DType.float16, DType.bfloat16
        for both in self.widths:
            yield Covered(self, AttentionSpec(bf16, *both, True, True))
            yield Covered(self, AttentionSpec(f16, *both))
        for both in COVERED_DIMS:
            part = AttentionSpec(bf16, *both, lse=True)
            yield Covered(
                self, replace(part, causal=True, q_view="packed", kv_view="packed"), often=False
            )
            yield Covered(self, replace(part, softcap=True))
        plain = AttentionSpec(bf16, 128, 128, lse=True)
        packed = replace(plain, q_view="packed", kv_view="packed")
        yield Covered(self, replace(packed, causal=True))
        yield Covered(self, replace(plain, window=True, softcap=True, sinks=True, lengths=True))
        yield Covered(
            self,
            AttentionSpec(
                f16, 64, 64, window=True, softcap=True, q_view="packed", kv_view="packed"
            ),
        )
        yield Covered(self, replace(plain, window=True), often=False)
        yield Covered(self, replace(packed, window=True), often=False)
        paged = replace(plain, kv_view="paged", lengths=True)
        yield Covered(self, replace(paged, causal=True, q_view="packed"))
        yield Covered(self, replace(paged, window=True, softcap=True, sinks=True), often=False)
        for both in self.widths:
            spec = AttentionSpec(f16, *both, True, True, q_view="packed", kv_view="paged")
            yield Covered(self, replace(spec, lengths=True), often=both == (96, 96))
        yield Covered(self, replace(plain, softcap=True, sinks=True), often=False)
        yield Covered(self, replace(plain, lengths=True, causal=True), often=False)
        yield Covered(
            self, AttentionSpec(bf16, 256, 256, window=True, softcap=True, lse=True), often=False
        )


def _counted(spec: AttentionSpec) -> bool:
    """Whether tiles differ in length, so that they are scheduled by an atomic counter."""
    return spec.causal or spec.window or is_ragged(spec)


def is_ragged(spec: AttentionSpec) -> bool:
    """Whether other data may follow a sequence's last key in memory."""
    return spec.lengths or spec.q_view == "packed" or _paged(spec)


def _paged(spec: AttentionSpec) -> bool:
    return spec.kv_view == "paged"


def _tiles(p: AttentionProblem, tile: HopperAttentionTile) -> _TileCount:
    """Sections of heads whose keys and values fit into a part of L2, and no fewer than the
    tile's."""
    q_tiles, heads, group = divide_up(p.S_q, tile.bm), p.batch * p.num_heads, p.head_group
    head_bytes = p.S_k * (p.spec.head_dim + p.spec.value_dim) * p.spec.kv.itemsize
    section = min(max(tile.fewest_heads, _SECTION_BYTES // head_bytes) * group, heads)
    last_heads = _LAST_SECTION_TILES // q_tiles
    if tile.late:
        cached = max(_LAST_SECTION_BYTES // head_bytes, _LAST_SECTION_HEADS)
        last_heads = min(last_heads, cached)
    last = min(max(section, last_heads * group), heads)
    return _TileCount(q_tiles, q_tiles * heads, section, last)

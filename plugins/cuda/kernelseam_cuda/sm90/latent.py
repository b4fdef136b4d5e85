"""Kernel definitions of cuda_kernels/sm90/attention/latent.h and latent_merge.h: latent
attention."""

from __future__ import annotations

from kernelseam.contract import ArchRow, Device, Launch, Launches, TensorMap
from kernelseam.costs import Work
from kernelseam.descriptors.attention.options import ANY_VIEW, SpecOption
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.kernels.attention.arguments import (
    OPERANDS,
    PAGES,
    SEQUENCES,
    VIEWS,
    matrices,
    page_values,
    row_values,
    walk_values,
)
from kernelseam.kernels.attention.ragged import EVEN_UNKNOWN, typical
from kernelseam.kernels.attention.refusals import refuse_mixed_views
from kernelseam.kernels.attention.scores import score_constants, score_values
from kernelseam.kernels.config import Constants
from kernelseam.kernels.elements import (
    DEVICE_TYPE,
    INT32,
    divide_up,
    divider_parameter,
    divider_values,
    refuse_row_strides,
    row_strides,
)
from kernelseam.kernels.signature import Signature, Structure
from kernelseam.symbolic import least

from kernelseam_cuda.sm90.kernel import HopperKernel
from kernelseam_cuda.sm90.latent_list import groups_of, places_of, row_tiles_of, together_of
from kernelseam_cuda.sm90.latent_tiles import (
    CLUSTER_LATENT_REGISTERS,
    FEW_LATENT_REGISTERS,
    FEW_SCALED_LATENT_REGISTERS,
    LATENT,
    LATENT_REGISTERS,
    SCALED_LATENT_REGISTERS,
    HopperLatentTile,
)

SUPPORTED = SpecOption.causal | ANY_VIEW | SpecOption.lengths | SpecOption.row_scale_block
"""The options that the kernel has."""
DIMS = tuple(dict.fromkeys((t.head_dim, t.value_dim) for t in LATENT))
"""Of keys and of values."""
ROW_SCALE_BLOCK = 128
"""Of FlashMLA's rows."""
_SCALED = 2, 0.73
"""Of such rows, which threads load and convert: how often memory's time for them passes, and the
part of the rate that is left."""
_FEWEST_TOGETHER = 4
"""Rows of a page that a copy brings together."""
_PANEL = 64
"""Columns of a tile in shared memory that lie together."""
_STATES = 2
"""That a block may leave: of the item that it begins with, and of that which it ends with."""
_MERGE_WARPS = 8
"""Of a block of latent_merge.h."""
_MERGE_BLOCKS = 2
"""For each of the two ends of a group's part, and each member."""

_MATRICES = ("q", "k", "out")
_LIST_INTS = ("batch", "kv_heads", "together", "groups")
_LIST = Structure(
    (
        ("sequences", SEQUENCES),
        *((n, "i32") for n in _LIST_INTS),
        ("heads", divider_parameter("head_group")),
    )
)
_SIGNATURE = Signature(
    (
        ("k_map", "tensor_map"),
        (
            "operands",
            Structure(
                (
                    *((m, matrices(m)) for m in _MATRICES),
                    ("lse", row_values("lse")),
                    ("sums", "pointer"),
                    ("sums_lse", "pointer"),
                    ("scale_log2", "f32"),
                )
            ),
        ),
        ("list", _LIST),
        ("pages", PAGES),
        ("boxes", "i32"),
        ("staggered", "i32"),
    )
)
_MERGE_SIGNATURE = Signature(
    (
        (
            "merged",
            Structure(
                (
                    ("sums", "pointer"),
                    ("sums_lse", "pointer"),
                    ("out", matrices("out")),
                    ("lse", row_values("lse")),
                )
            ),
        ),
        ("list", _LIST),
    )
)


class HopperLatent(HopperKernel):
    """Attention whose values are the first columns of the keys, a persistent block a
    multiprocessor; a second kernel joins what blocks share."""

    operation = "attention"
    name = "sm90-latent"
    entry = "attention_latent_sm90"
    source = "sm90/attention/latent.h"
    early = True
    multiplies = True
    operands = OPERANDS

    def refuse(self, problem: AttentionProblem, row: ArchRow) -> str | None:
        p, spec = problem, problem.spec
        if not spec.latent:
            return "it takes values that are the first columns of the keys: latent"
        if reason := spec.refused_by(_supported(spec)):
            return reason
        if spec.row_scale_block not in (None, ROW_SCALE_BLOCK):
            block = spec.row_scale_block
            return f"row_scale_block = {block}: it takes {ROW_SCALE_BLOCK}"
        if spec.dtype.itemsize != 2:
            return f"it takes bfloat16 and float16, not {spec.dtype}"
        if not self.tiles(spec, row):
            dims = ", ".join(f"{d}/{d_v}" for d, d_v in DIMS)
            return f"head dims {spec.dims}: it takes {dims}"
        if spec.kv_view != "paged" and (reason := refuse_mixed_views(spec)):
            return reason
        if spec.q_view == "pointers":
            return "queries by a list of pointers"
        if spec.vector < 16:
            return f"rows at multiples of {spec.vector} bytes: it copies 16 bytes at a time"
        if p.scale <= 0:
            return f"scale = {p.scale}: it takes more than 0"
        if not (p.batch and p.num_heads and p.S_q):
            return "there are no queries"
        if (rows := (p.S_q + p.S_k) * p.head_group) >= INT32 // 2:
            return f"(S_q + S_k)·heads of a group = {rows}: it takes less than 2^30"
        if (places := places_of(p, self.tiles(spec, row)[-1])) >= INT32:
            return f"{places} tiles of keys: it takes less than 2^31"
        return refuse_row_strides(**row_strides(p, *_MATRICES))

    def tiles(self, spec: AttentionSpec, row: ArchRow) -> tuple[HopperLatentTile, ...]:
        dims = spec.head_dim, spec.value_dim
        tiles = (t for t in LATENT if t.cluster == 1 or spec.row_scale_block)
        return tuple(t for t in tiles if (t.head_dim, t.value_dim) == dims)

    def tile(self, problem: AttentionProblem, row: ArchRow, device: Device) -> HopperLatentTile:
        """That of few rows where an entry has no more."""
        tiles = self.tiles(problem.spec, row)
        return next(t for t in tiles if self.takes(problem, t, row, device))

    def takes(
        self, problem: AttentionProblem, tile: HopperLatentTile, row: ArchRow, device: Device
    ) -> bool:
        """A cluster's blocks see the same keys."""
        p = problem
        if tile.cluster > 1:
            return together_of(p, tile) % tile.cluster == 0 and not (p.spec.causal and p.S_q > 1)
        return not tile.few or p.S_q * p.head_group <= tile.rows

    def variants(
        self, problem: AttentionProblem, row: ArchRow, device: Device
    ) -> dict[str, HopperLatentTile]:
        tiles = self.tiles(problem.spec, row)
        return {t.name: t for t in tiles if self.takes(problem, t, row, device)}

    def launches(
        self, problem: AttentionProblem, tile: HopperLatentTile, device: Device
    ) -> Launches:
        """The kernel and the one that joins what its blocks left in the workspace."""
        rows = _STATES * self.grid(problem, tile, device) * tile.rows
        sums = rows * tile.value_dim * 4
        workspace = {"sums": 0, "sums_lse": sums}
        return Launches(
            (Launch(self, problem, tile, workspace), Launch(MERGE, problem, tile, workspace)),
            sums + rows * 4,
        )

    def constants(self, spec: AttentionSpec, tile: HopperLatentTile, row: ArchRow) -> Constants:
        producer, scores, columns = _registers(spec, tile)
        return {
            **_constants(spec, tile),
            "KV": DEVICE_TYPE[spec.kv],
            "ROW_SCALES": spec.row_scale_block or 0,
            "DQK": spec.head_dim,
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": scores,
            "COLUMN_REGISTERS": columns,
            "SHARED_BYTES": self.shared_bytes(spec, tile),
        }

    def shared_bytes(self, spec: AttentionSpec, tile: HopperLatentTile) -> int:
        return tile.shared_bytes(spec.row_scale_block is not None)

    def signature(self, spec: AttentionSpec) -> Signature:
        return _SIGNATURE

    def grid(self, problem: AttentionProblem, tile: HopperLatentTile, device: Device) -> int:
        """A block a multiprocessor; no more than there can be work for."""
        return together_of(problem, tile) * groups_of(problem, tile, device)

    def cluster(self, tile: HopperLatentTile) -> int:
        return tile.cluster

    def threads(self, tile: HopperLatentTile, row: ArchRow) -> int:
        return 384

    def values(
        self, problem: AttentionProblem, tile: HopperLatentTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        return {
            **_list_values(p, tile, device),
            **walk_values(p, *_MATRICES, "lse"),
            "scale_log2": score_values(p)["scale_log2"],
            **page_values(p),
            "boxes": int(_boxes(p, tile) or _rows_together(p, tile)),
            "staggered": _staggered(p, tile),
        }

    def tensor_maps(
        self, problem: AttentionProblem, tile: HopperLatentTile, device: Device
    ) -> dict[str, TensorMap]:
        """Of keys: element, row, head, page or entry; boxes of 64 rows. Where tiles of rows are no
        boxes of it, of one page alone, and not used."""
        p = problem
        row = p.k_strides[2] or tile.head_dim
        counts = _matrices(p) if _boxes(p, tile) else (1, 1)
        return {
            "k_map": TensorMap(
                "k",
                p.spec.kv,
                (tile.head_dim, max(_rows(p), 1), *counts),
                (1, row, *_apart(p)),
                (_PANEL, tile.bn, 1, 1),
                swizzle=128,
                l2_promotion=256,
            )
        }

    def work(self, problem: AttentionProblem, tile: HopperLatentTile, device: Device) -> Work:
        """Every block an equal part of all keys, which each tile of rows multiplies again."""
        p, blocks = typical(problem, EVEN_UNKNOWN), self.grid(problem, tile, device)
        pairs = tile.rows * row_tiles_of(p, tile) * p.visible / p.S_q
        operations = 2.0 * (tile.head_dim + tile.value_dim) * pairs
        reads, part = _SCALED if p.spec.row_scale_block and not tile.few else (1, 1.0)
        return Work(
            p.bytes_moved * reads,
            blocks,
            operations / blocks,
            operations / blocks,
            p.spec.dtype,
            tile.rate * part,
            tile.block_seconds,
        )


class HopperLatentMerge(HopperKernel):
    """A warp a row of the results that several blocks made, or eight where they are many."""

    operation = "attention"
    entry = "attention_latent_merge_sm90"
    source = "sm90/attention/latent_merge.h"
    early = True
    operands = OPERANDS

    def refuse(self, problem: AttentionProblem, row: ArchRow) -> str | None:
        return HopperLatent().refuse(problem, row)

    def tiles(self, spec: AttentionSpec, row: ArchRow) -> tuple[HopperLatentTile, ...]:
        return HopperLatent().tiles(spec, row)

    def tile(self, problem: AttentionProblem, row: ArchRow, device: Device) -> HopperLatentTile:
        return HopperLatent().tile(problem, row, device)

    def launches(
        self, problem: AttentionProblem, tile: HopperLatentTile, device: Device
    ) -> Launches:
        return HopperLatent().launches(problem, tile, device)

    def constants(self, spec: AttentionSpec, tile: HopperLatentTile, row: ArchRow) -> Constants:
        shared = self.shared_bytes(spec, tile)
        return {**_constants(spec, tile), "BLOCKS": _MERGE_BLOCKS, "SHARED_BYTES": shared}

    def signature(self, spec: AttentionSpec) -> Signature:
        return _MERGE_SIGNATURE

    def grid(self, problem: AttentionProblem, tile: HopperLatentTile, device: Device) -> int:
        return HopperLatent().grid(problem, tile, device) * 2 * _MERGE_BLOCKS

    def threads(self, tile: HopperLatentTile, row: ArchRow) -> int:
        return row.warp_size * _MERGE_WARPS

    def shared_bytes(self, spec: AttentionSpec, tile: HopperLatentTile) -> int:
        return _MERGE_WARPS * tile.value_dim * 4

    def values(
        self, problem: AttentionProblem, tile: HopperLatentTile, device: Device
    ) -> dict[str, int | float]:
        return {**_list_values(problem, tile, device), **walk_values(problem, "out", "lse")}

    def work(self, problem: AttentionProblem, tile: HopperLatentTile, device: Device) -> Work:
        rows = least(problem.S_q * problem.head_group, tile.rows)
        states = _STATES * HopperLatent().grid(problem, tile, device)
        return Work(states * rows * tile.value_dim * 4)


MERGE = HopperLatentMerge()


def _supported(spec: AttentionSpec) -> SpecOption:
    """Keys of 8 bits only with scales in their rows."""
    return SUPPORTED | SpecOption.dtype_kv if spec.row_scale_block else SUPPORTED


def _constants(spec: AttentionSpec, tile: HopperLatentTile) -> Constants:
    return {
        "T": DEVICE_TYPE[spec.dtype],
        "DV": spec.value_dim,
        **score_constants(spec),
        "Q_VIEW": VIEWS[spec.q_view],
        "KV_VIEW": VIEWS[spec.kv_view],
        "OUT_VIEW": VIEWS[spec.q_view],
        "LENGTHS": spec.lengths,
        "LSE": spec.lse,
        "ROWS": tile.rows,
        "CLUSTER": tile.cluster,
        "ITEM_COST": tile.item_cost,
    }


def _registers(spec: AttentionSpec, tile: HopperLatentTile) -> tuple[int, int, int]:
    """Of the warpgroup that loads and of the consumers."""
    if spec.row_scale_block is None:
        return FEW_LATENT_REGISTERS if tile.few else LATENT_REGISTERS
    if tile.few:
        return FEW_SCALED_LATENT_REGISTERS
    return CLUSTER_LATENT_REGISTERS if tile.cluster > 1 else SCALED_LATENT_REGISTERS


def _list_values(p: AttentionProblem, tile: HopperLatentTile, device: Device) -> dict[str, int]:
    ints = (p.batch, p.kv_heads, together_of(p, tile), groups_of(p, tile, device))
    extents = {"S_q": p.S_q, "S_k": p.S_k, **dict(zip(_LIST_INTS, ints, strict=True))}
    return {**extents, **divider_values("head_group", p.head_group)}


def _rows(p: AttentionProblem) -> int:
    """Of a page, of all packed keys, or of an entry's."""
    return {"paged": p.page_size, "packed": p.total_k}.get(p.spec.kv_view, p.S_k)


def _matrices(p: AttentionProblem) -> tuple[int, int]:
    """KV heads, and pages or entries."""
    return p.kv_heads, {"paged": max(p.pages, 1), "packed": 1}.get(p.spec.kv_view, p.batch)


def _apart(p: AttentionProblem) -> tuple[int, int]:
    """Strides of those."""
    outer, head, _ = p.k_strides
    return head, outer


def _staggered(p: AttentionProblem, tile: HopperLatentTile) -> int:
    """More than 0 where several tiles of rows take the same keys side by side, so that products
    bound it: the second consumer then multiplies while the first makes its next softmax. Keys of 8
    bits are waited for."""
    return 0 if p.spec.row_scale_block else divide_up(p.S_q * p.head_group, tile.rows) - 1


def _boxes(p: AttentionProblem, tile: HopperLatentTile) -> bool:
    """Whether TMA finds a tile of keys: its rows lie in one page, and no matrices share memory.
    Few rows wait less for keys that come row by row."""
    apart = all(s > 0 or n == 1 for n, s in zip(_matrices(p), _apart(p), strict=True))
    whole = p.spec.kv_view != "paged" or p.page_size % tile.bn == 0
    whole = whole and not (p.spec.row_scale_block or tile.few)
    return whole and apart and p.k_strides[2] > 0


def _rows_together(p: AttentionProblem, tile: HopperLatentTile) -> bool:
    """Whether the rows of a page of keys lie one behind the other, for those who take them so: a
    copy takes its time whatever its size, and fewer rows are faster one by one."""
    scaled = p.spec.row_scale_block is not None and tile.few
    several = p.spec.kv_view != "paged" or p.page_size >= _FEWEST_TOGETHER
    return scaled and several and p.k_strides[2] == p.spec.key_width

"""Kernel definition of decode.h: few queries over many keys in one launch."""

from __future__ import annotations

from dataclasses import field
from functools import lru_cache

from kernelseam.contract import ArchRow, Device, Launch, Launches
from kernelseam.costs import Work
from kernelseam.descriptors.attention.options import ANY_VIEW, SpecOption
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.kernels.attention.arguments import OPERANDS, VIEWS
from kernelseam.kernels.attention.cost import STREAMED, least_seconds
from kernelseam.kernels.attention.forward_arguments import (
    SUPPORTED,
    forward_signature,
    no_tile,
    refuse_dims,
    refuse_strides,
    shared_constants,
    shared_values,
)
from kernelseam.kernels.attention.fp8 import query_bytes, refuse_fp8
from kernelseam.kernels.attention.ragged import EVEN_UNKNOWN, typical
from kernelseam.kernels.config import Constants, members
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.elements import (
    INT32,
    divide_up,
    pad,
    refuse_dtype,
)
from kernelseam.kernels.signature import Signature, Structure
from kernelseam.symbolic import least, most

MOST_ROWS = 128
"""Queries times heads of a group: 16 heads with 8 queries each. K and V are read again for every
tile of rows."""

# Seconds of an H200, to 5 % of 70 times (benchmarks/notes/choices.md).
ITEM_SECONDS = 2.2e-6
"""Of a block's item beyond its first, beside its keys."""
UNEVEN_SECONDS = 4.8e-6
"""Where blocks have parts of two items, of which they merge one each; where only the lengths in
device memory say so, half of it counts."""
MERGE_SECONDS, MERGED_SECONDS = 1.2e-6, 1.4e-10
"""Of merging an item's parts, and of each number of them: one block does it."""

_LEAN = ANY_VIEW | SpecOption.causal | SpecOption.sinks | SpecOption.dtype_out
"""The options of a lean tile."""

_PARTS = Structure(
    (
        ("sums", "pointer"),
        ("scales", "pointer"),
        ("counters", "pointer"),
        ("batch", "i32"),
        ("blocks", "i32"),
    )
)


@dataclass(frozen=True)
class DecodeTile:
    """A row of an arch's table, for head dims up to ``max_dim``: ``warps`` a block, each with a
    ring of ``stages`` tiles of ``bn`` keys; ``rows`` queries, heads of a group counted; ``blocks``
    that share a compute unit, which is how many the grid has of them."""

    dtypes: frozenset[DType]
    max_dim: int
    warps: int
    rows: int
    bn: int
    stages: int
    blocks: int
    q_resident: bool = False
    """Whether the queries stay in registers."""
    item_cost: int = 8
    """The time that a sequence's KV head takes beside its keys, in a warp's tiles: with less,
    blocks of many short sequences are late."""
    rate: float = field(default=0.4, compare=False)
    """As in GemmTile; so ``block_seconds``."""
    block_seconds: float = field(default=4e-6, compare=False)
    dtype_kv: DType | None = None
    """As in AttentionTile; so ``widened``."""
    widened: bool = False
    plain: bool = False
    """Only without a bias and a mask, which take more registers."""
    lean: bool = False
    """Only of pages, whose rows are read 16 bytes at a time, of head dims that are multiples of 64,
    and of scores that nothing but causality and lengths masks: others take more registers."""

    def beyond(self, spec: AttentionSpec) -> str | None:
        """What the spec has beyond the options that this tile is for, as a reason; or None."""
        if self.plain and (spec.bias or spec.mask):
            return "bias and mask are not supported by this kernel"
        if not self.lean:
            return None
        if spec.kv_view != "paged":
            return f"{spec.kv_view} keys: it takes pages"
        if spec.head_dim % 64 or spec.value_dim % 64:
            return f"head dims {spec.dims}: it takes multiples of 64"
        if spec.vector < 16:
            return f"rows at multiples of {spec.vector} bytes: it takes multiples of 16"
        return spec.refused_by(_LEAN)

    @property
    def name(self) -> str:
        """Rows×keys, warps, stages, blocks."""
        more = "-resident" * self.q_resident + f"-{self.dtype_kv}" * (self.dtype_kv is not None)
        return f"{self.rows}x{self.bn}-{self.warps}w-{self.stages}-{self.blocks}blocks{more}"

    def shared_bytes(self, spec: AttentionSpec) -> int:
        """Queries; a ring for each warp, whose stages hold its result too; its rows' scales, the
        places of a tile's rows, and scales of blocks."""
        dq, do, size = pad(spec.head_dim), pad(spec.value_dim), spec.dtype.itemsize
        stored = size if self.widened else spec.kv.itemsize
        stage = max(self.bn * (dq + do) * stored, self.rows * do * 4)
        control = 8 * self.rows + 16 * self.bn + 16
        if spec.kv_scales == "blocks":
            control += self.stages * self.bn * 8
        queries = self.rows * dq * query_bytes(spec, self.widened)
        return queries + self.warps * (self.stages * stage + control)


class AttentionDecode(KernelDefinition):
    """Blocks that stay share the keys of a batch evenly; the last of an item's joins its parts."""

    operation = "attention"
    name = "decode"
    entry = "attention_decode"
    source = "attention/decode.h"
    any_tile = True
    multiplies = True
    operands = OPERANDS

    def refuse(self, problem: AttentionProblem, row: ArchRow) -> str | None:
        p, spec = problem, problem.spec
        if reason := spec.refused_by(SUPPORTED):
            return reason
        if spec.batch_invariant:
            return "it cuts keys by the lengths of all entries, which batch_invariant excludes"
        if spec.dtype.itemsize != 2:
            return f"it takes bfloat16 and float16, not {spec.dtype}"
        if "pointers" in (spec.q_view, spec.kv_view):
            return "it takes no lists of addresses"
        if reason := refuse_dims(spec):
            return reason
        if (rows := p.S_q * p.head_group) > MOST_ROWS:
            return f"S_q·heads of a group = {rows}: it takes {MOST_ROWS} at most"
        if not (p.batch and p.num_heads and p.S_q):
            return "there are no queries"
        if reason := refuse_fp8(p, row):
            return reason
        if not (tiles := self.tiles(spec, row)):
            known = row.tiles.get("attention_decode", ())
            beyond = next((t.beyond(spec) for t in known if t.lean), None)
            return f"on {row.arch}, {beyond}" if beyond else no_tile(spec, row)
        if any(_places(p, t) >= INT32 for t in tiles):
            places = max(_places(p, t) for t in tiles)
            return f"{places} tiles of keys: it takes less than 2^31"
        return refuse_dtype(spec.dtype, row) or refuse_strides(p)

    def tiles(self, spec: AttentionSpec, row: ArchRow) -> tuple[DecodeTile, ...]:
        return _tiles(spec, row)

    def tile(self, problem: AttentionProblem, row: ArchRow, device: Device) -> DecodeTile:
        return least_seconds(self, problem, self.tiles(problem.spec, row), row, device)

    def variants(
        self, problem: AttentionProblem, row: ArchRow, device: Device
    ) -> dict[str, DecodeTile]:
        tiles = (self.tile(problem, row, device), *self.tiles(problem.spec, row))
        return {t.name: t for t in tiles}

    def launches(self, problem: AttentionProblem, tile: DecodeTile, device: Device) -> Launches:
        """The kernel alone. Its workspace: a counter for each block, which the kernel leaves 0, and
        two states for each."""
        blocks = self.grid(problem, tile, device)
        counters = divide_up(4 * blocks, 16) * 16
        sums = 2 * blocks * tile.rows * pad(problem.spec.value_dim) * 4
        workspace = {"counters": 0, "sums": counters, "scales": counters + sums}
        return Launches(
            (Launch(self, problem, tile, workspace),),
            counters + sums + 2 * blocks * tile.rows * 8,
            zeroed_bytes=counters,
        )

    def constants(self, spec: AttentionSpec, tile: DecodeTile, row: ArchRow) -> Constants:
        return {
            **shared_constants(spec),
            "OUT_VIEW": VIEWS[spec.q_view],
            "LSE": spec.lse,
            **members(tile, "warps", "rows", "bn", "stages", "q_resident", "item_cost"),
            "MIN_BLOCKS": tile.blocks,
            "SHARED_BYTES": tile.shared_bytes(spec),
        }

    def signature(self, spec: AttentionSpec) -> Signature:
        return forward_signature(_PARTS, spec)

    def grid(self, problem: AttentionProblem, tile: DecodeTile, device: Device) -> int:
        """What the device runs at once; no more than there can be work for."""
        return least(
            max(device.limits.compute_units, 1) * tile.blocks,
            most(_places(problem, tile) // (tile.item_cost + tile.warps), 1),
        )

    def values(
        self, problem: AttentionProblem, tile: DecodeTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        return {
            **shared_values(p),
            "batch": p.batch,
            "blocks": self.grid(p, tile, device),
        }

    def work(self, problem: AttentionProblem, tile: DecodeTile, device: Device) -> Work:
        """Every block an equal part of all keys that are seen, whole tiles of rows. Each tile of
        rows reads keys and values again. All blocks run at once: what they start with counts
        once."""
        p, blocks = typical(problem, EVEN_UNKNOWN), self.grid(problem, tile, device)
        rows = divide_up(p.S_q * p.head_group, tile.rows)
        keys = p.batch * p.kv_heads * p.visible / max(p.S_q, 1)
        dims = p.spec.head_dim + p.spec.value_dim
        again = int((rows - 1) * keys * dims * p.spec.kv.itemsize)
        padded = 2.0 * (pad(p.spec.head_dim) + pad(p.spec.value_dim))
        operations = padded * keys * rows * tile.rows / max(blocks, 1)
        return Work(
            p.bytes_moved + again,
            blocks,
            operations,
            operations,
            p.spec.dtype,
            tile.rate,
            start=tile.block_seconds
            + _beside_keys(problem, tile, p.batch * p.kv_heads * rows, blocks),
            overlap=STREAMED,
        )


DECODE = AttentionDecode()


def _places(p: AttentionProblem, tile: DecodeTile) -> int:
    """Of the kernel's list, where every sequence is as long as it can be."""
    rows = divide_up(p.S_q * p.head_group, tile.rows)
    return p.batch * p.kv_heads * rows * _places_of_item(p, tile)


def _places_of_item(p: AttentionProblem, tile: DecodeTile) -> int:
    return max(-(-p.S_k // tile.bn), tile.warps) + tile.item_cost


def _beside_keys(p: AttentionProblem, tile: DecodeTile, items: int, blocks: int) -> float:
    """Seconds of a block's items and of merging their parts, as cut.h cuts items of one length:
    whole, into equal parts, or else unevenly. So are all whose lengths differ."""
    if not items or not blocks:
        return 0.0
    places, parts, together = _places_of_item(p, tile), blocks // items, -(-items // blocks)
    even = items * places / blocks
    longest = (places - tile.item_cost) / parts if parts > 1 else together * places
    if longest > even + max(even / 16, tile.item_cost):
        return UNEVEN_SECONDS + max(items / blocks - 1, 0.0) * ITEM_SECONDS
    if parts > 1:
        merged = parts * min(p.S_q * p.head_group, tile.rows) * p.spec.value_dim
        return MERGE_SECONDS + merged * MERGED_SECONDS
    uneven = UNEVEN_SECONDS / 2 if p.spec.lengths and p.batch > 1 else 0.0
    return (together - 1) * ITEM_SECONDS + uneven


@lru_cache(512)
def _tiles(spec: AttentionSpec, row: ArchRow) -> tuple[DecodeTile, ...]:
    dim = max(pad(spec.head_dim), pad(spec.value_dim))
    fit = [
        t
        for t in row.tiles.get("attention_decode", ())
        if spec.dtype in t.dtypes
        and spec.dtype_kv is t.dtype_kv
        and not t.beyond(spec)
        and dim <= t.max_dim
        and t.shared_bytes(spec) <= row.shared_bytes_per_block
    ]
    narrowest = min((t.max_dim for t in fit), default=0)
    return tuple(t for t in fit if t.max_dim == narrowest)

"""Kernel definition of cache.h: rows of k and v between tokens and pages, in one launch."""

from __future__ import annotations

from dataclasses import replace

from kernelseam.contract import ArchRow, Device
from kernelseam.costs import Work
from kernelseam.descriptors.cache.problem import PagedCacheProblem, PagedCacheSpec
from kernelseam.dtypes import LARGEST, DType
from kernelseam.frozen import dataclass
from kernelseam.kernels.config import Constants, members
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.elements import (
    DEVICE_TYPE,
    INT32,
    divide_up,
    divider_parameter,
    divider_values,
    refuse_stored,
)
from kernelseam.kernels.signature import Signature, Structure

__all__ = ["CACHE", "CacheTile", "PagedCacheDefinition"]

_TYPES = frozenset({DType.float16, DType.bfloat16, DType.float32})
_THREADS = 256
_HEADS = (2, 1)
"""Of a token, that the lanes of a row have together, where rows are only moved: two have their
token's place found once."""
_MOST_ELEMENTS = 32
"""Of these heads, that a lane has."""
_PASSES = (4, 2, 1)
"""Heads of a token that lanes have one after another, where rows are computed and there are so many
that blocks fill the device; eight are no faster."""
_FEW_THREADS, _BLOCKS, _FEW_ELEMENTS = 128, 6, 16
"""Then threads of a block, and blocks that share a compute unit where a lane has at most so many
elements of a row."""
_AXES = ("outer", "head", "row")
_SIZES = ("S", "sequences", "table_width", "pages")
_EXTENTS = (*_SIZES, "num_heads", "kv_heads", "max_position", "eps")
"""Arguments that are the problem's own fields."""
_POSITION = {"": 0, "given": 1, "lengths": 2}
_SCALES = {"": 0, "heads": 1, "tokens": 2}
_ROTARY = {"": 0, "halves": 1, "pairs": 2}


@dataclass(frozen=True)
class CacheTile:
    """Threads of a block, those that have a row together, and heads of a token that these have
    together and one after another."""

    dtypes: frozenset[DType]
    threads: int
    lanes: int
    heads: int = 1
    blocks: int = 1
    """That share a compute unit."""
    passes: int = 1
    """No column of the table but chosen for a problem."""


def _rows(name: str) -> Structure:
    axes = tuple((f"{name}_{axis}", "i64") for axis in _AXES)
    return Structure(((name, "pointer"), *axes), ("base", *_AXES))


_PLACES = Structure(
    (
        *((n, "pointer") for n in ("slots", "table", "lengths", "positions", "offsets", "sources")),
        *((f"slots_{a}", "i64") for a in ("batch", "row")),
        ("table_row", "i64"),
        *((f"positions_{a}", "i64") for a in ("batch", "row")),
        *((n, "i32") for n in _SIZES),
        ("page", divider_parameter("page_size")),
    )
)
_ROTATION = Structure(
    (("cos", "pointer"), ("sin", "pointer"), ("cos_row", "i64"), ("max_position", "i32")),
    ("cosines", "sines", "row", "end"),
)
_NAMES = {
    "slots": "slot_mapping",
    "table": "block_table",
    "lengths": "kv_lengths",
    "offsets": "cu_seqlens",
}
"""Parameter → operand, where they differ."""
_POINTERS = (
    *("k", "v", "k_pages", "v_pages", "slots", "table", "lengths", "positions", "offsets"),
    *("sources", "q", "q_out", "cos", "sin", "q_norm", "k_norm", "k_scales", "v_scales"),
)


class PagedCacheDefinition(KernelDefinition):
    """Some lanes a row, all rows of all tokens in one grid."""

    operation = "paged_cache"
    entry = "paged_cache"
    source = "cache/cache.h"
    any_tile = True
    early = True

    def refuse(self, problem: PagedCacheProblem, row: ArchRow) -> str | None:
        p, s = problem, problem.spec
        if s.dtype_pages.is_fp8 and (reason := refuse_stored("pages", s.dtype_pages, row)):
            return reason
        for name, dtype in (("dtype", s.dtype), ("dtype_pages", s.dtype_pages), ("norm", s.norm)):
            if dtype and dtype not in _TYPES and not dtype.is_fp8:
                return f"{name} = {dtype} is not supported by this kernel on {row.arch}"
        for what, count in (
            ("rows of heads", p.tokens * _groups(p, 1)),
            ("slots", p.pages * p.page_size),
            ("places of a table's row", p.table_width * p.page_size),
        ):
            if count >= INT32:
                return f"it has {count} {what}, not fewer than 2^31"
        return None

    def tiles(self, spec: PagedCacheSpec, row: ArchRow) -> tuple[CacheTile, ...]:
        if spec.dtype_pages.is_fp8 and spec.dtype_pages not in row.fp8_dtypes:
            return ()
        n = _elements(spec) if _wide(spec) else 1
        halves = spec.rotary_dim // 2 // n if spec.rotary == "halves" else 0
        chunks = divide_up(max(spec.head_dim, spec.value_dim), n)
        pairs = halves + divide_up(chunks - 2 * halves, 2)
        lanes = min(1 << (pairs - 1).bit_length(), row.warp_size)
        held = 2 * divide_up(pairs, lanes) * n  # elements of a row that a lane has
        if _computes(spec):
            blocks = _BLOCKS if held <= _FEW_ELEMENTS else 1
            return (CacheTile(_TYPES, _FEW_THREADS, lanes, 1, blocks),)
        heads = (h for h in _HEADS if h == 1 or h * held <= _MOST_ELEMENTS)
        return tuple(CacheTile(_TYPES, _THREADS, lanes, h) for h in heads)

    def tile(self, problem: PagedCacheProblem, row: ArchRow, device: Device) -> CacheTile:
        """That of the most heads of whose groups a fifth at most is empty; in passes, where groups
        fill the device."""
        tiles, rows = self.tiles(problem.spec, row), _groups(problem, 1)
        if _computes(problem.spec):
            (tile,) = tiles
            tiles = tuple(replace(tile, passes=n) for n in _PASSES)
        for t in tiles:
            blocks, room = self.grid(problem, t, device), device.limits.compute_units * t.blocks
            full = 4 * t.heads * t.passes * _groups(problem, t.heads * t.passes) <= 5 * rows
            if full and (t.passes == 1 or blocks >= room):
                return t
        return tiles[-1]

    def constants(self, spec: PagedCacheSpec, tile: CacheTile, row: ArchRow) -> Constants:
        s = spec
        return {
            "T": DEVICE_TYPE[s.dtype],
            "PAGES": DEVICE_TYPE[s.dtype_pages],
            "D": s.head_dim,
            "DV": s.value_dim,
            "DIRECTION": ("append", "gather", "copy").index(s.direction),
            "SLOTS": s.slots.itemsize if s.slots else 0,
            "POSITION": _POSITION[s.position],
            "PACKED": s.packed,
            "ROTARY": _ROTARY[s.rotary],
            "ROTARY_DIM": s.rotary_dim,
            "NORM": DEVICE_TYPE[s.norm],
            "CACHE_SCALES": _SCALES[s.scaled],
            "LARGEST": LARGEST.get(s.dtype_pages, 1.0),
            "EXACT": s.exact,
            "WIDE": _wide(s),
            **members(tile, "threads", "lanes"),
            "ROW_HEADS": tile.heads,
            "MIN_BLOCKS": tile.blocks,
        }

    def signature(self, spec: PagedCacheSpec) -> Signature:
        optional: list[tuple[str, str | Structure]] = []
        if spec.q:
            optional += [("q", _rows("q")), ("q_out", _rows("q_out"))]
        if spec.rotary:
            optional.append(("rotation", _ROTATION))
        if spec.norm:
            optional += [("q_norm", "pointer")] * spec.q
            optional += [("k_norm", "pointer"), ("eps", "f32")]
        if spec.scaled:
            optional += [(n, _rows(n)) for n in ("k_scales", "v_scales")]
        return Signature(
            (
                *((n, _rows(n)) for n in ("k", "v", "k_pages", "v_pages")),
                ("places", _PLACES),
                ("num_heads", "i32"),
                ("kv_heads", "i32"),
                ("passes", "i32"),
                ("q_groups", "i32"),
                ("kv_groups", "i32"),
                ("groups", divider_parameter("row_groups")),
                ("tokens", divider_parameter("S_tokens")),
                ("total", "i32"),
                *optional,
            ),
            flat=True,
            optional=(
                *("q", "q_out", "rotation", "q_norm", "k_norm", "eps", "k_scales", "v_scales"),
            ),
        )

    def grid(self, problem: PagedCacheProblem, tile: CacheTile, device: Device) -> int:
        return divide_up(
            problem.tokens * _groups(problem, tile.heads * tile.passes), tile.threads // tile.lanes
        )

    def shared_bytes(self, spec: PagedCacheSpec, tile: CacheTile) -> int:
        return 0

    def values(
        self, problem: PagedCacheProblem, tile: CacheTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        values: dict[str, int | float] = {}
        for name in ("k", "v", "k_pages", "v_pages", "q", "q_out", "k_scales", "v_scales"):
            walk = getattr(p, f"{name}_strides")
            values |= {f"{name}_{a}": s for a, s in zip(_AXES, walk, strict=True)}
        for name in ("slots", "positions"):
            walk = getattr(p, f"{name}_strides")
            values |= {f"{name}_{a}": s for a, s in zip(("batch", "row"), walk, strict=True)}
        return {
            **values,
            "table_row": p.table_stride,
            **{n: getattr(p, n) for n in _EXTENTS},
            **divider_values("page_size", p.page_size),
            "passes": tile.passes,
            "q_groups": divide_up(p.num_heads, tile.heads * tile.passes),
            "kv_groups": divide_up(p.kv_heads, tile.heads * tile.passes),
            **divider_values("row_groups", _groups(p, tile.heads * tile.passes)),
            **divider_values("S_tokens", max(p.S, 1)),
            "total": p.tokens * _groups(p, tile.heads * tile.passes),
            "cos_row": p.cos_stride,
        }

    def pointers(self, spec: PagedCacheSpec) -> dict[str, str]:
        return {n: _NAMES.get(n, n) for n in _POINTERS}

    def work(self, problem: PagedCacheProblem, tile: CacheTile, device: Device) -> Work:
        return Work(problem.bytes_moved)


def _groups(p: PagedCacheProblem, heads: int) -> int:
    """Groups of a token's rows, of so many heads."""
    of_keys = divide_up(p.kv_heads, heads)
    return divide_up(p.num_heads, heads) + of_keys * (2 if p.spec.value_dim else 1)


def _computes(spec: PagedCacheSpec) -> bool:
    """Whether rows are computed on the way to pages."""
    return spec.direction == "append" and not spec.exact


def _elements(spec: PagedCacheSpec) -> int:
    """Of a row, those that a lane has at once."""
    return 16 // max(spec.dtype.itemsize, spec.dtype_pages.itemsize)


def _wide(s: PagedCacheSpec) -> bool:
    """Whether all elements of a lane exist, and are rotated, or none."""
    n = _elements(s)
    rotated = s.rotary_dim // 2 if s.rotary == "halves" else s.rotary_dim
    return s.vector == 16 and not any(x % n for x in (s.head_dim, s.value_dim, rotated))


CACHE = PagedCacheDefinition()

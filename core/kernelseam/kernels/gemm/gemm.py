"""Kernel definition of gemm.h: which tile, which constants, which arguments."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kernelseam.contract import ArchRow, Device, Launches
from kernelseam.costs import Work
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec, HeadsProblem, HeadsSpec
from kernelseam.dtypes import DType
from kernelseam.expressions.epilogues import HALVES, INTERLEAVED
from kernelseam.kernels.config import Constants, members
from kernelseam.kernels.definition import OfferingDefinition
from kernelseam.kernels.elements import (
    DEVICE_TYPE,
    INT32,
    TF32_PRODUCTS,
    divide_up,
    divider_parameter,
    divider_values,
    refuse_dtype,
    refuse_precision,
    refuse_row_strides,
    refuse_stored,
)
from kernelseam.kernels.gemm.bands import in_bands
from kernelseam.kernels.gemm.cost import gemm_work
from kernelseam.kernels.gemm.epilogue import (
    epilogue_constants,
    epilogue_pointers,
    epilogue_structure,
    epilogue_values,
    refuse_epilogue,
)
from kernelseam.kernels.gemm.reductions import (
    part_pointers,
    part_values,
    parts_structure,
    reducing,
    refuse_parts,
    strips_of,
    takes_reductions,
)
from kernelseam.kernels.gemm.tile import GemmTile
from kernelseam.kernels.signature import Signature, Structure
from kernelseam.symbolic import least

_STRIDED = ("a", "b", "c", "bias", "residual", "sums")
_AXES = ("batch", "head", "row")
_INTS = (
    "a_row",
    "b_row",
    "c_row",
    "residual_row",
    "M",
    "N",
    "K",
    "num_heads",
    "batch_group",
    "head_group",
    "b_head_group",
    "tiles_m",
    "tiles_n",
    "total",
    "blocks",
)
SCALES = ("a_scales", "b_scales")
_SEGMENTS, _HEADS = ("a", "a1", "a2"), ("c", "c1", "c2")
"""Parameters where A, or C, consists of three operands."""
_PAIR_COLUMNS = 32
"""A warp's columns are a multiple, so that engines take a half of them."""
_INTERLEAVED_SUMS = 2048
"""Of a warp: more leave no registers for places of single elements in shared memory."""


def _segments(names: tuple[str, str, str]) -> Structure:
    def one(n: str) -> Structure:
        strides = ((f"{n}_batch", "i64"), (f"{n}_head", "i64"), (f"{n}_row", "i32"))
        members = ((n, "pointer"), *strides, (f"{n}_first", "i32"))
        return Structure(members, ("base", *_AXES, "first"))

    return Structure(tuple((n, one(n)) for n in names), ("of[0]", "of[1]", "of[2]"))


HEADS_POINTERS = ("cosines", "sines", "positions", "table")
_HEADS_INTS = ("positions_row", "table_row", "rotary_row", "first_position")
HEADS_STRUCTURE = Structure(
    (
        ("operands", _segments(_HEADS)),
        *((n, "pointer") for n in HEADS_POINTERS),
        ("positions_batch", "i64"),
        *((n, "i32") for n in _HEADS_INTS),
        (
            "order",
            Structure(
                (("head", divider_parameter("head")), ("rotated_end", "i32"), ("rotary_dim", "i32"))
            ),
        ),
        ("tokens", divider_parameter("tokens")),
        ("page", divider_parameter("page")),
    )
)
NOT_GROUPED: Constants = {"GROUPED": 0, "GATHERED": False, "SCATTERED": False, "FACTORS": False}
"""What groups.h asks of a product that is not grouped."""
_ROTARY = {"": 0, "halves": 1, "pairs": 2}


class GemmDefinition(OfferingDefinition):
    """One grid over the tiles of C of all matrices of a batch."""

    operation = "gemm"
    entry = "gemm"
    source = "gemm/gemm.h"
    multiplies = True

    def refuse(self, problem: GemmProblem, row: ArchRow) -> str | None:
        p, spec = problem, problem.spec
        if spec.joined:
            return f"it does not join heads along {spec.joined.upper()}"
        if spec.heads and not spec.b_transposed:
            return "it makes heads of a weight [columns, hidden] alone"
        if reason := refuse_dtype(spec.dtype, row):
            return reason
        if spec.dtype_c.is_fp8 and (reason := refuse_stored("results", spec.dtype_c, row)):
            return reason
        if spec.dtype.is_fp8 and (spec.row_sums or spec.segmented or spec.heads):
            return f"it has no row sums, segments or heads of {spec.dtype}"
        if not self.tiles(spec, row):
            if spec.scale_block and self.tiles(replace(spec, scale_block=None), row):
                k = spec.scale_block[2]
                return f"scale_block[2] = {k}: no tile of {row.arch} scales sums of so many"
            if reason := refuse_precision(spec.precision, row.tiles.get("gemm", ()), row):
                return reason
            if spec.reductions:
                return f"no tile of {row.arch} has warps of blocks that sums and maxima are of"
            return f"no tile of {row.arch} takes {spec.dtype} to {spec.dtype_c}"
        if all(t.count(p) >= INT32 for t in self.tiles(spec, row)):
            count = min(t.count(p) for t in self.tiles(spec, row))
            return f"it has {count} tiles of C, not fewer than 2^31"
        if p.summed * max(p.K, 1) >= INT32:
            return f"it sums {p.summed} products of K = {p.K} into one C, 2^31 terms or more"
        if p.spec.reductions and (
            reason := refuse_parts(p, (strips_of(p, t) for t in self.tiles(spec, row)))
        ):
            return reason
        rows = {"stride_b_row": p.b_strides[2], "stride_residual_row": p.residual_strides[2]}
        rows["stride_a_scales_row"] = p.a_scale_strides[2]
        rows["stride_b_scales_column"] = p.b_scale_strides[2]
        for name, step in zip(SCALES, p.scale_k_strides, strict=True):
            rows[f"stride_{name}_k"] = step
        rows |= {f"stride_a{i}_row": s.strides[2] for i, s in enumerate(p.segments)} or {
            "stride_a_row": p.a_strides[2]
        }
        if p.heads is None:
            rows["stride_c_row"] = p.c_strides[2]
        else:
            tokens = {n: getattr(p.heads, f"{n}_strides")[2] for n in "qkv"}
            rows |= {f"the {n} token stride": s for n, s in tokens.items()}
        rows["stride_preactivation_row"] = p.preactivation_strides[2]
        return refuse_rounding(spec) or refuse_epilogue(spec) or refuse_row_strides(**rows)

    def tiles(self, spec: GemmSpec, row: ArchRow) -> tuple[GemmTile, ...]:
        return _tiles(spec, row)

    def takes(self, problem: GemmProblem, tile: GemmTile, row: ArchRow, device: Device) -> bool:
        return tile.count(problem) < INT32

    def offered(self, problem: GemmProblem, row: ArchRow) -> tuple[GemmTile, ...]:
        """The tiles that take a problem. Teams, which share no loads, are for matrices of a tile or
        two, and for what no other tile takes."""
        able = tuple(t for t in self.tiles(problem.spec, row) if t.count(problem) < INT32)
        apt = tuple(t for t in able if t.teams == 1 or t.count(problem) <= 2 * problem.results)
        return apt or able

    def work(self, problem: GemmProblem, tile: GemmTile, device: Device) -> Work:
        return gemm_work(problem, tile, device)

    def launches(self, problem: GemmProblem, tile: GemmTile, device: Device) -> Launches:
        if not problem.spec.reductions:
            return super().launches(problem, tile, device)
        return reducing(self, problem, tile, strips_of(problem, tile))

    def constants(self, spec: GemmSpec, tile: GemmTile, row: ArchRow) -> Constants:
        return {
            "T": DEVICE_TYPE[spec.dtype],
            "TC": DEVICE_TYPE[spec.dtype_c],
            **members(spec, "a_transposed", "b_transposed"),
            "POINTERS": spec.view == "pointers",
            **members(spec, "vector_a", "vector_b", "vector_c", "vector_r"),
            "BIAS": DEVICE_TYPE[spec.bias],
            "RESIDUAL": DEVICE_TYPE[spec.residual],
            "ROW_SUMS": DEVICE_TYPE[spec.row_sums],
            "PRECISION": TF32_PRODUCTS[spec.precision],
            "SCALES": spec.scales,
            **scale_constants(spec),
            **epilogue_constants(spec),
            **members(spec, "summed", "segmented"),
            **NOT_GROUPED,
            **heads_constants(spec.heads),
            **members(tile, "bm", "bn", "bk", "warps_m", "warps_n"),
            **members(tile, "teams", "stages", "persistent", "min_blocks"),
            "SHARED_BYTES": tile.shared_bytes(spec),
        }

    def signature(self, spec: GemmSpec) -> Signature:
        scalar = "f64" if spec.dtype_acc is DType.float64 else "f32"
        return Signature(
            (
                *((n, "pointer") for n in _STRIDED),
                *((f"{n}_{axis}", "i64") for n in _STRIDED for axis in _AXES[:2]),
                *((n, "i32") for n in _INTS),
                ("alpha", scalar),
                ("beta", scalar),
                *((("segments", _segments(_SEGMENTS)),) if spec.segmented else ()),
                *((("heads", HEADS_STRUCTURE),) if spec.heads else ()),
                *((("scales", scales_structure(spec)),) if spec.scales else ()),
                *((("epilogue", epilogue_structure(spec)),) if spec.epilogue else ()),
                *((("parts", parts_structure(spec)),) if spec.reductions else ()),
            ),
            generated=True,
            in_place=True,
            optional=("segments", "heads", "groups", "indices", "scales", "epilogue", "parts"),
        )

    def grid(self, problem: GemmProblem, tile: GemmTile, device: Device) -> int:
        """As many blocks as the device holds at once, each taking every grid-th tile; or one a
        tile."""
        if not tile.persistent:
            return tile.blocks(problem)
        return least(tile.blocks(problem), max(device.limits.compute_units, 1) * tile.min_blocks)

    def threads(self, tile: GemmTile, row: ArchRow) -> int:
        return row.warp_size * tile.warps_m * tile.warps_n * tile.teams

    def values(
        self, problem: GemmProblem, tile: GemmTile, device: Device
    ) -> dict[str, int | float]:
        p, reads = in_bands(problem, tile), problem.reads_inputs
        strides = {
            "a": p.a_strides,
            "b": p.b_strides,
            "c": p.c_strides,
            "residual": p.residual_strides,
            "bias": p.bias_strides,
            "sums": p.sums_strides,
            **dict(zip(_SEGMENTS, (s.strides for s in p.segments), strict=False)),
            **(
                {"c": p.heads.q_strides, "c1": p.heads.k_strides, "c2": p.heads.v_strides}
                if p.heads
                else {}
            ),
        }
        return {
            **{
                f"{n}_{axis}": s
                for n, axes in strides.items()
                for axis, s in zip(_AXES, axes, strict=False)
            },
            **{
                f"{n}_first": sum(s.heads for s in p.segments[:i])
                for i, n in enumerate(_SEGMENTS)
                if p.segments
            },
            "M": p.M,
            "N": p.N,
            "K": p.K if reads else 0,
            "num_heads": p.num_heads // p.c_head_group,
            "batch_group": p.c_batch_group,
            "head_group": p.c_head_group,
            "b_head_group": p.b_head_group,
            "tiles_m": divide_up(p.M, tile.bm),
            "tiles_n": divide_up(p.N, tile.bn),
            "total": tile.count(p),
            "blocks": self.grid(p, tile, device),
            "alpha": p.alpha if reads else 0.0,
            "beta": p.beta,
            **(heads_values(p.heads) if p.heads else {}),
            **scale_values(p),
            **(epilogue_values(problem, p) if p.spec.epilogue else {}),
            **(part_values(strips_of(problem, tile)) if p.spec.reductions else {}),
        }

    def pointers(self, spec: GemmSpec) -> dict[str, str]:
        suffix = "_ptrs" if spec.view == "pointers" else ""
        own = {"a": f"A{suffix}", "b": f"B{suffix}", "c": f"C{suffix}"}
        added = {n: f"{n}{suffix}" for n in ("bias", "residual") if getattr(spec, n)}
        if spec.scales:
            added |= {n: f"{n}{suffix}" for n in SCALES}
        added |= epilogue_pointers(spec, suffix) | dict.fromkeys(part_pointers(spec), "")
        others = [*_STRIDED, *(_SEGMENTS if spec.segmented else ())]
        if spec.heads:
            others += [*_HEADS, *HEADS_POINTERS]
        return {
            **dict.fromkeys(others, ""),
            **own,
            **added,
        }  # null, unless the launch names an operand


def _of_warp(tile: GemmTile) -> int:
    return tile.bm * tile.bn // (tile.warps_m * tile.warps_n)


@lru_cache(512)
def _tiles(spec: GemmSpec, row: ArchRow) -> tuple[GemmTile, ...]:
    return tuple(
        t
        for t in row.tiles.get("gemm", ())
        if spec.dtype in t.dtypes
        and (not spec.dtype_c.is_fp8 or spec.dtype_c in row.fp8_dtypes)
        and spec.precision == t.precision
        and t.shared_bytes(spec) <= row.shared_bytes_per_block
        and (t.row_sums or not _sums_more(spec))
        and (spec.plain or not t.plain)
        and (spec.scale_block is None or t.scales_blocks(spec.scale_block[2]))
        and (not spec.pairs or t.bn // t.warps_n % _PAIR_COLUMNS == 0)
        and (spec.pairs != INTERLEAVED or _of_warp(t) <= _INTERLEAVED_SUMS)
        and takes_reductions(spec, t)
    )


def _sums_more(spec: GemmSpec) -> bool:
    """Whether what is written beside C takes registers: sums of rows of A, sums and maxima in the
    epilogue, or both halves of pairs."""
    halves = spec.pairs == HALVES and spec.preactivation
    return spec.row_sums is not None or bool(spec.reductions) or halves


def refuse_rounding(spec: GemmSpec) -> str | None:
    """Why float64 sums are refused where the result has another dtype: it would be rounded
    twice."""
    for dtype in (spec.dtype_c, spec.row_sums):
        if spec.dtype_acc is DType.float64 and dtype not in (None, DType.float64):
            return f"sums of float64 are stored as float64 alone, not as {dtype}"
    return None


def scale_constants(spec: GemmSpec) -> Constants:
    """How many rows, columns and values of k share a scale; 0: a row and a column has one."""
    names = ("SCALE_M", "SCALE_N", "SCALE_K")
    return dict(zip(names, spec.scale_block or (0, 0, 0), strict=True))


def scales_structure(spec: GemmSpec) -> Structure:
    """Where scales lie: of A's rows, and of B's columns; or of their blocks."""
    axes = (*_AXES, *(("k",) if spec.scale_block else ()))

    def one(n: str) -> Structure:
        kinds = {axis: "i64" if axis in _AXES[:2] else "i32" for axis in axes}
        members = ((n, "pointer"), *((f"{n}_{axis}", kind) for axis, kind in kinds.items()))
        return Structure(members, ("base", *axes))

    return Structure(tuple((n, one(n)) for n in SCALES), ("a", "b"))


def scale_values(p: GemmProblem) -> dict[str, int]:
    """Their strides."""
    if not p.spec.scales:
        return {}
    walks = dict(zip(SCALES, (p.a_scale_strides, p.b_scale_strides), strict=True))
    by_k = zip(SCALES, p.scale_k_strides, strict=True)
    values = {
        f"{n}_{axis}": s
        for n, strides in walks.items()
        for axis, s in zip(_AXES, strides, strict=True)
    }
    return values | ({f"{n}_k": s for n, s in by_k} if p.spec.scale_block else {})


def heads_constants(spec: HeadsSpec | None) -> Constants:
    """Those of heads.h."""
    if spec is None:
        return {"HEADS": False, "ROTARY": 0, "POSITIONS": False, "PAGED": False}
    rotary = _ROTARY[spec.rotary]
    return {"HEADS": True, "ROTARY": rotary, "POSITIONS": spec.positions, "PAGED": spec.paged}


def heads_values(heads: HeadsProblem) -> dict[str, int | float]:
    """Arguments of heads.h."""
    values: dict[str, int | float] = {
        "positions_batch": heads.positions_strides[0],
        "positions_row": heads.positions_strides[1],
        "table_row": heads.table_stride,
        "c_first": 0,
        "c1_first": heads.num_heads,
        "c2_first": heads.num_heads + heads.kv_heads,
        "rotary_dim": heads.rotary_dim,
        "rotary_row": heads.rotary_stride,
        "rotated_end": (heads.num_heads + heads.kv_heads) * heads.head_dim,
        "first_position": heads.first_position,
    }
    for name, d in (
        ("head", heads.head_dim),
        ("tokens", max(heads.tokens, 1)),
        ("page", heads.page_size),
    ):
        values |= divider_values(name, d)
    return values

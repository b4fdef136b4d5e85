"""Tensor maps of cuda_kernels/sm90/gemm/gemm.h: what TMA loads of A, B and the residual, and where
it stores C."""

from __future__ import annotations

from kernelseam.contract import TensorMap
from kernelseam.descriptors.gemm.grouped_problem import GroupedGemmProblem
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.expressions.epilogues import HALVES

from kernelseam_cuda.sm90.gemm_tiling import box_bytes, results_of, slice_of
from kernelseam_cuda.sm90.tiles import HopperGemmTile

_ROWS = 64
"""Of a box of the result."""
_SWIZZLES = (64, 128)
"""Bytes of a row of a box that is swizzled over its width."""
UNIT_BYTES, _UNITS_BITS, _REACH = 16, 31, 2**29
"""Of a map that reaches every address: what its third axis counts, how far; how many such lengths
its fourth has."""
ORIGIN_BYTES = 256
"""Of the workspace: where such maps begin. TMA touches a map's first bytes where a box lies wholly
outside."""

MAPS = ("a_map", "b_map", "c_map", "residual_map")
SUMS_MAP = "sums_map"
"""Of what an epilogue is of, where that is written."""
_SEGMENTS = (("a_map", "A"), ("a1_map", "A1"), ("a2_map", "A2"))
"""Maps and operands of A's heads where they are those of three."""


def tensor_maps(problem: GemmProblem, tile: HopperGemmTile) -> dict[str, TensorMap]:
    """Axes column, row, head, batch; of lists column, row, and two that reach any address."""
    p, s = problem, problem.spec
    b_heads = p.num_heads // p.b_head_group
    # Where what is summed over comes first, a box holds a tile's whole side; else it is a
    # panel, and a cluster's blocks share its rows.
    k = slice_of(s)
    a_parts, b_parts = (tile.cluster, 1) if tile.shared_a else (1, tile.cluster)
    a_box = (k, k) if s.a_transposed else (k, tile.a_rows // a_parts)
    b_box, c_box = _b_box(s, tile, b_parts), _c_box(s, tile)
    c_shape = p.M, p.c_columns
    rounded = s.precision == "tf32"
    a_shape, b_shape = p.a_shape, p.b_shape
    a_heads, dim = p.num_heads, joined_dim(p) if s.joined else 0
    if s.joined == "a":
        a_shape = (p.K, dim)
    elif s.joined == "b":
        b_shape, b_heads = (p.K, dim), p.joined_heads
    elif s.joined == "k":
        a_shape, a_heads = (p.M, dim), p.joined_heads
    result = {
        parameter: tensor_map(
            p, name, a_shape, (segment.heads, p.batch), segment.strides, a_box, rounded
        )
        for (parameter, name), segment in zip(_SEGMENTS, p.segments, strict=False)
    } or {"a_map": tensor_map(p, "A", a_shape, (a_heads, p.batch), p.a_strides, a_box, rounded)}
    result["b_map"] = tensor_map(p, "B", b_shape, (b_heads, p.batch), p.b_strides, b_box, rounded)
    c = result["c_map"] = tensor_map(p, "C", c_shape, results_of(p), p.c_strides, c_box)
    result["residual_map"] = (
        tensor_map(p, "residual", c_shape, results_of(p), p.residual_strides, c_box)
        if s.residual
        else c
    )
    if s.preactivation:
        result[SUMS_MAP] = tensor_map(
            p, "preactivation", (p.M, p.N), results_of(p), p.preactivation_strides, c_box
        )
    return result


def grouped_tensor_maps(p: GroupedGemmProblem, tile: HopperGemmTile) -> dict[str, TensorMap]:
    """The same of a grouped product, whose groups are a batch: of what offsets divide there is one
    matrix, of which a box may begin anywhere."""
    s, even, k = p.spec.product, p.even, slice_of(p.spec.product)
    a_box = (k, k) if s.a_transposed else (k, tile.bm)
    b_box, c_box = _b_box(s, tile, tile.cluster), _c_box(s, tile)

    def one(
        name: str, shape: tuple[int, int], strides: tuple[int, int], box: tuple[int, int]
    ) -> TensorMap:
        walk = (strides[0], 0, strides[1])
        rounded = s.precision == "tf32" and name in ("A", "B")
        return tensor_map(even, name, shape, (1, p.matrices(name)), walk, box, rounded)

    c = one("C", (p.M, p.c_columns), p.c_strides, c_box)
    result = {
        "a_map": one("A", p.a_shape, p.a_strides, a_box),
        "b_map": one("B", p.b_shape, p.b_strides, b_box),
        "c_map": c,
        "residual_map": c,
    }
    if s.preactivation:
        result[SUMS_MAP] = one("preactivation", (p.M, p.N), p.preactivation_strides, c_box)
    return result


def list_tensor_maps(s: GemmSpec, tile: HopperGemmTile) -> dict[str, TensorMap]:
    """What maps of a list's matrices have in common; list_maps.h replaces where they are, their
    extents and row strides. They begin in the workspace."""
    k = slice_of(s)
    a_box = (k, k) if s.a_transposed else (k, tile.bm)
    boxes = {"a_map": a_box, "b_map": _b_box(s, tile, tile.cluster), "c_map": _c_box(s, tile)}

    def one(name: str, box: tuple[int, int]) -> TensorMap:
        dtype = s.dtype_c if name[0] == "c" else s.dtype
        return TensorMap(
            "",
            dtype,
            (*box, 1, 1),
            (1, box[0], box[0], box[0]),
            (*box, 1, 1),
            swizzle=box[0] * dtype.itemsize,
            l2_promotion=256,
        )

    result = {n: one(n, box) for n, box in boxes.items()}
    return {**result, "residual_map": result["c_map"]}


def _b_box(s: GemmSpec, tile: HopperGemmTile, parts: int) -> tuple[int, int]:
    """``parts``: blocks that load a part of a slice of B each."""
    k = slice_of(s)
    boxes = max(parts, 2) if s.pairs == HALVES else parts
    return (k, tile.bn // boxes) if s.b_transposed else (k, k // parts)


def _c_box(s: GemmSpec, tile: HopperGemmTile) -> tuple[int, int]:
    return box_bytes(s, tile) // s.dtype_c.itemsize, _ROWS


def steps(heads: int, entries: int, strides: tuple[int, int, int]) -> tuple[int, int]:
    """What a head and an entry of the batch count in a map's coordinates: 0 where all share one
    matrix."""
    batch, head, _ = strides
    return int(heads > 1 and head != 0), int(entries > 1 and batch != 0)


def steps_where_many(counts: tuple[int, int], strides: tuple[int, int, int]) -> list[int]:
    """``steps`` of the axes that have more than one."""
    return [step for n, step in zip(counts, steps(*counts, strides), strict=True) if n > 1]


def joined_dim(p: GemmProblem) -> int:
    """Elements of each of the heads that are joined."""
    return {"a": p.M, "b": p.N, "k": p.K}[p.spec.joined or ""] // p.joined_heads


def tensor_map(
    p: GemmProblem,
    name: str,
    shape: tuple[int, int],
    matrices: tuple[int, int],
    strides: tuple[int, int, int],
    box: tuple[int, int],
    to_tf32: bool = False,
) -> TensorMap:
    """``matrices``: heads and entries of the batch."""
    batch_stride, head_stride, row = strides
    dtype = p.spec.dtype if name[0] in "AB" else p.spec.dtype_c
    extents: tuple[int, ...]
    if p.spec.view == "pointers":
        unit = UNIT_BYTES // dtype.itemsize
        extents, apart = (2**_UNITS_BITS, _REACH), (unit, unit << _UNITS_BITS)
        name = f"{name}_ptrs"
    else:
        by = steps(*matrices, strides)
        extents = tuple(n if step else 1 for n, step in zip(matrices, by, strict=True))
        apart = (head_stride, batch_stride)
    return TensorMap(
        name,
        dtype,
        (shape[1], shape[0], *extents),
        (1, row, *apart),
        (*box, 1, 1),
        swizzle=width if (width := box[0] * dtype.itemsize) in _SWIZZLES else 0,
        l2_promotion=256,
        to_tf32=to_tf32,
    )

"""Kernel definition of Hopper's GEMM whose columns are heads of q, k and v: the epilogue of
cuda_kernels/sm90/gemm/heads.h."""

from __future__ import annotations

from dataclasses import replace

from kernelseam.contract import ArchRow, Device, TensorMap
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec, HeadsProblem, HeadsSpec
from kernelseam.kernels.config import Constants
from kernelseam.kernels.elements import refuse_row_strides
from kernelseam.kernels.gemm.gemm import (
    HEADS_POINTERS,
    HEADS_STRUCTURE,
    heads_constants,
    heads_values,
)
from kernelseam.kernels.signature import Signature

from kernelseam_cuda.sm90.gemm import HopperGemm
from kernelseam_cuda.sm90.tiles import FEW_ROWS, HEADS, SPLIT, TURNED, UNTURNED, HopperGemmTile

_CHUNK = 8
"""Elements of 16 bytes: a head is of whole ones."""
_PANEL, _ROWS = 64, 64
"""Columns and rows that TMA stores of one head and one entry."""
_UNIT, _GROUP = 32, 64
"""Of the columns that are rotated by halves: so many of one half lie together, then as many of the
other, which make a group."""
_C_MAPS = (("c_map", "C", "q"), ("c1_map", "C1", "k"), ("c2_map", "C2", "v"))


class HopperHeads(HopperGemm):
    """Products whose columns are heads of q, k and v, rotated or not, into strided memory or
    pages."""

    def refuse_options(self, problem: GemmProblem) -> str | None:
        p, spec, h = problem, problem.spec, problem.heads
        if h is None or spec.heads is None:
            return "it takes products of heads alone"
        if spec.dtype.itemsize != 2 or spec.dtype_c is not spec.dtype:
            return f"its heads are of 16 bits, of {spec.dtype} in and out, not of {spec.dtype_c}"
        for option in ("a_transposed", "residual", "summed", "row_sums", "segmented", "joined"):
            if getattr(spec, option):
                return f"{option} of heads is not supported by this kernel"
        if p.alpha != 1 or p.beta:
            return "it takes alpha = 1 and beta = 0"
        if spec.heads.rotary and not spec.b_transposed:
            return "it turns heads of a weight [columns, hidden] alone"
        if h.head_dim % _CHUNK:
            return f"head_dim = {h.head_dim}: it takes multiples of {_CHUNK}"
        if spec.heads.rotary == "halves" and (h.head_dim % _GROUP or h.rotary_dim % _GROUP):
            return (
                f"rotary_dim = {h.rotary_dim} of head_dim = {h.head_dim} by halves: it takes "
                f"multiples of {_GROUP}"
            )
        return refuse_row_strides(
            **{f"the {n} token stride": getattr(h, f"{n}_strides")[2] for n in "qkv"}
        )

    def tiles(self, spec: GemmSpec, row: ArchRow) -> tuple[HopperGemmTile, ...]:
        return _tiles_of(spec)

    def as_launched(self, spec: GemmSpec, tile: HopperGemmTile) -> tuple[HopperGemmTile, ...]:
        return (tile,)

    def stores(self, p: GemmProblem, tile: HopperGemmTile) -> bool:
        """TMA stores 64 rows of one entry, and 64 columns of one head."""
        h, spec = p.heads, p.spec.heads
        assert h is not None and spec is not None
        return tile.store == "rows" or _stored_by_tma(p, h, spec)

    def offered(self, p: GemmProblem) -> tuple[HopperGemmTile, ...]:
        return tuple(t for t in _tiles_of(p.spec) if self.few_enough(p, t) and self.stores(p, t))

    def constants(self, spec: GemmSpec, tile: HopperGemmTile, row: ArchRow) -> Constants:
        return {**super().constants(spec, tile, row), **heads_constants(spec.heads)}

    def signature(self, spec: GemmSpec) -> Signature:
        plain = super().signature(spec)
        maps = (("c1_map", "tensor_map"), ("c2_map", "tensor_map"))
        return replace(plain, parameters=(*plain.parameters, *maps, ("result", HEADS_STRUCTURE)))

    def values(
        self, problem: GemmProblem, tile: HopperGemmTile, device: Device
    ) -> dict[str, int | float]:
        h = problem.heads
        assert h is not None
        places = {
            f"{parameter}_{axis}": stride
            for parameter, strides in (
                ("c", h.q_strides),
                ("c1", h.k_strides),
                ("c2", h.v_strides),
            )
            for axis, stride in zip(("batch", "head", "row"), strides, strict=True)
        }
        return {**super().values(problem, tile, device), **places, **heads_values(h)}

    def pointers(self, spec: GemmSpec) -> dict[str, str]:
        return {**super().pointers(spec), **dict.fromkeys(("c1", "c2", *HEADS_POINTERS), "")}

    def tensor_maps(
        self, problem: GemmProblem, tile: HopperGemmTile, device: Device
    ) -> dict[str, TensorMap]:
        """Of q, k and v: element, token, head, entry. Where warps store, and where the rows of B
        come in units, that is what is not used, or the box."""
        h, spec = problem.heads, problem.spec.heads
        assert h is not None and spec is not None
        maps = super().tensor_maps(problem, tile, device)
        if spec.rotary == "halves":
            maps["b_map"] = replace(maps["b_map"], box=(_PANEL, _UNIT, 1, 1))
        ordered = spec.rotary == "halves" and tile.store == "tma"
        counts = (h.num_heads, h.kv_heads, h.kv_heads)
        for (parameter, name, operand), count in zip(_C_MAPS, counts, strict=True):
            maps[parameter] = maps["a_map"]
            if tile.store == "tma" and count == 0:
                maps[parameter] = maps["c_map"]
            elif tile.store == "tma":
                batch, head, row = getattr(h, f"{operand}_strides")
                maps[parameter] = TensorMap(
                    name,
                    problem.spec.dtype,
                    (h.head_dim, h.tokens, count, _entries(problem, h)),
                    (1, row, head, batch),
                    (_UNIT if ordered else _PANEL, _ROWS, 1, 1),
                    swizzle=64 if ordered else 128,
                    l2_promotion=256,
                )
        maps["residual_map"] = maps["a_map"]
        return maps


def _tiles_of(spec: GemmSpec) -> tuple[HopperGemmTile, ...]:
    """TMA stores no pages. Half a panel of columns is for a weight that lies along K, and for heads
    that are not rotated."""
    assert spec.heads is not None
    whole_panels = spec.heads.rotary or not spec.b_transposed
    more = (TURNED,) if spec.heads.rotary else UNTURNED if not whole_panels else ()
    tiles = (*HEADS, *more, *SPLIT, *FEW_ROWS)
    return tuple(t for t in tiles if t.store == "rows" or not spec.heads.paged)


def _entries(p: GemmProblem, h: HeadsProblem) -> int:
    """Of the batch, whose tokens are rows of one matrix or of one each."""
    return p.batch if p.batch > 1 else p.M // max(h.tokens, 1)


def _stored_by_tma(p: GemmProblem, h: HeadsProblem, spec: HeadsSpec) -> bool:
    one_entry = h.tokens == p.M
    return not spec.paged and h.head_dim % _PANEL == 0 and (one_entry or h.tokens % _ROWS == 0)

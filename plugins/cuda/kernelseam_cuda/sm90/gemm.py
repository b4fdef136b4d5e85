"""Kernel definition of cuda_kernels/sm90/gemm/gemm.h: which tile, which constants, which tensor
maps and arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate

from kernelseam.contract import ArchRow, Device, Launch, LaunchConfig, Launches, TensorMap
from kernelseam.costs import Work, predicted
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.kernels.covered import Covered
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.elements import (
    DEVICE_TYPE,
    INT32,
    divide_up,
    divider_parameter,
    divider_values,
    refuse_row_strides,
)
from kernelseam.kernels.signature import Signature, Structure

from kernelseam_cuda.sm90.tiles import GEMM, REGISTERS, SPLIT, HopperGemmTile
from kernelseam_cuda.toolchain import sources

SLICE = 64
"""Elements of K in a stage of the ring."""
_FEW_TILES = 400
"""More than that fill the GPU without a split of their sums."""
_MAX_EXTENT = 2**30
"""Rows and columns: a tile's place, and its end, are 32-bit."""
_MAX_TILES = 2**31 - 2**16
"""A block counts in 32 bits by a grid's clusters, beyond the last."""
_GROUP_ROWS = 8
"""Rows of tiles in a group of the rasterisation: tiles.h."""
_PANEL, _ROWS = 64, 64
"""Columns and rows of a box of the result."""
_UNIT_BYTES, _UNITS_BITS, _REACH = 16, 31, 2**29
"""Of a map that reaches every address: what its third axis counts, how far; how many such lengths
its fourth has."""
_ORIGIN_BYTES = 256
"""Of the workspace: where such maps begin. TMA touches a map's first bytes where a box lies wholly
outside."""

_MAPS = ("a_map", "b_map", "c_map", "residual_map")
_POINTERS = ("a", "b", "c", "bias", "residual", "origin")
_STRIDES = ("c_batch", "c_head", "bias_batch", "bias_head")
_INTS = (
    "c_row",
    "M",
    "N",
    "slices",
    "a_head_step",
    "a_batch_step",
    "b_head_step",
    "b_batch_step",
    "residual_head_step",
    "residual_batch_step",
)
_SUMS_STRIDES = ("sums_batch", "sums_head")
_GROUPS = ("batch_group", "head_group")
_SEGMENTS = (("a_map", "A"), ("a1_map", "A1"), ("a2_map", "A2"))
"""Maps and operands of A's heads where they are those of three."""
_ORDER = Structure(
    (
        *((n, divider_parameter(n)) for n in ("matrix", "group", "last", "heads")),
        ("rows", "i32"),
        ("total", "i32"),
    )
)
_SEGMENT_PARAMETERS = (
    ("a1_map", "tensor_map"),
    ("a2_map", "tensor_map"),
    ("a1_first", "i32"),
    ("a2_first", "i32"),
)
_MOSTLY_C = 0.75
"""Above this part of the bytes moved C is stored with the L2 policy evict-first. H200:
256 × 2048×2048×128, C 0.89 of them, gains 4 %; 256 × 2048×128×2048, 0.06, would lose 8 %."""
_LINE, _LINE_OPERATIONS = 128, 7_000
"""Bytes of a line of the L2 cache; what a block at full rate could do while one comes (H200: 1.4
ns). Where rows are not whole lines, a panel's row of 128 bytes lies in two."""
_SHARED_OPERATIONS = 15_000
"""That a block could do meanwhile, where another reads the same lines of A as it does: the cache
serves them one after the other (H200: 3 ns). It bounds products of few rows with many columns."""


class HopperGemm(KernelDefinition):
    """Half-precision products, a persistent block or cluster a multiprocessor or two."""

    operation = "gemm"
    name = "sm90"
    archs = ("sm_90a",)
    entry = "gemm_sm90"
    source = "sm90/gemm/gemm.h"
    multiplies = True

    def sources(self) -> Mapping[str, str]:
        return sources()

    def refuse(self, problem: GemmProblem, row: ArchRow) -> str | None:
        p, spec = problem, problem.spec
        if spec.dtype.itemsize != 2:
            return f"it takes bfloat16 and float16, not {spec.dtype}"
        if spec.dtype_c is not spec.dtype:
            return f"its result is of {spec.dtype}, not {spec.dtype_c}"
        if reason := self.refuse_options(problem):
            return reason
        if p.summed * p.K >= INT32:
            return f"it sums {p.summed} products of K = {p.K} into one C, 2^31 terms or more"
        if spec.residual not in (None, spec.dtype):
            return f"its residual is of {spec.dtype}, not {spec.residual}"
        vectors = {"A": spec.vector_a, "B": spec.vector_b, "C": spec.vector_c}
        if spec.residual:
            vectors["residual"] = spec.vector_r
        for name, vector in vectors.items():
            if vector < 16:
                return f"rows of {name} at multiples of {vector} bytes: TMA takes multiples of 16"
        if not (p.M and p.N and p.results and p.reads_inputs):
            return "there is nothing to multiply"
        for name, n in (("M", p.M), ("N", p.N)):
            if n >= _MAX_EXTENT:
                return f"{name} = {n}: it takes less than 2**30"
        if not self.offered(p):
            return f"it needs {_MAX_TILES} tiles or more"
        a_rows = {f"stride_a{i}_row": s.strides[2] for i, s in enumerate(p.segments)}
        return refuse_row_strides(
            **(a_rows or {"stride_a_row": p.a_strides[2]}),
            stride_b_row=p.b_strides[2],
            stride_c_row=p.c_strides[2],
            stride_residual_row=p.residual_strides[2],
        )

    def refuse_options(self, problem: GemmProblem) -> str | None:
        """Why it does not take what the spec asks for beside a product, or None."""
        spec = problem.spec
        if spec.heads:
            return "it does not know heads"
        if spec.summed and spec.view == "pointers":
            return "it does not sum products of lists"
        if spec.joined and not _joins(problem):
            return f"it does not join such heads along {spec.joined.upper()}"
        for segment in problem.segments:
            head_and_batch = (segment.heads, problem.batch)
            if 0 in _steps_where_many(head_and_batch, segment.strides):
                return "heads or batches of A's segments share memory"
        return None

    def tiles(self, spec: GemmSpec, row: ArchRow) -> tuple[HopperGemmTile, ...]:
        return _tiles_of(spec)

    def as_launched(self, tile: HopperGemmTile) -> tuple[HopperGemmTile, ...]:
        return (tile, replace(tile, c_first=True)) if tile.store == "tma" else (tile,)

    def tile(self, problem: GemmProblem, row: ArchRow, device: Device) -> HopperGemmTile:
        """The tile that should take the least time."""
        return min(
            self.offered(problem),
            key=lambda t: predicted(_work(problem, t), row.costs, device.limits),
        )

    def offered(self, p: GemmProblem) -> tuple[HopperGemmTile, ...]:
        """TMA stores chunks of 16 bytes whole: where C's last is not, tiles whose warps store.
        Where C is most of what is moved, TMA's stores leave the L2 cache to A and B."""
        c = p.results * p.M * p.N * p.spec.dtype.itemsize
        mostly_c, whole = (
            c > _MOSTLY_C * p.bytes_moved,
            p.N * p.spec.dtype.itemsize % _UNIT_BYTES == 0,
        )
        return tuple(
            replace(t, c_first=mostly_c and t.store == "tma")
            for t in _tiles_of(p.spec)
            if self.few_enough(p, t) and (whole or t.store == "rows")
        )

    def few_enough(self, p: GemmProblem, tile: HopperGemmTile) -> bool:
        """Whether its tiles can be counted; where their sums are split, that they are few, and
        that every part has something to sum."""
        if tile.split == 1:
            return _tiles(p, tile) < _MAX_TILES
        slices = divide_up(p.K, SLICE)
        return (
            _tiles(p, tile) <= _FEW_TILES
            and (tile.split - 1) * divide_up(slices, tile.split) < slices
        )

    def variants(
        self, problem: GemmProblem, row: ArchRow, device: Device
    ) -> dict[str, HopperGemmTile]:
        return {t.name: t for t in (self.tile(problem, row, device), *self.offered(problem))}

    def launches(self, problem: GemmProblem, tile: HopperGemmTile, device: Device) -> Launches:
        if problem.spec.view != "pointers":
            return Launches((Launch(self, problem, tile),))
        return Launches(
            (Launch(self, problem, tile, dict.fromkeys((*_MAPS, "origin"), 0)),), _ORIGIN_BYTES
        )

    def defines(self, spec: GemmSpec, tile: HopperGemmTile, row: ArchRow) -> dict[str, object]:
        producer, consumer = REGISTERS[tile.groups]
        return {
            "T": DEVICE_TYPE[spec.dtype],
            "A_TRANSPOSED": spec.a_transposed,
            "B_TRANSPOSED": spec.b_transposed,
            "POINTERS": spec.view == "pointers",
            "BIAS": DEVICE_TYPE[spec.bias] if spec.bias else "void",
            "RESIDUAL": spec.residual is not None,
            "ROW_SUMS": DEVICE_TYPE[spec.row_sums] if spec.row_sums else "void",
            "SUMMED": spec.summed,
            "SEGMENTED": spec.segmented,
            "JOINED": (None, "a", "b", "k").index(spec.joined),
            "HEADS": False,
            "BM": tile.bm,
            "BN": tile.bn,
            "GROUPS": tile.groups,
            "STAGES": tile.stages,
            "CLUSTER": tile.cluster,
            "SPLIT": tile.split,
            "BLOCKS": tile.blocks,
            "BUFFERS": tile.buffers,
            "STORE": int(tile.store == "tma"),
            "C_FIRST": tile.c_first,
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
            "SHARED_BYTES": self.shared_bytes(spec, tile),
        }

    def signature(self, spec: GemmSpec) -> Signature:
        return Signature(
            (
                *((m, "tensor_map") for m in _MAPS),
                *((p, "pointer") for p in _POINTERS),
                *((s, "i64") for s in _STRIDES),
                *((i, "i32") for i in _INTS),
                ("alpha", "f32"),
                ("beta", "f32"),
                ("order", _ORDER),
                ("b_heads", divider_parameter("b_heads")),
                ("sums", "pointer"),
                *((s, "i64") for s in _SUMS_STRIDES),
                *((g, "i32") for g in _GROUPS),
                *(_SEGMENT_PARAMETERS if spec.segmented else ()),
                *((("joined", divider_parameter("joined")),) if spec.joined else ()),
            )
        )

    def grid(self, problem: GemmProblem, tile: HopperGemmTile, device: Device) -> int:
        if tile.split > 1:  # each cluster has one tile
            return _tiles(problem, tile) * tile.split
        clusters = max(device.limits.compute_units, tile.cluster) // tile.cluster * tile.blocks
        return min(_tiles(problem, tile), clusters) * tile.cluster

    def config(
        self, problem: GemmProblem, tile: HopperGemmTile, row: ArchRow, device: Device
    ) -> LaunchConfig:
        return replace(
            super().config(problem, tile, row, device), cluster=(tile.cluster * tile.split, 1, 1)
        )

    def threads(self, tile: HopperGemmTile, row: ArchRow) -> int:
        return 128 * (tile.groups + 1)

    def shared_bytes(self, spec: GemmSpec, tile: HopperGemmTile) -> int:
        return tile.shared_bytes(spec.bias is not None, spec.row_sums is not None)

    def values(
        self, problem: GemmProblem, tile: HopperGemmTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        rows, columns = _grid_of_tiles(p, tile)
        strides = (*p.c_strides[:2], *p.bias_strides)
        ints = (
            p.c_strides[2],
            p.M,
            p.N,
            divide_up(p.K, SLICE),
            *_steps(p.num_heads, p.batch, p.a_strides),
            *_steps(p.num_heads // p.b_head_group, p.batch, p.b_strides),
            *_steps(*_results(p), p.residual_strides),
        )
        dividers = {
            "matrix": rows * columns,
            "group": _GROUP_ROWS * columns,
            "last": rows % _GROUP_ROWS or 1,
            "heads": _results(p)[0],
            "b_heads": p.b_head_group,
        }
        found = dict(zip(_STRIDES, strides, strict=True)) | dict(zip(_INTS, ints, strict=True))
        for name, d in dividers.items():
            found |= divider_values(name, d)
        for i, first in enumerate(accumulate(s.heads for s in p.segments[:-1]), 1):
            found[f"a{i}_first"] = first
        found |= dict(zip(_SUMS_STRIDES, p.sums_strides, strict=True))
        found |= dict(zip(_GROUPS, (p.c_batch_group, p.c_head_group), strict=True))
        if p.spec.joined:
            found |= divider_values("joined", _joined_dim(p))
        return {**found, "rows": rows, "total": _tiles(p, tile), "alpha": p.alpha, "beta": p.beta}

    def pointers(self, spec: GemmSpec) -> dict[str, str]:
        suffix = "_ptrs" if spec.view == "pointers" else ""
        added = {n: f"{n}{suffix}" if getattr(spec, n) else "" for n in ("bias", "residual")}
        return {
            "a": f"A{suffix}",
            "b": f"B{suffix}",
            "c": f"C{suffix}",
            **added,
            "origin": "",
            "sums": "",
        }

    def tensor_maps(
        self, problem: GemmProblem, tile: HopperGemmTile, device: Device
    ) -> dict[str, TensorMap]:
        """Axes column, row, head, batch; of lists column, row, and two that reach any address."""
        p, s = problem, problem.spec
        b_heads = p.num_heads // p.b_head_group
        # Where what is summed over comes first, a box holds a tile's whole side; else it is a
        # panel, and a cluster's blocks share its rows.
        a_box = (SLICE, SLICE) if s.a_transposed else (SLICE, tile.bm)
        b_box = (
            (SLICE, tile.bn // tile.cluster) if s.b_transposed else (SLICE, SLICE // tile.cluster)
        )
        c_shape, c_box = (p.M, p.N), (_PANEL, _ROWS)
        a_shape, b_shape = p.a_shape, p.b_shape
        a_heads, dim = p.num_heads, _joined_dim(p) if s.joined else 0
        if s.joined == "a":
            a_shape = (p.K, dim)
        elif s.joined == "b":
            b_shape, b_heads = (p.K, dim), p.joined_heads
        elif s.joined == "k":
            a_shape, a_heads = (p.M, dim), p.joined_heads
        found = {
            parameter: _map(p, name, a_shape, (segment.heads, p.batch), segment.strides, a_box)
            for (parameter, name), segment in zip(_SEGMENTS, p.segments, strict=False)
        } or {"a_map": _map(p, "A", a_shape, (a_heads, p.batch), p.a_strides, a_box)}
        found["b_map"] = _map(p, "B", b_shape, (b_heads, p.batch), p.b_strides, b_box)
        c = found["c_map"] = _map(p, "C", c_shape, _results(p), p.c_strides, c_box)
        found["residual_map"] = (
            _map(p, "residual", c_shape, _results(p), p.residual_strides, c_box)
            if s.residual
            else c
        )
        return found

    def work(self, problem: GemmProblem, tile: HopperGemmTile, device: Device) -> Work:
        return _work(problem, tile)

    def covering(self) -> Iterable[Covered]:
        """Both dtypes, every transposition, view, option and kind of sum."""
        f16, bf16, f32 = DType.float16, DType.bfloat16, DType.float32
        plain = GemmSpec(bf16, bf16, f32)
        yield Covered(self, replace(plain, b_transposed=True, bias=bf16, residual=bf16))
        yield Covered(self, GemmSpec(f16, f16, f32, a_transposed=True, view="pointers"))
        summed = replace(plain, summed=True)
        yield Covered(self, replace(summed, b_transposed=True, bias=bf16, residual=bf16))
        yield Covered(self, replace(summed, segmented=True), often=False)
        joined = replace(plain, a_transposed=True, summed=True, row_sums=bf16)
        yield Covered(self, replace(joined, segmented=True, joined="a"), often=False)
        yield Covered(self, replace(joined, joined="b"), often=False)
        yield Covered(self, replace(plain, segmented=True, joined="k"), often=False)
        sums = GemmSpec(f16, f16, f32, a_transposed=True, segmented=True, row_sums=f16)
        yield Covered(self, sums)
        yield Covered(self, replace(sums, summed=True, segmented=False, row_sums=f32), often=False)
        yield Covered(self, plain, often=False)
        yield Covered(self, GemmSpec(f16, f16, f32, b_transposed=True), often=False)
        yield Covered(
            self, replace(plain, a_transposed=True, b_transposed=True, bias=f32), often=False
        )
        yield Covered(self, replace(plain, view="pointers", bias=bf16, residual=bf16), often=False)


def _grid_of_tiles(p: GemmProblem, tile: HopperGemmTile) -> tuple[int, int]:
    """Of one matrix: rows of a cluster's tiles, columns."""
    return divide_up(p.M, tile.bm * tile.cluster), divide_up(p.N, tile.bn)


def _tiles(p: GemmProblem, tile: HopperGemmTile) -> int:
    """Of all matrices, a cluster's counted once."""
    rows, columns = _grid_of_tiles(p, tile)
    return rows * columns * p.results


def _results(p: GemmProblem) -> tuple[int, int]:
    """Heads and batches of results."""
    return p.num_heads // p.c_head_group, p.batch // p.c_batch_group


def _steps(heads: int, entries: int, strides: tuple[int, int, int]) -> tuple[int, int]:
    """What a head and an entry of the batch count in a map's coordinates: 0 where all share one
    matrix."""
    batch, head, _ = strides
    return int(heads > 1 and head != 0), int(entries > 1 and batch != 0)


def _joined_dim(p: GemmProblem) -> int:
    """Elements of each of the heads that are joined."""
    return {"a": p.M, "b": p.N, "k": p.K}[p.spec.joined or ""] // p.joined_heads


def _joins(p: GemmProblem) -> bool:
    """Whether a box's 64 elements of the joined axis are of one head, and that axis is the first in
    memory."""
    s, many = p.spec, p.joined_heads > 1
    first = {
        "a": s.a_transposed and s.segmented,
        "b": not s.b_transposed and (p.b_strides[1] > 0 or not many),
        "k": not s.a_transposed and (s.segmented or p.a_strides[1] > 0 or not many),
    }[s.joined or ""]
    return first and p.num_heads == 1 and _joined_dim(p) % _PANEL == 0


def _tiles_of(spec: GemmSpec) -> tuple[HopperGemmTile, ...]:
    if spec.joined == "a" and spec.summed:  # places of so many boxes do not fit the registers
        return tuple(t for t in GEMM if t.bm < 256)
    return GEMM + (SPLIT if _linear(spec) else ())


def _linear(spec: GemmSpec) -> bool:
    """Whether it is a linear layer's product, or that of its input's gradient: rows of A are
    tokens, and nothing else is summed."""
    return (
        not spec.a_transposed and not spec.summed and not spec.row_sums and spec.view == "strided"
    )


def _steps_where_many(counts: tuple[int, int], strides: tuple[int, int, int]) -> list[int]:
    """``_steps`` of the axes that have more than one."""
    steps = _steps(*counts, strides)
    return [step for n, step in zip(counts, steps, strict=True) if n > 1]


def _map(
    p: GemmProblem,
    name: str,
    shape: tuple[int, int],
    matrices: tuple[int, int],
    strides: tuple[int, int, int],
    box: tuple[int, int],
) -> TensorMap:
    """``matrices``: heads and entries of the batch."""
    batch_stride, head_stride, row = strides
    dtype = p.spec.dtype
    extents: tuple[int, ...]
    if p.spec.view == "pointers":
        unit = _UNIT_BYTES // dtype.itemsize
        extents, apart = (2**_UNITS_BITS, _REACH), (unit, unit << _UNITS_BITS)
        name = f"{name}_ptrs"
    else:
        steps = _steps(*matrices, strides)
        extents = tuple(n if step else 1 for n, step in zip(matrices, steps, strict=True))
        apart = (head_stride, batch_stride)
    return TensorMap(
        name,
        dtype,
        (shape[1], shape[0], *extents),
        (1, row, *apart),
        (*box, 1, 1),
        swizzle=128,
        l2_promotion=256,
    )


def _work(p: GemmProblem, tile: HopperGemmTile) -> Work:
    rows, columns = _grid_of_tiles(p, tile)
    size = p.spec.dtype.itemsize
    lines = sum(
        n * (2 if row * size % _LINE else 1)
        for n, row in ((tile.bm, p.a_strides[2]), (tile.bn // tile.cluster, p.b_strides[2]))
    )
    slice_operations = max(
        2.0 * tile.bm * tile.bn * SLICE,
        _LINE_OPERATIONS * tile.rate * lines,
        _SHARED_OPERATIONS * columns / tile.split,
    )
    return Work(
        p.bytes_moved,
        rows * tile.cluster * columns * p.results * tile.split,
        slice_operations * divide_up(divide_up(p.K, SLICE), tile.split) * p.summed,
        dtype=p.spec.dtype,
        rate=tile.rate,
        block_seconds=tile.block_seconds,
    )

"""Kernel definition of cuda_kernels/sm90/gemm/gemm.h: which tile, which constants, which tensor
maps and arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from kernelseam.contract import ArchRow, Device, Launch, LaunchConfig, Launches, TensorMap
from kernelseam.costs import Work, predicted
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.kernels.covered import Covered
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.elements import (
    DEVICE_TYPE,
    divide_up,
    divider_parameter,
    divider_values,
    refuse_row_strides,
)
from kernelseam.kernels.signature import Signature, Structure

from kernelseam_cuda.sm90.tiles import GEMM, REGISTERS, HopperGemmTile, HopperTf32Tile
from kernelseam_cuda.toolchain import sources

SLICE_BYTES = 128
"""Of K, in a stage of the ring."""
_SLICE = 64
"""Elements of K whose products take as long, of 16 bits; of TF32 half as many do."""
_MAX_EXTENT = 2**30
"""Rows and columns: a tile's place, and its end, are 32-bit."""
MAX_TILES = 2**31 - 2**16
"""A block counts in 32 bits by a grid's clusters, beyond the last."""
_GROUP_ROWS = 8
"""Rows of tiles in a group of the rasterisation: tiles.h."""
_PANEL_BYTES, _ROWS = 128, 64
"""Of a row of a box of the result, and its rows."""
_UNIT_BYTES, _UNITS_BITS, _REACH = 16, 31, 2**29
"""Of a map that reaches every address: what its third axis counts, how far; how many such lengths
its fourth has."""
ORIGIN_BYTES = 256
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
ORDER = Structure(
    (
        *((n, divider_parameter(n)) for n in ("matrix", "group", "last", "heads")),
        ("rows", "i32"),
        ("total", "i32"),
    )
)
_MOSTLY_C = 0.75
"""Above this part of the bytes moved C is stored with the L2 policy evict-first. H200:
256 × 2048×2048×128, C 0.89 of them, gains 4 %; 256 × 2048×128×2048, 0.06, would lose 8 %."""
_LINE, _LINE_OPERATIONS = 128, 7_000
"""Bytes of a line of the L2 cache; what a block at full rate could do while one comes (H200: 1.4
ns). Where rows are not whole lines, a panel's row of 128 bytes lies in two."""
_LISTED = 1.25
"""Lines of such a row in a list, whose matrices may begin anywhere within a line. Where they do,
64 × 1024³ takes 243 µs by pairs that share B and 370 by the tile that is as fast where they do not
(210); where C is most of what is moved, its stores decide."""
_SHARED_OPERATIONS = 15_000
"""That a block could do meanwhile, where another reads the same lines of A as it does: the cache
serves them one after the other (H200: 3 ns). It bounds products of few rows with many columns."""


class HopperGemm(KernelDefinition):
    """Products of half precision, and in TF32 where both factors lie along K; a persistent block or
    cluster a multiprocessor or two."""

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
        if spec.dtype is DType.float32:
            if spec.precision != "tf32":
                return f"it multiplies float32 in tf32, not in {spec.precision or 'float32'}"
            if spec.a_transposed or not spec.b_transposed:
                return "it takes TF32 out of shared memory, where A and B must lie along K"
        elif spec.dtype.itemsize != 2:
            return f"it takes bfloat16, float16 and float32, not {spec.dtype}"
        if spec.dtype_c not in (results := dict.fromkeys((spec.dtype, DType.float32))):
            return f"its result is of {' or '.join(map(str, results))}, not {spec.dtype_c}"
        for option in ("summed", "row_sums", "segmented", "heads"):
            if getattr(spec, option):
                return f"it does not know {option}"
        if spec.residual not in (None, spec.dtype_c):
            return f"its residual is of the result's {spec.dtype_c}, not of {spec.residual}"
        vectors = {"A": spec.vector_a, "B": spec.vector_b, "C": spec.vector_c}
        if spec.residual:
            vectors["residual"] = spec.vector_r
        for name, vector in vectors.items():
            if vector < 16:
                return f"rows of {name} at multiples of {vector} bytes: TMA takes multiples of 16"
        if reason := refuse_extents(p):
            return reason
        if not self._offered(p):
            return f"it needs {MAX_TILES} tiles or more"
        return refuse_row_strides(
            stride_a_row=p.a_strides[2],
            stride_b_row=p.b_strides[2],
            stride_c_row=p.c_strides[2],
            stride_residual_row=p.residual_strides[2],
        )

    def tiles(self, spec: GemmSpec, row: ArchRow) -> tuple[HopperGemmTile, ...]:
        return GEMM

    def as_launched(self, tile: HopperGemmTile) -> tuple[HopperGemmTile, ...]:
        return (tile, replace(tile, c_first=True)) if tile.store == "tma" else (tile,)

    def tile(self, problem: GemmProblem, row: ArchRow, device: Device) -> HopperGemmTile:
        """The tile that should take the least time."""
        return min(
            self._offered(problem),
            key=lambda t: predicted(_work(problem, t), row.costs, device.limits),
        )

    def _offered(self, p: GemmProblem) -> tuple[HopperGemmTile, ...]:
        """TMA stores chunks of 16 bytes whole: where C's last is not, tiles whose warps store.
        Where C is most of what is moved, TMA's stores leave the L2 cache to A and B."""
        row = p.N * p.spec.dtype_c.itemsize
        mostly_c = p.results * p.M * row > _MOSTLY_C * p.bytes_moved
        whole = row % _UNIT_BYTES == 0
        return tuple(
            replace(t, c_first=mostly_c and t.store == "tma")
            for t in GEMM
            if tile_count(p, t) < MAX_TILES and (whole or t.store == "rows")
        )

    def variants(
        self, problem: GemmProblem, row: ArchRow, device: Device
    ) -> dict[str, HopperGemmTile]:
        return {t.name: t for t in (self.tile(problem, row, device), *self._offered(problem))}

    def launches(self, problem: GemmProblem, tile: HopperGemmTile, device: Device) -> Launches:
        if problem.spec.view != "pointers":
            return Launches((Launch(self, problem, tile),))
        return Launches(
            (Launch(self, problem, tile, dict.fromkeys((*_MAPS, "origin"), 0)),), ORIGIN_BYTES
        )

    def defines(self, spec: GemmSpec, tile: HopperGemmTile, row: ArchRow) -> dict[str, object]:
        producer, consumer = REGISTERS[tile.groups]
        return {
            "T": DEVICE_TYPE[spec.dtype],
            "TC": DEVICE_TYPE[spec.dtype_c],
            "A_TRANSPOSED": spec.a_transposed,
            "B_TRANSPOSED": spec.b_transposed,
            "POINTERS": spec.view == "pointers",
            "BIAS": DEVICE_TYPE[spec.bias] if spec.bias else "void",
            "RESIDUAL": spec.residual is not None,
            "BM": tile.bm,
            "BN": tile.bn,
            "GROUPS": tile.groups,
            "STAGES": tile.stages,
            "CLUSTER": tile.cluster,
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
                ("order", ORDER),
                ("b_heads", divider_parameter("b_heads")),
            )
        )

    def grid(self, problem: GemmProblem, tile: HopperGemmTile, device: Device) -> int:
        clusters = max(device.limits.compute_units, tile.cluster) // tile.cluster * tile.blocks
        return min(tile_count(problem, tile), clusters) * tile.cluster

    def config(
        self, problem: GemmProblem, tile: HopperGemmTile, row: ArchRow, device: Device
    ) -> LaunchConfig:
        return replace(super().config(problem, tile, row, device), cluster=(tile.cluster, 1, 1))

    def threads(self, tile: HopperGemmTile, row: ArchRow) -> int:
        return 128 * (tile.groups + 1)

    def shared_bytes(self, spec: GemmSpec, tile: HopperGemmTile) -> int:
        return tile.shared_bytes(spec.bias is not None)

    def values(
        self, problem: GemmProblem, tile: HopperGemmTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        strides = (*p.c_strides[:2], *p.bias_strides)
        ints = (
            p.c_strides[2],
            p.M,
            p.N,
            divide_up(p.K, _slice(p.spec)),
            *steps(p, p.num_heads, p.a_strides),
            *steps(p, p.num_heads // p.b_head_group, p.b_strides),
            *steps(p, p.num_heads, p.residual_strides),
        )
        found = dict(zip(_STRIDES, strides, strict=True)) | dict(zip(_INTS, ints, strict=True))
        return {**found, **order_values(p, tile), "alpha": p.alpha, "beta": p.beta}

    def pointers(self, spec: GemmSpec) -> dict[str, str]:
        suffix = "_ptrs" if spec.view == "pointers" else ""
        added = {n: f"{n}{suffix}" if getattr(spec, n) else "" for n in ("bias", "residual")}
        return {"a": f"A{suffix}", "b": f"B{suffix}", "c": f"C{suffix}", **added, "origin": ""}

    def tensor_maps(
        self, problem: GemmProblem, tile: HopperGemmTile, device: Device
    ) -> dict[str, TensorMap]:
        """Axes column, row, head, batch; of lists column, row, and two that reach any address."""
        p, s = problem, problem.spec
        b_heads = p.num_heads // p.b_head_group
        # Where what is summed over comes first, a box holds a tile's whole side; else it is a
        # panel, and a cluster's blocks share its rows.
        k = _slice(s)
        a_box = (k, k) if s.a_transposed else (k, tile.bm)
        b_box = (k, tile.bn // tile.cluster) if s.b_transposed else (k, k // tile.cluster)
        c_shape, c_box = (p.M, p.N), (_PANEL_BYTES // s.dtype_c.itemsize, _ROWS)
        rounded = s.precision == "tf32"
        a = tensor_map(p, "A", p.a_shape, p.num_heads, p.a_strides, a_box, rounded)
        b = tensor_map(p, "B", p.b_shape, b_heads, p.b_strides, b_box, rounded)
        c = tensor_map(p, "C", c_shape, p.num_heads, p.c_strides, c_box)
        residual = (
            tensor_map(p, "residual", c_shape, p.num_heads, p.residual_strides, c_box)
            if s.residual
            else c
        )
        return {"a_map": a, "b_map": b, "c_map": c, "residual_map": residual}

    def work(self, problem: GemmProblem, tile: HopperGemmTile, device: Device) -> Work:
        return _work(problem, tile)

    def covering(self) -> Iterable[Covered]:
        """Both dtypes, every transposition, view and option."""
        f16, bf16, f32 = DType.float16, DType.bfloat16, DType.float32
        plain = GemmSpec(bf16, bf16, f32)
        yield Covered(self, replace(plain, b_transposed=True, bias=bf16, residual=bf16))
        yield Covered(self, GemmSpec(f16, f16, f32, a_transposed=True, view="pointers"))
        yield Covered(self, GemmSpec(bf16, f32, f32, bias=f32, residual=f32))
        yield Covered(
            self, GemmSpec(f16, f32, f32, b_transposed=True, view="pointers"), often=False
        )
        yield Covered(self, plain, often=False)
        yield Covered(self, GemmSpec(f16, f16, f32, b_transposed=True), often=False)
        yield Covered(
            self, replace(plain, a_transposed=True, b_transposed=True, bias=f32), often=False
        )
        single = GemmSpec(f32, f32, f32, b_transposed=True, precision="tf32")
        yield Covered(self, single)
        yield Covered(self, replace(single, view="pointers", bias=f32, residual=f32), often=False)
        yield Covered(self, replace(plain, view="pointers", bias=bf16, residual=bf16), often=False)


def refuse_extents(p: GemmProblem) -> str | None:
    """Why a problem is too small or too large."""
    if not (p.M and p.N and p.results and p.reads_inputs):
        return "there is nothing to multiply"
    for name, n in (("M", p.M), ("N", p.N)):
        if n >= _MAX_EXTENT:
            return f"{name} = {n}: it takes less than 2**30"
    return None


def grid_of_tiles(p: GemmProblem, tile: HopperGemmTile | HopperTf32Tile) -> tuple[int, int]:
    """Of one matrix: rows of a cluster's tiles, columns."""
    return divide_up(p.M, tile.bm * tile.cluster), divide_up(p.N, tile.bn)


def tile_count(p: GemmProblem, tile: HopperGemmTile | HopperTf32Tile) -> int:
    """Of all matrices, a cluster's counted once."""
    rows, columns = grid_of_tiles(p, tile)
    return rows * columns * p.results


def order_values(p: GemmProblem, tile: HopperGemmTile | HopperTf32Tile) -> dict[str, int]:
    """The walk of tiles (tiles.h's TileScheduler), and the divider that finds B's head."""
    rows, columns = grid_of_tiles(p, tile)
    dividers = {
        "matrix": rows * columns,
        "group": _GROUP_ROWS * columns,
        "last": rows % _GROUP_ROWS or 1,
        "heads": p.num_heads,
        "b_heads": p.b_head_group,
    }
    found = {"rows": rows, "total": tile_count(p, tile)}
    for name, d in dividers.items():
        found |= divider_values(name, d)
    return found


def _slice(spec: GemmSpec) -> int:
    """Elements of K in a stage of the ring."""
    return SLICE_BYTES // spec.dtype.itemsize


def steps(p: GemmProblem, heads: int, strides: tuple[int, int, int]) -> tuple[int, int]:
    """What a head and an entry of the batch count in a map's coordinates: 0 where all share one
    matrix."""
    batch, head, _ = strides
    return int(heads > 1 and head != 0), int(p.batch > 1 and batch != 0)


def tensor_map(
    p: GemmProblem,
    name: str,
    shape: tuple[int, int],
    heads: int,
    strides: tuple[int, int, int],
    box: tuple[int, int],
    to_tf32: bool = False,
) -> TensorMap:
    batch_stride, head_stride, row = strides
    dtype = p.spec.dtype if name in ("A", "B") else p.spec.dtype_c
    if p.spec.view == "pointers":
        unit = _UNIT_BYTES // dtype.itemsize
        extents, apart = (2**_UNITS_BITS, _REACH), (unit, unit << _UNITS_BITS)
        name = f"{name}_ptrs"
    else:
        by_head, by_batch = steps(p, heads, strides)
        extents, apart = (
            (heads if by_head else 1, p.batch if by_batch else 1),
            (head_stride, batch_stride),
        )
    return TensorMap(
        name,
        dtype,
        (shape[1], shape[0], *extents),
        (1, row, *apart),
        (*box, 1, 1),
        swizzle=128,
        l2_promotion=256,
        to_tf32=to_tf32,
    )


def _work(p: GemmProblem, tile: HopperGemmTile) -> Work:
    rows, columns = grid_of_tiles(p, tile)
    size = p.spec.dtype.itemsize
    whole = _LISTED if p.spec.view == "pointers" and not tile.c_first else 1
    lines = sum(
        n * (2 if row * size % _LINE else whole)
        for n, row in ((tile.bm, p.a_strides[2]), (tile.bn // tile.cluster, p.b_strides[2]))
    )
    slice_operations = max(
        2.0 * tile.bm * tile.bn * _SLICE,
        _LINE_OPERATIONS * tile.rate * lines,
        _SHARED_OPERATIONS * columns,
    )
    return Work(
        p.bytes_moved,
        rows * tile.cluster * columns * p.results,
        slice_operations * divide_up(p.K, _slice(p.spec)),
        dtype=DType.bfloat16,
        rate=tile.rate,
        block_seconds=tile.block_seconds,
    )

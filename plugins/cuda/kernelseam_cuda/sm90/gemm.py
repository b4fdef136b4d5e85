"""Kernel definition of cuda_kernels/sm90/gemm/gemm.h: which tile, which constants, which tensor
maps and arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

from kernelseam.contract import ArchRow, Device, Launch, Launches, TensorMap
from kernelseam.costs import Work, predicted
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.frozen import changed
from kernelseam.kernels.config import Constants, members
from kernelseam.kernels.elements import (
    DEVICE_TYPE,
    INT32,
    divide_up,
    divider_parameter,
    divider_values,
    refuse_dtype,
    refuse_row_strides,
)
from kernelseam.kernels.gemm.epilogue import (
    epilogue_constants,
    epilogue_pointers,
    epilogue_structure,
    epilogue_values,
)
from kernelseam.kernels.gemm.gemm import (
    NOT_GROUPED,
    SCALES,
    heads_constants,
    scale_constants,
    scale_values,
    scales_structure,
)
from kernelseam.kernels.gemm.reductions import (
    number_operands,
    number_values,
    numbers_structure,
    part_pointers,
    part_values,
    parts_structure,
    reducing,
)
from kernelseam.kernels.signature import Signature
from kernelseam.symbolic import least

from kernelseam_cuda.sm90.gemm_cost import mostly_c
from kernelseam_cuda.sm90.gemm_cost import work as work_of
from kernelseam_cuda.sm90.gemm_maps import (
    MAPS,
    ORIGIN_BYTES,
    SUMS_MAP,
    UNIT_BYTES,
    joined_dim,
    steps,
    steps_where_many,
)
from kernelseam_cuda.sm90.gemm_maps import tensor_maps as tensor_maps_of
from kernelseam_cuda.sm90.gemm_tiling import (
    FEWEST_STAGES,
    MAX_TILES,
    ORDER,
    SCALED_COLUMNS,
    all_at_once,
    in_step,
    kept_bytes,
    last_wave,
    order_values,
    refuse_extents,
    refuse_reductions,
    result_dtypes,
    results_of,
    slice_of,
    strips_of,
    tile_count,
    tiles_of,
    with_tail_sums,
)
from kernelseam_cuda.sm90.kernel import HopperKernel
from kernelseam_cuda.sm90.tiles import ONE_WAVE, REGISTERS, HopperGemmTile

_FEW_ROWS = 64
"""Of A that blocks share: of more, wider tiles read B less often."""
_REGISTERS = {**REGISTERS, 3: (40, 152)}
"""As attention has them, but that more are left to the loading thread."""
_FAST_MEMORY = 4e12
"""Bytes a second. Where memory is slower, a tile of a result that is most of what is moved has a
ring of one slice more than it sums: ``in_step``. An H100 has 3.35e12, an H200 4.8e12."""
_POINTERS = ("a", "b", "c", "bias", "residual", "origin")
_STRIDES = ("c_batch", "c_head", "bias_batch", "bias_head")
_INTS = (
    *("c_row", "M", "N", "slices"),
    *(f"{n}_{axis}_step" for n in ("a", "b", "residual") for axis in ("head", "batch")),
)
_SUMS_STRIDES = ("sums_batch", "sums_head")
_GROUPS = ("batch_group", "head_group")
_SEGMENT_PARAMETERS = tuple(
    (f"a{i}_{name}", kind)
    for name, kind in (("map", "tensor_map"), ("first", "i32"))
    for i in (1, 2)
)
_OPTIONAL = (
    "groups",
    *(name for name, _ in _SEGMENT_PARAMETERS),
    *("joined", "c1_map", "c2_map", "result", "indices", "gathered", "scales"),
    *("epilogue", SUMS_MAP, "parts", "reduced"),
)


class HopperGemm(HopperKernel):
    """Products of half precision, and in TF32 and of e4m3 where both factors lie along K; a
    persistent block or cluster a multiprocessor or two."""

    operation = "gemm"
    name = "sm90"
    entry = "gemm_sm90"
    source = "sm90/gemm/gemm.h"
    early = True
    """Its blocks set up their barriers while the kernel before it ends."""
    multiplies = True

    def refuse(self, problem: GemmProblem, row: ArchRow) -> str | None:
        p, spec = problem, problem.spec
        if spec.dtype is DType.float32:
            if spec.precision != "tf32":
                return f"it multiplies float32 in tf32, not in {spec.precision or 'float32'}"
            if spec.a_transposed or not spec.b_transposed:
                return "it takes TF32 out of shared memory, where A and B must lie along K"
        elif spec.dtype.is_fp8:
            if spec.dtype not in row.matrix_dtypes:
                return refuse_dtype(spec.dtype, row)
            if spec.a_transposed or not spec.b_transposed:
                return "it takes e4m3 out of shared memory, where A and B must lie along K"
        elif spec.dtype.itemsize != 2:
            return f"it takes bfloat16, float16, float32 and e4m3, not {spec.dtype}"
        if spec.dtype_c not in (results := result_dtypes(spec.dtype)):
            *first, last = map(str, results)
            known = f"{', '.join(first)} or {last}" if first else last
            return f"its result is of {known}, not {spec.dtype_c}"
        if reason := self.refuse_options(problem) or refuse_reductions(problem):
            return reason
        if p.summed * p.K >= INT32:
            return f"it sums {p.summed} products of K = {p.K} into one C, 2^31 terms or more"
        if spec.residual not in (None, spec.dtype_c):
            return f"its residual is of the result's {spec.dtype_c}, not of {spec.residual}"
        vectors = {"A": spec.vector_a, "B": spec.vector_b, "C": spec.vector_c}
        if spec.residual:
            vectors["residual"] = spec.vector_r
        if spec.preactivation:
            vectors["preactivation"] = spec.vector_p
        for name, vector in vectors.items():
            if vector < 16:
                return f"rows of {name} at multiples of {vector} bytes: TMA takes multiples of 16"
        if reason := refuse_extents(p):
            return reason
        if not any(self.few_enough(p, t) and self.stores(p, t) for t in self.tiles(spec, row)):
            return f"it needs {MAX_TILES} tiles or more"
        a_rows = {f"stride_a{i}_row": s.strides[2] for i, s in enumerate(p.segments)}
        return refuse_row_strides(
            **(a_rows or {"stride_a_row": p.a_strides[2]}),
            stride_b_row=p.b_strides[2],
            stride_c_row=p.c_strides[2],
            stride_residual_row=p.residual_strides[2],
            stride_preactivation_row=p.preactivation_strides[2],
            stride_a_scales_row=p.a_scale_strides[2],
            stride_b_scales_column=p.b_scale_strides[2],
            stride_a_scales_k=p.scale_k_strides[0],
            stride_b_scales_k=p.scale_k_strides[1],
        )

    def refuse_options(self, problem: GemmProblem) -> str | None:
        """Why it does not take what the spec asks for beside a product, or None."""
        spec = problem.spec
        if spec.heads:
            return "heads is not supported by this kernel"
        if spec.dtype_c.is_fp8 and (problem.beta != 0 or spec.residual or spec.preactivation):
            return f"beta, residual and preactivation of {spec.dtype_c} are not supported"
        for option in ("row_sums", "segmented", "joined", "epilogue"):
            if spec.dtype.itemsize != 2 and getattr(spec, option):
                return f"{option} of {spec.dtype} is not supported by this kernel"
        if spec.scale_block and (spec.scale_block[2] != slice_of(spec) or not tiles_of(spec)):
            return (
                f"scale_block = {spec.scale_block}: it scales blocks of {slice_of(spec)} values of "
                f"k and of multiples of {SCALED_COLUMNS} columns"
            )
        if spec.summed and spec.view == "pointers":
            return "it does not sum products of lists"
        if spec.joined and not _joins(problem):
            return f"it does not join such heads along {spec.joined.upper()}"
        for segment in problem.segments:
            head_and_batch = (segment.heads, problem.batch)
            if 0 in steps_where_many(head_and_batch, segment.strides):
                return "heads or batches of A's segments share memory"
        return None

    def tiles(self, spec: GemmSpec, row: ArchRow) -> tuple[HopperGemmTile, ...]:
        return tiles_of(spec)

    def as_launched(self, spec: GemmSpec, tile: HopperGemmTile) -> tuple[HopperGemmTile, ...]:
        if tile.mostly_c:
            stages = range(tile.stages, FEWEST_STAGES - 1, -1)
            return tuple(replace(tile, c_first=True, stages=s) for s in stages)
        return (tile, replace(tile, c_first=True)) if tile.store == "tma" else (tile,)

    def tile(self, problem: GemmProblem, row: ArchRow, device: Device) -> HopperGemmTile:
        """The tile that should take the least time."""
        slow = device.limits.bytes_per_second < _FAST_MEMORY
        return min(
            (in_step(problem, t) if slow else t for t in self.able(problem, device)),
            key=lambda t: predicted(work_of(problem, t, device), row.costs, device.limits),
        )

    def takes(
        self, problem: GemmProblem, tile: HopperGemmTile, row: ArchRow, device: Device
    ) -> bool:
        if tile.adds_up and not all_at_once(problem, tile, device):
            return False
        return self.few_enough(problem, tile) and self.stores(problem, tile)

    def stores(self, p: GemmProblem, tile: HopperGemmTile) -> bool:
        """Whether it can store such a C: TMA stores chunks of 16 bytes whole; where C's last is
        not, tiles whose warps store. In ping-pong, where a consumer gives its turn away when all
        stages of its tile have come, the ring must hold those of C and the residual beside its
        last slice."""
        sources = (p.beta != 0) + (p.spec.residual is not None)
        if tile.ping_pong and sources * tile.source_stages(p.spec.dtype_c.itemsize) >= tile.stages:
            return False
        return tile.store == "rows" or _whole(p)

    def offered(self, p: GemmProblem) -> tuple[HopperGemmTile, ...]:
        """Where C is most of what is moved, TMA's stores leave the L2 cache to A and B; ping-pong
        without an epilogue was not measured there."""
        c_first = mostly_c(p)
        plain = p.spec.epilogue is None
        tiles = [
            t
            for t in tiles_of(p.spec)
            if not 0 < t.few_rows < p.M
            if not (t.tail_slices and t.tail_slices * slice_of(p.spec) > p.K)
            if self.few_enough(p, t) and self.stores(p, t) and c_first >= t.mostly_c
            if not (c_first and plain and t.ping_pong)
        ]
        if not c_first:
            return tuple(tiles)
        return tuple([changed(t, c_first=True) if t.store == "tma" else t for t in tiles])

    def able(self, p: GemmProblem, device: Device) -> list[HopperGemmTile]:
        """Of those the ones that a device has room for."""
        return [
            t
            for t in self.offered(p)
            if not t.adds_up or all_at_once(p, t, device)
            if not t.tail_slices or last_wave(p, t, device)
        ]

    def few_enough(self, p: GemmProblem, tile: HopperGemmTile) -> bool:
        """Whether it is for so many tiles, which can be counted; where blocks share rows of A, or
        load few, that it is one product, of so few rows; for so many slices; where sums are split,
        that tiles are few, that every part has something to sum, and that the ring has room for the
        parts behind the source tiles."""
        slices = divide_up(p.K, slice_of(p.spec))
        few = tile.few_rows or (INT32 if tile in ONE_WAVE else tile.shared_a * _FEW_ROWS)
        if few and (p.results > 1 or few < p.M):
            return False
        if slices < tile.fewest_slices or (tile in ONE_WAVE and p.beta != 0):
            return False
        if tile.split == 1:
            most = min(MAX_TILES, tile.most_tiles + 1)
            return tile.fewest_tiles <= tile_count(p, tile) < most
        sources = (p.beta != 0) + (p.spec.residual is not None)
        return (
            tile.stages_after_sums(sources) <= tile.stages
            and tile_count(p, tile) <= tile.most_tiles
            and (tile.split - 1) * divide_up(slices, tile.split) < slices
        )

    def variants(
        self, problem: GemmProblem, row: ArchRow, device: Device
    ) -> dict[str, HopperGemmTile]:
        offered = self.able(problem, device)
        stepped = (in_step(problem, t) for t in offered)
        return {t.name: t for t in (self.tile(problem, row, device), *offered, *stepped)}

    def launches(self, problem: GemmProblem, tile: HopperGemmTile, device: Device) -> Launches:
        if problem.spec.reductions:
            own = reducing(self, problem, tile, strips_of(problem, tile), tile.adds_up)
        else:
            own = Launches((Launch(self, problem, tile),))
        if tile.tail_slices:
            return with_tail_sums(own, tile, self.grid(problem, tile, device))
        if problem.spec.view != "pointers":
            return own
        maps = (*MAPS, SUMS_MAP) if problem.spec.preactivation else MAPS
        origin = dict.fromkeys((*maps, "origin"), 0)
        return Launches((Launch(self, problem, tile, origin),), ORIGIN_BYTES)

    def accumulators(self, spec: GemmSpec, tile: HopperGemmTile) -> Iterable[int]:
        return tile.accumulators

    def constants(self, spec: GemmSpec, tile: HopperGemmTile, row: ArchRow) -> Constants:
        producer, consumer = _REGISTERS[tile.groups]
        return {
            "T": DEVICE_TYPE[spec.dtype],
            "TC": DEVICE_TYPE[spec.dtype_c],
            **members(spec, "a_transposed", "b_transposed", "scales"),
            **scale_constants(spec),
            **epilogue_constants(spec),
            "POINTERS": spec.view == "pointers",
            "BIAS": DEVICE_TYPE[spec.bias],
            "RESIDUAL": spec.residual is not None,
            "ROW_SUMS": DEVICE_TYPE[spec.row_sums],
            **members(spec, "summed", "segmented"),
            "JOINED": (None, "a", "b", "k").index(spec.joined),
            **NOT_GROUPED,
            **heads_constants(None),
            **members(tile, "bm", "bn", "a_rows", "groups", "stages", "cluster", "group_rows"),
            **members(tile, "shared_a", "split", "tail_slices", "adds_up", "in_turns", "ping_pong"),
            **members(tile, "halves", "blocks", "buffers"),
            "STORE": int(tile.store == "tma"),
            "C_FIRST": tile.c_first,
            "B_FIRST": tile.b_first,
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
            "SHARED_BYTES": self.shared_bytes(spec, tile),
        }

    def signature(self, spec: GemmSpec) -> Signature:
        return Signature(
            (
                *((m, "tensor_map") for m in MAPS),
                *((p, "pointer") for p in _POINTERS),
                *((s, "i64") for s in _STRIDES),
                *((i, "i32") for i in _INTS),
                ("alpha", "f32"),
                ("beta", "f32"),
                ("order", ORDER),
                ("b_heads", divider_parameter("b_heads")),
                ("sums", "pointer"),
                *((s, "i64") for s in _SUMS_STRIDES),
                *((g, "i32") for g in _GROUPS),
                *(_SEGMENT_PARAMETERS if spec.segmented else ()),
                *((("joined", divider_parameter("joined")),) if spec.joined else ()),
                *((("scales", scales_structure(spec)),) if spec.scales else ()),
                *((("epilogue", epilogue_structure(spec)),) if spec.epilogue else ()),
                *(((SUMS_MAP, "tensor_map"),) if spec.preactivation else ()),
                *((("parts", parts_structure(spec)),) if spec.reductions else ()),
                *((("reduced", numbers_structure(spec)),) if spec.reductions else ()),
            ),
            generated=True,
            in_place=True,
            optional=_OPTIONAL,
        )

    def grid(self, problem: GemmProblem, tile: HopperGemmTile, device: Device) -> int:
        if tile.split > 1:  # each cluster has one tile
            return tile_count(problem, tile) * tile.split
        clusters = max(device.limits.compute_units, tile.cluster) // tile.cluster * tile.blocks
        if tile.tail_slices:
            return clusters * tile.cluster
        return least(tile_count(problem, tile), clusters) * tile.cluster

    def cluster(self, tile: HopperGemmTile) -> int:
        return tile.cluster * tile.split

    def threads(self, tile: HopperGemmTile, row: ArchRow) -> int:
        return 128 * (tile.groups + 1)

    def shared_bytes(self, spec: GemmSpec, tile: HopperGemmTile) -> int:
        blocks = spec.scale_block is not None
        columns, sums = spec.bias is not None or (spec.scales and not blocks), bool(spec.row_sums)
        return tile.shared_bytes(columns, sums, blocks, kept=kept_bytes(spec, tile))

    def values(
        self, problem: GemmProblem, tile: HopperGemmTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        strides = (*p.c_strides[:2], *p.bias_strides)
        ints = (
            p.c_strides[2],
            p.M,
            p.N,
            divide_up(p.K, slice_of(p.spec)),
            *steps(p.num_heads, p.batch, p.a_strides),
            *steps(p.num_heads // p.b_head_group, p.batch, p.b_strides),
            *steps(*results_of(p), p.residual_strides),
        )
        values: dict[str, int | float] = dict(zip(_STRIDES, strides, strict=True))
        values |= dict(zip(_INTS, ints, strict=True))
        for i, first in enumerate(accumulate(s.heads for s in p.segments[:-1]), 1):
            values[f"a{i}_first"] = first
        values |= dict(zip(_SUMS_STRIDES, p.sums_strides, strict=True))
        values |= dict(zip(_GROUPS, (p.c_batch_group, p.c_head_group), strict=True))
        if p.spec.joined:
            values |= divider_values("joined", joined_dim(p))
        values |= scale_values(p)
        if p.spec.epilogue:
            values |= epilogue_values(p, p)
        if p.spec.reductions:
            strips = strips_of(p, tile)
            values |= {**part_values(strips), **number_values(p, strips)}
        return {**values, **order_values(p, tile), "alpha": p.alpha, "beta": p.beta}

    def pointers(self, spec: GemmSpec) -> dict[str, str]:
        suffix = "_ptrs" if spec.view == "pointers" else ""
        added = {n: f"{n}{suffix}" if getattr(spec, n) else "" for n in ("bias", "residual")}
        return {
            "a": f"A{suffix}",
            "b": f"B{suffix}",
            "c": f"C{suffix}",
            **added,
            **{n: f"{n}{suffix}" for n in SCALES if spec.scales},
            **epilogue_pointers(spec, suffix),
            **dict.fromkeys((*part_pointers(spec), *number_operands(spec), "origin", "sums"), ""),
        }

    def tensor_maps(
        self, problem: GemmProblem, tile: HopperGemmTile, device: Device
    ) -> dict[str, TensorMap]:
        return tensor_maps_of(problem, tile)

    def work(self, problem: GemmProblem, tile: HopperGemmTile, device: Device) -> Work:
        return work_of(problem, tile, device)


def _whole(p: GemmProblem) -> bool:
    """Whether rows of C are of whole chunks of 16 bytes, which TMA stores."""
    return p.c_columns * p.spec.dtype_c.itemsize % UNIT_BYTES == 0


def _joins(p: GemmProblem) -> bool:
    """Whether a box's 64 elements of the joined axis are of one head, and that axis is the first in
    memory."""
    s, many = p.spec, p.joined_heads > 1
    first = {
        "a": s.a_transposed and s.segmented,
        "b": not s.b_transposed and (p.b_strides[1] > 0 or not many),
        "k": not s.a_transposed and (s.segmented or p.a_strides[1] > 0 or not many),
    }[s.joined or ""]
    return first and p.num_heads == 1 and joined_dim(p) % slice_of(p.spec) == 0

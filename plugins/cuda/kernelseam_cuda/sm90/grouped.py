"""Kernel definition of cuda_kernels/sm90/gemm/gemm.h for grouped products."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kernelseam.contract import ArchRow, Device, Launch, Launches, TensorMap
from kernelseam.costs import Work
from kernelseam.descriptors.gemm.grouped_problem import (
    GroupedGemmProblem,
    GroupedGemmSpec,
)
from kernelseam.dtypes import DType
from kernelseam.kernels.config import Constants
from kernelseam.kernels.definition import OfferingDefinition
from kernelseam.kernels.elements import divide_up, divider_values, refuse_row_strides
from kernelseam.kernels.gemm.grouped import (
    group_constants,
    group_pointers,
    group_values,
    with_groups,
)
from kernelseam.kernels.signature import Signature, Structure
from kernelseam.symbolic import least

from kernelseam_cuda.sm90.gemm import HopperGemm
from kernelseam_cuda.sm90.gemm_cost import mostly_c
from kernelseam_cuda.sm90.gemm_cost import work as work_of
from kernelseam_cuda.sm90.gemm_maps import UNIT_BYTES, grouped_tensor_maps
from kernelseam_cuda.sm90.gemm_tiling import (
    MAX_TILES,
    SCALED_COLUMNS,
    TAIL_SLICES,
    last_wave,
    order_values,
    slice_of,
    storing,
    takes_pairs,
    with_tail_sums,
)
from kernelseam_cuda.sm90.kernel import HopperKernel
from kernelseam_cuda.sm90.tiles import (
    GROUPED,
    GROUPED_E4M3,
    GROUPED_E4M3_BLOCKS,
    GROUPED_INDEXED,
    GROUPED_INDEXED_E4M3,
    GROUPED_PING_PONG,
    REGISTERS,
    HopperGemmTile,
)

_FEWEST_SLICES, _FEWEST_ALONE = 128, 64
"""Of the sums whose tiles of a last wave are cut along K; where no other waves are. (H200, E2
157×3904→6080, its input gradient, 95 slices: 36.0 µs cut and 38.8 whole; 35 and 42 slices: 14.4 and
19.2 cut, 10.6 and 15.7 whole.)"""
MAX_GROUPS = 1024
"""Whose rows of tiles fit the table in shared memory."""
TABLE_BYTES = 4 * (MAX_GROUPS + 1 + 32 + 3)
_GATHERING_REGISTERS = 56, 224
"""Of two consumers: a thread that gathers has the addresses of eight rows."""
_GATHERED = Structure((("a_row", "i32"), ("K", "i32")), ("a_row", "K"))
_GEMM = HopperGemm()


class HopperGroups(HopperKernel, OfferingDefinition):
    """Products of groups by the persistent blocks of the GEMM."""

    name = "sm90"
    entry = _GEMM.entry
    source = _GEMM.source
    early = True
    """Its blocks set up their barriers while the kernel before it ends, or maps are made."""
    multiplies = True

    @abstractmethod
    def count(self, p: Any, tile: HopperGemmTile) -> int:
        """The most tiles that groups can have, those of a cluster counted as one."""

    @abstractmethod
    def whole(self, p: Any) -> bool:
        """Whether C's rows are of whole chunks of 16 bytes, as TMA stores them."""

    def stores(self, p: Any, tile: HopperGemmTile) -> bool:
        """Whether tiles can be counted, and stored."""
        if (tile.ping_pong or tile.tail_slices) and p.beta:
            return False
        return self.count(p, tile) < MAX_TILES and (self.whole(p) or tile.store == "rows")

    def takes(self, problem: Any, tile: HopperGemmTile, row: ArchRow, device: Device) -> bool:
        return self.stores(problem, tile)

    def grid(self, problem: Any, tile: HopperGemmTile, device: Device) -> int:
        clusters = max(device.limits.compute_units, tile.cluster) // tile.cluster * tile.blocks
        if tile.tail_slices:  # few tiles are cut into parts
            return clusters * tile.cluster
        return least(self.count(problem, tile), clusters) * tile.cluster

    def cluster(self, tile: HopperGemmTile) -> int:
        return tile.cluster

    def threads(self, tile: HopperGemmTile, row: ArchRow) -> int:
        return _GEMM.threads(tile, row)


class HopperGroupedGemm(HopperGroups):
    """Groups along M and N, and along K where both factors are read along M and N."""

    operation = "grouped_gemm"

    def refuse(self, problem: GroupedGemmProblem, row: ArchRow) -> str | None:
        p, product, along = problem, problem.spec.product, problem.spec.along
        if along == "k" and (product.dtype.itemsize != 2):
            return f"it does not group {product.dtype} along K"
        if along == "k" and (not product.a_transposed or product.b_transposed):
            return "along K it takes A and B that do not lie along K"
        if along == "m" and product.a_transposed:
            return "along M it takes rows of A alone"
        if p.spec.indices and p.beta:
            return "it adds no C to rows that have indices or factors"
        if _gathers(p.spec) and product.dtype is DType.float32:
            return "it gathers no rows that are rounded to TF32"
        if p.spec.indices and product.scale_block:
            return "rows that have indices or factors have no scales of blocks"
        if p.groups > MAX_GROUPS:
            return f"{p.groups} groups: it takes {MAX_GROUPS}"
        if reason := _GEMM.refuse(replace(p.even, M=max(p.even.M, 1), K=max(p.even.K, 1)), row):
            return reason
        if not p.groups or not (p.M and p.N and p.reads_inputs):
            return "there is nothing to multiply"
        if not self.offered(p):
            return f"it needs {MAX_TILES} tiles or more, or no tile takes {p.spec}"
        return refuse_row_strides(
            stride_a_row=p.a_strides[1], stride_b_row=p.b_strides[1], stride_c_row=p.c_strides[1]
        )

    def tiles(self, spec: GroupedGemmSpec, row: ArchRow) -> tuple[HopperGemmTile, ...]:
        return _tiles_of(spec)

    def as_launched(self, spec: Any, tile: HopperGemmTile) -> tuple[HopperGemmTile, ...]:
        forms = (tile, replace(tile, tail_slices=TAIL_SLICES)) if _has_tail(tile) else (tile,)
        first = (False, True) if tile.store == "tma" else (False,)
        return tuple(replace(t, c_first=c) for t in forms for c in first)

    def offered(
        self, problem: GroupedGemmProblem, row: ArchRow | None = None
    ) -> tuple[HopperGemmTile, ...]:
        """Tiles that take a problem. Where C is most of what is moved, its stores leave the L2
        cache to A and B, as in the batched product. Tiles of a last wave are cut along a long K,
        of a shorter one where there is no other wave."""
        p, c_first, slices = problem, mostly_c(problem.even), _cut_slices(problem)
        tiles = (
            replace(t, c_first=c_first and t.store == "tma", tail_slices=fewest)
            for t in _tiles_of(p.spec)
            for fewest in _forms(t, slices)
        )
        return tuple(t for t in tiles if self.stores(p, t))

    def count(self, p: GroupedGemmProblem, tile: HopperGemmTile) -> int:
        rows, columns = tile.bm * tile.cluster, divide_up(p.N, tile.bn)
        if p.spec.along == "k":
            return divide_up(p.M, rows) * columns * p.groups
        if p.spec.along == "n":  # a group's first tile begins up to UNIT_BYTES before it
            product = p.spec.product
            unit = UNIT_BYTES // min(product.dtype.itemsize, product.dtype_c.itemsize)
            return divide_up(p.M, rows) * ((p.N + p.groups * unit) // tile.bn + p.groups)
        return (p.M // rows + p.groups) * columns

    def whole(self, p: GroupedGemmProblem) -> bool:
        """Along N warps store what a group's ends cut."""
        return p.spec.along == "n" or p.c_columns * p.spec.product.dtype_c.itemsize % 16 == 0

    def work(self, problem: GroupedGemmProblem, tile: HopperGemmTile, device: Device) -> Work:
        """Cut tiles are less where they are the only ones; else nothing was gained that could be
        foreseen."""
        cut = last_wave(problem.even, tile, device) if tile.tail_slices else None
        whole = tile if cut and not cut.waves else replace(tile, tail_slices=0)
        return work_of(problem.even, whole, device)

    def launches(
        self, problem: GroupedGemmProblem, tile: HopperGemmTile, device: Device
    ) -> Launches:
        """The kernel alone; where tiles of the last wave are cut along K, with their sums."""
        own = Launches((Launch(self, problem, tile),))
        if not tile.tail_slices:
            return own
        return with_tail_sums(own, tile, self.grid(problem, tile, device))

    def accumulators(self, spec: GroupedGemmSpec, tile: HopperGemmTile) -> Iterable[int]:
        return tile.accumulators

    def constants(self, spec: GroupedGemmSpec, tile: HopperGemmTile, row: ArchRow) -> Constants:
        producer, consumer = REGISTERS[tile.groups]
        if _gathers(spec) and tile.groups > 1:
            producer, consumer = _GATHERING_REGISTERS
        return {
            **_GEMM.constants(spec.product, tile, row),
            **group_constants(spec),
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
            "SHARED_BYTES": self.shared_bytes(spec, tile),
        }

    def signature(self, spec: GroupedGemmSpec) -> Signature:
        more = {"gathered": _GATHERED} if _gathers(spec) else {}
        return with_groups(_GEMM.signature(spec.product), bool(spec.indices), **more)

    def shared_bytes(self, spec: GroupedGemmSpec, tile: HopperGemmTile) -> int:
        blocks = spec.product.scale_block is not None
        columns = spec.product.scales and not blocks
        table = 4 * (1 + 32 + 3) if spec.along == "k" else TABLE_BYTES
        return tile.shared_bytes(columns, False, blocks, table)

    def values(
        self, problem: GroupedGemmProblem, tile: HopperGemmTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        order = order_values(p.even, tile)
        if p.spec.along == "m":  # a row of tiles
            order |= divider_values("matrix", divide_up(p.N, tile.bn))
        elif p.spec.along == "n":  # a column
            order |= divider_values("matrix", divide_up(p.M, tile.bm * tile.cluster))
        heads = ("c_head", "bias_batch", "bias_head", "sums_batch", "sums_head")
        steps = ("a_head_step", "b_head_step", "residual_head_step", "residual_batch_step")
        return {
            **dict.fromkeys((*heads, *steps), 0),
            **dict.fromkeys(("batch_group", "head_group"), 1),
            "a_batch_step": int(p.spec.along == "n" and p.groups > 1 and p.a_strides[0] != 0),
            "b_batch_step": int(p.spec.along == "m" and p.groups > 1 and p.b_strides[0] != 0),
            "c_batch": p.c_strides[0],
            "c_row": p.c_strides[1],
            "M": p.M,
            "N": p.N,
            "slices": divide_up(p.K, slice_of(p.spec.product)),
            **order,
            **group_values(p),
            **({"a_row": p.a_strides[1], "K": p.K} if _gathers(p.spec) else {}),
            "alpha": p.alpha,
            "beta": p.beta,
        }

    def pointers(self, spec: GroupedGemmSpec) -> dict[str, str]:
        return {**_GEMM.pointers(spec.product), **group_pointers(spec)}

    def tensor_maps(
        self, problem: GroupedGemmProblem, tile: HopperGemmTile, device: Device
    ) -> dict[str, TensorMap]:
        return grouped_tensor_maps(problem, tile)


def _has_tail(tile: HopperGemmTile) -> bool:
    """Whether a tile's blocks may share the tiles of a last wave. (Pairs by twice as many rows have
    fewer tiles, of which more fill a wave; of 64×256 cut ones were no faster.)"""
    return tile in GROUPED and tile.cluster == 1 and (tile.store == "tma" or tile.blocks == 2)


def _forms(tile: HopperGemmTile, slices: int) -> tuple[int, ...]:
    """The fewest slices of a part (0: tiles are whole) by which a tile is offered. (H200, E8
    8192×4096→14336 skewed, by 128×256, µs: its input gradient, K = 14336, 8.2 waves, 1630 as whole
    tiles, 1509 cut; forward, K = 4096, the same within 4 % either way.)"""
    if slices < _FEWEST_ALONE or not _has_tail(tile):
        return (0,)
    if slices >= _FEWEST_SLICES and tile.store == "tma":
        return (TAIL_SLICES,)
    return (0, TAIL_SLICES)


def _cut_slices(p: GroupedGemmProblem) -> int:
    """Of products whose tiles may be cut, plain ones of 16 bits, where no C is added; else 0."""
    product = p.spec.product
    plain = not (p.spec.indices or product.epilogue or p.beta) and product.dtype.itemsize == 2
    return divide_up(p.K, slice_of(product)) if plain and p.spec.along == "m" else 0


def _gathers(spec: GroupedGemmSpec) -> bool:
    return "a_indices" in spec.indices


def _tiles_of(spec: GroupedGemmSpec) -> tuple[HopperGemmTile, ...]:
    tiles = tuple(t for t in _all_tiles_of(spec) if takes_pairs(spec.product, t))
    return storing(spec.product, tiles)


def _all_tiles_of(spec: GroupedGemmSpec) -> tuple[HopperGemmTile, ...]:
    product = spec.product
    if {"a_indices", "c_indices"} & {*spec.indices}:
        return GROUPED_INDEXED_E4M3 if product.dtype.is_fp8 else GROUPED_INDEXED
    if product.scale_block:
        return GROUPED_E4M3_BLOCKS if product.scale_block[1] % SCALED_COLUMNS == 0 else ()
    if product.dtype.is_fp8:
        return GROUPED_E4M3
    return GROUPED + ((GROUPED_PING_PONG,) if _takes_turns(spec) else ())


def _takes_turns(spec: GroupedGemmSpec) -> bool:
    """Whether two consumers may have a tile each: rows of A alone, a plain product or a gate, and
    one result, of 16 bits."""
    product = spec.product
    half = product.dtype.itemsize == product.dtype_c.itemsize == 2
    plain = not product.epilogue or bool(product.pairs)
    rows = spec.along != "k" and not product.a_transposed
    return half and plain and rows and not (spec.indices or product.preactivation)

"""What the kernels of Hopper's gradients share, and those before and after the one that multiplies:
kernel definitions of cuda_kernels/sm90/attention/backward/row_values.h and query_gradient.h."""

from __future__ import annotations

from typing import Any

from kernelseam.contract import ArchRow, Device, Launches, TensorMap
from kernelseam.costs import Work
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.descriptors.attention.options import ANY_VIEW, SpecOption
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.frozen import changed
from kernelseam.kernels.attention.arguments import (
    MATRICES,
    OPERANDS,
    SEQUENCES,
    matrices,
    row_values,
    walk_values,
)
from kernelseam.kernels.attention.forward_arguments import spec_constants
from kernelseam.kernels.attention.scores import score_values
from kernelseam.kernels.config import Constants
from kernelseam.kernels.elements import divide_up, refuse_row_strides, row_strides
from kernelseam.kernels.signature import Signature, Structure

from kernelseam_cuda.sm90.attention_blocks import by_pair, has_mask_mod, mask_axes
from kernelseam_cuda.sm90.attention_bwd_cost import (
    BackwardTile,
    row_work,
    sees_fewer,
    tile_count,
)
from kernelseam_cuda.sm90.attention_bwd_heads import for_problem
from kernelseam_cuda.sm90.attention_bwd_tiles import ATTENTION_BWD, HopperBackwardTile
from kernelseam_cuda.sm90.attention_refusals import refuse_dims, refuse_far_scores, refuse_rows
from kernelseam_cuda.sm90.kernel import HopperKernel
from kernelseam_cuda.sm90.tiles import PANEL, promotion

SUPPORTED = (
    ANY_VIEW
    | SpecOption.causal
    | SpecOption.window
    | SpecOption.softcap
    | SpecOption.sinks
    | SpecOption.batch_invariant
    | SpecOption.alibi
    | SpecOption.bias
    | SpecOption.mask
    | SpecOption.prefix
    | SpecOption.expression
)
"""The forward's options that the kernel has the gradients of."""
WIDTHS = tuple(dict.fromkeys((t.head_dim, t.value_dim) for t in ATTENTION_BWD))
"""Head dims of queries and keys, and of values, up to which tiles are, the narrowest first."""
_ROWS = 64
_SUM_THREADS = 256
_MOST_LISTED = 1 << 15
"""Blocks of queries, or of keys, that a list may name (tiles.h: ListedBlock)."""
_ELEMENT_MAX = max(t.head_dim for t in ATTENTION_BWD if isinstance(t, HopperBackwardTile))
"""The widest heads of which scores by element have tiles."""
WORKSPACE = ("lse_base2", "delta", "sums", "semaphores")
_GRADIENTS = ("dout", "dq", "dk", "dv")
_BLOCK_COUNT = ("query_blocks", "head_blocks", "num_heads")
BLOCKS = Structure(tuple((n, "i32") for n in _BLOCK_COUNT))


class HopperBackwardKernel(HopperKernel):
    """What the three kernels have in common: one problem, one tile, blocks of ``step`` queries."""

    operation = "attention_bwd"
    name = "sm90"
    operands = OPERANDS
    early = True
    """Each starts while the one before it ends."""

    def refuse(self, problem: AttentionBwdProblem, row: ArchRow) -> str | None:
        p, spec = problem.forward, problem.spec.forward
        if reason := spec.refused_by(SUPPORTED):
            return reason
        if spec.dtype.itemsize != 2:
            return f"it takes bfloat16 and float16, not {spec.dtype}"
        return (
            refuse_dims(spec)
            or refuse_rows(p)
            or _refuse_elements(problem)
            or refuse_row_strides(**row_strides(p, *MATRICES), **row_strides(problem, *_GRADIENTS))
        )

    def tiles(self, spec: AttentionBwdSpec, row: ArchRow) -> tuple[BackwardTile, ...]:
        tiles = tiles_of(spec.forward)
        ordered, s = tuple([changed(t, in_order=True) for t in tiles]), spec.forward
        return (
            ordered
            if spec.deterministic or s.batch_invariant or has_mask_mod(s)
            else tiles + ordered
        )

    def tile(self, problem: AttentionBwdProblem, row: ArchRow, device: Device) -> BackwardTile:
        """In order also where any order is allowed and few keys are met: to set the sums to zero
        would take longer than to wait in order."""
        first, *others = self.tiles(problem.spec, row)
        few = others and sees_fewer(problem.forward, first.few_keys)
        return for_problem(problem, others[0] if few else first, device)

    def constants(self, spec: AttentionBwdSpec, tile: BackwardTile, row: ArchRow) -> Constants:
        s = spec.forward
        columns, value_columns = tile.columns(s)
        return {
            **spec_constants(s),
            "QK_COLUMNS": columns,
            "V_COLUMNS": value_columns,
            "STEP": tile.step,
            "IN_ORDER": tile.in_order,
            "STAGGERED": False,
        }

    def shared_bytes(self, spec: AttentionBwdSpec, tile: BackwardTile) -> int:
        return 0

    def values(
        self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device
    ) -> dict[str, int | float]:
        p, count = problem.forward, tile_count(problem, tile)
        known: dict[str, int | float] = {
            **walk_values(p, "out", "lse"),
            **walk_values(problem, *_GRADIENTS),
            "S_q": p.S_q,
            "S_k": p.S_k,
            **count,
            **score_values(p),
            **self.own_values(problem, tile),
            "scale": p.scale,
        }
        scalars = self.signature(problem.spec).scalars
        wanted = (n for n, kind, _ in scalars if kind not in _ADDRESSES)
        return {n: known[n] for n in wanted}

    def own_values(self, problem: AttentionBwdProblem, tile: Any) -> dict[str, int | float]:
        """What the kernel is given besides."""
        return {}

    def work(self, problem: Any, tile: BackwardTile, device: Device) -> Work:
        return row_work(problem, tile, self.row_bytes(problem.spec, tile))

    def row_bytes(self, spec: AttentionBwdSpec, tile: BackwardTile) -> int:
        """Bytes that a row of queries moves."""
        raise NotImplementedError

    def launches(
        self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device
    ) -> Launches:
        """The kernel that multiplies has those of all three."""
        raise NotImplementedError


_ADDRESSES = ("pointer", "tensor_map")


class RowValues(HopperBackwardKernel):
    """A block 64 rows of queries: their values; their sums set to zero."""

    entry = "attention_backward_rows_sm90"
    source = "sm90/attention/backward/row_values.h"
    _signature = Signature(
        (
            ("out", matrices("out")),
            ("dout", matrices("dout")),
            ("lse", row_values("lse")),
            *((p, "pointer") for p in WORKSPACE),
            ("sequences", SEQUENCES),
            ("blocks", BLOCKS),
            ("left", "i32"),
            ("right", "i32"),
        )
    )

    def signature(self, spec: AttentionBwdSpec) -> Signature:
        return self._signature

    def grid(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> int:
        p = problem.forward
        return p.batch * p.num_heads * divide_up(p.S_q, tile.step) * tile.step // _ROWS

    def threads(self, tile: BackwardTile, row: ArchRow) -> int:
        return 256

    def row_bytes(self, spec: AttentionBwdSpec, tile: BackwardTile) -> int:
        s = spec.forward
        columns, _ = tile.columns(s)
        return 4 * s.value_dim + (0 if tile.in_order else 4 * columns) + 12


class QueryGradient(HopperBackwardKernel):
    """A block 64 rows of queries."""

    entry = "attention_backward_dq_sm90"
    source = "sm90/attention/backward/query_gradient.h"
    _signature = Signature(
        (
            ("sums", "pointer"),
            ("dq", matrices("dq")),
            ("sequences", SEQUENCES),
            ("blocks", BLOCKS),
            ("scale", "f32"),
        )
    )

    def signature(self, spec: AttentionBwdSpec) -> Signature:
        return self._signature

    def grid(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> int:
        p = problem.forward
        return p.batch * p.num_heads * divide_up(p.S_q, _ROWS)

    def threads(self, tile: BackwardTile, row: ArchRow) -> int:
        return 128

    def row_bytes(self, spec: AttentionBwdSpec, tile: BackwardTile) -> int:
        s = spec.forward
        return 4 * tile.columns(s)[0] + 2 * s.head_dim


class PartSums(HopperBackwardKernel):
    """A thread 16 bytes of a row of keys' or values' gradients, of all parts of a group's heads."""

    entry = "attention_backward_part_sums_sm90"
    source = "sm90/attention/backward/part_sums.h"
    _signature = Signature(
        (
            ("dk_parts", "pointer"),
            ("dv_parts", "pointer"),
            ("dk", matrices("dk")),
            ("dv", matrices("dv")),
            *((n, "i32") for n in ("batch", "kv_heads", "head_parts", "S_k")),
        )
    )

    def signature(self, spec: AttentionBwdSpec) -> Signature:
        return self._signature

    def grid(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> int:
        p, spec = problem.forward, problem.spec.forward
        chunks = (spec.head_dim + spec.value_dim) // 8
        return divide_up(p.batch * p.kv_heads * p.S_k * chunks, _SUM_THREADS)

    def threads(self, tile: BackwardTile, row: ArchRow) -> int:
        return _SUM_THREADS

    def work(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> Work:
        p, spec = problem.forward, problem.spec.forward
        row = (spec.head_dim + spec.value_dim) * spec.dtype.itemsize * (tile.head_parts + 1)
        return Work(p.batch * p.kv_heads * p.S_k * row)


ROW_VALUES, QUERY_GRADIENT, PART_SUMS = RowValues(), QueryGradient(), PartSums()


def row_extents(p: AttentionProblem) -> tuple[int, int, int]:
    """Rows of queries and of keys of a head, and entries, as tensor maps have them: packed rows are
    of one."""
    if p.spec.q_view == "packed":
        return p.total_q, p.total_k, 1
    return p.S_q, p.S_k, p.batch


def row_map(
    operand: str,
    dtype: DType,
    extents: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    box: int,
) -> TensorMap:
    """Of axes column, row, head, entry, in boxes of a panel of so many rows; ``strides`` of entry,
    head, row."""
    return TensorMap(
        operand,
        dtype,
        extents,
        (1, *reversed(strides)),
        (PANEL, box, 1, 1),
        swizzle=128,
        l2_promotion=promotion(extents[0] * dtype.itemsize),
    )


def element_bytes(spec: AttentionSpec) -> int:
    """Of a bias and a mask in memory, that each pair of a query and a key has."""
    return (spec.bias.itemsize if spec.bias else 0) + spec.mask


def _refuse_elements(problem: AttentionBwdProblem) -> str | None:
    """Why it takes no such scores and masks by element, or None."""
    p, spec = problem.forward, problem.spec.forward
    if not by_pair(spec):
        return None
    if has_mask_mod(spec):
        if spec.bias or spec.mask:
            return "a mask_mod beside a bias or a mask in memory"
        if mask_axes(p)[1]:
            return "a mask_mod that tells heads apart"
        if max(p.S_q // _ROWS, p.S_k // _ROWS) >= _MOST_LISTED:
            return (
                f"S_q = {p.S_q}, S_k = {p.S_k} under a mask_mod: lists hold {_MOST_LISTED} blocks"
            )
    if problem.spec.score_gradient:
        return "the gradient by what a score_mod returns"
    if problem.spec.bias_gradient and spec.prefix and spec.window:
        return "the gradient of a bias under a prefix beside a window"
    if not tiles_of(spec):
        return f"scores or masks by element of head dims {spec.dims}: it takes up to {_ELEMENT_MAX}"
    return refuse_far_scores(p)


def tiles_of(spec: AttentionSpec) -> tuple[BackwardTile, ...]:
    """Those of the narrowest width that holds the head dims; by element also what each pair of a
    query and a key has."""
    if by_pair(spec):
        fits = (
            t.beside(element_bytes(spec))
            for t in ATTENTION_BWD
            if isinstance(t, HopperBackwardTile)
            and max(spec.head_dim, spec.value_dim) <= t.head_dim
        )
        return next(((t,) for t in fits if t), ())
    width = next(w for w in WIDTHS if spec.head_dim <= w[0] and spec.value_dim <= w[1])
    return tuple(t for t in ATTENTION_BWD if (t.head_dim, t.value_dim) == width)

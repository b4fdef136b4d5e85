"""The unfused attention: q·kᵀ as a GEMM, softmax.h over all rows, p·v as a GEMM. Three launches,
scores in memory."""

from __future__ import annotations

from kernelseam.contract import ArchRow, Composition, Device, Launch, Launches, Toolchain
from kernelseam.descriptors.attention.options import SpecOption
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.kernels.attention.row_kernels import RowTile
from kernelseam.kernels.attention.scores import SCORE_OPTIONS, refuse_scores
from kernelseam.kernels.attention.softmax import SOFTMAX, SoftmaxProblem, factor
from kernelseam.kernels.elements import INT32, divide_up
from kernelseam.kernels.gemm.gemm import GemmDefinition
from kernelseam.kernels.gemm.tile import GemmTile
from kernelseam.kernels.kernel import KernelImplementation

SUPPORTED = SCORE_OPTIONS | SpecOption.dtype_out | SpecOption.batch_invariant | SpecOption.precision
"""The options that it has beside views."""
PITCH = 8
"""Rows of scores and of probabilities begin at multiples of so many elements: of 16 bytes and
more."""
_GEMM = GemmDefinition()


@dataclass(frozen=True)
class UnfusedTile:
    """The tiles of its two products."""

    scores: GemmTile
    values: GemmTile


class Unfused(Composition):
    """One GEMM, one softmax and one GEMM for all heads of all entries of the batch.

    Scores are float32, [batch, head, query, key] in the workspace; probabilities, of q's dtype, lie
    behind them or, where that is float32 too, in their place. A hidden value has weight 0 in the
    second product, where 0·NaN and 0·inf are NaN: unlike with the fused kernel it must be finite.
    """

    operation = "attention"
    name = "gemm-softmax-gemm"

    def refuse(self, problem: AttentionProblem, row: ArchRow) -> str | None:
        p, spec = problem, problem.spec
        if spec.kv_view == "paged":
            return (
                "k and v are paged: it takes pages that lie end to end, as one matrix with one "
                "row stride; block "
                "tables and gapped pages are refused"
            )
        for name, view in (("q", spec.q_view), ("k and v", spec.kv_view)):
            if view != "strided":
                return f"{name} are {view}: it takes strided rows"
        if spec.lengths:
            return "kv_lengths: its products take as many keys for every entry of the batch"
        if reason := spec.refused_by(SUPPORTED):
            return reason
        if spec.dtype is DType.float64:
            return "it has no float64"
        if p.S_q + p.S_k >= 2**30:
            return f"S_q + S_k = {p.S_q + p.S_k}: it takes less than 2**30"
        if (rows := p.batch * p.num_heads * p.S_q) >= INT32:
            return f"it has {rows} rows of scores, not fewer than 2^31"
        if reason := refuse_scores(p):
            return reason
        for name, product in zip(("q·kᵀ", "p·v"), self._products(p), strict=True):
            if reason := _GEMM.refuse(product, row):
                return f"{name}: {reason}"
        return None

    def tile(self, problem: AttentionProblem, row: ArchRow, device: Device) -> UnfusedTile:
        scores, values = self._products(problem)
        if problem.spec.batch_invariant:  # the same whatever the extents
            return UnfusedTile(_GEMM.tiles(scores.spec, row)[0], _GEMM.tiles(values.spec, row)[0])
        return UnfusedTile(_GEMM.tile(scores, row, device), _GEMM.tile(values, row, device))

    def takes(
        self, problem: AttentionProblem, tile: UnfusedTile, row: ArchRow, device: Device
    ) -> bool:
        return all(
            _GEMM.takes(p, t, row, device)
            for p, t in zip(self._products(problem), (tile.scores, tile.values), strict=True)
        )

    def launches(self, problem: AttentionProblem, tile: UnfusedTile, device: Device) -> Launches:
        p, dtype = problem, problem.spec.dtype
        scores, values = self._products(p)
        elements = p.batch * p.num_heads * p.S_q * pitch(p)
        apart = dtype is not DType.float32
        at = divide_up(4 * elements, 256) * 256 if apart else 0
        return Launches(
            (
                Launch(_GEMM, scores, tile.scores, {"c": 0}, {"a": "q", "b": "k"}),
                Launch(
                    SOFTMAX, SoftmaxProblem(p, pitch(p)), RowTile(), {"products": 0, "weights": at}
                ),
                Launch(_GEMM, values, tile.values, {"a": at}, {"b": "v", "c": "out"}),
            ),
            at + elements * dtype.itemsize,
        )

    def _products(self, problem: AttentionProblem) -> tuple[GemmProblem, GemmProblem]:
        """q·kᵀ to float32, and p·v."""
        p, spec, f32 = problem, problem.spec, DType.float32
        row = pitch(p)
        between = (p.num_heads * p.S_q * row, p.S_q * row, row)
        out_vector = 16 if spec.vector >= 16 else spec.out.itemsize
        scores = GemmProblem(
            GemmSpec(
                spec.dtype,
                f32,
                f32,
                b_transposed=True,
                vector_a=spec.vector,
                vector_b=spec.vector,
                precision=spec.precision,
            ),
            p.S_q,
            p.S_k,
            spec.head_dim,
            p.batch,
            p.num_heads,
            p.q_strides,
            p.k_strides,
            between,
            max(p.head_group, 1),
        )
        values = GemmProblem(
            GemmSpec(
                spec.dtype,
                spec.out,
                f32,
                vector_b=spec.vector,
                vector_c=out_vector,
                precision=spec.precision,
            ),
            p.S_q,
            spec.value_dim,
            p.S_k,
            p.batch,
            p.num_heads,
            between,
            p.v_strides,
            p.out_strides,
            max(p.head_group, 1),
            1 / factor(spec.dtype),
        )
        return scores, values


def pitch(problem: AttentionProblem) -> int:
    """Elements from a row of scores to the next."""
    return divide_up(problem.S_k, PITCH) * PITCH


class UnfusedAttention(KernelImplementation):
    """The unfused attention on one vendor's toolchain. It promises less than the fused kernels, and
    is chosen only by name, tuned, or where they refuse."""

    last_resort = True

    def __init__(self, toolchain: Toolchain) -> None:
        super().__init__(Unfused(), toolchain)

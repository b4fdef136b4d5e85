"""Kernel definition of softmax.h: the second of three launches of an unfused attention."""

from __future__ import annotations

from kernelseam.contract import ArchRow, Device
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.kernels.attention.arguments import OPERANDS
from kernelseam.kernels.attention.row_kernels import RowTile, SmallKernel
from kernelseam.kernels.attention.scores import (
    SCORES,
    score_constants,
    score_values,
)
from kernelseam.kernels.config import Constants
from kernelseam.kernels.elements import DEVICE_TYPE, divide_up


def factor(dtype: DType) -> int:
    """What probabilities are multiplied with as they are rounded to a dtype. float16 would lose
    small ones among its subnormals: they are raised to the top of its range."""
    return 2**15 if dtype is DType.float16 else 1


@dataclass(frozen=True)
class SoftmaxProblem:
    """An attention's probabilities from its products q·kᵀ, both row-major [batch, head, query, key]
    with rows of ``pitch`` elements. Operands that are not in the workspace are the attention's
    own."""

    attention: AttentionProblem
    pitch: int

    @property
    def spec(self) -> AttentionSpec:
        return self.attention.spec

    @property
    def rows(self) -> int:
        return self.attention.batch * self.attention.num_heads * self.attention.S_q

    @property
    def operations(self) -> int:
        """Of each score: scaled, the maximum taken off, an exponential, added up."""
        return 4 * self.rows * self.attention.S_k

    @property
    def bytes_moved(self) -> int:
        """Scores read and probabilities written once; and what else changes scores."""
        p = self.attention
        size = self.rows * p.S_k * (4 + p.spec.dtype.itemsize) + (
            4 * self.rows if p.spec.lse else 0
        )
        return size + p.plane_bytes

    @property
    def compute_dtype(self) -> DType:
        return DType.float32


class Softmax(SmallKernel):
    """A warp a row."""

    entry, source = "softmax", "attention/softmax.h"
    pointer_names = ("products", "weights", "lse", "sinks")
    stride_names = ("lse_batch", "lse_head")
    int_names = ("num_heads", "S_q", "S_k", "pitch", "total")
    structures = (("score", SCORES),)
    operands = OPERANDS

    def constants(self, spec: AttentionSpec, tile: RowTile, row: ArchRow) -> Constants:
        return {
            **score_constants(spec),
            "T": DEVICE_TYPE[spec.dtype],
            "FACTOR": float(factor(spec.dtype)),
            "LSE": spec.lse,
            "WARPS": tile.warps,
        }

    def grid(self, problem: SoftmaxProblem, tile: RowTile, device: Device) -> int:
        return divide_up(problem.rows, tile.warps)

    def values(
        self, problem: SoftmaxProblem, tile: RowTile, device: Device
    ) -> dict[str, int | float]:
        p = problem.attention
        ints = (p.num_heads, p.S_q, p.S_k, problem.pitch, problem.rows)
        return {**self._values(p.lse_strides, ints), **score_values(p)}


SOFTMAX = Softmax()

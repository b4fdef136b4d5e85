"""Partial attentions to be merged, as data."""

from __future__ import annotations

from dataclasses import replace

from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.samples.common import SHORT, CommonCase
from kernelseam.samples.operand_layout import OperandLayout


@dataclass(frozen=True)
class MergeCase(CommonCase):
    """Partial attentions merged. Field names are the descriptor's; outs and out give the memory
    layouts."""

    name: str
    dtype: DType
    dtype_out: DType
    parts: int = 3
    batch: int = 2
    num_heads: int = 3
    rows: int = 17
    value_dim: int = 64
    lse: bool = True
    outs: OperandLayout = OperandLayout()
    out: OperandLayout = OperandLayout()
    part_gap: int = 0
    """Unused elements after every part's results, and after every head's row of an LSE."""
    data: str = "normal"
    """LSEs: "normal" N(0,4), "apart" (parts outweigh each other by up to e^200), "absent" (−inf for
    half of them, their results NaN), "nothing" (−inf for all), "nan" or "inf" (one of them)."""

    operation = "merge_states"


def case(kind: str, what: str = "", **fields: object) -> MergeCase:
    """``kind`` is DTYPE-DTYPE_OUT."""
    dtype, _, dtype_out = kind.partition("-")
    name = "merge-states-" + kind + ("-" + what if what else "")
    return replace(MergeCase(name, SHORT[dtype], SHORT[dtype_out]), **fields)  # type: ignore[arg-type]

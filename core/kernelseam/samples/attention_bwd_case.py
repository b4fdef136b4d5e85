"""The gradients of an attention as data."""

from __future__ import annotations

from dataclasses import fields, replace

from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.samples import attention_case
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.common import CommonCase
from kernelseam.samples.operand_layout import OperandLayout


@dataclass(frozen=True)
class BackwardCase(CommonCase):
    """The gradients of an attention. ``forward`` is the attention that was computed, with the
    layouts of q, k, v, out and lse."""

    name: str
    forward: AttentionCase
    dout: OperandLayout = OperandLayout()
    dq: OperandLayout = OperandLayout()
    dk: OperandLayout = OperandLayout()
    dv: OperandLayout = OperandLayout()
    packed: bool = False
    """dq, dk and dv are slices of one [B, S, H + 2·H_kv, D] array."""
    bias_gradient: bool = False
    dbias: OperandLayout = OperandLayout()
    """With the bias's own axes: extent 1 where it is broadcast."""
    sink_gradient: bool = False
    deterministic: bool = True

    operation = "attention_bwd"

    @property
    def dtype(self) -> DType:
        """The dtype of q, k, v, dout and their gradients."""
        return self.forward.dtype

    @property
    def batch(self) -> int:
        return self.forward.batch

    @property
    def num_heads(self) -> int:
        return self.forward.num_heads


FORWARD = {f.name for f in fields(AttentionCase)} - {f.name for f in fields(BackwardCase)}
"""Fields that only the forward has."""


def case(kind: str, what: str = "", **given: object) -> BackwardCase:
    """``kind`` is DTYPE-D[/D_v][-causal]; fields that the backward lacks are its forward's."""
    forward = attention_case.case(
        kind, what, **{"S_q": 40, "S_k": 70, **{n: x for n, x in given.items() if n in FORWARD}}
    )
    plain = BackwardCase(forward.name.replace("attention", "attention-bwd", 1), forward)
    return replace(plain, **{n: x for n, x in given.items() if n not in FORWARD})  # type: ignore[arg-type]

"""The gradients of an attention as a parity case."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

from kernelseam.dtypes import DType
from kernelseam.parity.cases import attention_case
from kernelseam.parity.cases.attention_case import AttentionCase
from kernelseam.parity.cases.common import Exemptions, Plant
from kernelseam.parity.cases.walk import Walk


@dataclass(frozen=True)
class BackwardCase:
    """The gradients of an attention. ``forward`` says what was computed and how its operands lie:
    q, k, v, out, lse."""

    name: str
    forward: AttentionCase
    dout: Walk = Walk()
    dq: Walk = Walk()
    dk: Walk = Walk()
    dv: Walk = Walk()
    packed: bool = False
    """dq, dk and dv are slices of one [B, S, H + 2·H_kv, D] array."""
    bias_gradient: bool = False
    dbias: Walk = Walk()
    """Of the bias's own axes: 1 long where it repeats."""
    sink_gradient: bool = False
    deterministic: bool = True
    plants: tuple[Plant, ...] = ()
    may_refuse: frozenset[str] = frozenset()
    group: str = ""

    operation = "attention_bwd"
    sample: ClassVar[int | None] = None
    exempt: ClassVar[Exemptions] = ()

    @property
    def dtype(self) -> DType:
        """That of q, k, v and all that lies as they do."""
        return self.forward.dtype

    @property
    def batch(self) -> int:
        return self.forward.batch

    @property
    def num_heads(self) -> int:
        return self.forward.num_heads


FORWARD = {f.name for f in fields(AttentionCase)} - {f.name for f in fields(BackwardCase)}
"""Fields that are the forward's alone."""


def case(kind: str, what: str = "", **given: object) -> BackwardCase:
    """``kind`` is DTYPE-D[/D_v][-causal]; the fields are the backward's own, and else its
    forward's."""
    forward = attention_case.case(
        kind, what, **{"S_q": 40, "S_k": 70, **{n: x for n, x in given.items() if n in FORWARD}}
    )
    found = BackwardCase(forward.name.replace("attention", "attention-bwd", 1), forward)
    return replace(found, **{n: x for n, x in given.items() if n not in FORWARD})  # type: ignore[arg-type]

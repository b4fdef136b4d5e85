"""Attention of float32 by way of TF32, and its gradients."""

from __future__ import annotations

from collections.abc import Iterator

from kernelseam.descriptors.common.precision import PRECISIONS
from kernelseam.dtypes import DType
from kernelseam.samples import attention_bwd_case, attention_case
from kernelseam.samples.attention_bwd_case import BackwardCase
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.common import INF, NAN, NAN_EXEMPTIONS, TOKENS, InjectedValue
from kernelseam.samples.operand_layout import OperandLayout

_REFUSES = frozenset({"shared"})
"""Where an arch has no TF32."""
_TIGHT = OperandLayout(aligned=False)


def precisions() -> Iterator[AttentionCase]:
    """The forward."""
    for precision in PRECISIONS:

        def one(kind: str, what: str = "", of: str = precision, **more: object) -> AttentionCase:
            given = {"precision": of, "may_refuse": _REFUSES, **more}
            return attention_case.case(kind, "-".join((of, what)) if what else of, **given)

        yield one("f32-64")
        yield one("f32-128-causal", S_q=129, batch=1)
        yield one("f32-16/80")
        yield one("f32-256", S_q=33, batch=1)
        yield one("f32-33/7-causal", "ragged", S_q=33, S_k=70, q=_TIGHT, k=_TIGHT, v=_TIGHT)
        yield one("f32-64-causal", "gqa-6-2", num_heads=6, batch=1)
        yield one("f32-64", "window-33-12", window=(33, 12), S_q=150, S_k=200, batch=1)
        yield one("f32-64", "extreme", data="extreme", batch=1)
        yield one("f32-64", "falling", data="falling", scale=1.0, batch=1)
        yield one("f32-64", "split", S_q=1, S_k=5000, batch=1, num_heads=4, kv_heads=1)
        yield one("f32-64", "holes", data="holes", batch=1)
        yield one(
            "f32-128",
            "everything",
            window=(50, 9),
            prefix=(0, 12),
            softcap=8.0,
            alibi=(0.5, 0.25),
            bias=DType.float32,
            mask="random",
            sinks=(0.0, 1.0),
        )
        yield one(
            "f32-64-causal",
            "sequences",
            q_sequences=(33, 7, 0, 40),
            k_sequences=(33, 20, 5, 40),
            batch=4,
            S_q=40,
            S_k=40,
            margin=5,
            q=TOKENS,
            k=TOKENS,
            v=TOKENS,
            out=TOKENS,
        )
        yield one(
            "f32-64", "pages", page_size=16, kv_lengths=(129, 0, 65), batch=3, k=TOKENS, v=TOKENS
        )
        yield one("f32-64", "pointers", view="host", scattered=True)
        for what, operand, value in (
            ("inf-in-k", "k", INF),
            ("minus-inf-in-v", "v", -INF),
            ("nan-in-q", "q", NAN),
        ):
            place = InjectedValue(operand, value, (0, 0, 60, 2))
            exempt = NAN_EXEMPTIONS if operand == "v" else ()  # the key is hidden from early rows
            yield one("f32-64-causal", what, S_q=129, batch=1, injected=(place,), exempt=exempt)


def precise_gradients() -> Iterator[BackwardCase]:
    """The gradients, in order and in any."""
    for precision in PRECISIONS:
        for free in (False, True):

            def one(
                kind: str,
                what: str = "",
                of: str = precision,
                any_order: bool = free,
                **more: object,
            ) -> BackwardCase:
                given = {"precision": of, "may_refuse": _REFUSES, "deterministic": not any_order}
                parts = (of, *(("any-order",) if any_order else ()), *((what,) if what else ()))
                return attention_bwd_case.case(kind, "-".join(parts), **{**given, **more})

            yield one("f32-64")
            yield one("f32-128-causal", S_q=129, S_k=129, batch=1)
            yield one("f32-33/7-causal", "ragged", S_q=33)
            yield one(
                "f32-64",
                "everything",
                window=(50, 9),
                softcap=8.0,
                alibi=(0.5, 0.25),
                mask="random",
                sinks=(0.0, 1.0),
                sink_gradient=True,
                kv_lengths=(70, 33),
            )
        yield attention_bwd_case.case(
            "f32-192/256", precision, precision=precision, may_refuse=_REFUSES, batch=1
        )

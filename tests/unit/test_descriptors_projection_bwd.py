"""The descriptors of the projections' gradients: what they make of a problem, and every refusal,
word for word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernelseam import OutputProjectionBwd, QkvProjectionBwd, plan
from kernelseam.descriptors import OutputProjectionBwdProblem, QkvProjectionBwdProblem
from kernelseam.dtypes import DType
from projection_fields import ALL, OUT_ALL
from projection_fields import OUT as FORWARD_OUT
from projection_fields import QKV as FORWARD_QKV
from refusals import Refused

F16, F32 = DType.float16, DType.float32
QKV, OUT = FORWARD_QKV | ALL, FORWARD_OUT | OUT_ALL
NONE: dict[str, Any] = {"d_input": None, "d_weight": None, "d_bias": None}


def qkv(**more: Any) -> QkvProjectionBwdProblem:
    found = QkvProjectionBwd(**{**QKV, **more}).problem()
    assert isinstance(found, QkvProjectionBwdProblem)
    return found


def output(**more: Any) -> OutputProjectionBwdProblem:
    found = OutputProjectionBwd(**{**OUT, **more}).problem()
    assert isinstance(found, OutputProjectionBwdProblem)
    return found


def shapes(problem: Any) -> dict[str, tuple[int, ...]]:
    return {r.name: r.shape for r in problem.operands}


def zeros(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


def test_gradients_have_the_layout_of_their_operands() -> None:
    p = qkv()
    assert p.dq_strides == (160, 40, 8) and p.dk_strides == p.dv_strides == (80, 40, 8)
    assert (p.input_strides, p.d_input_strides, p.weight_stride, p.d_weight_stride) == (
        (120, 24),
        (120, 24),
        24,
        24,
    )
    rows, weight = (2, 1, 5, 24), (1, 1, 64, 24)
    assert shapes(p) == {
        "dq": (2, 4, 5, 8),
        "dk": (2, 2, 5, 8),
        "dv": (2, 2, 5, 8),
        "input": rows,
        "weight": weight,
        "d_input": rows,
        "d_weight": weight,
        "d_bias": (64,),
    }
    assert [r.name for r in p.operands if r.written] == ["d_input", "d_weight", "d_bias"]
    o = output()
    assert o.attn_out_strides == o.d_attn_out_strides == (160, 40, 8) and o.d_output_strides == (
        120,
        24,
    )
    assert shapes(o) == {
        "d_output": rows,
        "attn_out": (2, 4, 5, 8),
        "weight": (1, 1, 24, 32),
        "d_attn_out": (2, 4, 5, 8),
        "d_weight": (1, 1, 24, 32),
        "d_bias": (24,),
    }


def test_only_requested_gradients_are_computed_and_their_operands_read() -> None:
    """Its operand may be given or not: its rule walks over nothing."""
    spans = {r.name: r.span for r in qkv(d_input=None).operands}
    assert spans["weight"] == 0 < spans["input"] and "d_input" not in spans
    spans = {r.name: r.span for r in qkv(d_weight=None, d_bias=None).operands}
    assert (
        spans["input"] == 0 < spans["weight"] and "d_weight" not in spans and "d_bias" not in spans
    )
    spans = {r.name: r.span for r in output(d_weight=None).operands}
    assert spans["attn_out"] == 0 < spans["weight"]
    x = {
        "dq": zeros(1, 2, 3, 4),
        "dk": zeros(1, 1, 3, 4),
        "dv": zeros(1, 1, 3, 4),
        "d_bias": zeros(16),
    }
    d = QkvProjectionBwd(batch=1, S=3, hidden=5, num_heads=2, kv_heads=1, head_dim=4, **x)
    x["dq"][:], x["dv"][0, 0, :, 1] = 1, [1, 2, 4]
    plan(d).bind()()
    assert x["d_bias"].tolist() == [3.0] * 8 + [0.0] * 5 + [7.0] + [0.0] * 2
    assert d.problem() == d.without_arrays().problem()


def test_heads_of_an_attention_s_result() -> None:
    token_major = {"stride_{}_batch": 160, "stride_{}_head": 8, "stride_{}_row": 32}

    def lie(*names: str) -> dict[str, int]:
        return {field.format(n): s for n in names for field, s in token_major.items()}

    both, one, other = (
        output(**lie("attn_out", "d_attn_out")),
        output(**lie("attn_out")),
        output(**lie("d_attn_out")),
    )
    assert (both.num_heads, both.head_dim, both.spec.apart, both.spec.d_apart) == (
        1,
        32,
        False,
        False,
    )
    assert (one.num_heads, one.spec.apart, one.spec.d_apart) == (4, False, True)
    assert (other.num_heads, other.spec.apart, other.spec.d_apart) == (4, True, False)
    alone = output(d_attn_out=None, **lie("attn_out"))
    assert (alone.num_heads, alone.spec.d_apart) == (1, False)


def test_element_types_and_accesses() -> None:
    assert qkv().spec.d_bias is F16 and qkv(dtype_bias="float32").spec.d_bias is F32
    assert qkv(d_bias=zeros(64)).spec.d_bias is F32 and qkv(d_bias=None).spec.d_bias is None
    assert (
        qkv(stride_dk_row=12).spec.vector_dqkv == 2
        and qkv(d_input=(1 << 20) + 2).spec.vector_d_input == 2
    )
    s = output(d_output=(1 << 20) + 8, stride_weight_row=33).spec
    assert (s.vector_d_output, s.vector_weight, s.vector_d_weight) == (2, 2, 16)


def test_operations_and_bytes() -> None:
    p = qkv()
    assert (
        p.operations == 2 * 2 * 10 * 64 * 24 and qkv(d_weight=None).operations == 2 * 10 * 64 * 24
    )
    assert p.bytes_moved == 2 * (10 * 64 + 2 * (10 + 64) * 24)
    assert str(p) == (
        "qkv_projection_bwd float16 d_input d_weight d_bias batch=2 S=5 hidden=24 heads=4/2 dim=8"
    )
    o = output(d_bias=None)
    assert o.operations == 2 * 2 * 10 * 32 * 24 and o.bytes_moved == 2 * (
        10 * 24 + 2 * (10 + 24) * 32
    )
    assert str(o) == (
        "output_projection_bwd float16 d_weight d_attn_out heads apart batch=2 S=5 heads=4 dim=8 "
        "hidden=24"
    )


def test_from_arrays() -> None:
    dq, dk = zeros(2, 5, 4, 8), zeros(2, 5, 2, 8)
    given = {
        "input": zeros(2, 5, 24),
        "weight": zeros(64, 24),
        "d_input": zeros(2, 5, 24),
        "d_bias": zeros(64),
    }
    p = QkvProjectionBwd.from_arrays(dq, dk, dk, layout="bshd", **given).problem()
    swapped = QkvProjectionBwd.from_arrays(
        *(x.swapaxes(1, 2) for x in (dq, dk, dk)), **given
    ).problem()
    assert p == swapped and p.dq_strides == (160, 8, 32)
    rows = {n: x[0] for n, x in given.items() if x.ndim == 3}
    p = QkvProjectionBwd.from_arrays(
        dq[0], dk[0], dk[1], layout="bshd", **{**given, **rows}
    ).problem()
    assert (p.batch, p.S, p.hidden) == (1, 5, 24)
    alone = QkvProjectionBwd.from_arrays(dq, dk, dk, layout="bshd", d_bias=zeros(64)).problem()
    assert alone.hidden == 0 and not alone.spec.d_input
    d, w = zeros(2, 5, 24), zeros(24, 32)
    o = OutputProjectionBwd.from_arrays(
        d, attn_out=dq, weight=w, d_attn_out=dq.copy(), layout="bshd"
    ).problem()
    assert (o.num_heads, o.head_dim) == (1, 32)
    o = OutputProjectionBwd.from_arrays(
        d, attn_out=zeros(2, 4, 5, 8), weight=w, d_weight=w.copy()
    ).problem()
    assert (o.num_heads, o.head_dim, o.spec.apart) == (4, 8, True)
    assert (
        OutputProjectionBwd.from_arrays(d[0], attn_out=zeros(5, 32), d_weight=w).problem().batch
        == 1
    )
    assert OutputProjectionBwd.from_arrays(d, d_bias=zeros(24)).problem().head_dim == 0


@pytest.mark.parametrize(
    ("make", "more", "message"),
    [
        (
            qkv,
            NONE,
            (
                "d_input = None: one of d_input, d_weight and d_bias must be asked for. Give its "
                "array, or 0: it will be bound."
            ),
        ),
        (
            output,
            {"d_attn_out": None, "d_weight": None, "d_bias": None},
            (
                "d_attn_out = None: one of d_attn_out, d_weight and d_bias must be asked for. "
                "Give its array, or 0: it will be bound."
            ),
        ),
        (
            qkv,
            {"d_input": None, "stride_d_input_row": 24},
            "stride_d_input_row = 24: describes d_input. Give d_input too (0: it will be bound).",
        ),
    ],
)
def test_refusals(
    make: Callable[..., Any], more: dict[str, Any], message: str, refused: Refused
) -> None:
    refused(message, lambda: make(**more))


def test_arrays_that_do_not_fit(refused: Refused) -> None:
    dq, dk = zeros(2, 4, 5, 8), zeros(2, 2, 5, 8)
    refused(
        "dk = an array of shape [2, 5, 2, 8]: must be [B=2, H_kv, S=5, D=8]. Check the order of "
        "the axes of all arrays.",
        lambda: QkvProjectionBwd.from_arrays(dq, dk.swapaxes(1, 2), dk, d_bias=zeros(64)),
    )
    refused(
        "d_bias = an array of shape [32]: must be [columns=64]. Check the order of the axes of "
        "all arrays.",
        lambda: QkvProjectionBwd.from_arrays(dq, dk, dk, d_bias=zeros(32)),
    )
    refused(
        "weight = an array of shape [24, 24]: must be [hidden=24, columns=32]. Check the order of "
        "the axes of all arrays.",
        lambda: OutputProjectionBwd.from_arrays(
            zeros(2, 5, 24), weight=zeros(24, 24), d_attn_out=dq
        ),
    )

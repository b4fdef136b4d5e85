"""The projections' descriptors: what they make of a problem, and every refusal, word for word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernelseam import OutputProjection, QkvProjection, plan
from kernelseam.descriptors import OutputProjectionProblem, QkvProjectionProblem
from kernelseam.descriptors.gemm.problem import HeadsSpec
from kernelseam.dtypes import DType
from projection_fields import OUT, QKV
from refusals import Refused, refusals

F16, F32, F64 = DType.float16, DType.float32, DType.float64
ROTARY: dict[str, Any] = {"cos": 0, "sin": 0, "rotary_dim": 6, "max_position": 9}
PAGES: dict[str, Any] = {"block_table": 0, "pages": 7, "page_size": 4, "table_width": 3}


def qkv(**more: Any) -> QkvProjectionProblem:
    found = QkvProjection(**{**QKV, **more}).problem()
    assert isinstance(found, QkvProjectionProblem)
    return found


def output(**more: Any) -> OutputProjectionProblem:
    found = OutputProjection(**{**OUT, **more}).problem()
    assert isinstance(found, OutputProjectionProblem)
    return found


def rules(problem: Any) -> dict[str, Any]:
    return {r.name: r for r in problem.operands}


def zeros(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


# ---------------------------------------------------------------- what is derived


def test_strides_default_to_row_major() -> None:
    p = qkv()
    assert (p.input_strides, p.weight_stride) == ((120, 24), 24)
    assert p.heads.q_strides == (160, 40, 8) and p.heads.k_strides == p.heads.v_strides == (
        80,
        40,
        8,
    )
    assert {n: r.shape for n, r in rules(p).items()} == {
        "input": (2, 1, 5, 24),
        "weight": (1, 1, 64, 24),
        "q": (2, 4, 5, 8),
        "k": (2, 2, 5, 8),
        "v": (2, 2, 5, 8),
    }
    assert [n for n, r in rules(p).items() if r.written] == ["q", "k", "v"]
    assert qkv(kv_heads=None).heads.kv_heads == 4 and qkv(stride_k_row=16).heads.k_strides == (
        160,
        80,
        16,
    )
    o = output(bias=0, residual=0)
    assert (o.attn_out_strides, o.weight_stride) == ((160, 40, 8), 32)
    assert o.out_strides == o.residual_strides == (120, 24)
    assert [(n, r.shape, r.written, r.may_alias) for n, r in rules(o).items()] == [
        ("attn_out", (2, 4, 5, 8), False, ""),
        ("weight", (1, 1, 24, 32), False, ""),
        ("bias", (24,), False, ""),
        ("residual", (2, 1, 5, 24), False, "out"),
        ("out", (2, 1, 5, 24), True, ""),
    ]


def test_pages_take_the_heads_within_their_rows() -> None:
    p = qkv(**PAGES)
    assert p.heads.q_strides == (160, 40, 8) and p.heads.k_strides == p.heads.v_strides == (
        64,
        8,
        16,
    )
    assert (p.heads.page_size, p.heads.table_stride, p.pages, p.table_width) == (4, 3, 7, 3)
    assert p.spec.heads == HeadsSpec(paged=True)
    found = rules(p)
    assert found["k"].shape == (7, 2, 4, 8) and found["block_table"].shape == (2, 3)
    assert qkv(**PAGES, stride_v_head=32).heads.v_strides == (4 * 64, 32, 64)
    assert rules(qkv(**PAGES, S=0))["k"].span == 0


def test_rotation_and_positions() -> None:
    p = qkv(**ROTARY, first_position=4)
    assert p.spec.heads == HeadsSpec("halves") and (p.heads.rotary_dim, p.heads.first_position) == (
        6,
        4,
    )
    assert (p.heads.rotary_stride, p.max_position) == (3, 9)
    found = rules(p)
    assert found["cos"].shape == found["sin"].shape == (9, 3) and found["cos"].dtype is F32
    p = qkv(**ROTARY, rotary_style="pairs", positions=0, stride_cos_row=5, stride_positions_batch=0)
    assert p.spec.heads == HeadsSpec("pairs", True) and p.heads.rotary_stride == 5
    assert p.heads.positions_strides == (0, 1) and rules(p)["positions"].dtype is DType.int32
    assert rules(p)["sin"].strides == (5, 1)
    assert qkv().heads.positions_strides == (0, 0) and qkv().spec.heads == HeadsSpec()


def test_adjacent_heads_are_one() -> None:
    """Token-major rows, or no heads at all: the same problem."""
    apart = output()
    assert (apart.num_heads, apart.head_dim, apart.spec.apart) == (4, 8, True)
    together = output(stride_attn_out_batch=160, stride_attn_out_head=8, stride_attn_out_row=32)
    assert (together.num_heads, together.head_dim, together.spec.apart) == (1, 32, False)
    rows = output(num_heads=1, head_dim=32)
    assert (rows.num_heads, rows.head_dim, rows.attn_out_strides[2]) == (1, 32, 32)
    assert (
        rows.attn_out_strides[::2] == together.attn_out_strides[::2] and rows.spec == together.spec
    )
    # the heads of a single token can not but lie side by side
    assert not output(batch=1, S=1).spec.apart


def test_accesses_are_as_wide_as_all_rows_allow() -> None:
    assert (qkv().spec.vector_input, qkv().spec.vector_weight, qkv().spec.vector_out) == (
        16,
        16,
        16,
    )
    assert (
        qkv(stride_input_row=26).spec.vector_input == 2
        and qkv(weight=4 + (1 << 20)).spec.vector_weight == 2
    )
    for more in ({"stride_q_row": 12}, {"v": (1 << 20) + 8}, {"head_dim": 6}):
        p = qkv(**more)
        assert p.spec.vector_out == 2 and {rules(p)[n].alignment for n in "qkv"} == {2}
    assert (
        qkv(dtype_out="float32").spec.vector_out == 16
        and qkv(dtype_out="float32", head_dim=6).spec.vector_out == 4
    )
    o = output(residual=(1 << 20) + 2, dtype_residual="float16")
    assert (o.spec.vector_residual, o.spec.vector_out) == (2, 16) and rules(o)[
        "residual"
    ].alignment == 2


def test_element_types() -> None:
    p = qkv(bias=0)
    assert (p.spec.bias, p.spec.dtype_out) == (F16, F16)
    p = qkv(bias=zeros(64), q=zeros(2, 4, 5, 8), dtype_out=None)
    assert (p.spec.bias, p.spec.dtype_out) == (F32, F32)
    assert qkv(dtype="float64", bias=0, dtype_bias="float32").spec.bias is F32
    o = output(bias=0, residual=zeros(2, 5, 24), dtype_out="float32", dtype_bias="bfloat16")
    assert (o.spec.bias, o.spec.residual, o.spec.dtype_out) == (DType.bfloat16, F32, F32)


def test_operations_and_bytes() -> None:
    p = qkv()
    assert p.operations == 2 * 10 * 24 * 64 and p.bytes_moved == 2 * (10 * 24 + 64 * 24 + 10 * 64)
    assert str(p) == "qkv_projection float16→float16 batch=2 S=5 hidden=24 heads=4/2 dim=8"
    p = qkv(bias=0, **ROTARY, **PAGES, positions=0)
    assert str(p.spec) == "qkv_projection float16→float16 bias rotary=halves positions paged"
    o = output(residual=0, dtype_residual="float32")
    assert o.operations == 2 * 10 * 32 * 24 and o.bytes_moved == 2 * (
        10 * 32 + 24 * 32
    ) + 10 * 24 * (2 + 4)
    assert str(o) == (
        "output_projection float16→float16 residual heads apart batch=2 S=5 heads=4 dim=8 hidden=24"
    )


def test_they_keep_no_array() -> None:
    x = {"input": zeros(2, 5, 24), "weight": zeros(64, 24), "bias": zeros(64)}
    d = QkvProjection(**{**QKV, "dtype": None}, **x, q=zeros(2, 4, 5, 8))
    assert (
        list(d.operands()) == ["input", "weight", "bias", "q"] and str(d.device) == "numpy:0 (cpu)"
    )
    bare = d.without_arrays()
    assert (
        bare.device is None
        and bare.problem() == d.problem()
        and bare.operands() == {n: i.pointer for n, i in d._arrays.items()}
    )
    o = OutputProjection(
        **{**OUT, "dtype": None}, attn_out=zeros(2, 4, 5, 8), residual=zeros(2, 5, 24)
    )
    bare_output = o.without_arrays()
    assert bare_output.problem() == o.problem() and bare_output.simplified() == (bare_output, "")


def test_from_arrays() -> None:
    """As they lie in memory: transposed views, one entry without its axis, pages with the head
    first."""
    x, weight = zeros(2, 5, 24), zeros(64, 24)
    q, k = zeros(2, 5, 4, 8), zeros(2, 5, 2, 8)
    p = QkvProjection.from_arrays(x, weight, q, k, k.copy(), layout="bshd").problem()
    same = QkvProjection.from_arrays(
        x, weight, *(a.swapaxes(1, 2) for a in (q, k, k.copy()))
    ).problem()
    assert p == same and p.heads.q_strides == (160, 8, 32) and p.heads.k_strides == (80, 8, 16)
    tables = {
        "cos": zeros(9, 8)[:, :3],
        "sin": zeros(9, 8)[:, 3:6],
        "rotary_style": "pairs",
        "first_position": 2,
    }
    p = QkvProjection.from_arrays(
        x[0], weight, q[0], k[0], k[1], layout="bshd", bias=zeros(64), **tables
    ).problem()
    assert (p.batch, p.heads.tokens, p.heads.rotary_dim, p.heads.rotary_stride) == (1, 5, 6, 8)
    pages = zeros(7, 2, 4, 8)
    p = QkvProjection.from_arrays(
        x,
        weight,
        q,
        pages,
        pages.copy(),
        layout="bshd",
        kv_layout="hnd",
        block_table=zeros(2, 9, dtype=np.int32)[:, :3],
        positions=zeros(2, 5, dtype=np.int32),
    ).problem()
    assert p.heads.k_strides == (64, 32, 8) and (
        p.pages,
        p.heads.page_size,
        p.heads.table_stride,
    ) == (7, 4, 9)
    out, w = zeros(2, 5, 24), zeros(24, 32)
    by_heads = OutputProjection.from_arrays(q, w, out, layout="bshd", residual=out.copy()).problem()
    assert (
        by_heads
        == OutputProjection.from_arrays(q.reshape(2, 5, 32), w, out, residual=out.copy()).problem()
    )
    assert OutputProjection.from_arrays(q[0].reshape(5, 32), w, out[0]).problem().batch == 1
    assert OutputProjection.from_arrays(zeros(2, 4, 5, 8), w, out).problem().spec.apart


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("more", "message"),
    refusals("projection", "qkv", globals()),
)
def test_qkv_refusals(more: dict[str, Any], message: str, refused: Refused) -> None:
    refused(message, lambda: qkv(**more))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"residual": zeros(2, 5, 24, dtype=np.float64)},
            (
                "residual = an array of float64: must be no wider than float32, "
                "in which products of float16 are summed. Convert it, or widen what is multiplied."
            ),
        ),
        (
            {"num_heads": 1 << 20, "head_dim": 1 << 20},
            (
                "num_heads·head_dim = 1099511627776: must be from 0 to 2**31 - 1. Give a count in "
                "that range."
            ),
        ),
    ],
)
def test_output_refusals(more: dict[str, Any], message: str, refused: Refused) -> None:
    refused(message, lambda: output(**more))


def test_arrays_that_do_not_fit(refused: Refused) -> None:
    x, weight, q, k = zeros(2, 5, 24), zeros(64, 24), zeros(2, 4, 5, 8), zeros(2, 2, 5, 8)

    def made(*arrays: Any, **more: Any) -> Callable[[], object]:
        return lambda: QkvProjection.from_arrays(*arrays, **more)

    refused(
        "layout = sbhd: must be one of bhsd, bshd. Name the order of the axes.",
        made(x, weight, q, k, k, layout="sbhd"),
    )
    refused(
        "kv_layout = 1: must be one of nhd, hnd. Name the order of the axes.",
        made(x, weight, q, k, k, kv_layout=1),
    )
    refused(
        "q = an array of shape [2, 5, 4, 8]: must be [B=2, H, S=5, D]. Check the order of the "
        "axes of all arrays.",
        made(x, weight, q.swapaxes(1, 2), k, k),
    )
    refused(
        "v = an array of shape [2, 4, 5, 8]: must be [B=2, H_kv=2, S=5, D=8]. Check the order of "
        "the axes of all arrays.",
        made(x, weight, q, k, q),
    )
    refused(
        "weight = an array of shape [24, 64]: must be [columns=64, hidden=24]. Check the order of "
        "the axes of all arrays.",
        made(x, weight.T, q, k, k),
    )
    cos, sin = zeros(9, 3), zeros(9, 8)[:, :3]
    refused(
        "sin = rows 8 elements apart: those of cos are 3 elements apart. Let them be alike.",
        made(x, weight, q, k, k, cos=cos, sin=sin),
    )
    refused(
        "sin = an array of shape [9, 2]: must be [max_position=9, rotary_dim/2=3]. Check the "
        "order of the axes of all arrays.",
        made(x, weight, q, k, k, cos=cos, sin=cos[:, :2]),
    )
    refused(
        "positions = an array of float32: must be int32. Convert the array.",
        made(x, weight, q, k, k.copy(), cos=cos, sin=cos, positions=zeros(2, 5)),
    )
    refused(
        "out = an array of shape [2, 24, 5]: must be [B=2, S=5, hidden=24]. Check the order of "
        "the axes of all arrays.",
        lambda: OutputProjection.from_arrays(q, zeros(24, 32), zeros(2, 24, 5)),
    )


def test_what_positions_and_tables_name_is_held_against_memory(refused: Refused) -> None:
    x, weight, q, pages = zeros(2, 5, 24), zeros(64, 24), zeros(2, 4, 5, 8), zeros(7, 4, 2, 8)
    table = np.array([[6, 0, 1], [2, -1, 3]], np.int32)
    positions = np.tile(np.arange(5, dtype=np.int32), (2, 1))

    def bound(**more: Any) -> Callable[[], object]:
        given = {"block_table": table, "positions": positions, **more}
        arrays = QkvProjection.from_arrays(x, weight, q, pages, pages.copy(), **given)
        return lambda: plan(arrays).bind()

    refused(
        "block_table[1, 1] = -1: must be a page, from 0 to 6. Name a page for position 4.", bound()
    )
    table[1, 1] = 7
    refused(
        "block_table[1, 1] = 7: must be a page, from 0 to 6. Name a page for position 4.", bound()
    )
    positions[1] = [0, 3, 8, 9, 11]
    bound()()
    positions[0, 2] = 12
    refused(
        "positions[0, 2] = 12: must be a position, from 0 to 11: table_width·page_size is 12. "
        "Correct it, or give longer tables.",
        bound(),
    )
    positions[0, 2] = 10
    refused(
        "positions[0, 2] = 10: must be a position, from 0 to 9: max_position is 10. Correct it, "
        "or give longer tables.",
        bound(cos=zeros(10, 3), sin=zeros(10, 3)),
    )
    positions[0, 2] = -1
    refused(
        "positions[0, 2] = -1: must be a position, from 0 to 9: max_position is 10. Correct it, "
        "or give longer tables.",
        bound(cos=zeros(10, 3), sin=zeros(10, 3)),
    )

"""Arrays whose strides are left out have the operand's axes: merged, split or with axes of extent
1, never in another order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelseam.contract import ArrayInfo, OperandRule
from kernelseam.descriptors.common.operands import has_axes
from kernelseam.descriptors.common.validation import packed
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from refusals import Refused

B, H, G, S, T, D, DV = 2, 6, 3, 5, 7, 4, 8  # batch, heads, KV heads, queries, keys, dims
HEADS = {"batch": B, "num_heads": H, "kv_heads": G}
EXTENTS: dict[str, Any] = {**HEADS, "S_q": S, "S_k": T, "head_dim": D, "value_dim": DV}


def zeros(shape: tuple[int, ...], kind: str = "f4") -> Any:
    return np.zeros(shape, kind)


def attention(**arrays: Any) -> ks.Attention:
    return ks.Attention(**EXTENTS, dtype="float32", **arrays)


def packed_attention(**arrays: Any) -> ks.Attention:
    offsets = np.array([0, 3, 9], np.int32)
    return ks.Attention(
        **EXTENTS,
        total_q=9,
        total_k=9,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        dtype="float32",
        **arrays,
    )


def paged_attention(**arrays: Any) -> ks.Attention:
    return ks.Attention(
        **EXTENTS,
        pages=4,
        page_size=5,
        table_width=3,
        kv_lengths=np.zeros(B, np.int32),
        dtype="float32",
        **{"block_table": 0, **arrays},
    )


def listed_attention(**arrays: Any) -> ks.AttentionPointers:
    def listed(n: int, rows: int, width: int) -> list[Any]:
        return [zeros((rows, width)) for _ in range(n)]

    return ks.AttentionPointers(
        **EXTENTS,
        q_ptrs=listed(B * H, S, D),
        k_ptrs=listed(B * G, T, D),
        v_ptrs=listed(B * G, T, DV),
        out_ptrs=listed(B * H, S, DV),
        **arrays,
    )


def gradients(**arrays: Any) -> ks.AttentionBwd:
    forward = attention(bias=0, return_lse=True)
    return ks.AttentionBwd(forward=forward, **arrays)


def merge(**arrays: Any) -> ks.MergeStates:
    return ks.MergeStates(
        parts=3, batch=B, num_heads=H, rows=S, value_dim=D, dtype="float32", **arrays
    )


def product(**arrays: Any) -> ks.BatchedGemmStrided:
    return ks.BatchedGemmStrided(M=S, N=T, K=D, batch=B, num_heads=H, dtype="float32", **arrays)


def scaled_product(**arrays: Any) -> ks.BatchedGemmStrided:
    scales = {"a_scales": 0, "b_scales": 0, **arrays}
    return ks.BatchedGemmStrided(
        M=S, N=T, K=8, batch=B, num_heads=H, dtype="float8_e4m3fn", scale_block=(1, 1, 4), **scales
    )


def qkv(**arrays: Any) -> ks.QkvProjection:
    return ks.QkvProjection(
        batch=B, S=S, hidden=9, num_heads=H, kv_heads=G, head_dim=D, dtype="float32", **arrays
    )


def turned_qkv(**arrays: Any) -> ks.QkvProjection:
    return qkv(rotary_dim=D, max_position=7, **{"cos": 0, "sin": 0, "positions": 0, **arrays})


def output(**arrays: Any) -> ks.OutputProjection:
    return ks.OutputProjection(
        batch=B, S=S, hidden=9, num_heads=H, head_dim=D, dtype="float32", **arrays
    )


def qkv_bwd(**arrays: Any) -> ks.QkvProjectionBwd:
    wanted = {"d_input": 0, "d_weight": 0, **arrays}
    return ks.QkvProjectionBwd(
        batch=B, S=S, hidden=9, num_heads=H, kv_heads=G, head_dim=D, dtype="float32", **wanted
    )


def output_bwd(**arrays: Any) -> ks.OutputProjectionBwd:
    wanted = {"d_attn_out": 0, "d_weight": 0, **arrays}
    return ks.OutputProjectionBwd(
        batch=B, S=S, hidden=9, num_heads=H, head_dim=D, dtype="float32", **wanted
    )


OPERANDS: dict[Callable[..., Any], dict[str, tuple[int, ...]]] = {
    attention: {
        "q": (B, H, S, D),
        "k": (B, G, T, D),
        "v": (B, G, T, DV),
        "out": (B, H, S, DV),
        "lse": (B, H, S),
        "bias": (B, H, S, T),
        "mask": (B, H, S, T),
        "alibi_slopes": (B, H),
    },
    packed_attention: {
        "q": (9, H, D),
        "k": (9, G, D),
        "v": (9, G, DV),
        "out": (9, H, DV),
        "lse": (H, 9),
    },
    paged_attention: {"k": (4, 5, G, D), "v": (4, 5, G, DV), "block_table": (B, 3)},
    listed_attention: {"lse": (B, H, S), "bias": (B, H, S, T), "mask": (B, H, S, T)},
    gradients: {
        "dout": (B, H, S, DV),
        "dq": (B, H, S, D),
        "dk": (B, G, T, D),
        "dv": (B, G, T, DV),
        "dbias": (B, H, S, T),
    },
    merge: {"outs": (3, B, H, S, D), "lses": (3, B, H, S), "out": (B, H, S, D), "lse": (B, H, S)},
    product: {
        "A": (B, H, S, D),
        "B": (B, H, D, T),
        "C": (B, H, S, T),
        "bias": (B, H, T),
        "residual": (B, H, S, T),
    },
    scaled_product: {"a_scales": (B, H, S, 2), "b_scales": (B, H, T, 2)},
    qkv: {
        "input": (B, S, 9),
        "weight": ((H + 2 * G) * D, 9),
        "q": (B, H, S, D),
        "k": (B, G, S, D),
        "v": (B, G, S, D),
    },
    turned_qkv: {"cos": (7, 2), "sin": (7, 2), "positions": (B, S)},
    output: {
        "attn_out": (B, H, S, D),
        "weight": (9, H * D),
        "residual": (B, S, 9),
        "out": (B, S, 9),
    },
    qkv_bwd: {
        "dq": (B, H, S, D),
        "dk": (B, G, S, D),
        "dv": (B, G, S, D),
        "input": (B, S, 9),
        "weight": ((H + 2 * G) * D, 9),
        "d_input": (B, S, 9),
        "d_weight": ((H + 2 * G) * D, 9),
    },
    output_bwd: {
        "d_output": (B, S, 9),
        "attn_out": (B, H, S, D),
        "weight": (9, H * D),
        "d_attn_out": (B, H, S, D),
        "d_weight": (9, H * D),
    },
}
HOST_DEVICE = ks.devices()[-1]
KINDS = {"mask": "?", "block_table": "i4", "positions": "i4"}
BOUND_LATER = (attention, gradients, merge, product, qkv, output, qkv_bwd, output_bwd)


def cases() -> list[Any]:
    return [
        pytest.param(make, name, shape, id=f"{make.__name__}-{name}")
        for make, operands in OPERANDS.items()
        for name, shape in operands.items()
    ]


def exchanged(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The shape with an axis and the next in each other's place."""
    return (*shape[:axis], shape[axis + 1], shape[axis], *shape[axis + 2 :])


@pytest.mark.parametrize(("make", "name", "shape"), cases())
def test_the_shape_is_the_operands(
    make: Callable[..., Any], name: str, shape: tuple[int, ...]
) -> None:
    kind = KINDS.get(name, "f4")
    for same in (
        shape,
        (1, *shape),
        (*shape[:-1], 1, shape[-1]),
        (shape[0] * shape[1], *shape[2:]),
        (math.prod(shape),),
        tuple(n for n in shape if n > 1),
    ):
        assert (
            make(**{name: zeros(same, kind)}).problem()
            == make(**{name: zeros(shape, kind)}).problem()
        )
    for axis in range(len(shape) - 1):
        other = exchanged(shape, axis)
        with pytest.raises(InvalidValue) as e:
            make(**{name: zeros(other, kind)})
        assert e.value.field == name
        assert f"an array of shape {list(other)}: must be [" in str(e.value)
        assert "where no strides are given. Check the order of the axes" in str(e.value)
    longer = (shape[0] + 1, *shape[1:])
    with pytest.raises(InvalidValue, match=f"{name} = an array of shape"):
        make(**{name: zeros(longer, kind)})


def test_the_message(refused: Refused) -> None:
    rest = "Check the order of the axes, or give all strides."
    refused(
        "q = an array of shape [2, 5, 6, 4]: must be [2, 6, 5, 4] where no strides are given. "
        f"{rest}",
        lambda: attention(q=zeros((B, S, H, D))),
    )
    refused(
        f"q = an array of shape [6, 9, 4]: must be [9, 6, 4] where no strides are given. {rest}",
        lambda: packed_attention(q=zeros((H, 9, D))),
    )
    refused(
        "A = an array of shape [4, 5, 3] with strides [15, 3, 1]: its axes are not [1, 4, 2, 3] "
        f"with strides [36, 9, 6, 1], those left out packed. {rest}",
        lambda: ks.BatchedGemmStrided(
            M=2, N=2, K=3, num_heads=4, A=zeros((4, 5, 3)), stride_a_row=6, stride_a_head=9
        ),
    )


@pytest.mark.parametrize("make", BOUND_LATER)
def test_arrays_that_bind_gives(make: Callable[..., Any]) -> None:
    operands = OPERANDS[make]
    descriptor = make(**dict.fromkeys(operands, 0))
    for name, shape in operands.items():
        with pytest.raises(InvalidValue, match=f"{name} = an array of shape .* where no strides"):
            descriptor.resolve(
                {name: zeros(exchanged(shape, 0), KINDS.get(name, "f4"))}, None, HOST_DEVICE
            )


def info(shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> ArrayInfo:
    own = packed(shape, [None] * len(shape)) if strides is None else strides
    return ArrayInfo(4096, shape, own, DType.float32, HOST_DEVICE, "numpy", None)


def rule(shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> OperandRule:
    own = packed(shape, [None] * len(shape)) if strides is None else strides
    return OperandRule("x", DType.float32, shape, own, 4)


def regrouped(a: list[int], b: list[int]) -> bool:
    """Whether both are sequences of groups of equal products, each a single axis of one of them."""
    if not a or not b:
        return not a and not b
    return any(
        math.prod(a[:i]) == math.prod(b[:j]) and regrouped(a[i:], b[j:])
        for i, j in (*((1, j + 1) for j in range(len(b))), *((i + 1, 1) for i in range(len(a))))
    )


@st.composite
def same_products(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    factors = draw(st.lists(st.sampled_from((2, 2, 3, 5)), min_size=1, max_size=6))

    def grouped(order: list[int]) -> list[int]:
        groups: list[int] = []
        for f in order:
            if groups and draw(st.booleans()):
                groups[-1] *= f
            else:
                groups.append(f)
        return groups

    return grouped(factors), grouped(draw(st.permutations(factors)))


@given(same_products())
def test_axes_merge_and_split(shapes: tuple[list[int], list[int]]) -> None:
    ours, theirs = map(tuple, shapes)
    assert has_axes(rule(ours), info(theirs), whole=True) == regrouped(list(ours), list(theirs))


def test_some_strides_given() -> None:
    """An array may then be longer than what is read of it, but has the axes that are walked."""
    cache = info((B, G, 16, D))
    assert has_axes(rule((B, G, T, D), cache.strides), cache, whole=False)
    assert has_axes(rule((B * G, T, D), (16 * D, D, 1)), cache, whole=False)
    assert has_axes(rule((G, T, D), (16 * D, D, 1)), cache, whole=False)
    assert has_axes(rule((B, T, D), (G * 16 * D, D, 1)), cache, whole=False)
    assert has_axes(rule((B, H, T, D), (G * 16 * D, 0, D, 1)), cache, whole=False)
    assert has_axes(rule((B, 3, D), (40, 8, 1)), info((500,)), whole=False)
    turned = info((B, H, S, D), (S * H * D, D, H * D, 1))
    assert has_axes(rule((B, H, S, D), turned.strides), turned, whole=False)
    assert not has_axes(rule((B, H, S, D), (H * D, D, H * D, 1)), turned, whole=False)
    assert not has_axes(rule((B, G, T, D), (G * T * D, T * D, D, 1)), cache, whole=False)
    assert not has_axes(rule((B, S, D), (S * D, D, 1)), info((B, 2, 3, D)), whole=False)


def test_heads_after_rows_of_gradients() -> None:
    """``from_arrays`` of dense, packed and repeated operands gives each its strides."""
    q, k, v = zeros((B, S, H, D)), zeros((B, T, G, D)), zeros((B, T, G, DV))
    out, lse, bias = zeros((B, S, H, DV)), zeros((B, H, S)), zeros((1, H, S, T))
    p = ks.AttentionBwd.from_arrays(
        *(q, k, v, out, lse, out, q, k, v, bias), layout="bshd", bias=bias, causal=True
    ).problem()
    assert (p.dout_strides, p.dq_strides) == ((240, 8, 48), (120, 4, 24))
    assert (p.dk_strides, p.dv_strides) == ((84, 4, 12), (168, 8, 24))
    assert p.dbias_strides == (0, S * T, T, 1) and p.forward.spec.causal
    offsets = np.array([0, 5, 9], np.int32)
    p = ks.AttentionBwd.from_arrays(
        *(zeros((9, n, d)) for n, d in ((H, D), (G, D), (G, DV), (H, DV))),
        zeros((H, 9)),
        *(zeros((9, n, d)) for n, d in ((H, DV), (H, D), (G, D), (G, DV))),
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=5,
        max_seqlen_k=5,
        deterministic=False,
    ).problem()
    assert (p.dout_strides, p.dk_strides) == ((0, 8, 48), (0, 4, 12))
    assert not p.spec.deterministic


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "dq",
            (B, H, S, D),
            "dq = an array of shape [2, 6, 5, 4]: must be [B=2, S_q=5, H=6, D=4].",
        ),
        (
            "dbias",
            (B, H, S, T),
            "dbias = an array of shape [2, 6, 5, 7]: must repeat to [1, 6, 5, 7].",
        ),
        ("dsinks", (G,), "dsinks = an array of shape [3]: must be [H=6]."),
    ],
)
def test_gradients_of_other_shapes(name: str, shape: tuple[int, ...], message: str) -> None:
    q, k, v = zeros((B, S, H, D)), zeros((B, T, G, D)), zeros((B, T, G, DV))
    out, lse, bias = zeros((B, S, H, DV)), zeros((B, H, S)), zeros((1, H, S, T))
    results = {"dq": q, "dk": k, "dv": v, "dbias": bias, "dsinks": zeros((H,))}
    with pytest.raises(InvalidValue) as e:
        ks.AttentionBwd.from_arrays(
            *(q, k, v, out, lse, out),
            **{**results, name: zeros(shape)},
            layout="bshd",
            bias=bias,
            sinks=zeros((H,)),
        )
    assert str(e.value).startswith(message)

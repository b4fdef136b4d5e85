"""Attention whose q, k and v are all of 8 bits: descriptors, scales, the functions on arrays."""

from __future__ import annotations

from typing import Any

import kernelseam
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from kernelseam.descriptors import Attention
from kernelseam.descriptors.attention.options import SpecOption
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.dtypes import DType
from kernelseam.oracle import check, formulas, tolerances
from kernelseam.oracle.formulas import Variant
from kernelseam.planning import plan
from refusals import Refused

Array = npt.NDArray[Any]
FN = DType.float8_e4m3fn
BASE: dict[str, Any] = {
    "batch": 2,
    "num_heads": 4,
    "kv_heads": 2,
    "S_q": 33,
    "S_k": 70,
    "head_dim": 64,
    "dtype_q": "float8_e4m3fn",
}
SCALES: dict[str, Any] = {"q_scales": 0, "k_scales": 0, "v_scales": 0}


def problem(**more: Any) -> AttentionProblem:
    made = Attention(**{**BASE, **more}).problem()
    assert isinstance(made, AttentionProblem)
    return made


def drawn(kind: type = ml_dtypes.float8_e4m3fn) -> tuple[Array, Array, Array]:
    """q [2, 4, 33, 64] and k, v [2, 2, 70, 64]."""
    rng = np.random.default_rng(3)
    shapes = ((2, 4, 33, 64), (2, 2, 70, 64), (2, 2, 70, 64))
    q, k, v = (rng.standard_normal(s).astype(kind) for s in shapes)
    return q, k, v


def test_what_is_derived() -> None:
    p = problem()
    s = p.spec
    assert (s.dtype, s.q, s.kv, s.out) == (DType.bfloat16, FN, FN, DType.bfloat16)
    assert (s.q_scales, s.kv_scales, p.q_scale_block) == (None, None, 0)
    assert s.options == SpecOption.dtype_q | SpecOption.dtype_kv
    assert str(p) == ("attention float8_e4m3fn to bfloat16 batch=2 heads=4/2 S_q=33 S_k=70 dim=64")
    assert {r.name: (r.dtype, r.alignment) for r in p.operands} == {
        "q": (FN, 16),
        "k": (FN, 16),
        "v": (FN, 16),
        "out": (DType.bfloat16, 16),
    }
    assert p.bytes_moved == 2 * 4 * 33 * 64 * 3 + 2 * 2 * 70 * 128
    assert problem(dtype="float16").spec.out is DType.float16
    wide = problem(dtype_out="float32").spec
    assert (wide.dtype, wide.out) == (DType.bfloat16, DType.float32)
    q, k, v = drawn()
    for kind, dtype in ((np.float16, DType.float16), (np.float32, DType.bfloat16)):
        out = np.empty(q.shape, kind)
        spec = Attention.from_arrays(q, k, v, out).problem().spec
        assert (spec.dtype, spec.q, spec.out) == (dtype, FN, DType.of(out.dtype))


@pytest.mark.parametrize(
    ("more", "shape", "strides"),
    [
        ({}, (2, 2, 1), (2, 1, 0)),
        ({"stride_q_scales_batch": 0, "stride_q_scales_head": 0}, (2, 2, 1), (0, 0, 0)),
        ({"q_scale_block": 16}, (2, 4, 3), (12, 3, 1)),
        ({"q_scale_block": 100}, (2, 4, 1), (4, 1, 1)),
        ({"q_scale_block": 16, "cu_seqlens_q": 0, "total_q": 50}, (1, 4, 4), (0, 1, 4)),
        ({"cu_seqlens_q": 0, "total_q": 50}, (2, 2, 1), (2, 1, 0)),
    ],
)
def test_where_scales_lie(
    more: dict[str, Any], shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    p = problem(**SCALES, **more)
    (rule,) = (r for r in p.operands if r.name == "q_scales")
    assert (rule.dtype, rule.shape, rule.strides) == (DType.float32, shape, strides)
    assert p.spec.q_scales == ("blocks" if "q_scale_block" in more else "heads")
    assert p.spec.kv_scales == "heads"


def test_what_descriptors_refuse(refused: Refused) -> None:
    refused(
        "dtype_q = int32: must be bfloat16 as dtype is, or one of float8_e4m3fn, float8_e4m3fnuz. "
        "Convert q.",
        lambda: problem(dtype_q="int32", dtype="bfloat16"),
    )
    refused(
        "dtype_kv = float8_e4m3fnuz: must be float8_e4m3fn as q's. Leave it out, or convert q.",
        lambda: problem(dtype_kv="float8_e4m3fnuz"),
    )
    refused(
        "dtype = float32: must be float16 or bfloat16 where q, k and v are float8_e4m3fn. Give "
        "dtype_out='float32' for a wider result.",
        lambda: problem(dtype="float32"),
    )
    refused(
        "q_scales = None: must be given where k_scales is. Give it: ones change nothing.",
        lambda: problem(k_scales=0, v_scales=0),
    )
    refused(
        "q_scales = given: scales are for q of 8 bits. Leave it out, or give dtype_q.",
        lambda: problem(**SCALES, dtype_q=None, dtype="float16", dtype_kv="float8_e4m3fn"),
    )
    refused(
        "q_scale_block = 4: is about scales. Give q_scales too.",
        lambda: problem(q_scale_block=4),
    )
    refused(
        "stride_q_scales_block = 3: describes blocks of queries. Give q_scale_block too.",
        lambda: problem(**SCALES, stride_q_scales_block=3),
    )
    q, k, v = drawn()
    refused(
        "v = an array of float16: must be float8_e4m3fn as q is. Convert the array: with q of 8 "
        "bits, q, k and v share their dtype.",
        lambda: kernelseam.attention(q, k, v.astype(np.float16)),
    )


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz])
def test_scales_of_every_kind(kind: type) -> None:
    q, k, v = drawn(kind)
    rng = np.random.default_rng(5)
    of_keys = np.ones((2, 2, 70), np.float32)
    for shape, block, per_query in (
        ((1, 1), None, lambda x: np.broadcast_to(x[..., None], (2, 4, 33))),
        ((2, 2), None, lambda x: np.repeat(x, 2, 1)[..., None] * np.ones(33)),
        ((2, 4, 7), 5, lambda x: np.repeat(x, 5, 2)[:, :, :33]),
    ):
        scales = rng.uniform(0.1, 2, shape).astype(np.float32)
        ones, out = np.ones((1, 1), np.float32), np.empty(q.shape, np.float16)
        given: dict[str, Any] = {"q_scales": scales, "k_scales": ones, "v_scales": ones}
        plan(Attention.from_arrays(q, k, v, out, **given, q_scale_block=block)).bind(check=True)()
        made = kernelseam.attention(q, k, v, **given, q_scale_block=block, out_dtype="float16")
        assert np.array_equal(made, out)
        variant = Variant(q_scales=per_query(scales), k_scales=of_keys)
        assert check.attention(q, k, v, out, causal=False, variant=variant)
        assert not check.attention(q, k, v, out, causal=False)


def test_without_scales_it_is_the_attention_of_the_numbers() -> None:
    q, k, v = drawn()
    out, lse = kernelseam.attention(q, k, v, causal=True, return_lse=True)
    assert out.dtype == ml_dtypes.bfloat16
    wide = (x.astype(ml_dtypes.bfloat16) for x in (q, k, v))
    expected, expected_lse = kernelseam.attention(*wide, causal=True, return_lse=True)
    assert np.array_equal(out, expected) and np.array_equal(lse, expected_lse)


def test_the_bound_is_wider_than_that_of_16_bits() -> None:
    """By about what weights of 8 bits round, and never more than all of P|V|."""
    q, k, v = drawn()
    want = formulas.attention(q, k, v, False, 0.125)
    assert (want.spread <= want.pv).all() and (want.spread >= 0.99 * np.abs(want.out)).all()
    bounds = [
        tolerances.attention(want, 70, 64, d, DType.bfloat16)[0].mean()
        for d in (FN, DType.bfloat16)
    ]
    assert 3 * bounds[1] < bounds[0] < 30 * bounds[1]


def tensors() -> tuple[Any, ...]:
    """q, k, v and their scales as torch's."""
    torch = pytest.importorskip("torch", reason="torch is missing")
    arrays = [torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn) for x in drawn()]
    rng = torch.Generator().manual_seed(2)
    return *arrays, *(torch.rand((2, 2), generator=rng) + 0.5 for _ in range(3))


def test_torch_compiles_it() -> None:
    """Dense, packed and paged, with the same bits as outside of what is compiled."""
    q, k, v, *scales = tensors()
    torch = pytest.importorskip("torch", reason="torch is missing")
    given: dict[str, Any] = dict(zip(SCALES, scales, strict=True))

    def dense(q: Any, k: Any, v: Any) -> Any:
        return kernelseam.attention(q, k, v, causal=True, **given)

    offsets = torch.tensor([0, 20, 33], dtype=torch.int32)
    packed_q, packed_k, packed_v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))

    def packed(q: Any, k: Any, v: Any) -> Any:
        return kernelseam.attention_varlen(q, k, v, offsets, offsets, 33, 33, **given)

    table = torch.arange(2, dtype=torch.int32)[:, None]
    lengths = torch.tensor([70, 61], dtype=torch.int32)
    tokens = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def paged(q: Any, k: Any, v: Any) -> Any:
        return kernelseam.attention_paged(q, k, v, table, lengths, **given)

    for function, operands in (
        (dense, (q, k, v)),
        (packed, (packed_q, packed_k, packed_v)),
        (paged, tokens),
    ):
        expected = function(*operands)
        assert expected.dtype is torch.bfloat16
        actual = torch.compile(function, backend="eager", fullgraph=True)(*operands)
        assert torch.equal(actual, expected), function.__name__


def test_torchs_operators_take_scales() -> None:
    q, k, v, *scales = tensors()
    torch = pytest.importorskip("torch", reason="torch is missing")
    from kernelseam.interop.torch_library.attention import ATTENTION

    operator = torch.ops.kernelseam.attention
    arrays = (q, k, v, *[None] * 6, *scales)
    out, lse = operator(*arrays, causal=True)
    expected = kernelseam.attention(
        q, k, v, causal=True, **dict(zip(SCALES, scales, strict=True)), return_lse=True
    )
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    # its other utilities compare tensors of 8 bits, which torch has no products of
    given = {"causal": True}
    torch.library.opcheck(operator.default, arrays, given, test_utils="test_faketensor")
    mapped = torch.vmap(lambda q, s: ATTENTION(q, *arrays[1:9], s, *scales[1:])[0])
    two = torch.stack([scales[0], 2 * scales[0]])
    both = mapped(torch.stack([q, q]), two)
    assert torch.equal(both[0], operator(*arrays)[0]) and not torch.equal(both[1], both[0])

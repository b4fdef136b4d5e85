"""The edges of the reference attention, one by one, and what it takes of memory and of options."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_formula import Array, close, formula
from kernelseam import Attention, plan, planning
from kernelseam.descriptors import AttentionProblem, AttentionSpec
from kernelseam.descriptors.attention.options import SpecOption, names_of
from kernelseam.dtypes import DType
from kernelseam.errors import Unsupported
from kernelseam.plugins import plugins
from kernelseam.reference import attention as reference

F32 = np.dtype(np.float32)
UNTOUCHED = 77.0


def dense(q: Array, k: Array, v: Array, **more: Any) -> tuple[Array, Array]:
    """out and lse of q [B, H, S_q, D], k and v [B, H_kv, S_k, D], in memory that held other
    values."""
    out = np.full((*q.shape[:3], v.shape[3]), UNTOUCHED, more.pop("kind", q.dtype))
    lse = np.full(q.shape[:3], UNTOUCHED, np.promote_types(q.dtype, F32))
    plan(Attention.from_arrays(q, k, v, out, lse, **more)).bind()()
    return out, lse


def normal(*shape: int, seed: int = 5) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_a_query_that_sees_no_key() -> None:
    q, k, v = (
        normal(1, 2, 5, 4),
        np.full((1, 2, 3, 4), np.nan, np.float32),
        np.full((1, 2, 3, 4), np.nan, np.float32),
    )
    for more in (
        {"mask": np.zeros((1, 2, 5, 3), bool)},
        {"kv_lengths": np.zeros(1, np.int32)},
        {
            "kv_lengths": np.zeros(1, np.int32),
            "block_table": np.zeros((1, 1), np.int32),
            "kv_layout": "hnd",  # one page of 3 rows
        },
    ):
        out, lse = dense(q, k, v, **more)
        assert (out == 0).all() and (lse == -np.inf).all()
        out, lse = dense(q, k, v, sinks=np.array([0.5, -np.inf], np.float32), **more)
        assert (out == 0).all() and (lse[:, 0] == 0.5).all() and (lse[:, 1] == -np.inf).all()
    q, k, v = normal(1, 1, 5, 4), normal(1, 1, 3, 4), normal(1, 1, 3, 4)
    out, lse = dense(q, k, v, window=(0, 0))  # rows 0 and 1 lie left of the first key
    assert (out[0, 0, :2] == 0).all() and (lse[0, 0, :2] == -np.inf).all()
    np.testing.assert_allclose(out[0, 0, 2:], v[0, 0], rtol=1e-6)


@pytest.mark.parametrize("empty", ["batch", "num_heads", "S_q", "S_k", "head_dim", "value_dim"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_empties(empty: str, return_lse: bool) -> None:
    """Nothing to compute is no error, and what is not read may be missing; what is written is."""
    sizes = {
        "batch": 2,
        "num_heads": 4,
        "kv_heads": 2,
        "S_q": 3,
        "S_k": 5,
        "head_dim": 4,
        "value_dim": 4,
        empty: 0,
    }
    n = {k: sizes[k] for k in ("batch", "num_heads", "S_q")}
    d = Attention(
        **sizes,
        dtype="float32",
        return_lse=return_lse,
        causal=True,
        window=(3, 0),
        bias=0,
        mask=0,
        alibi_slopes=0,
        sinks=0,
        prefix_lengths=0,
        kv_lengths=0,
    )
    out = np.full((*n.values(), sizes["value_dim"]), UNTOUCHED, np.float32)
    shapes = {
        "q": (*n.values(), sizes["head_dim"]),
        "k": (n["batch"], 2, sizes["S_k"], sizes["head_dim"]),
        "v": (n["batch"], 2, sizes["S_k"], sizes["value_dim"]),
        "bias": (*n.values(), sizes["S_k"]),
        "alibi_slopes": tuple(n.values())[:2],
        "sinks": (n["num_heads"],),
    }
    operands = {name: np.ones(shape, np.float32) for name, shape in shapes.items()} | {
        "mask": np.ones((*n.values(), sizes["S_k"]), bool),
        "out": out,
        "kv_lengths": np.full(n["batch"], sizes["S_k"], np.int32),
        "prefix_lengths": np.ones(n["batch"], np.int32),
    }
    if return_lse:
        operands["lse"] = np.full(tuple(n.values()), UNTOUCHED, np.float32)
    read = {rule.name for rule in d.problem().operands if rule.span}
    plan(d).bind(**{name: x for name, x in operands.items() if name in read})()
    if empty == "S_k":
        assert (out == 0).all() and (not return_lse or (operands["lse"] == 1).all())  # of the sink
    if empty == "head_dim":
        # the last query sees four in the band and one before the prefix
        keys = np.exp(-np.arange(5)).sum()
        np.testing.assert_allclose(out[..., 2, :], keys / (keys + 1), rtol=1e-5)
    if empty == "value_dim" and return_lse:
        assert (operands["lse"] != UNTOUCHED).all()


def test_a_sink_is_a_key_of_value_0() -> None:
    q, k, v = normal(1, 2, 3, 4), np.zeros((1, 2, 6, 4), np.float32), normal(1, 2, 6, 4)
    out, lse = dense(q, k, v, sinks=np.log([2, 10]).astype(np.float32))
    for h, of in ((0, 8), (1, 16)):
        np.testing.assert_allclose(
            out[0, h], np.tile(v[0, h].sum(axis=0) / of, (3, 1)), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(lse[0, h], np.log(of), rtol=1e-6)


def test_a_visible_weight_of_0_lets_nan_through_and_a_hidden_key_does_not() -> None:
    q, k, v = (
        np.ones((1, 1, 2, 1), np.float32),
        np.zeros((1, 1, 3, 1), np.float32),
        normal(1, 1, 3, 2),
    )
    k[0, 0, 1], v[0, 0, 1, 0] = -1e6, np.nan  # e^−1e6 is 0, and 0·NaN is NaN
    out, _ = dense(q, k, v, scale=1.0)
    assert np.isnan(out[..., 0]).all() and np.isfinite(out[..., 1]).all()
    mask = np.array([[True, False, True], [True, True, True]])[None, None]
    bias = np.where(mask, np.float32(0), np.float32(np.nan))
    out, lse = dense(q, k, v, scale=1.0, mask=mask, bias=bias)
    np.testing.assert_allclose(out[0, 0, 0], v[0, 0, ::2].mean(axis=0), rtol=1e-6)
    assert np.isnan(out[0, 0, 1, 0]) and np.isfinite(lse).all()
    # a bias hides the score, not the key
    hidden = np.where(mask, np.float32(0), np.float32(-np.inf))
    assert np.isnan(dense(q, k, v, scale=1.0, bias=hidden)[0][0, 0, :, 0]).all()


def test_rows_whose_every_score_is_minus_infinity() -> None:
    bias = np.full((1, 1, 3, 5), -np.inf, np.float32)
    out, lse = dense(normal(1, 1, 3, 4), normal(1, 1, 5, 4), normal(1, 1, 5, 4), bias=bias)
    assert (out == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("kind", [F32, np.dtype(ml_dtypes.bfloat16)])
def test_a_bias_of_the_most_negative_number_hides_nothing_where_all_have_it(kind: Any) -> None:
    q, k, v = (normal(1, 1, n, 4, seed=n).astype(kind) for n in (3, 5, 5))
    bias = np.full((1, 1, 3, 5), ml_dtypes.finfo(kind).min, kind)
    bias[0, 0, 0, 2] = 0
    out, lse = dense(q, k, v, bias=bias, kind=F32)
    np.testing.assert_allclose(out[0, 0, 0], v[0, 0, 2].astype(F32), rtol=1e-6)
    np.testing.assert_allclose(out[0, 0, 1], v[0, 0].astype(F32).mean(axis=0), rtol=1e-5, atol=1e-6)
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("cap", [1e-300, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_extreme_softcaps(cap: float, kind: Any) -> None:
    q, k, v = (normal(1, 1, n, 4, seed=n).astype(kind) for n in (3, 5, 5))
    q[0, 0, 1] = 0
    out, lse = dense(q, k, v, softcap=cap)
    expected, want_lse = formula(q[0, 0], k[0, 0], v[0, 0], scale=0.5, softcap=cap)
    close(out[0, 0], expected)
    close(lse[0, 0], want_lse)


def test_float64_stays_float64() -> None:
    q, k, v = (np.random.default_rng(n).standard_normal((1, 2, n, 8)) for n in (300, 1200, 1200))
    bias = np.random.default_rng(1).standard_normal((1, 2, 300, 1200))
    out, lse = dense(q, k, v, causal=True, bias=bias, softcap=4.0)
    expected, want_lse = formula(
        q[0, 1], k[0, 1], v[0, 1], scale=8**-0.5, causal=True, bias=bias[0, 1], softcap=4.0
    )
    np.testing.assert_allclose(out[0, 1], expected, rtol=0, atol=1e-14)
    np.testing.assert_allclose(lse[0, 1], want_lse, rtol=0, atol=1e-14)


def test_16_bits_are_computed_in_float32() -> None:
    """Partial results for a merge keep more than 16 bits."""
    q, k, v = (normal(1, 2, n, 8, seed=n).astype(np.float16) for n in (30, 90, 90))
    out, _ = dense(q, k, v, dtype_out="float32", kind=F32)
    expected, _ = formula(q[0, 1], k[0, 1], v[0, 1], scale=8**-0.5)
    assert abs(out[0, 1] - expected).max() < 1e-6


def test_a_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    """Bit for bit, alone or packed among others, in whatever order threads take them."""
    q, k, v = (normal(900, 2, 16, seed=n) for n in (1, 2, 3))
    offsets = np.array([0, 310, 320, 320, 900], np.int32)

    def packed(first: int, last: int, longest: int) -> tuple[Array, Array]:
        rows = slice(offsets[first], offsets[last])
        n = int(offsets[last] - offsets[first])
        out, lse = (
            np.full((n, 2, 16), UNTOUCHED, np.float32),
            np.full((1, 2, n), UNTOUCHED, np.float32),
        )
        part = offsets[first : last + 1] - offsets[first]
        plan(
            Attention(
                batch=last - first,
                num_heads=2,
                S_q=longest,
                S_k=longest,
                head_dim=16,
                q=q[rows],
                k=k[rows],
                v=v[rows],
                out=out,
                lse=lse,
                cu_seqlens_q=part,
                cu_seqlens_k=part,
                total_q=n,
                total_k=n,
                causal=True,
                batch_invariant=True,
            )
        ).bind()()
        return out, lse

    whole, whole_lse = packed(0, 4, 600)
    for b in range(4):
        rows = slice(offsets[b], offsets[b + 1])
        alone, lse = packed(b, b + 1, int(np.diff(offsets)[b]))
        np.testing.assert_array_equal(alone, whole[rows])
        np.testing.assert_array_equal(lse, whole_lse[..., rows])


def test_threads_and_one_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = normal(3, 4, 300, 32), normal(3, 2, 500, 32), normal(3, 2, 500, 32)
    more: dict[str, Any] = {
        "kv_lengths": np.array([500, 0, 77], np.int32),
        "window": (200, 10),
        "sinks": np.arange(4, dtype=np.float32),
    }
    results = []
    for serial in (0.0, math.inf):
        monkeypatch.setattr("kernelseam.reference.threads._SERIAL", serial)
        planning.forget()
        results.append(dense(q, k, v, **more))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_lengths_are_read_at_each_launch() -> None:
    q, k, v, out = (
        normal(2, 1, 4, 8),
        normal(2, 1, 9, 8),
        normal(2, 1, 9, 8),
        np.empty((2, 1, 4, 8), np.float32),
    )
    lengths = np.array([9, 9], np.int32)
    call = plan(
        Attention(
            batch=2,
            num_heads=1,
            S_q=4,
            S_k=9,
            head_dim=8,
            q=q,
            k=k,
            v=v,
            out=out,
            kv_lengths=lengths,
            causal=True,
        )
    ).bind()
    for now in ((9, 9), (5, 0)):
        lengths[:] = now
        call()
        for b in range(2):
            close(
                out[b, 0],
                formula(q[b, 0], k[b, 0, : now[b]], v[b, 0, : now[b]], scale=8**-0.5, causal=True)[
                    0
                ],
            )


@pytest.mark.parametrize(("causal", "most"), [(False, 1.0), (True, 0.6)])
def test_a_score_has_one_exponential(
    causal: bool, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few are computed behind a causal mask, and none is copied under one."""
    exp, copyto, counts, copies = np.exp, np.copyto, list[int](), list[bool]()

    def counted(x: Any, **more: Any) -> Any:
        counts.append(np.size(x))
        return exp(x, **more)

    def copied(to: Any, x: Any, **more: Any) -> None:
        copies.append("where" in more)
        copyto(to, x, **more)

    S = 1024
    q, k, v = (normal(1, 1, S, 16, seed=n) for n in range(3))
    with monkeypatch.context() as patched:
        patched.setattr(np, "exp", counted)
        patched.setattr(np, "copyto", copied)
        out, _ = dense(q, k, v, causal=causal)
    close(out[0, 0], formula(q[0, 0], k[0, 0], v[0, 0], scale=0.25, causal=causal)[0])
    assert S * S / 2 <= sum(counts) <= most * S * S
    assert copies and not any(copies)


def test_memory_does_not_grow_with_the_square() -> None:
    S = 5120
    q, k, v = (normal(1, 1, S, 8, seed=n) for n in range(3))
    row = normal(1, 1, 1, S)
    more: dict[str, Any] = {
        "bias": row,
        "mask": row > -2,
        "softcap": 5.0,
        "alibi_slopes": np.full((1, 1), 0.1, np.float32),
        "window": (S, S - 1),
    }
    tracemalloc.start()
    try:
        out, _ = dense(q, k, v, **more)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20  # the scores alone are 100 MiB
    expected, _ = formula(
        q[0, 0, -1:],
        k[0, 0],
        v[0, 0],
        scale=8**-0.5,
        bias=row[0, 0],
        mask=row[0, 0] > -2,
        softcap=5.0,
        slope=0.1,
    )
    close(out[0, 0, -1:], expected)


@pytest.mark.parametrize("option", names_of(reference.SUPPORTED))
def test_an_unknown_option_is_refused(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SUPPORTED", reference.SUPPORTED & ~SpecOption[option])
    spec = AttentionSpec(DType.float16, 8, 8)
    values = {
        "bias": DType.float16,
        "dtype_out": DType.float32,
        "q_view": "packed",
        "kv_view": "paged",
    }
    value: Any = values.get(option, True)
    zeros = (0, 0, 0)
    problem = AttentionProblem(
        replace(spec, **{option: value}), 1, 1, 1, 1, 1, zeros, zeros, zeros, zeros
    )
    device = plugins().backend("numpy").runtime.devices()[0]
    assert (
        reference.NumpyAttention().supports(problem, device)
        == f"{option} is not supported by this kernel"
    )
    assert reference.NumpyAttention().supports(replace(problem, spec=spec), device) is None


def test_the_refusal_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SUPPORTED", SpecOption.causal)
    planning.forget()
    with pytest.raises(Unsupported, match=r"numpy: sinks, window are not supported by "):
        plan(
            Attention(
                batch=1,
                num_heads=1,
                S_q=1,
                S_k=1,
                head_dim=1,
                dtype="float32",
                sinks=0,
                window=(1, 0),
            ),
            backend="numpy",
        )

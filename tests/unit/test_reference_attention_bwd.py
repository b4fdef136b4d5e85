"""The reference's gradients of an attention: against what torch derives by itself, values that are
no numbers, what they take of memory and of options. The matrix and test_random_problems.py have
their results."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_formula import Array, attention, close, gradients
from kernelseam import Attention, AttentionBwd, plan, planning
from kernelseam.descriptors import AttentionProblem, AttentionSpec
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.descriptors.attention.options import SpecOption, names_of
from kernelseam.dtypes import DType
from kernelseam.plugins import plugins
from kernelseam.reference import attention_bwd as reference
from traced_memory import peak_of

F32 = np.dtype(np.float32)
RNG = np.random.default_rng(31)
UNTOUCHED = 77.0


def normal(*shape: int, kind: Any = F32) -> Array:
    return RNG.standard_normal(shape).astype(kind)


# ---------------------------------------------------------------- the formula itself


def dense(
    q: Array, k: Array, v: Array, dout: Array, *, sums: tuple[str, ...] = (), **more: Any
) -> dict[str, Array]:
    """Gradients, by name, of q [B, H, S_q, D], k and v [B, H_kv, S_k, D], out and lse among them,
    in memory that held other values. ``sums``: dbias and dsinks, where they are wanted."""
    out = np.empty((*q.shape[:3], v.shape[3]), dout.dtype)
    lse = np.empty(q.shape[:3], np.promote_types(q.dtype, F32))
    forward = Attention.from_arrays(q, k, v, out, lse, **more)
    plan(forward).bind()()
    result = {
        "dq": np.full_like(q, UNTOUCHED),
        "dk": np.full_like(k, UNTOUCHED),
        "dv": np.full_like(v, UNTOUCHED),
    }
    if "dbias" in sums:
        result["dbias"] = np.full_like(more["bias"], UNTOUCHED)
    if "dsinks" in sums:
        result["dsinks"] = np.full(q.shape[1], UNTOUCHED, np.float32)
    plan(AttentionBwd(forward=forward, dout=dout, **result)).bind()()
    return {**result, "out": out, "lse": lse}


@pytest.mark.parametrize("seed", range(12))
def test_what_torch_derives(seed: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rng = np.random.default_rng(seed)
    B, G, group, S_q, S_k, D, D_v = (int(rng.integers(1, n)) for n in (3, 3, 4, 40, 40, 20, 20))
    H = G * group
    q, k, v, dout = (
        rng.standard_normal(s)
        for s in ((B, H, S_q, D), (B, G, S_k, D), (B, G, S_k, D_v), (B, H, S_q, D_v))
    )
    kept = [int(n) if rng.random() < 0.6 else 1 for n in (B, H, S_q, S_k)]
    bias, sinks = rng.standard_normal(kept), rng.standard_normal(H).astype(np.float32)
    mask, causal, cap = (
        rng.random((B, 1, S_q, S_k)) < 0.8,
        bool(rng.random() < 0.5),
        float(rng.choice([0.5, 4])),
    )
    actual = dense(
        q,
        k,
        v,
        dout,
        sums=("dbias", "dsinks"),
        causal=causal,
        softcap=cap,
        bias=bias,
        mask=mask,
        sinks=sinks,
    )
    leaves = [
        torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (q, k, v, bias, sinks)
    ]
    tq, tk, tv, tbias, tsinks = leaves
    out, _ = attention(
        *(tq, tk, tv), causal=causal, softcap=cap, bias=tbias, mask=mask, sinks=tsinks
    )
    out.backward(torch.tensor(dout))
    for name, leaf in zip(("dq", "dk", "dv", "dbias", "dsinks"), leaves, strict=True):
        expected = leaf.grad.numpy()
        limit = 1e-7 if name == "dsinks" else 1e-13
        assert abs(actual[name] - expected).max() < limit * (1 + abs(expected).max()), name


# ---------------------------------------------------------------- edges


@pytest.mark.parametrize("kind", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)])
def test_16_bits_are_summed_in_float32(kind: Any) -> None:
    """A thousand queries of the same little gradient: sums in 16 bits would stop growing."""
    ones = np.ones((1, 1, 1000, 1), kind)
    k = v = np.ones((1, 1, 1, 1), kind)
    bias = np.zeros((1, 1, 1, 1), kind)
    sinks = np.zeros(1, np.float32)
    actual = dense(ones, k, v, ones, sums=("dbias", "dsinks"), bias=bias, scale=0.0, sinks=sinks)
    assert (
        actual["dv"][0, 0, 0, 0] == 500
        and actual["dbias"][0, 0, 0, 0] == kind.type(250)
        and actual["dk"] == 0
    )
    assert abs(actual["dsinks"][0] + 250) < 1e-3


def test_queries_that_see_no_key_and_keys_that_no_query_sees() -> None:
    q, k, v, dout = normal(1, 2, 5, 4), normal(1, 2, 3, 4), normal(1, 2, 3, 4), normal(1, 2, 5, 4)
    nan = (
        np.full_like(q, np.nan),
        np.full_like(k, np.nan),
        np.full_like(v, np.nan),
        np.full_like(dout, np.nan),
    )
    hidden: dict[str, Any] = {"mask": np.zeros((1, 2, 5, 3), bool)}
    for more in (hidden, {"kv_lengths": np.zeros(1, np.int32)}):
        for operands in ((q, k, v, dout), nan):
            actual = dense(
                *operands, sums=("dbias",), bias=np.full((1, 2, 5, 3), np.nan, F32), **more
            )
            assert all((actual[n] == 0).all() for n in ("dq", "dk", "dv", "dbias"))
        actual = dense(q, k, v, dout, sums=("dsinks",), sinks=np.array([0.5, -np.inf], F32), **more)
        assert all((actual[n] == 0).all() for n in ("dq", "dk", "dv", "dsinks"))
    actual = dense(q, k, v, dout, window=(0, 0))  # rows 0 and 1 lie left of the first key
    assert (actual["dq"][0, :, :2] == 0).all()
    np.testing.assert_allclose(actual["dv"], dout[:, :, 2:], rtol=1e-6)
    assert abs(actual["dk"]).max() < 1e-6  # one key: its weight is 1 whatever it is
    actual = dense(
        normal(1, 1, 2, 4),
        normal(1, 1, 9, 4),
        normal(1, 1, 9, 4),
        normal(1, 1, 2, 4),
        window=(3, 0),
    )
    assert all(
        (actual[n][0, 0, :4] == 0).all() and (actual[n][0, 0, 4:] != 0).all() for n in ("dk", "dv")
    )


def test_rows_whose_every_score_is_minus_infinity() -> None:
    bias = np.full((1, 1, 3, 5), -np.inf, F32)
    bias[0, 0, 1] = 0
    q, k, v, dout = normal(1, 1, 3, 4), normal(1, 1, 5, 4), normal(1, 1, 5, 4), normal(1, 1, 3, 4)
    alone = dense(q[:, :, 1:2].copy(), k, v, dout[:, :, 1:2].copy())
    dout[0, 0, ::2] = np.nan  # where nothing was seen, nothing is taken
    actual = dense(
        q, k, v, dout, sums=("dbias", "dsinks"), bias=bias, sinks=np.full(1, -np.inf, F32)
    )
    assert (
        (actual["dq"][0, 0, ::2] == 0).all()
        and (actual["dbias"][0, 0, ::2] == 0).all()
        and actual["dsinks"] == 0
    )
    for name in ("dk", "dv"):
        np.testing.assert_allclose(actual[name], alone[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize(("S_q", "S_k"), [(40, 40), (300, 310)])
def test_a_causal_mask_keeps_out_what_is_not_finite(
    value: float, where: str, S_q: int, S_k: int
) -> None:
    x = {
        "q": normal(1, 1, S_q, 8),
        "k": normal(1, 1, S_k, 8),
        "v": normal(1, 1, S_k, 8),
        "dout": normal(1, 1, S_q, 8),
    }
    more: dict[str, Any] = {"causal": True, "softcap": 5.0, "bias": np.zeros((1, 1, S_q, S_k), F32)}
    clean = dense(**x, sums=("dbias",), **more)
    at = S_q // 2
    key = at + S_k - S_q
    x[where][0, 0, key if where in "kv" else at, 3] = value
    actual = dense(**x, sums=("dbias",), **more)
    # Queries before the key and all others than the query; keys behind the query, while all are
    # seen by the last one.
    queries = np.arange(S_q) < at if where in "kv" else np.arange(S_q) != at
    keys = np.zeros(S_k, bool) if where in "kv" else np.arange(S_k) > key
    for name, same in (("dq", queries), ("dbias", queries), ("dk", keys), ("dv", keys)):
        np.testing.assert_allclose(
            actual[name][0, 0, same], clean[name][0, 0, same], rtol=1e-4, atol=1e-5
        )
    if value is np.nan:
        assert (
            np.isnan(actual["dk"][0, 0, : key + 1]).all() and np.isnan(actual["dq"][0, 0, at]).all()
        )


def test_threads_and_one_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, whatever the bias's gradient is summed over."""
    q, k, v, dout = (
        normal(3, 4, 300, 16),
        normal(3, 2, 500, 16),
        normal(3, 2, 500, 16),
        normal(3, 4, 300, 16),
    )
    for shape in ((3, 4, 300, 500), (1, 4, 300, 500), (3, 1, 1, 500), (1, 1, 300, 1)):
        strides = zip(
            ("batch", "head", "row", "column"), np.empty(shape).strides, shape, strict=True
        )
        more: dict[str, Any] = {
            "kv_lengths": np.array([500, 0, 77], np.int32),
            "window": (200, 10),
            "bias": normal(*shape),
            "sinks": np.arange(4, dtype=np.float32),
            **{f"stride_bias_{a}": s // 8 * (n > 1) for a, s, n in strides},
        }
        results = []
        for serial in (0.0, math.inf):
            monkeypatch.setattr("kernelseam.reference.threads._SERIAL", serial)
            planning.forget()
            results.append(dense(q, k, v, dout, sums=("dbias", "dsinks"), **more))
        for name, x in results[0].items():
            np.testing.assert_array_equal(x, results[1][name])
    planning.forget()


def test_threads_share_what_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    device = plugins().backend("numpy").runtime.devices()[0]
    device = replace(device, limits=replace(device.limits, compute_units=8))
    monkeypatch.setattr("kernelseam.reference.threads._SERIAL", 0.0)
    base: dict[str, Any] = {
        "batch": 3,
        "num_heads": 4,
        "kv_heads": 2,
        "S_q": 9,
        "S_k": 9,
        "head_dim": 4,
        "bias": 0,
    }
    for summed, threads in (
        ((), 6),
        (("batch",), 2),
        (("head",), 3),
        (("batch", "head"), 1),
        (("row", "column"), 6),
    ):
        strides = {"batch": 324, "head": 81, "row": 9, "column": 1, **dict.fromkeys(summed, 0)}
        forward = Attention(
            **base,
            dtype="float32",
            return_lse=True,
            **{f"stride_bias_{axis}": s for axis, s in strides.items()},
        )
        problem = AttentionBwd(forward=forward, dbias=0).problem()
        parts = reference.NumpyAttentionBwd().build(problem, device)
        assert parts.steps[0].threads == threads


def test_memory_does_not_grow_with_the_square() -> None:
    S = 4096
    q, k, v, dout = (normal(1, 1, S, 8) for _ in range(4))
    row = normal(1, 1, 1, S)
    more: dict[str, Any] = {
        "bias": row,
        "mask": row > -2,
        "softcap": 5.0,
        "alibi_slopes": np.full((1, 1), 0.1, F32),
    }
    actual, peak = peak_of(lambda: dense(q, k, v, dout, sums=("dbias",), **more))
    assert peak < 30 << 20  # the scores alone are 64 MiB
    dq = gradients(q[:, :, -1:], k, v, dout[:, :, -1:], **more)["dq"]
    close(actual["dq"][:, :, -1:], dq, 4)


# ---------------------------------------------------------------- what it refuses


def problem_of(spec: AttentionSpec) -> AttentionBwdProblem:
    zeros = (0, 0, 0)
    forward = AttentionProblem(spec, 1, 1, 1, 1, 1, zeros, zeros, zeros, zeros)
    return AttentionBwdProblem(AttentionBwdSpec(spec), forward, zeros, zeros, zeros, zeros)


@pytest.mark.parametrize("option", names_of(reference.SUPPORTED))
def test_an_unknown_option_is_refused(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SUPPORTED", reference.SUPPORTED & ~SpecOption[option])
    values: dict[str, Any] = {
        "bias": DType.float16,
        "dtype_out": DType.float32,
        "q_view": "packed",
        "kv_view": "packed",
    }
    spec = AttentionSpec(DType.float16, 8, 8, lse=True)
    device = plugins().backend("numpy").runtime.devices()[0]
    requested = problem_of(replace(spec, **{option: values.get(option, True)}))
    assert (
        reference.NumpyAttentionBwd().supports(requested, device)
        == f"{option} is not supported by this kernel"
    )
    assert reference.NumpyAttentionBwd().supports(problem_of(spec), device) is None


@pytest.mark.parametrize(
    ("name", "view", "message"),
    [
        ("kv_view", "paged", "k and v are paged: it takes strided and packed rows"),
        ("kv_view", "pointers", "k and v are pointers: it takes strided and packed rows"),
        ("q_view", "pointers", "q are pointers: it takes strided and packed rows"),
    ],
)
def test_views_that_it_refuses(name: str, view: str, message: str) -> None:
    spec: Any = replace(AttentionSpec(DType.float16, 8, 8, lse=True), **{name: view})
    device = plugins().backend("numpy").runtime.devices()[0]
    assert reference.NumpyAttentionBwd().supports(problem_of(spec), device) == message

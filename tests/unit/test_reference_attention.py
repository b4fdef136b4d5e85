"""The reference attention: values that are no numbers, what it takes of memory and of options. The
matrix, test_random_problems.py and empty_reductions.py have its results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_formula import Array, attention, close
from kernelseam import Attention, AttentionBwd, plan
from kernelseam.descriptors import AttentionProblem, AttentionSpec
from kernelseam.descriptors.attention.options import SpecOption, names_of
from kernelseam.dtypes import DType
from kernelseam.plugins import plugins
from kernelseam.reference import attention as reference
from traced_memory import peak_of

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


@pytest.mark.parametrize("cap", [1e-300, 1e-30, 1e30, 1e300])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_extreme_softcaps(cap: float, kind: Any) -> None:
    q, k, v = (normal(1, 1, n, 4, seed=n).astype(kind) for n in (3, 5, 5))
    q[0, 0, 1] = 0
    out, lse = dense(q, k, v, softcap=cap)
    expected, want_lse = attention(q, k, v, softcap=cap)
    close(out, expected)
    close(lse, want_lse)


def test_16_bits_are_computed_in_float32() -> None:
    """Partial results for a merge keep more than 16 bits."""
    q, k, v = (normal(1, 2, n, 8, seed=n).astype(np.float16) for n in (30, 90, 90))
    out, _ = dense(q, k, v, dtype_out="float32", kind=F32)
    assert abs(out - attention(q, k, v)[0]).max() < 1e-6


@pytest.mark.parametrize("empty", ["batch", "num_heads", "S_q", "S_k", "head_dim", "value_dim"])
def test_empties(empty: str) -> None:
    """What is not read may be missing; what is written is written."""
    sizes = {"batch": 2, "num_heads": 4, "kv_heads": 2, "S_q": 3, "S_k": 5, "head_dim": 4}
    operands = ("bias", "mask", "alibi_slopes", "sinks", "prefix_lengths", "kv_lengths")
    forward = Attention(
        **{**sizes, "value_dim": 4, empty: 0},
        **dict.fromkeys(operands, 0),
        dtype="float32",
        return_lse=True,
        causal=True,
        window=(3, 0),
    )
    for d in (forward, AttentionBwd(forward=forward, dbias=0, dsinks=0)):
        rules = d.problem().operands
        kinds = {r.name: (r.dtype or DType.float32).numpy for r in rules}
        given = {r.name: np.full(r.shape, 77 if r.written else 1, kinds[r.name]) for r in rules}
        given["kv_lengths"][:] = forward.S_k
        plan(d).bind(**{r.name: given[r.name] for r in rules if r.span})()
        for rule in rules:
            assert not rule.written or (given[rule.name] != 77).all(), rule.name


def test_lengths_are_read_at_each_launch() -> None:
    q, k, out = normal(2, 1, 4, 8), normal(2, 1, 9, 8), np.empty((2, 1, 4, 8), np.float32)
    lengths = np.array([9, 9], np.int32)
    call = plan(Attention.from_arrays(q, k, k, out, kv_lengths=lengths, causal=True)).bind()
    for now in ((9, 9), (5, 0)):
        lengths[:] = now
        call()
        for b, n in enumerate(now):
            close(out[b], attention(q[b], k[b, :, :n], k[b, :, :n], causal=True)[0])


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
    close(out, attention(q, k, v, causal=causal)[0])
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
    (out, _), peak = peak_of(lambda: dense(q, k, v, **more))
    assert peak < 40 << 20  # the scores alone are 100 MiB
    of_scores = {n: x for n, x in more.items() if n != "window"}
    close(out[:, :, -1:], attention(q[:, :, -1:], k, v, **of_scores)[0])


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

"""The reference's gradients of an attention: against their formula over random mixtures of options
and views, and that against what torch derives by itself."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_formula import Array, attention, close, formula, gradients
from attention_mixture import KINDS, UNTOUCHED, Mixture
from kernelseam import Attention, AttentionBwd, plan, planning
from kernelseam.descriptors import AttentionProblem, AttentionSpec
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.descriptors.attention.options import SpecOption, names_of
from kernelseam.dtypes import DType
from kernelseam.plugins import plugins
from kernelseam.reference import attention_bwd as reference
from kernelseam.reference.attention_tiling import Block

F32 = np.dtype(np.float32)
RNG = np.random.default_rng(31)
VIEWS = ("strided", "packed")
NAMES = ("dout", "dq", "dk", "dv", "dbias", "dsinks")
SUMS = 8.0  # of ``close``: gradients are sums of products of sums


def normal(*shape: int, kind: Any = F32) -> Array:
    return RNG.standard_normal(shape).astype(kind)


# ---------------------------------------------------------------- mixtures


@dataclass
class Gradients(Mixture):
    """A mixture with what its forward gave, dout, and memory for the gradients that held other
    values."""

    q_views: tuple[str, ...] = VIEWS
    kv_views: tuple[str, ...] = VIEWS

    def memory(self) -> None:
        super().memory()
        f, kind = self.fields, DType.of(self.fields["dtype_out"]).numpy
        self.dout = [
            self.rng.standard_normal((self.heads, n, self.D_v)).astype(kind) for n in self.S_q
        ]
        rows = (
            ("dout", self.q_view, self.heads, self.D_v, kind, self.dout),
            ("dq", self.q_view, self.heads, self.D, self.kind, None),
            ("dk", self.kv_view, self.kv_heads, self.D, self.kind, None),
            ("dv", self.kv_view, self.kv_heads, self.D_v, self.kind, None),
        )
        for row in rows:
            self.place(*row)
        if "bias" in f and self.maybe(0.8):
            strides = [f[f"stride_bias_{axis}"] for axis in ("batch", "head", "row", "column")]
            whole = (self.batch, self.heads, f["S_q"], f["S_k"])
            shape = [min(n, 1) if s == 0 else n for n, s in zip(whole, strides, strict=True)]
            order = self.rng.permutation(4)
            room = np.full([shape[a] + 1 for a in order], UNTOUCHED, f["bias"].dtype)
            x = f["dbias"] = room[:-1, :-1, :-1, :-1].transpose(np.argsort(order))
            steps = zip(("batch", "head", "row", "column"), x.strides, strict=True)
            f |= {f"stride_dbias_{axis}": s // x.itemsize for axis, s in steps}
        if "sinks" in f and self.maybe(0.8):
            f["dsinks"] = np.full(self.heads, UNTOUCHED, np.float32)
        with np.errstate(all="ignore"):
            for b in range(self.batch):
                for h in range(self.heads):
                    out, lse = formula(**self.formula(b, h))
                    for row, x in zip(self.rows("out", self.q_view, b, h), out, strict=True):
                        row[: self.D_v] = x
                    self.lse(b, h)[:] = lse

    def lse(self, b: int, h: int) -> Array:
        first = self.fields["cu_seqlens_q"][b] if self.q_view == "packed" else 0
        return self.fields["lse"][
            0 if self.q_view == "packed" else b, h, first : first + self.S_q[b]
        ]

    def descriptor(self) -> AttentionBwd:
        own = {
            n: x for n, x in self.fields.items() if n.removeprefix("stride_").split("_")[0] in NAMES
        }
        forward = {n: x for n, x in self.fields.items() if n not in own}
        return AttentionBwd(forward=Attention(**forward), **own)

    def want(self, b: int, h: int) -> tuple[Array, Array, Array, Array, float]:
        """What the formula makes of one query head: dq, dk, dv, dx and dsink."""
        out = np.array([row[: self.D_v] for row in self.rows("out", self.q_view, b, h)]).reshape(
            -1, self.D_v
        )
        with np.errstate(all="ignore"):
            return gradients(
                **self.formula(b, h), dout=self.dout[b][h], out=out, lse=self.lse(b, h)
            )

    def close_rows(self, name: str, view: str, b: int, h: int, expected: Array) -> None:
        """Rows of a gradient within their tolerance, what lies around them untouched."""
        width = expected.shape[1]
        for row, wanted in zip(self.rows(name, view, b, h), expected, strict=True):
            close(row[:width], wanted, SUMS * (1 + abs(wanted[np.isfinite(wanted)]).max(initial=0)))
            assert (row[width:] == UNTOUCHED).all()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that most problems have several, of queries and of keys."""
    monkeypatch.setattr(reference, "BLOCK", Block(columns=16, keys=12))
    planning.forget()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("tens", range(12))
def test_random_mixtures(tens: int) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        case = Gradients(seed)
        f = case.fields
        plan(case.descriptor()).bind()()
        actual = {(b, h): case.want(b, h) for b in range(case.batch) for h in range(case.heads)}
        for (b, h), (dq, *_) in actual.items():
            case.close_rows("dq", case.q_view, b, h, dq)
        for b in range(case.batch):
            for g in range(case.kv_heads):
                heads = range(g * case.group, (g + 1) * case.group)
                with np.errstate(invalid="ignore"):
                    dk, dv = (sum(actual[b, h][i] for h in heads) for i in (1, 2))
                case.close_rows("dk", case.kv_view, b, g, dk)
                case.close_rows("dv", case.kv_view, b, g, dv)
                if case.kv_view == "strided":
                    assert all((f[n][b, g, case.S_k[b] :] == 0).all() for n in ("dk", "dv"))
        for name, view, lengths in (("dq", case.q_view, case.S_q), ("dk", case.kv_view, case.S_k)):
            if view == "packed":
                first, stop = (f[f"cu_seqlens_{name[1]}"][i] for i in (0, -1))
                assert stop - first == sum(lengths)
                assert (f[name][:, :, :first] == UNTOUCHED).all() and (
                    f[name][:, :, stop:] == UNTOUCHED
                ).all()
        if "dbias" in f:
            whole = np.zeros((case.batch, case.heads, f["S_q"], f["S_k"]))
            for (b, h), (*_, dx, _) in actual.items():
                whole[b, h, : case.S_q[b], : case.S_k[b]] = dx
            axes = tuple(
                i
                for i, (n, m) in enumerate(zip(whole.shape, f["dbias"].shape, strict=True))
                if m == 1 != n
            )
            with np.errstate(invalid="ignore"):
                expected = whole.sum(axis=axes, keepdims=True)
            close(
                f["dbias"],
                expected,
                SUMS * (1 + abs(expected[np.isfinite(expected)]).max(initial=0)),
            )
            beside = np.array(f["dbias"].base)
            beside[:-1, :-1, :-1, :-1] = UNTOUCHED
            assert (beside == UNTOUCHED).all()
        if "dsinks" in f:
            with np.errstate(invalid="ignore"):
                expected = np.array(
                    [sum(actual[b, h][4] for b in range(case.batch)) for h in range(case.heads)]
                )
            close(
                f["dsinks"],
                expected,
                SUMS * (1 + abs(expected[np.isfinite(expected)]).max(initial=0)),
            )


def test_the_mixtures_mix() -> None:
    cases = [Gradients(seed) for seed in range(120)]
    assert {(c.q_view, c.kv_view) for c in cases} == {(q, k) for q in VIEWS for k in VIEWS}
    specs = [c.descriptor().problem().spec for c in cases]
    elsewhere = SpecOption.expression  # test_user_scores.py
    assert reduce(or_, (s.forward.options for s in specs)) | elsewhere == reference.SUPPORTED
    assert {s.dtype for s in specs} == {DType.of(k) for k in KINDS}
    assert {(s.bias_gradient, s.sink_gradient) for s in specs} == {
        (x, y) for x in (True, False) for y in (True, False)
    }
    summed = [tuple(np.array(c.fields["dbias"].shape) == 1) for c in cases if "dbias" in c.fields]
    assert len(set(summed)) > 8
    assert (
        any(0 in c.S_q for c in cases)
        and any(0 in c.S_k for c in cases)
        and any(c.group > 1 for c in cases)
    )


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


def test_float64_stays_float64() -> None:
    """Given the forward's own result and LSE."""
    q, k, v, dout = (normal(1, 2, n, 8, kind=float) for n in (300, 700, 700, 300))
    bias = normal(1, 2, 300, 700, kind=float)
    actual = dense(q, k, v, dout, sums=("dbias",), causal=True, bias=bias, softcap=4.0)
    dq, dk, dv, dx, _ = gradients(
        q[0, 1],
        k[0, 1],
        v[0, 1],
        dout[0, 1],
        actual["out"][0, 1],
        actual["lse"][0, 1],
        scale=8**-0.5,
        causal=True,
        bias=bias[0, 1],
        softcap=4.0,
    )
    for name, expected in (("dq", dq), ("dk", dk), ("dv", dv), ("dbias", dx)):
        np.testing.assert_allclose(actual[name][0, 1], expected, rtol=0, atol=1e-13)


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


@pytest.mark.parametrize("empty", ["batch", "num_heads", "S_q", "S_k", "head_dim", "value_dim"])
def test_empties(empty: str) -> None:
    """Nothing to compute is no error, and what is written is zeros; what is not read may be
    missing."""
    n = {
        "batch": 2,
        "num_heads": 4,
        "kv_heads": 2,
        "S_q": 3,
        "S_k": 5,
        "head_dim": 4,
        "value_dim": 4,
        empty: 0,
    }
    forward = Attention(
        **n,
        dtype="float32",
        return_lse=True,
        causal=True,
        window=(3, 0),
        bias=0,
        mask=0,
        alibi_slopes=0,
        sinks=0,
        prefix_lengths=0,
        kv_lengths=0,
        softcap=3.0,
        stride_bias_batch=0,
        stride_bias_head=0,
    )
    d = AttentionBwd(forward=forward, dbias=0, dsinks=0)
    rules = {r.name: r for r in d.problem().operands}
    kinds = {name: np.dtype((rule.dtype or DType.float32).numpy) for name, rule in rules.items()}
    operands = {name: np.ones(rule.shape, kinds[name]) for name, rule in rules.items()}
    operands["kv_lengths"] *= n["S_k"]
    for name in ("dq", "dk", "dv", "dbias", "dsinks"):
        operands[name] *= UNTOUCHED
    plan(d).bind(**{name: x for name, x in operands.items() if rules[name].span})()
    written = (
        ["dq", "dk", "dv", "dbias", "dsinks"] if empty not in ("head_dim", "value_dim") else ["dk"]
    )
    for name in written:
        if empty == "S_k" and name == "dsinks":
            continue  # rows of sinks alone take what the made-up out says
        assert (operands[name] == 0).all(), name
    assert all(
        (operands[name] != UNTOUCHED).all() for name in ("dq", "dk", "dv", "dbias", "dsinks")
    )


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


def test_lengths_are_read_at_each_launch() -> None:
    q, k, v, dout = normal(2, 1, 4, 8), normal(2, 1, 9, 8), normal(2, 1, 9, 8), normal(2, 1, 4, 8)
    lengths, out, lse = np.array([9, 9], np.int32), np.empty_like(q), np.empty((2, 1, 4), F32)
    forward = Attention(
        batch=2,
        num_heads=1,
        S_q=4,
        S_k=9,
        head_dim=8,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        kv_lengths=lengths,
        causal=True,
    )
    dq, dk, dv = (np.full_like(x, UNTOUCHED) for x in (q, k, v))
    first, second = (
        plan(forward).bind(),
        plan(AttentionBwd(forward=forward, dout=dout, dq=dq, dk=dk, dv=dv)).bind(),
    )
    for now in ((9, 9), (5, 0)):
        lengths[:] = now
        first()
        second()
        for b, n in enumerate(now):
            expected = gradients(
                q[b, 0],
                k[b, 0, :n],
                v[b, 0, :n],
                dout[b, 0],
                out[b, 0],
                lse[b, 0],
                scale=8**-0.5,
                causal=True,
            )
            close(dq[b, 0], expected[0], 4)
            close(dk[b, 0, :n], expected[1], 4)
            close(dv[b, 0, :n], expected[2], 4)
            assert (dk[b, 0, n:] == 0).all() and (dv[b, 0, n:] == 0).all()


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
    tracemalloc.start()
    try:
        actual = dense(q, k, v, dout, sums=("dbias",), **more)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30 << 20  # the scores alone are 64 MiB
    expected = gradients(
        q[0, 0, -1:],
        k[0, 0],
        v[0, 0],
        dout[0, 0, -1:],
        actual["out"][0, 0, -1:],
        actual["lse"][0, 0, -1:],
        scale=8**-0.5,
        bias=row[0, 0],
        mask=row[0, 0] > -2,
        softcap=5.0,
        slope=0.1,
    )
    close(actual["dq"][0, 0, -1:], expected[0], 4)


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

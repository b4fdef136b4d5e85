"""The reference's gradients of an attention: against their formula over random mixtures of options and views, and that
against central differences and against what torch derives by itself."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_formula import Array, close, formula, gradients
from attention_mixture import KINDS, UNTOUCHED, Mixture

from kernelseam import Attention, AttentionBwd, plan, planning
from kernelseam.descriptors import AttentionProblem, AttentionSpec
from kernelseam.descriptors.attention_bwd_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.dtypes import DType
from kernelseam.plugins import plugins
from kernelseam.reference import attention_bwd as reference
from kernelseam.reference import attention_bwd_block

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
    """A mixture with what its forward gave, dout, and memory for the gradients that held other values."""

    q_views: tuple[str, ...] = VIEWS
    kv_views: tuple[str, ...] = VIEWS

    def memory(self) -> None:
        super().memory()
        f, kind = self.fields, DType.of(self.fields["dtype_out"]).numpy
        self.dout = [self.rng.standard_normal((self.heads, n, self.D_v)).astype(kind) for n in self.S_q]
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
        return self.fields["lse"][0 if self.q_view == "packed" else b, h, first : first + self.S_q[b]]

    def descriptor(self) -> AttentionBwd:
        own = {n: x for n, x in self.fields.items() if n.removeprefix("stride_").split("_")[0] in NAMES}
        forward = {n: x for n, x in self.fields.items() if n not in own}
        return AttentionBwd(forward=Attention(**forward), **own)

    def want(self, b: int, h: int) -> tuple[Array, Array, Array, Array, float]:
        """What the formula makes of one query head: dq, dk, dv, dx and dsink."""
        out = np.array([row[: self.D_v] for row in self.rows("out", self.q_view, b, h)]).reshape(-1, self.D_v)
        with np.errstate(all="ignore"):
            return gradients(**self.formula(b, h), dout=self.dout[b][h], out=out, lse=self.lse(b, h))

    def close_rows(self, name: str, view: str, b: int, h: int, want: Array) -> None:
        """Rows of a gradient within their tolerance, what lies around them untouched."""
        width = want.shape[1]
        for row, wanted in zip(self.rows(name, view, b, h), want, strict=True):
            close(row[:width], wanted, SUMS * (1 + abs(wanted[np.isfinite(wanted)]).max(initial=0)))
            assert (row[width:] == UNTOUCHED).all()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that most problems have several, of queries and of keys."""
    for module in (reference, attention_bwd_block):
        monkeypatch.setattr(module, "QUERIES", 16)
    monkeypatch.setattr(attention_bwd_block, "KEYS", 12)
    planning.forget()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("tens", range(24))
def test_random_mixtures(tens: int) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        case = Gradients(seed)
        f = case.fields
        plan(case.descriptor()).bind()()
        found = {(b, h): case.want(b, h) for b in range(case.batch) for h in range(case.heads)}
        for (b, h), (dq, *_) in found.items():
            case.close_rows("dq", case.q_view, b, h, dq)
        for b in range(case.batch):
            for g in range(case.kv_heads):
                heads = range(g * case.group, (g + 1) * case.group)
                with np.errstate(invalid="ignore"):
                    dk, dv = (sum(found[b, h][i] for h in heads) for i in (1, 2))
                case.close_rows("dk", case.kv_view, b, g, dk)
                case.close_rows("dv", case.kv_view, b, g, dv)
                if case.kv_view == "strided":
                    assert all((f[n][b, g, case.S_k[b] :] == 0).all() for n in ("dk", "dv"))
        for name, view, lengths in (("dq", case.q_view, case.S_q), ("dk", case.kv_view, case.S_k)):
            if view == "packed":
                first, stop = (f[f"cu_seqlens_{name[1]}"][i] for i in (0, -1))
                assert stop - first == sum(lengths)
                assert (f[name][:, :, :first] == UNTOUCHED).all() and (f[name][:, :, stop:] == UNTOUCHED).all()
        if "dbias" in f:
            whole = np.zeros((case.batch, case.heads, f["S_q"], f["S_k"]))
            for (b, h), (*_, dx, _) in found.items():
                whole[b, h, : case.S_q[b], : case.S_k[b]] = dx
            axes = tuple(i for i, (n, m) in enumerate(zip(whole.shape, f["dbias"].shape, strict=True)) if m == 1 != n)
            with np.errstate(invalid="ignore"):
                want = whole.sum(axis=axes, keepdims=True)
            close(f["dbias"], want, SUMS * (1 + abs(want[np.isfinite(want)]).max(initial=0)))
            beside = np.array(f["dbias"].base)
            beside[:-1, :-1, :-1, :-1] = UNTOUCHED
            assert (beside == UNTOUCHED).all()
        if "dsinks" in f:
            with np.errstate(invalid="ignore"):
                want = np.array([sum(found[b, h][4] for b in range(case.batch)) for h in range(case.heads)])
            close(f["dsinks"], want, SUMS * (1 + abs(want[np.isfinite(want)]).max(initial=0)))


def test_the_mixtures_mix() -> None:
    cases = [Gradients(seed) for seed in range(240)]
    assert {(c.q_view, c.kv_view) for c in cases} == {(q, k) for q in VIEWS for k in VIEWS}
    specs = [c.descriptor().problem().spec for c in cases]
    options = frozenset().union(*(s.forward.options for s in specs))
    assert options == reference.KNOWN
    assert {s.dtype for s in specs} == {DType.of(k) for k in KINDS}
    assert {(s.bias_gradient, s.sink_gradient) for s in specs} == {(x, y) for x in (True, False) for y in (True, False)}
    summed = [tuple(np.array(c.fields["dbias"].shape) == 1) for c in cases if "dbias" in c.fields]
    assert len(set(summed)) > 8
    assert any(0 in c.S_q for c in cases) and any(0 in c.S_k for c in cases) and any(c.group > 1 for c in cases)

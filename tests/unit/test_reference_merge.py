"""The reference merge of partial attentions, against its formula and against the attention over all
keys."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_formula import Array, close
from kernelseam import Attention, plan, planning
from kernelseam.descriptors import MergeProblem, MergeSpec, MergeStates
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.plugins import plugins
from kernelseam.reference import merge as reference

UNTOUCHED = 77.0


def merged(outs: Array, lses: Array, kind: Any, **more: Any) -> tuple[Array, Array]:
    """out and lse of outs [parts, B, H, rows, D_v] and lses [parts, B, H, rows]."""
    out = np.full(outs.shape[1:], UNTOUCHED, kind)
    lse = np.full(lses.shape[1:], UNTOUCHED, lses.dtype)
    parts, batch, heads, rows, dim = outs.shape
    plan(
        MergeStates(
            parts=parts,
            batch=batch,
            num_heads=heads,
            rows=rows,
            value_dim=dim,
            outs=outs,
            lses=lses,
            out=out,
            lse=lse,
            **more,
        )
    ).bind()()
    return out, lse


def normal(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("result", [np.float16, np.float32])
@pytest.mark.parametrize("block", [40, 1 << 16])
def test_the_formula(kind: Any, result: Any, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_ELEMENTS", block)
    planning.forget()
    outs = normal(4, 2, 3, 17, 5).astype(kind)
    lses = (9 * normal(4, 2, 3, 17)).astype(np.promote_types(kind, np.float32))
    out, lse = merged(outs, lses, result)
    s = lses.astype(np.float64)
    want_lse = np.log(np.exp(s).sum(axis=0))
    close(out, (np.exp(s - want_lse)[..., None] * outs.astype(np.float64)).sum(axis=0))
    close(lse, want_lse, 30)


def test_float64_stays_float64() -> None:
    """Parts of float64 with LSEs of float64; LSEs of another dtype are refused."""
    rng = np.random.default_rng(2)
    outs, lses = rng.standard_normal((4, 2, 3, 17, 5)), 9 * rng.standard_normal((4, 2, 3, 17))
    out, lse = merged(outs, lses, np.float64)
    want_lse = np.log(np.exp(lses).sum(axis=0))
    close(out, (np.exp(lses - want_lse)[..., None] * outs).sum(axis=0))
    close(lse, want_lse)
    with pytest.raises(InvalidValue, match="^lses = an array of float32: must be float64"):
        merged(outs, lses.astype(np.float32), np.float64)
    with pytest.raises(InvalidValue, match="^lses = an array of float64: must be float32"):
        merged(outs.astype(np.float32), lses, np.float32)


def test_strides() -> None:
    whole = normal(2, 7, 2, 3, 9)  # [batch, rows, heads, parts, dim and more]
    outs, lses = whole[..., :4].transpose(3, 0, 2, 1, 4), normal(2, 3, 2, 7).transpose(1, 0, 2, 3)
    out, lse = (
        np.full((2, 7, 2, 6), UNTOUCHED, np.float32),
        np.full((2, 3, 7), UNTOUCHED, np.float32),
    )
    steps = {
        f"stride_{name}_{axis}": s // 4
        for name, x in (("outs", outs), ("lses", lses), ("out", out.swapaxes(1, 2)), ("lse", lse))
        for axis, s in zip(
            {"outs": ("part", "batch", "head", "row"), "lses": ("part", "batch", "head")}.get(
                name, ("batch", "head", "row")
            )[: x.ndim - 1],
            x.strides,
            strict=False,
        )
    }
    plan(
        MergeStates(
            parts=3,
            batch=2,
            num_heads=2,
            rows=7,
            value_dim=4,
            outs=outs,
            lses=lses,
            out=out,
            lse=lse,
            **steps,
        )
    ).bind()()
    expected, want_lse = merged(np.ascontiguousarray(outs), np.ascontiguousarray(lses), np.float32)
    np.testing.assert_array_equal(out.swapaxes(1, 2)[..., :4], expected)
    np.testing.assert_array_equal(lse[:, :2], want_lse)
    assert (out[..., 4:] == UNTOUCHED).all() and (lse[:, 2:] == UNTOUCHED).all()


def test_a_part_without_a_key_is_not_read() -> None:
    outs, lses = normal(3, 1, 1, 4, 2), np.zeros((3, 1, 1, 4), np.float32)
    lses[1, ..., :2], outs[1, ..., :2, :] = -np.inf, np.nan
    lses[:, ..., 1], outs[:, ..., 1, :] = -np.inf, np.inf
    out, lse = merged(outs, lses, np.float32)
    np.testing.assert_allclose(out[0, 0, 0], (outs[0] + outs[2])[0, 0, 0] / 2, rtol=1e-6)
    assert (out[0, 0, 1] == 0).all() and lse[0, 0, 1] == -np.inf
    np.testing.assert_allclose(lse[0, 0, [0, 2, 3]], np.log([2, 3, 3]), rtol=1e-6)


def test_what_is_not_finite_reaches_its_row() -> None:
    outs, lses = normal(2, 1, 1, 5, 2), np.zeros((2, 1, 1, 5), np.float32)
    outs[0, 0, 0, 0, 1], lses[1, 0, 0, 1], lses[0, 0, 0, 2] = np.nan, np.nan, np.inf
    outs[0, 0, 0, 3, 0], lses[0, 0, 0, 3] = np.nan, -1e4  # a weight of 0, yet not −inf: 0·NaN
    out, lse = merged(outs, lses, np.float32)
    nan = np.isnan(out[0, 0])
    assert nan.tolist() == [
        [False, True],
        [True, True],
        [True, True],
        [True, False],
        [False, False],
    ]
    assert np.isnan(lse[0, 0]).tolist() == [False, True, True, False, False]


def test_parts_of_the_keys_joined_are_the_attention_over_all() -> None:
    q, k, v = (normal(2, 4, n, 16).astype(np.float16) for n in (30, 90, 91))
    v, cuts = v[:, :, :90], (0, 10, 64, 90)

    def attention(keys: slice, dtype_out: str) -> tuple[Array, Array]:
        part_k, part_v = (np.ascontiguousarray(x[:, :, keys]) for x in (k, v))
        out, lse = np.empty(q.shape, dtype_out), np.empty(q.shape[:3], np.float32)
        plan(
            Attention(
                batch=2,
                num_heads=4,
                S_q=30,
                S_k=part_k.shape[2],
                head_dim=16,
                q=q,
                k=part_k,
                v=part_v,
                out=out,
                lse=lse,
            )
        ).bind()()
        return out, lse

    pieces = [attention(slice(a, b), "float32") for a, b in zip(cuts, cuts[1:], strict=False)]
    out, lse = merged(
        np.stack([o for o, _ in pieces]), np.stack([s for _, s in pieces]), np.float32
    )
    expected, want_lse = attention(slice(None), "float32")
    assert abs(out - expected).max() < 1e-6 and abs(lse - want_lse).max() < 2e-6


def test_memory_is_that_of_a_block() -> None:
    outs, lses, out = (
        np.ones((2, 1, 1, 20000, 64), np.float32),
        np.zeros((2, 1, 1, 20000), np.float32),
        None,
    )
    out = np.empty(outs.shape[1:], np.float32)
    call = plan(
        MergeStates(
            parts=2, batch=1, num_heads=1, rows=20000, value_dim=64, outs=outs, lses=lses, out=out
        )
    ).bind()
    tracemalloc.start()
    try:
        call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20 and (out == 1).all()


def test_lists_and_packed_rows_are_refused() -> None:
    """They belong to plans of other implementations."""
    device = plugins().backend("numpy").runtime.devices()[0]
    for option in ("pointers", "packed"):
        spec = MergeSpec(DType.float32, DType.float32, 4, **{option: True})
        problem = MergeProblem(spec, 1, 1, 1, 1, (4, 4, 4, 4), (1, 1, 1), (4, 4, 4))
        assert (
            reference.NumpyMerge().supports(problem, device)
            == f"{option} is not supported by this kernel"
        )

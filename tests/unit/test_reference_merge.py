"""The reference merge of partial attentions: float64, memory (and a projection's), refusals. The
matrix and test_random_problems.py have the results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_formula import Array, close
from kernelseam import QkvProjection, plan
from kernelseam.descriptors import MergeProblem, MergeSpec, MergeStates
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.plugins import plugins
from kernelseam.reference import merge as reference
from traced_memory import peak_of

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
    _, peak = peak_of(call)
    assert peak < 1 << 20 and (out == 1).all()


def test_a_projections_memory_is_that_of_blocks() -> None:
    """Those of a product, whatever its rows."""
    w, sizes = np.ones((3 * 512, 512), np.float16), []
    for rows in (6000, 12000):
        x = np.ones((1, rows, 512), np.float16)
        q, k, v = (np.empty((1, rows, 8, 64), np.float16) for _ in "qkv")
        made = plan(QkvProjection.from_arrays(x, w, q, k, v, layout="bshd"))
        _, peak = peak_of(made.bind())
        assert peak < 1 << 20 and (q == 512).all()
        sizes.append(made.workspace_bytes)
    assert sizes[0] == sizes[1] < 13 << 20


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

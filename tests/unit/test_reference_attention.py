"""The reference attention against its formula, over random mixtures of options and views."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import pytest
from attention_formula import close, formula
from attention_mixture import KINDS, UNTOUCHED, Mixture
from kernelseam import Attention, plan, planning
from kernelseam.descriptors import AttentionProblem, AttentionSpec
from kernelseam.descriptors.attention.options import STORED, SpecOption
from kernelseam.dtypes import DType
from kernelseam.plugins import plugins
from kernelseam.reference import attention as reference
from kernelseam.reference.attention_tiling import Block


def run(case: Mixture) -> None:
    d = Attention(**case.fields)
    if not case.pointers:
        plan(d).bind()()
        return
    # Lists of addresses come by a descriptor of their own: here they replace the strided view in
    # the problem.
    p = d.problem()
    assert isinstance(p, AttentionProblem)
    names = {"q": "q_view", "k": "kv_view", "v": "kv_view", "out": "q_view"}
    strides = {
        f"{n}_strides": (0, 0, x[0].strides[0] // x[0].itemsize) for n, x in case.pointers.items()
    }
    p = replace(p, spec=replace(p.spec, **{names[n]: "pointers" for n in case.pointers}), **strides)
    lists = {
        f"{n}_ptrs": np.array([x.ctypes.data for x in matrices], np.uint64)
        for n, matrices in case.pointers.items()
    }
    launch(p, {**d.operands(), **lists})


def launch(problem: AttentionProblem, operands: dict[str, Any]) -> None:
    """Run a problem for which there is no descriptor."""
    device = plugins().backend("numpy").runtime.devices()[0]
    implementation = reference.NumpyAttention()
    assert implementation.supports(problem, device) is None
    parts = implementation.build(problem, device)
    workspace = np.full(parts.workspace_bytes + 64, 255, np.uint8)  # NaN
    pointers = {n: x.ctypes.data for n, x in operands.items()}
    parts.steps[0].bind(pointers, workspace.ctypes.data)(0)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that most problems have several, of queries and of keys."""
    monkeypatch.setattr(reference, "BLOCK", Block(columns=16, keys=24))
    planning.forget()


# in the formula, where operands are not finite
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("tens", range(24))
def test_random_mixtures(tens: int) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        case = Mixture(seed)
        run(case)
        f = case.fields
        touched = np.zeros(f["lse"].shape, bool)
        for b in range(case.batch):
            for h in range(case.heads):
                out, lse = formula(**case.formula(b, h))
                actual = case.rows("out", case.q_view, b, h)
                first = f["cu_seqlens_q"][b] if case.q_view == "packed" else 0
                at = (0 if case.q_view == "packed" else b, h, slice(first, first + case.S_q[b]))
                touched[at] = True
                close(f["lse"][at], lse, 1 + abs(lse[np.isfinite(lse)]).max(initial=0))
                for row, wanted in zip(actual, out, strict=True):
                    close(row[: case.D_v], wanted, 4)
                    assert (row[case.D_v :] == UNTOUCHED).all()
        assert (f["lse"][~touched] == UNTOUCHED).all()
        if case.q_view == "packed":
            assert (f["out"][0].swapaxes(0, 1)[~touched[0].any(axis=0)] == UNTOUCHED).all()


def test_the_mixtures_mix() -> None:
    """Every option and every pair of views takes part, and with it every refusal of an unknown
    option is possible."""
    cases = [Mixture(seed) for seed in range(240)]
    assert {(c.q_view, c.kv_view) for c in cases} == {
        (q, k)
        for q in ("strided", "packed", "pointers")
        for k in ("strided", "packed", "paged", "pointers")
    }
    specs: list[AttentionSpec] = [Attention(**c.fields).problem().spec for c in cases]
    options = reduce(or_, (s.options for s in specs))
    # of 8 bits: test_fp8_keys.py, test_fp8_queries.py
    views = SpecOption.q_view | SpecOption.kv_view
    # test_user_scores.py, test_prefix_groups.py
    elsewhere = STORED | SpecOption.expression | SpecOption.prefix_groups
    assert not reference.SUPPORTED & ~(options | elsewhere | views)
    assert {s.dtype for s in specs} == {DType.of(k) for k in KINDS}
    assert any(0 in c.S_q for c in cases) and any(0 in c.S_k for c in cases)
    assert any(
        "block_table" in c.fields and any(n % c.fields["page_size"] for n in c.S_k) for c in cases
    )

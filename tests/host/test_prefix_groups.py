"""Entries of a batch whose block tables begin alike, on the host platform: the parity cases, and
tables drawn at random; groups are found anew at every launch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernelseam.contract import Device
from kernelseam.descriptors import Attention
from kernelseam.parity.matrix import matrix
from kernelseam.parity.running.run import Target, run_case
from kernelseam.planning import plan
from kernelseam.plugins import Plugins
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.common import PREFIX_GROUPS
from kernelseam_hostcpp.runtime import DEVICES, HostArray

CASES = [
    c
    for c in matrix(operation="attention")
    if isinstance(c, AttentionCase) and c.prefix_groups is not None
]
PAGE, WIDTH, PAGES, HEADS, D = 4, 6, 40, 2, 16
RNG = np.random.default_rng(3)


def _parameters() -> Iterator[object]:
    for case in CASES:
        slow = case.name.endswith("-ramp")
        marks = [pytest.mark.slow("a compilation each")] if slow else []
        yield pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", list(_parameters()))
def test_parity(hostcpp: Plugins, case: AttentionCase) -> None:
    device: Device = DEVICES[CASES.index(case) % 2 if case.dtype_kv is None else 0]
    outcome = run_case(case, Target(device, PREFIX_GROUPS, "attention", builtin=True))
    outcome.require()
    assert outcome.refusal is None, outcome.refusal
    assert outcome.verdict is not None and outcome.verdict.worst <= 1


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """A table whose rows begin as those before them do, lengths, and a number of groups."""
    batch = draw(st.integers(1, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    table = rng.integers(0, PAGES, (batch, WIDTH)).astype(np.int32)
    for b in range(1, batch):
        if rng.random() < 0.7:
            n = rng.integers(1, WIDTH + 1)
            table[b, :n] = table[b - 1, :n]
    lengths = rng.integers(0, WIDTH * PAGE + 1, batch).astype(np.int32)
    lengths[rng.random(batch) < 0.5] = WIDTH * PAGE
    for b, n in enumerate(lengths):
        table[b, -(-n // PAGE) :] = -1
    return table, lengths, draw(st.integers(1, 5))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches())
def test_groups_of_any_table(hostcpp: Plugins, drawn: tuple[np.ndarray, np.ndarray, int]) -> None:
    """The same as without groups; entries of the table beyond the lengths are not read."""
    table, lengths, groups = drawn
    q = RNG.standard_normal((len(table), 1, HEADS, D)).astype(np.float32)
    k, v = (RNG.standard_normal((PAGES, PAGE, 1, D)).astype(np.float32) for _ in range(2))
    expected, found = (
        _attention(q, k, v, table, lengths, **options)
        for options in ({}, {"prefix_groups": groups, "implementation": PREFIX_GROUPS})
    )
    np.testing.assert_allclose(found, expected, atol=2e-5)


def _attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    table: np.ndarray,
    lengths: np.ndarray,
    implementation: str = "shared",
    **options: Any,
) -> np.ndarray:
    out = np.full_like(q, np.nan)
    arrays = [HostArray(x) for x in (q, k, v, out)]
    made = Attention.from_arrays(
        *arrays,
        layout="bshd",
        block_table=HostArray(table),
        kv_lengths=HostArray(lengths),
        max_seqlen_k=WIDTH * PAGE,
        causal=True,
        **options,
    )
    plan(made, implementation=implementation).bind()()
    return out


def test_a_call_serves_other_groups(hostcpp: Plugins) -> None:
    """Groups are found at every launch: tables and lengths may change between them."""
    q = RNG.standard_normal((6, 1, HEADS, D)).astype(np.float16)
    k, v = (RNG.standard_normal((PAGES, PAGE, 1, D)).astype(np.float16) for _ in range(2))
    table = np.zeros((6, WIDTH), np.int32)
    lengths, out = np.full(6, WIDTH * PAGE, np.int32), np.empty_like(q)
    shared = {"block_table": HostArray(table), "kv_lengths": HostArray(lengths)}
    made = Attention.from_arrays(
        *(HostArray(x) for x in (q, k, v, out)),
        layout="bshd",
        max_seqlen_k=WIDTH * PAGE,
        prefix_groups=2,
        **shared,
    )
    call = plan(made, implementation=PREFIX_GROUPS).bind()
    for ends in ((0, 6), (0, 2, 6), (0, 1, 2, 3, 4, 5, 6), (0, 3, 4, 6)):
        table[:] = RNG.permutation(PAGES)[: 6 * WIDTH].reshape(6, WIDTH)
        for begin, end in pairwise(ends):
            table[begin:end, :4] = table[begin, :4]
        lengths[:] = RNG.integers(17, WIDTH * PAGE + 1, 6)
        call()
        expected = _attention(q, k, v, table, lengths)
        np.testing.assert_allclose(out.astype(float), expected.astype(float), atol=3e-3)

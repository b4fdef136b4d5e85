"""The reference GEMM with a bias, a residual and sums: the formula on random problems, and what is
never read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelseam import BatchedGemmPointers, BatchedGemmStrided, plan, planning
from kernelseam.contract import Device
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec, HeadsSpec
from kernelseam.dtypes import DType
from kernelseam.reference import gemm as reference
from kernelseam.reference.gemm import NumpyGemm

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(40)
few = st.integers(1, 4)


def integers(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.integers(-3, 4, shape).astype(dtype)


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Blocks so small that problems have many, along every axis."""
    patch = pytest.MonkeyPatch()
    patch.setattr(reference, "_SIDE", 4)
    patch.setattr(reference, "_BLOCK", 3 * 4 * 4)
    planning.forget()
    yield
    patch.undo()
    planning.forget()


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Extents, groups that divide them, transposes, factors, and what is added."""
    batch_group, head_group, b_group = draw(few), draw(few), draw(few)
    return {
        "M": draw(st.integers(1, 9)),
        "N": draw(st.integers(1, 9)),
        "K": draw(st.integers(0, 9)),
        "batch": batch_group * draw(st.integers(0, 2)),
        "num_heads": math.lcm(head_group, b_group) * draw(few),
        "b_head_group": b_group,
        "c_batch_group": batch_group,
        "c_head_group": head_group,
        "a_transposed": draw(st.booleans()),
        "b_transposed": draw(st.booleans()),
        "alpha": draw(st.sampled_from([1.0, 2.0, 0.0])),
        "beta": draw(st.sampled_from([0.0, 0.0, -1.0])),
        "bias": draw(st.booleans()),
        "residual": draw(st.sampled_from(["", "own", "C"])),
        "dtype": draw(st.sampled_from(["float16", "bfloat16", "float32", "float64"])),
        "wide": draw(st.booleans()),
    }


def operands(p: dict[str, Any]) -> tuple[dict[str, Array], Array, dict[str, Any]]:
    """The operands of such a problem, what C must be, and the descriptor's other fields."""
    fields = dict(p)
    bias, residual, wide = (fields.pop(n) for n in ("bias", "residual", "wide"))
    kind = DType.of(p["dtype"], "dtype")
    dtype, to = kind.numpy, (kind.accumulator if wide else kind).numpy
    M, N, K, B, H = (p[n] for n in ("M", "N", "K", "batch", "num_heads"))
    lead = (B // p["c_batch_group"], H // p["c_head_group"])
    x = {
        "A": integers(B, H, *((K, M) if p["a_transposed"] else (M, K)), dtype=dtype),
        "B": integers(
            B, H // p["b_head_group"], *((N, K) if p["b_transposed"] else (K, N)), dtype=dtype
        ),
        "C": integers(*lead, M, N, dtype=to),
    }
    a, b = (y.astype(np.float64) for y in (x["A"], x["B"]))
    a, b = (
        a.swapaxes(2, 3) if p["a_transposed"] else a,
        b.swapaxes(2, 3) if p["b_transposed"] else b,
    )
    product = a @ np.repeat(b, p["b_head_group"], axis=1)
    expected = p["alpha"] * product.reshape(
        lead[0], p["c_batch_group"], lead[1], p["c_head_group"], M, N
    ).sum((1, 3))
    expected = expected + p["beta"] * x["C"].astype(np.float64)
    if bias:
        x["bias"] = integers(*lead, N, dtype=dtype)
        expected = expected + x["bias"].astype(np.float64)[:, :, None]
    if residual == "own" or (residual and p["beta"]):
        x["residual"] = integers(*lead, M, N, dtype=dtype)
    elif residual:
        x["residual"] = x["C"]
    expected = expected + (x["residual"].astype(np.float64) if residual else 0)
    return x, expected.astype(to), fields


@settings(max_examples=120)
@given(problems())
def test_strided_is_the_formula(p: dict[str, Any]) -> None:
    x, expected, fields = operands(p)
    plan(BatchedGemmStrided(**x, **fields), device="numpy").bind()()
    np.testing.assert_array_equal(x["C"], expected)


@settings(max_examples=80)
@given(problems())
def test_lists_are_the_formula(p: dict[str, Any]) -> None:
    x, expected, fields = operands(p)
    heads, group = p["num_heads"], fields.pop("b_head_group")
    entries: dict[str, Any] = {
        f"{n}_ptrs": [y[i] for i in np.ndindex(*y.shape[:2])] for n, y in x.items()
    }
    entries["B_ptrs"] = [x["B"][b, h // group] for b in range(p["batch"]) for h in range(heads)]
    planned = plan(BatchedGemmPointers(**entries, **fields), device="numpy")
    planned.bind()()
    np.testing.assert_array_equal(x["C"], expected)


def test_sums_go_by_batch_then_by_head() -> None:
    """In float32, where the order shows: 2²⁴ + 1 + 1 is 2²⁴, 1 + 1 + 2²⁴ is 2²⁴ + 2."""
    big = 2.0**24
    for values, expected in (
        (((big, 1.0), (1.0, -big)), 0.0),
        (((1.0, 1.0), (big, 0.0)), big + 2),
        (((big, 1.0), (1.0, 0.0)), big),
    ):
        a, b = np.array(values, np.float32).reshape(2, 2, 1, 1), np.ones((2, 2, 1, 1), np.float32)
        c = np.empty((1, 1, 1, 1), np.float32)
        plan(
            BatchedGemmStrided(
                A=a, B=b, C=c, M=1, N=1, K=1, batch=2, num_heads=2, c_batch_group=2, c_head_group=2
            )
        ).bind()()
        assert c.item() == expected


def test_what_is_added_is_rounded_with_the_sum() -> None:
    """In float16 2049 would be 2048 before 1 is added."""
    a, b, c = (
        np.full((1, 1), 2048, np.float16),
        np.ones((1, 1), np.float16),
        np.empty((1, 1), np.float16),
    )
    one = np.ones(1, np.float16)
    plan(BatchedGemmStrided(A=a, B=b, C=c, bias=one, residual=one[None], M=1, N=1, K=1)).bind()()
    assert c.item() == 2050


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_inputs_that_are_never_read_may_be_missing(dtype: Any) -> None:
    c, bias, residual = (
        np.full((2, 3, 4), np.nan, dtype),
        integers(4, dtype=dtype),
        integers(2, 3, 4, dtype=dtype),
    )
    plan(
        BatchedGemmStrided(
            C=c,
            bias=bias,
            residual=residual,
            M=3,
            N=4,
            K=5,
            batch=4,
            c_batch_group=2,
            alpha=0,
            dtype=c.dtype,
            stride_bias_batch=0,
        )
    ).bind()()
    np.testing.assert_array_equal(c, bias + residual)


def test_a_nan_that_is_added_stays_where_it_is() -> None:
    a, b, c = integers(2, 5, 6), integers(2, 6, 7), np.empty((2, 5, 7), np.float32)
    bias, residual = np.zeros((2, 7), np.float32), np.zeros((2, 5, 7), np.float32)
    bias[0, 3], residual[1, 2, 5] = np.nan, np.inf
    plan(
        BatchedGemmStrided(A=a, B=b, C=c, bias=bias, residual=residual, M=5, N=7, K=6, batch=2)
    ).bind()()
    expected = a @ b
    expected[0, :, 3], expected[1, 2, 5] = np.nan, np.inf
    np.testing.assert_array_equal(c, expected)


def test_memory_is_bounded_and_sums_launch_once() -> None:
    d = BatchedGemmStrided(
        M=500,
        N=500,
        K=10**6,
        batch=10**4,
        c_batch_group=10**4,
        bias=0,
        residual=0,
        dtype="float16",
        beta=1,
    )
    planned = plan(d, backend="numpy")
    assert planned.workspace_bytes <= 34 * 2**20
    assert [r.kernel for r in planned.launches] == ["numpy_gemm"]


@pytest.mark.parametrize(
    "more", [{"row_sums": DType.float32}, {"segmented": True}, {"heads": HeadsSpec()}]
)
def test_what_projections_ask_for_is_refused(more: dict[str, Any]) -> None:
    spec = GemmSpec(DType.float32, DType.float32, DType.float32, **more)
    problem = GemmProblem(spec, 2, 2, 2, 1, 1, (4, 4, 2), (4, 4, 2), (4, 4, 2))
    output = NumpyGemm().supports(problem, Device("numpy", 0, "cpu"))
    assert output == "has no row sums, segments or heads, which are a projection's"

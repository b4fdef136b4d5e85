"""BatchedGemmStrided's bias, residual and sums: what it derives, what it refuses, and the residual
that is C itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernelseam import BatchedGemmStrided, DType, plan
from refusals import Refused, refusals

BASE: dict[str, Any] = {"M": 4, "N": 8, "K": 8, "batch": 6, "num_heads": 4, "dtype": "float32"}


def gemm(**more: Any) -> BatchedGemmStrided:
    return BatchedGemmStrided(**{**BASE, **more})


def rules(d: BatchedGemmStrided) -> dict[str, tuple[int, ...]]:
    return {r.name: r.shape for r in d.problem().operands}


# ---------------------------------------------------------------- what is derived


def test_they_take_part_where_they_are_given() -> None:
    assert list(rules(gemm())) == ["A", "B", "C"] and gemm().problem().spec.plain
    assert rules(gemm(bias=0)) == {
        "A": (6, 4, 4, 8),
        "B": (6, 4, 8, 8),
        "C": (6, 4, 4, 8),
        "bias": (6, 4, 8),
    }
    p = gemm(bias=0, residual=4096).problem()
    assert (p.spec.bias, p.spec.residual, p.spec.summed, p.spec.plain) == (
        DType.float32,
        DType.float32,
        False,
        False,
    )
    assert str(p.spec) == "gemm float32→float32 NN strided bias residual"
    assert gemm(residual=0).operands() == {"residual": 0}


def test_strides_pack_around_those_given() -> None:
    p = gemm(bias=0, residual=0).problem()
    assert (p.bias_strides, p.residual_strides) == ((32, 8), (128, 32, 8))
    p = gemm(bias=0, residual=0, stride_bias_head=0, stride_residual_row=10).problem()
    assert (p.bias_strides, p.residual_strides) == ((0, 0), (160, 40, 10))
    p = gemm(
        bias=0,
        residual=0,
        stride_bias_batch=0,
        stride_residual_head=0,
        c_batch_group=3,
        c_head_group=2,
    ).problem()
    assert (p.bias_strides, p.residual_strides, p.c_strides) == ((0, 8), (0, 0, 8), (64, 32, 8))
    p = gemm().problem()
    assert (p.bias_strides, p.residual_strides) == ((0, 0), (0, 0, 0))


def test_groups_leave_fewer_results() -> None:
    p = gemm(bias=0, residual=0, c_batch_group=3, c_head_group=2, b_head_group=4).problem()
    assert (p.results, p.summed, p.matrices, p.spec.summed) == (4, 6, 24, True)
    assert [r.shape for r in p.operands] == [
        (6, 4, 4, 8),
        (6, 1, 8, 8),
        (2, 2, 4, 8),
        (2, 2, 8),
        (2, 2, 4, 8),
    ]
    assert p.operations == 2 * 24 * 4 * 8 * 8
    assert (
        gemm(c_head_group=4).problem().spec.summed
        and not gemm(c_head_group=1).problem().spec.summed
    )
    assert gemm(batch=0, c_batch_group=3).problem().results == 0


def test_dtypes() -> None:
    def kinds(**more: Any) -> tuple[str, str]:
        s = gemm(bias=0, residual=0, **more).problem().spec
        return str(s.bias), str(s.residual)

    assert kinds() == ("float32", "float32")
    assert kinds(dtype="float16") == ("float16", "float16")
    assert kinds(dtype="float16", dtype_c="float32") == ("float32", "float32")
    assert kinds(dtype="float16", dtype_bias="bfloat16", dtype_residual=np.float32) == (
        "bfloat16",
        "float32",
    )
    assert kinds(dtype="float64", dtype_bias="float32") == ("float32", "float64")
    d = gemm(
        dtype="float16",
        bias=np.zeros((6, 4, 8), np.float32),
        residual=np.zeros((6, 4, 4, 8), np.float16),
    )
    assert (d.problem().spec.bias, d.problem().spec.residual) == (DType.float32, DType.float16)


@pytest.mark.parametrize(
    ("more", "vector"),
    [
        ({}, 16),
        ({"N": 6}, 4),
        ({"residual": 8}, 4),
        ({"stride_residual_head": 34}, 4),
        ({"stride_residual_row": 0}, 16),
        ({"N": 6, "stride_residual_row": 8}, 16),
        ({"N": 4, "dtype_residual": "float16", "dtype_c": "float32"}, 2),
    ],
)
def test_vector_class_of_the_residual(more: dict[str, Any], vector: int) -> None:
    p = gemm(**{"residual": 0, "bias": 4, **more}).problem()
    assert p.spec.vector_r == vector
    actual = {r.name: r.alignment for r in p.operands}
    assert (actual["residual"], actual["bias"]) == (vector, p.spec.bias.itemsize)  # type: ignore[union-attr]


def test_over_addresses_it_is_the_same_problem() -> None:
    x = {
        "A": np.zeros((6, 4, 4, 8), "f4"),
        "B": np.zeros((6, 4, 8, 8), "f4"),
        "C": np.zeros((2, 4, 4, 8), "f4"),
    }
    added = {"bias": np.zeros((2, 4, 8), "f2"), "residual": np.zeros((2, 4, 4, 8), "f2")}
    d = gemm(**x, **added, c_batch_group=3)
    bare = d.without_arrays()
    assert bare.operands() == {n: a.ctypes.data for n, a in {**x, **added}.items()}
    assert bare.problem() == d.problem() and bare.device is None
    assert replace(d, c_batch_group=1, C=None, bias=None, residual=None).problem().spec.plain


# ---------------------------------------------------------------- what is refused

MESSAGES: list[tuple[dict[str, Any], str]] = refusals("gemm_added", "added", globals())


@pytest.mark.parametrize(
    ("more", "message"), MESSAGES, ids=[m[0].__repr__()[:40] for m in MESSAGES]
)
def test_refused(more: dict[str, Any], message: str, refused: Refused) -> None:
    refused(message, lambda: gemm(**more))


def test_one_bias_for_all_says_so_by_its_strides() -> None:
    d = gemm(bias=np.zeros(8, np.float32), stride_bias_batch=0, stride_bias_head=0)
    assert d.problem().bias_strides == (0, 0)


# ---------------------------------------------------------------- overlaps


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        n: rng.integers(-3, 4, s).astype(np.float32)
        for n, s in (("A", (6, 4, 4, 8)), ("B", (6, 4, 8, 8)), ("C", (6, 4, 4, 8)))
    }


def test_the_residual_may_be_c() -> None:
    x = arrays()
    expected = x["A"] @ x["B"] + x["C"]
    plan(gemm(**x, residual=x["C"])).bind()()
    np.testing.assert_array_equal(x["C"], expected)
    gaps = np.zeros((6, 4, 4, 12), np.float32)
    strides = {
        f"stride_{n}_{a}": s
        for n in ("c", "residual")
        for a, s in (("batch", 192), ("head", 48), ("row", 12))
    }
    gaps[..., :8] = 1
    plan(gemm(**{**x, "C": gaps}, residual=gaps, **strides)).bind(check=True)()
    np.testing.assert_array_equal(gaps[..., :8], x["A"] @ x["B"] + 1)


def test_a_residual_that_overlaps_c_otherwise_is_refused(refused: Refused) -> None:
    x = arrays()
    at = hex(x["C"].ctypes.data)
    message = f"C = {at}: overlaps residual. Give the output memory of its own."
    others: list[dict[str, Any]] = [
        {"beta": 1.0},  # which reads what others have written
        {"residual": x["C"].ctypes.data + 32},
        {"stride_residual_head": 0},
        {"stride_residual_batch": 256},
        {"stride_residual_row": 16},
        {"dtype_residual": "float16", "residual": x["C"].ctypes.data},
    ]
    for more in others:
        call = {**x, "residual": x["C"].ctypes.data, **more}
        refused(message, lambda call=call: plan(gemm(**call)).bind())


def test_a_bias_may_not_be_c(refused: Refused) -> None:
    x = arrays()
    refused(
        f"C = {hex(x['C'].ctypes.data)}: overlaps bias. Give the output memory of its own.",
        lambda: plan(gemm(**x, bias=x["C"], stride_bias_batch=0, stride_bias_head=0)).bind(),
    )
    halves = np.zeros((6, 4, 4, 16), np.float32)  # interleaved: columns beside those of C
    strides = {
        f"stride_{n}_{a}": s
        for n in ("c", "residual")
        for a, s in (("batch", 256), ("head", 64), ("row", 16))
    }
    halves[..., 8:] = 2
    plan(
        gemm(**{**x, "C": halves.ctypes.data}, residual=halves.ctypes.data + 32, **strides)
    ).bind()()
    np.testing.assert_array_equal(halves[..., :8], x["A"] @ x["B"] + 2)


def test_what_bind_gives_in_place_of_what_was_announced(refused: Refused) -> None:
    x = arrays()
    p = plan(gemm(**x, bias=0, residual=0))
    refused(
        "bias = null: must be the address of memory on the device. Give bias in the descriptor "
        "or to bind.",
        p.bind,
    )
    bias, residual = np.ones((6, 4, 8), np.float32), np.full((6, 4, 4, 8), 2, np.float32)
    p.bind(bias=bias, residual=residual)()
    np.testing.assert_array_equal(x["C"], x["A"] @ x["B"] + 3)
    plain = plan(gemm(**x))
    refused(
        "bias = given: is no operand of this plan. Its operands are A, B, C.",
        lambda: plain.bind(bias=bias),
    )

"""BatchedGemmPointers' bias, residual and sums: lists with an entry for each C, and the strided way
for even ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernelseam import BatchedGemmPointers, DType, plan, trace
from kernelseam.errors import Unsupported
from kernelseam_thirdvendor import AcmeArray
from refusals import Refused

Array = npt.NDArray[Any]
RNG = np.random.default_rng(7)
SPACED = "addresses are evenly spaced: the strided way is taken"


def integers(*shape: int, dtype: str = "f4") -> Array:
    return RNG.integers(-3, 4, shape).astype(dtype)


def apart(count: int, *shape: int) -> list[Array]:
    """Arrays in an order that is not that of memory, so that they are not evenly spaced."""
    pool = integers(count, *shape)
    return [pool[i] for i in (*range(1, count, 2), *range(0, count, 2))]


def gemm(**more: Any) -> BatchedGemmPointers:
    return BatchedGemmPointers(
        **{"M": 5, "N": 4, "K": 8, "batch": 2, "num_heads": 6, "dtype": "float32", **more}
    )


def lists(results: int = 12) -> dict[str, list[Array]]:
    return {"A_ptrs": apart(12, 5, 8), "B_ptrs": apart(12, 8, 4), "C_ptrs": apart(results, 5, 4)}


def summed(x: dict[str, list[Array]], batch_group: int = 1, head_group: int = 1) -> list[Array]:
    """What each C must be, without what is added to it."""
    products = np.array([a @ b for a, b in zip(x["A_ptrs"], x["B_ptrs"], strict=True)])
    parts = products.reshape(2 // batch_group, batch_group, 6 // head_group, head_group, 5, 4).sum(
        (1, 3)
    )
    return list(parts.reshape(-1, 5, 4))


@pytest.mark.parametrize("kind", ["vectors", "rows", "addresses", "numpy"])
def test_a_bias_for_each_matrix(kind: str) -> None:
    x, bias = lists(), apart(12, 4)
    turn: dict[str, Callable[[list[Array]], object]] = {
        "vectors": list,
        "rows": lambda v: [b[None] for b in v],
        "addresses": lambda v: [b.ctypes.data for b in v],
        "numpy": lambda v: np.array([b.ctypes.data for b in v]),
    }
    p = plan(gemm(**x, bias_ptrs=turn[kind](bias)))
    assert (p.note, p.problem.spec.bias, p.problem.spec.view) == ("", DType.float32, "pointers")
    with trace() as launches:
        p.bind(check=True)()
    assert len(launches) == 1
    for c, expected, b in zip(x["C_ptrs"], summed(x), bias, strict=True):
        np.testing.assert_array_equal(c, expected + b)


def test_one_bias_for_all_is_one_address() -> None:
    x, bias = lists(), integers(4, dtype="f2")
    p = plan(gemm(**x, bias_ptrs=[bias] * 12))
    assert p.problem.spec.bias is DType.float16
    p.bind()()
    np.testing.assert_array_equal(x["C_ptrs"][7], summed(x)[7] + bias)


@pytest.mark.parametrize(("batch_group", "head_group"), [(1, 1), (2, 1), (1, 3), (2, 6)])
def test_sums_with_a_residual_of_its_own_rows(batch_group: int, head_group: int) -> None:
    results = 12 // batch_group // head_group
    x, wide = lists(results), [integers(5, 9)[:, 2:6] for _ in range(results)]
    p = plan(
        gemm(**x, residual_ptrs=wide, c_batch_group=batch_group, c_head_group=head_group, alpha=2.0)
    )
    assert (p.problem.results, p.problem.residual_strides, p.problem.spec.vector_r) == (
        results,
        (0, 0, 9),
        4,
    )
    p.bind(check=True)()
    for c, expected, r in zip(x["C_ptrs"], summed(x, batch_group, head_group), wide, strict=True):
        np.testing.assert_array_equal(c, 2 * expected + r)


def test_lists_on_the_device_in_the_right_number(acme: Any, refused: Refused) -> None:
    x = {n: AcmeArray(np.array([m.ctypes.data for m in actual])) for n, actual in lists(4).items()}
    d = gemm(
        **x, c_head_group=3, bias_ptrs=x["C_ptrs"], residual_ptrs=[4096 * i for i in range(1, 5)]
    )
    assert d.problem().spec.summed
    with pytest.raises(Unsupported, match="acme-gemm: Acme multiplies, and adds nothing"):
        plan(d)
    refused(
        "bias_ptrs = 12 entries: must have batch·num_heads / (c_batch_group·c_head_group) = 4. "
        "Give one entry a matrix, batch-major.",
        lambda: gemm(**x, c_head_group=3, bias_ptrs=x["A_ptrs"]),
    )


# ---------------------------------------------------------------- the strided way


@pytest.mark.parametrize(("batch_group", "head_group"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_even_lists_take_the_strided_way(batch_group: int, head_group: int) -> None:
    results = 12 // batch_group // head_group
    x = {"A_ptrs": list(integers(12, 5, 8)), "B_ptrs": list(integers(12, 8, 4))}
    x["C_ptrs"] = list(integers(results, 5, 4))
    bias, residual = integers(results, 4), integers(results, 5, 4)
    p = plan(
        gemm(
            **x,
            bias_ptrs=list(bias),
            residual_ptrs=list(residual),
            c_batch_group=batch_group,
            c_head_group=head_group,
        )
    )
    heads = 6 // head_group
    assert p.note == SPACED and (p.problem.batch, p.problem.num_heads) == (2, 6)
    assert p.problem.bias_strides == (4 * heads, 4)
    assert p.problem.residual_strides == p.problem.c_strides == (20 * heads, 20, 4)
    p.bind(check=True)()
    for c, expected, b, r in zip(
        x["C_ptrs"], summed(x, batch_group, head_group), bias, residual, strict=True
    ):
        np.testing.assert_array_equal(c, expected + b + r)
    other = integers(results, 4)
    p.bind(bias_ptrs=list(other))()
    np.testing.assert_array_equal(
        x["C_ptrs"][0], summed(x, batch_group, head_group)[0] + other[0] + residual[0]
    )


def test_a_bias_that_is_uneven_keeps_them_lists() -> None:
    x = {
        "A_ptrs": list(integers(12, 5, 8)),
        "B_ptrs": list(integers(12, 8, 4)),
        "C_ptrs": list(integers(12, 5, 4)),
    }
    assert plan(gemm(**x)).note == SPACED
    assert plan(gemm(**x, bias_ptrs=apart(12, 4))).note == ""
    announced = gemm(**x, bias_ptrs=0)
    assert "bias_ptrs" not in announced.operands()
    p = plan(announced)
    assert p.note == "" and p.problem.spec.bias is DType.float32
    p.bind(bias_ptrs=apart(12, 4))()


# ---------------------------------------------------------------- in place


def test_each_residual_may_be_its_own_c() -> None:
    x = lists()
    expected = [w + c for w, c in zip(summed(x), x["C_ptrs"], strict=True)]
    plan(gemm(**x, residual_ptrs=x["C_ptrs"])).bind(check=True)()
    for c, w in zip(x["C_ptrs"], expected, strict=True):
        np.testing.assert_array_equal(c, w)


def test_some_residuals_may_be_their_c_and_no_other() -> None:
    x, own = lists(), apart(12, 5, 4)
    mixed = [own[i] if i % 3 else x["C_ptrs"][i] for i in range(12)]
    expected = [w + r for w, r in zip(summed(x), mixed, strict=True)]
    plan(gemm(**x, residual_ptrs=mixed)).bind(check=True)()
    for c, w in zip(x["C_ptrs"], expected, strict=True):
        np.testing.assert_array_equal(c, w)


def test_residuals_that_are_another_c_are_refused(refused: Refused) -> None:
    x, own = lists(), apart(12, 5, 4)
    c = x["C_ptrs"]

    def message(i: int, how: str) -> str:
        return f"C_ptrs[{i}] = {hex(c[i].ctypes.data)}: {how}. Give the output memory of its own."

    swapped = [*c[:3], c[4], c[3], *c[5:]]
    actual: list[tuple[str, dict[str, Any]]] = [
        (message(5, "is also residual_ptrs[8]"), {"residual_ptrs": [*own[:8], c[5], *own[9:]]}),
        (
            message(2, "is also residual_ptrs[2]"),
            {"residual_ptrs": [*own[:2], c[2], *own[3:]], "beta": 1.0},
        ),
        (
            message(2, "is also residual_ptrs[2]"),
            {
                "residual_ptrs": [y.ctypes.data for y in (*own[:2], c[2], *own[3:])],
                "stride_residual_row": 8,
            },
        ),
        (
            message(5, "overlaps the matrix of residual_ptrs[0]"),  # the last in memory
            {"residual_ptrs": [c[5].ctypes.data + 16, *(y.ctypes.data for y in c[1:])]},
        ),
        (
            message(1, "is also bias_ptrs[4]"),
            {"bias_ptrs": [*own[0][:4], c[1][0], *own[1], *own[2][:2]]},
        ),
    ]
    for text, more in actual:
        refused(text, lambda more=more: gemm(**x, **more))
    with pytest.raises(
        ValueError, match=r"^C_ptrs\[[34]\] = 0x[0-9a-f]+: is also residual_ptrs\[[34]\]\."
    ):
        gemm(**x, residual_ptrs=swapped)


# ---------------------------------------------------------------- what is refused


def test_refused(refused: Refused) -> None:
    x = lists()
    bias = apart(12, 4)
    cases: list[tuple[str, dict[str, Any]]] = [
        (
            (
                "stride_residual_row = 4: describes residual_ptrs. Give residual_ptrs too (0: it "
                "will be bound)."
            ),
            {"stride_residual_row": 4},
        ),
        (
            "dtype_bias = float16: describes bias_ptrs. Give bias_ptrs too (0: it will be bound).",
            {"dtype_bias": "float16"},
        ),
        (
            (
                "C_ptrs = 12 entries: must have batch·num_heads / (c_batch_group·c_head_group) = "
                "6. Give one entry a matrix, batch-major."
            ),
            {"c_batch_group": 2},
        ),
        (
            (
                "bias_ptrs[2] = strides [2]: the last axis must be contiguous (stride 1). Copy "
                "the array into a contiguous one."
            ),
            {"bias_ptrs": [*bias[:2], integers(8)[::2], *bias[3:]]},
        ),
        (
            (
                "residual_ptrs = an array of float64: must be no wider than float32, in which it "
                "is added. Convert it."
            ),
            {"residual_ptrs": [integers(5, 4, dtype="f8")] * 12},
        ),
    ]
    for message, more in cases:
        refused(message, lambda more=more: gemm(**x, **more))

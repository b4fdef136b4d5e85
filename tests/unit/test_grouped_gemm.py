"""The grouped GEMM: descriptor, function on arrays, reference; the matrix has the numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import kernelseam
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelseam import GroupedGemm, plan
from kernelseam.bundling.traces import read_trace
from kernelseam.descriptors.gemm.grouped_problem import INDICES
from kernelseam.errors import InvalidValue
from kernelseam.parity.running.run import Target, run_case
from kernelseam.plugins import plugins
from kernelseam.samples.grouped_case import GroupedCase
from kernelseam.tuned.classes import problem_class, representative

UNTOUCHED = 77.0
FIELDS: dict[str, Any] = {"groups": 3, "M": 10, "N": 6, "K": 8, "along": "m", "dtype": "float32"}


def normal(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def ends(*values: int) -> Any:
    return np.array(values, np.int32)


def test_the_first_form_leaves_what_follows_the_last_group() -> None:
    a, b, out = normal(10, 8), normal(3, 8, 6), np.full((10, 6), UNTOUCHED, np.float32)
    result = kernelseam.grouped_mm(a, b, ends(4, 4, 9), out=out)
    assert result is out
    np.testing.assert_allclose(out[:4], a[:4] @ b[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out[4:9], a[4:9] @ b[2], rtol=1e-5, atol=1e-5)
    assert (out[9] == UNTOUCHED).all()


def test_the_other_forms() -> None:
    offs = ends(2, 2, 7)
    a, b = normal(3, 5, 8), normal(8, 7)
    columns = kernelseam.grouped_mm(a, b, offs)
    np.testing.assert_allclose(columns[:, 2:], a[2] @ b[:, 2:], rtol=1e-5, atol=1e-5)
    a, b = normal(5, 7), normal(7, 6)
    summed = kernelseam.grouped_mm(a, b, offs)
    assert summed.shape == (3, 5, 6) and not summed[1].any()
    np.testing.assert_allclose(summed[2], a[:, 2:] @ b[2:], rtol=1e-5, atol=1e-5)
    added = kernelseam.grouped_mm(a, b, offs, out=summed.copy(), beta=1.0, alpha=-1.0)
    np.testing.assert_allclose(added, np.zeros_like(added), atol=1e-5)
    a, b = normal(3, 5, 8), normal(3, 8, 6)
    np.testing.assert_allclose(kernelseam.grouped_mm(a, b), a @ b, rtol=1e-5, atol=1e-5)


def test_transposed_views_are_taken_as_they_are() -> None:
    a, b, offs = normal(8, 10).T, normal(3, 6, 8).transpose(0, 2, 1), ends(1, 6, 10)
    with kernelseam.trace() as launches:
        result = kernelseam.grouped_mm(a, b, offs)
    assert len(launches) == 1
    for g, (begin, end) in enumerate(pairwise((0, *offs.tolist()))):
        np.testing.assert_allclose(result[begin:end], a[begin:end] @ b[g], rtol=1e-5, atol=1e-5)


def test_offsets_are_read_at_each_launch() -> None:
    a, b, out, offs = normal(10, 8), normal(2, 8, 6), np.zeros((10, 6), np.float32), ends(3, 10)
    call = plan(
        GroupedGemm(groups=2, M=10, N=6, K=8, along="m", A=a, B=b, C=out, offsets=offs)
    ).bind(check=True)
    for first in (3, 0, 10, 7):
        offs[0] = first
        call()
        np.testing.assert_allclose(out[:first], a[:first] @ b[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(out[first:], a[first:] @ b[1], rtol=1e-5, atol=1e-5)
    offs[0] = 11
    with pytest.raises(InvalidValue, match=r"offsets\[1\] = 10: must not be below its predece"):
        call()


def test_rows_are_gathered_scattered_and_multiplied() -> None:
    """Of 13 rows the last two are behind the last group: their indices and factors are not read."""
    a, b, offs, rng = normal(20, 8), normal(3, 8, 6), ends(4, 4, 11), np.random.default_rng(0)
    taken, places = rng.integers(0, 20, 13), rng.permutation(16)[:13]
    factors, out = rng.standard_normal(13), np.full((16, 6), UNTOUCHED, np.float32)
    taken[11:], places[11:], factors[11:] = -5, 99, np.nan
    kernelseam.grouped_mm(
        a,
        b,
        offs,
        a_indices=taken.astype(np.int32),
        out_indices=places.astype(np.int32),
        out_factors=factors.astype(np.float32),
        out=out,
    )
    for i in range(11):
        want = factors[i] * (a[taken[i]] @ b[0 if i < 4 else 2])
        np.testing.assert_allclose(out[places[i]], want, rtol=1e-5, atol=1e-5)
    assert (out[sorted({*range(16)} - {*places[:11].tolist()})] == UNTOUCHED).all()


def test_an_epilogue_is_told_of_the_group_and_of_the_products_row() -> None:
    """Wherever a row is read from or written to."""
    a, b, bias, rows = normal(7, 8), normal(3, 8, 6), normal(3, 3), normal(10)
    taken, places = np.arange(10, dtype=np.int32) % 7, np.arange(10, dtype=np.int32)[::-1].copy()
    before = np.full((10, 6), UNTOUCHED, np.float32)
    found = kernelseam.grouped_mm(
        a,
        b,
        ends(4, 4, 9),
        a_indices=taken,
        out_indices=places,
        epilogue=["reglu", lambda acc, m, n, batch: acc * rows[m] + bias[batch, n]],
        preactivation=before,
    )
    groups = np.array([0] * 4 + [2] * 5)
    sums = np.einsum("mk,mkn->mn", a[taken[:9]], b[groups])
    wanted = np.maximum(sums[:, :3], 0) * sums[:, 3:] * rows[:9, None] + bias[groups]
    np.testing.assert_allclose(found[places[:9]], wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(before[places[:9]], sums, rtol=1e-5, atol=1e-5)
    assert (before[places[9]] == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preactivation": normal(10, 3)}, "must have shape \\[10, 6\\]"),
        (
            {"preactivation": np.ones((10, 6))},
            "preactivation = an array of float64: must be float32",
        ),
        ({"preactivation": normal(6, 10).T}, "must have contiguous rows"),
        ({"out": normal(10, 6)}, "out = .* must have shape \\[10, 3\\]"),
    ],
)
def test_results_of_an_epilogue_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        kernelseam.grouped_mm(
            normal(10, 8), normal(3, 8, 6), ends(1, 3, 9), epilogue="swiglu", **given
        )


def test_an_epilogue_is_verified_by_the_matrix_and_not_by_a_plan() -> None:
    gemm = GroupedGemm(
        **{**FIELDS, "dtype": None},
        A=normal(10, 8),
        B=normal(3, 8, 6),
        C=np.empty((10, 6), np.float32),
        offsets=ends(4, 4, 9),
        epilogue="relu",
    )
    with pytest.raises(InvalidValue, match="the oracle calls an epilogue itself"):
        plan(gemm).bind(check=True)


def test_a_trace_keeps_which_indices_there_were(tmp_path: Path) -> None:
    path, few = tmp_path / "traced.json", np.arange(4, dtype=np.int32)
    with kernelseam.trace(path):
        kernelseam.grouped_mm(normal(10, 8), normal(3, 8, 6), ends(1, 3, 4), a_indices=few)
    (traced,) = read_trace(path)
    assert traced.problem.spec.indices == ("a_indices",) and traced.problem.a_rows == 10
    path.write_text(path.read_text().replace('"a_indices"', '"b_indices"'))
    with pytest.raises(InvalidValue, match=r"spec.indices = .*b_indices.*: must be one of"):
        read_trace(path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a_indices": ends(0, 1, 10, 3)}, r"a_indices\[2\] = 10: must be a row, from 0 to a_rows"),
        ({"a_indices": ends(0, -1, 1, 3)}, r"a_indices\[1\] = -1: must be a row"),
        ({"out_indices": ends(*range(8), 3, 9)}, r"out_indices\[8\] = 3: must differ from those"),
        ({"out_indices": ends(1, 2)}, r"out_indices = .* must have an entry for each of 10 rows"),
        ({"out_factors": normal(9)}, r"out_factors = .* must have an entry for each of 10 rows"),
        ({"a_indices": np.arange(10)}, "a_indices.dtype = int64: must be int32"),
        ({"out_factors": np.ones(10)}, "out_factors = an array of float64: must be float32"),
    ],
)
def test_indices_that_are_refused(arrays: dict[str, Any], message: str) -> None:
    offs = ends(1, 3, 4) if "a_indices" in arrays else ends(1, 3, 9)
    with pytest.raises((InvalidValue, kernelseam.errors.UnknownName), match=message):
        kernelseam.grouped_mm(normal(10, 8), normal(3, 8, 6), offs, **arrays)


@pytest.mark.parametrize(
    ("offs", "message"),
    [
        (ends(4, 3, 9), r"offs\[1\] = 3: must not be below its predecessor, 4"),
        (ends(-1, 3, 9), r"offs\[0\] = -1: must not be below 0"),
        (ends(1, 3, 11), r"offs\[2\] = 11: must not exceed M = 10"),
        (ends(1, 3), "b = an array of shape .3, 8, 6.: must have a matrix for each of the 2"),
        (ends(1, 3, 9)[:, None], "offs = an array of shape .3, 1. with strides"),
        (np.array([1, 3, 9]), "offs.dtype = int64: must be int32"),
        (None, "offs = None: must say where groups end"),
    ],
)
def test_offsets_that_are_refused(offs: Any, message: str) -> None:
    with pytest.raises((InvalidValue, kernelseam.errors.UnknownName), match=message):
        kernelseam.grouped_mm(normal(10, 8), normal(3, 8, 6), offs)


def test_forms_that_are_refused() -> None:
    with pytest.raises(InvalidValue, match="a = an array of 1 axes, and b of 3: must be two or"):
        kernelseam.grouped_mm(normal(8), normal(3, 8, 6), ends(1, 2, 3))
    with pytest.raises(InvalidValue, match="offs = given: divides an array of two axes"):
        kernelseam.grouped_mm(normal(3, 5, 8), normal(3, 8, 6), ends(1, 2, 3))
    with pytest.raises(InvalidValue, match=r"b = an array of shape \[3, 7, 6\]: must have K = 8"):
        kernelseam.grouped_mm(normal(5, 8), normal(3, 7, 6), ends(1, 2, 3))
    with pytest.raises(InvalidValue, match="out = None: is read, because beta = 1"):
        kernelseam.grouped_mm(normal(5, 8), normal(3, 8, 6), ends(1, 2, 3), beta=1)
    with pytest.raises(InvalidValue, match=r"a_indices = given: is of rows of a \[T, K\], with b"):
        kernelseam.grouped_mm(normal(5, 7), normal(7, 6), ends(1, 2, 7), a_indices=ends(1, 2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"along": "x"}, "along = x: must be 'm', 'n' or 'k'"),
        ({"stride_a_group": 80}, "stride_a_group = 80: A has no axis of groups"),
        ({"along": "k", "stride_c_group": 3}, "stride_c_group = 3: the 3 entries of this axis"),
        ({"a_scales": 256, "b_scales": 256}, "a_scales = given: scales are for A and B of 8 bits"),
        ({"groups": -1}, "groups = -1: must be from 0"),
        ({"stride_a_scales_row": 1}, "stride_a_scales_row = 1: describes a_scales"),
        ({"a_rows": 4}, "a_rows = 4: describes a_indices"),
        ({"along": "k", "epilogue": "relu"}, "epilogue = given: is of rows of groups along 'm'"),
        ({"preactivation": 0}, "preactivation = given: is what an epilogue is of"),
        ({"epilogue": "swiglu", "beta": 1.0}, "beta = 1.0: has the result's columns"),
        ({"epilogue": "swiglu", "N": 7}, "N = 7: must be even"),
        ({"along": "k", "c_factors": 0}, "c_factors = given: is of rows of groups along 'm'"),
        ({"a_transposed": True, "a_indices": 0}, "a_indices = given: names rows of A, which are"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        GroupedGemm(**{**FIELDS, **fields})


def test_blocks_of_scales_are_along_m_and_of_one_row() -> None:
    scaled = {**FIELDS, "dtype": "float8_e4m3fn", "a_scales": 256, "b_scales": 256}
    problem = GroupedGemm(**scaled, scale_block=(1, 4, 4)).problem()
    assert problem.scale_extents == ((1, 10, 2), (3, 2, 2))
    assert (problem.a_scale_strides, problem.b_scale_strides) == ((0, 2), (4, 2))
    for fields in ({"along": "k"}, {"scale_block": (2, 4, 4)}):
        with pytest.raises(InvalidValue, match="groups are along 'm': no block may lie in two"):
            GroupedGemm(**{**scaled, "scale_block": (1, 4, 4), **fields})


def test_rows_within_which_groups_begin_allow_no_wide_accesses() -> None:
    def vectors(**fields: Any) -> tuple[int, int, int]:
        wide = {**FIELDS, "M": 16, "N": 16, "K": 16, **fields}
        spec = GroupedGemm(**wide).problem().spec
        whole = spec.product
        assert (whole.vector_a, whole.vector_b, whole.vector_c) == (16, 16, 16)
        product = spec.by_elements
        return product.vector_a, product.vector_b, product.vector_c

    assert vectors() == (16, 16, 16)
    assert vectors(a_transposed=True) == (4, 16, 16)
    assert vectors(along="n") == (16, 4, 4)
    assert vectors(along="n", b_transposed=True) == (16, 16, 4)
    assert vectors(along="k") == (4, 16, 16)
    assert vectors(along="k", a_transposed=True, b_transposed=True) == (16, 4, 16)


def test_a_class_chooses_by_the_groups_and_not_by_their_sizes() -> None:
    problem, other = (
        GroupedGemm(**{**FIELDS, "M": m, "dtype": "bfloat16"}).problem() for m in (4090, 4040)
    )
    assert representative(problem) == representative(other)
    assert problem_class(problem) == problem_class(other)
    assert problem.even.M == 1364 and problem.even.batch == 3
    few, many = (
        GroupedGemm(
            **{**FIELDS, "M": 4090, "dtype": "bfloat16"}, a_indices=256, c_indices=256, a_rows=n
        ).problem()
        for n in (100, 9000)
    )
    assert representative(few) == representative(many) != representative(problem)
    more = GroupedGemm(**{**FIELDS, "M": 4090, "groups": 4, "dtype": "bfloat16"}).problem()
    assert problem_class(problem) != problem_class(more)


@settings(max_examples=60)
@given(
    along=st.sampled_from("mnk"),
    dtype=st.sampled_from([kernelseam.DType.float16, kernelseam.DType.float32]),
    transposed=st.tuples(st.booleans(), st.booleans()),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    rest=st.integers(0, 9),
    extents=st.tuples(*[st.integers(1, 40)] * 3),
    beta=st.sampled_from([0.0, -0.5]),
    indices=st.sets(st.sampled_from(INDICES)),
    epilogue=st.sampled_from(["", "swiglu", "checkerboard", "gated_options"]),
)
def test_random_problems(
    along: str,
    dtype: Any,
    transposed: tuple[bool, bool],
    sizes: list[int],
    rest: int,
    extents: tuple[int, int, int],
    beta: float,
    indices: set[str],
    epilogue: str,
) -> None:
    if along != "m" or transposed[0]:
        indices -= {"a_indices"} if along == "m" else {*INDICES}
    device = plugins().backend("numpy").runtime.devices()[0]
    case = GroupedCase(
        "random",
        dtype,
        along,
        tuple(sizes),
        rest,
        *extents,
        beta=beta,
        a_transposed=transposed[0],
        b_transposed=transposed[1],
    )
    case = replace(case, indices=tuple(n for n in INDICES if n in indices))
    if along == "m" and (epilogue == "checkerboard" or (not beta and extents[1] % 2 == 0)):
        case = replace(case, epilogue=epilogue, preactivation=bool(epilogue))
    run_case(case, Target(device, "numpy", "grouped_gemm", True)).require()

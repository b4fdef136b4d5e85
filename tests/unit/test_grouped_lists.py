"""The grouped GEMM over lists: descriptor, function on arrays, reference; the matrix has the
numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import kernelseam
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelseam import GroupedGemmPointers, plan
from kernelseam.arrays import describe
from kernelseam.descriptors.common.options import values_of
from kernelseam.descriptors.gemm.grouped_pointers import table_of
from kernelseam.descriptors.gemm.options import ListOptions
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.kernels.listed import ListedKernels
from kernelseam.ops.grouped_list import _function as list_function
from kernelseam.ops.grouped_list import list_work
from kernelseam.ops.listed import Lists
from kernelseam.ops.operation import Operation
from kernelseam.ops.split import split_of
from kernelseam.parity.running.run import Target, run_case
from kernelseam.plugins import plugins
from kernelseam.samples.grouped_pointers_case import GroupedPointersCase

SIZES = ((5, 6, 8), (0, 3, 2), (13, 21, 41), (2, 3, 0))
FIELDS: dict[str, Any] = {"M": [5, 2], "N": [6, 3], "K": 8, "dtype": "float32"}


def normal(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def lists() -> tuple[list[Any], list[Any], list[Any]]:
    a = [normal(m, k) for m, _, k in SIZES]
    b = [normal(k, n) for _, n, k in SIZES]
    return a, b, [normal(m, n) for m, n, _ in SIZES]


def test_products_of_different_sizes_are_one_launch() -> None:
    a, b, old = lists()
    out = [x.copy() for x in old]
    with kernelseam.trace() as launches:
        results = kernelseam.grouped_mm_list(a, b, alpha=2.0, beta=0.5, out=out)
    assert len(launches) == 1
    for x, y, was, is_now, result in zip(a, b, old, out, results, strict=True):
        assert result is is_now
        np.testing.assert_allclose(result, 2 * (x @ y) + 0.5 * was, rtol=1e-5, atol=1e-5)


def test_a_list_that_mixes_layouts_and_dtypes_is_a_launch_a_combination() -> None:
    a = [
        normal(16, 8),
        normal(8, 16).T,
        normal(20, 8).astype(np.float16),
        normal(4, 8),
        normal(4, 5),
    ]
    b = [normal(8, 12), normal(8, 4), normal(8, 8).astype(np.float16), normal(4, 8).T, normal(5, 4)]
    with kernelseam.trace() as launches:
        results = kernelseam.grouped_mm_list(a, b)
    # as they are; a transposed; float16; b transposed; rows that are not multiples of 16 bytes
    assert len(launches) == 5
    with kernelseam.trace() as launches:
        kernelseam.grouped_mm_list([*a, *a], [*b, *b])
    assert len(launches) == 5
    for x, y, result in zip(a, b, results, strict=True):
        within = 1e-2 if x.dtype == np.float16 else 1e-5
        assert result.dtype == x.dtype
        np.testing.assert_allclose(result, x @ y, rtol=within, atol=within)


def test_results_may_lie_as_their_transposes() -> None:
    a, b = [normal(5, 8), normal(9, 3)], [normal(8, 6), normal(3, 4)]
    out = [np.zeros((6, 5), np.float32).T, np.zeros((9, 4), np.float32)]
    kernelseam.grouped_mm_list(a, b, out=out)
    for x, y, result in zip(a, b, out, strict=True):
        np.testing.assert_allclose(result, x @ y, rtol=1e-5, atol=1e-5)


def test_addresses_in_a_list_are_read_at_each_launch() -> None:
    a, b, out = lists()
    where = {
        n: np.array([x.ctypes.data for x in of], np.uint64)
        for n, of in (("A_ptrs", a), ("B_ptrs", b), ("C_ptrs", out))
    }
    m, n, k = zip(*SIZES, strict=True)
    planned = plan(GroupedGemmPointers(M=m, N=n, K=k, dtype="float32"), backend="numpy")
    call = planned.bind(**where, check=True)
    call()
    for x, y, result in zip(a, b, out, strict=True):
        np.testing.assert_allclose(result, x @ y, rtol=1e-5, atol=1e-5)
    other = [normal(x.shape[0], x.shape[1] + 1)[:, :-1] for x in a]
    with pytest.raises(InvalidValue, match=r"A_ptrs\[0\] = row stride 9: rows are walked 8 apart"):
        planned.bind(**{**where, "A_ptrs": other})


def test_the_table_has_extents_and_strides_of_each_group() -> None:
    problem = GroupedGemmPointers(**FIELDS, stride_c_row=[9, 7], b_transposed=True).problem()
    assert problem.sizes == ((5, 6, 8), (2, 3, 8))
    assert table_of(problem).tolist() == [5, 6, 8, 8, 8, 9, 2, 3, 8, 8, 8, 7]
    assert problem.operations == 2 * (5 * 6 * 8 + 2 * 3 * 8)


def test_wide_accesses_need_every_row_of_a_list_to_begin_at_16_bytes() -> None:
    def vectors(**fields: Any) -> tuple[int, int, int]:
        product = GroupedGemmPointers(**{**FIELDS, "N": [8, 4], **fields}).problem().spec.product
        return product.vector_a, product.vector_b, product.vector_c

    at: dict[str, Any] = {f"{n}_ptrs": [1 << 20, 2 << 20] for n in "AB"}
    at["C_ptrs"] = [1 << 30, 2 << 30]
    assert vectors(**at) == (16, 16, 16)
    assert vectors(**{**at, "B_ptrs": [1 << 20, (2 << 20) + 4]}) == (16, 4, 16)
    assert vectors(**at, stride_c_row=[9, 8]) == (16, 16, 4)
    assert vectors() == (4, 4, 4)
    assert vectors(alignment=16) == (16, 16, 16)
    with pytest.raises(InvalidValue, match=r"A_ptrs\[1\] = 0x100008: must be a multiple of 16"):
        GroupedGemmPointers(**FIELDS, A_ptrs=[1 << 20, (1 << 20) + 8], alignment=16)


LAYOUTS = ("rows", "transposed", "wide rows", "late")


@st.composite
def listed(draw: st.DrawFn, lists: int) -> list[list[Any]]:
    """A, B and, of three lists, C of a few products: views of arrays of their own."""
    found: list[list[Any]] = [[] for _ in range(lists)]
    for _ in range(draw(st.integers(1, 4))):
        m, n, k = (draw(st.sampled_from([0, 1, 3, 8, 16])) for _ in range(3))
        dtype = draw(st.sampled_from([np.float16, np.float32]))
        for of, shape in zip(found, ((m, k), (k, n), (m, n)), strict=False):
            layout = draw(st.sampled_from(LAYOUTS))
            rows, columns = shape[::-1] if layout == "transposed" else shape
            whole = np.zeros((rows, columns + 16 * (layout == "wide rows")), dtype)
            if layout == "late":
                whole = np.zeros(rows * columns + 1, dtype)[1:].reshape(rows, columns)
            of.append(whole[:, :columns].T if layout == "transposed" else whole[:, :columns])
    return found


@given(st.data(), st.sampled_from([2, 3]), st.sampled_from([0.0, 1.5]))
@settings(max_examples=150)
def test_one_pass_finds_what_the_descriptor_does(data: Any, count: int, alpha: float) -> None:
    """Problems, addresses and their order, which calls on tensors are packed from."""
    lists = data.draw(listed(count))
    given = list(lists)
    if count == 2:
        given.append(
            [np.zeros((a.shape[0], b.shape[1]), a.dtype) for a, b in zip(*lists, strict=True)]
        )
    planned: list[Any] = []

    class Watched(Operation):
        def launch_lists(self, operands: Any, descriptor: Any, *others: Any) -> None:
            planned.append(descriptor)

    names = [f"{n}[{g}]" for n in ("a", "b", "out") for g in range(len(given[0]))]
    infos = {n: describe(x, n, None) for n, x in zip(names, sum(given, []), strict=True)}
    values = values_of(ListOptions)(
        alpha=alpha, beta=0.5, out_dtype=None, precision=None, products=len(given[0])
    )
    list_work(Watched(dict(infos), None), *values)
    kinds = [
        (DType.of(a.dtype), DType.of(c.dtype)) for a, c in zip(given[0], given[2], strict=True)
    ]
    order = [infos[n] for n in names]
    found = Lists(kinds, None).launches(
        np.array([x.pointer for x in order], np.int64).reshape(3, -1),
        np.array([(*x.shape, *x.strides) for x in order], np.int64).reshape(3, -1, 4),
        alpha,
        0.5,
    )
    assert found is not None
    whole = [d for d in planned if any(m and n for m, n, _ in d.problem().sizes)]
    assert [x.problem for x in found] == [d.problem() for d in whole]
    for x, d in zip(found, whole, strict=True):
        assert table_of(x.problem).tolist() == table_of(d.problem()).tolist()
        pointers = [d._lists[f"{n}_ptrs"].addresses.tolist() for n in "ABC"]
        assert x.addresses.tolist() == pointers


@pytest.mark.parametrize("fault", ["shared", "inner", "strides", "rows", "null", "size"])
def test_what_is_refused_is_left_to_the_descriptor(fault: str) -> None:
    at = np.array([[1 << 20, 2 << 20], [3 << 20, 3 << 20], [4 << 20, 5 << 20]])
    layouts = np.array([[[4, 4, 4, 1]] * 2] * 3)
    lists = Lists([(DType.float32, DType.float32)] * 2, None)
    assert lists.launches(at, layouts, 1.0, 0.0) is not None, "B is read by both"
    if fault == "shared":
        at[2, 1] = at[1, 0] + 32
    elif fault == "inner":
        layouts[1, 0, 0] = 5
    elif fault == "strides":
        layouts[0, 1, 2:] = 8, 2
    elif fault == "rows":
        layouts[2, 0, 2] = 3
    elif fault == "null":
        at[0, 1] = 0
    else:
        layouts[0, 0, 2] = 1 << 31
    assert lists.launches(at, layouts, 1.0, 0.0) is None


@pytest.mark.parametrize(
    ("beta", "captured", "served"), [(0, False, True), (0, True, False), (1, False, False)]
)
def test_results_that_are_new_are_not_added_to(
    monkeypatch: pytest.MonkeyPatch, beta: float, captured: bool, served: bool
) -> None:
    """beta is a number, of which a signature knows the type alone."""
    names = tuple(f"{x}[{g}]" for x in ("a", "b") for g in range(2))
    arrays = {n: normal(4, 4) for n in (*names, "out[0]", "out[1]")}
    infos = {n: describe(x, n) for n, x in arrays.items()}
    options = values_of(ListOptions)(alpha=1, beta=0, out_dtype=None, precision=None, products=2)
    asked = []
    monkeypatch.setattr(ListedKernels, "find", lambda _, *problem: asked.append(problem))
    on: Any = SimpleNamespace(captures=lambda: captured, device=infos["a[0]"].device)
    function = list_function(on, infos, names, options, None)
    order = [infos[n] for n in names]
    factors, _ = split_of(options).parted(
        values_of(ListOptions)(alpha=1, beta=beta, out_dtype=None, precision=None, products=2)
    )
    numbers = [x.pointer for x in order] + list(factors)
    numbers += [n for x in order for n in (*x.shape, *x.strides)]
    places = iter((1 << 30, 1 << 31))

    def empty(*_: object) -> Any:
        return SimpleNamespace(data_ptr=lambda: next(places))

    assert function.run(function.once, empty, None, *numbers) is None
    assert bool(asked) is served


def test_the_size_that_most_operations_have_chooses_the_tile() -> None:
    even = (
        GroupedGemmPointers(M=[4096, *[1] * 100], N=4096, K=1024, dtype="bfloat16").problem().even
    )
    assert (even.M, even.N, even.K) == (3999, 4096, 1024) and even.batch == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"M": [5, -2]}, r"M\[1\] = -2: must be from 0"),
        ({"N": [6, 3, 4]}, "N = 3 entries: M has 2. Give as many, one a group"),
        ({"M": 5, "N": 6}, "M = 5: says no number of groups, nor do N and K"),
        ({"stride_a_row": [8]}, "stride_a_row = 1 entries: must have one for each of the 2 groups"),
        ({"stride_c_row": [6, 2]}, r"stride_c_row\[1\] = 2: the 2 entries of this axis of C_ptrs"),
        ({"A_ptrs": [256]}, "A_ptrs = 1 entries: must have one for each of the 2 groups"),
        ({"A_ptrs": [256, 0]}, r"A_ptrs\[1\] = null: must be the address of a matrix"),
        ({"A_ptrs": [256, 513]}, r"A_ptrs\[1\] = 0x201: must be a multiple of 4 bytes"),
        ({"A_ptrs": [256, 2**64 - 8]}, r"A_ptrs\[1\] = .*: a walk over 64 bytes leaves the 64-bit"),
        ({"C_ptrs": [256, 256]}, r"C_ptrs\[1\] = 0x100: equals C_ptrs\[0\]. Give every output"),
        ({"A_ptrs": [512, 1024], "C_ptrs": [4096, 600]}, r"C_ptrs\[1\] = 0x258: overlaps the mat"),
        ({"A_ptrs": [normal(5, 8), normal(3, 8)]}, r"A_ptrs\[1\] = .*\[3, 8\]: must be \[2, 8\]"),
        (
            {"A_ptrs": [normal(5, 8), normal(2, 8).astype(np.float64)]},
            r"A_ptrs\[1\] = an array of float64: A_ptrs\[0\] is of float32",
        ),
        ({"A_ptrs": [normal(5, 16)[:, ::2], normal(2, 8)]}, r"A_ptrs\[0\] = strides \[16, 2\]"),
        ({"alignment": 24}, "alignment = 24: must be a power of two"),
        ({"precision": "tf32", "dtype": "float16"}, "precision = tf32: is a way to multiply floa"),
        ({"dtype": None}, "dtype = None: must be named where A_ptrs and B_ptrs are no arrays"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        GroupedGemmPointers(**{**FIELDS, **fields})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": [normal(8, 6)]}, "b = 1 arrays: a has 2. Give one for each product"),
        ({"a": normal(2, 5, 8)}, "a = .*: must be a list of arrays"),
        ({"b": [normal(8, 6), normal(7, 6)]}, r"b\[1\] = .*: must have K = 8 rows, as a\[1\] of"),
        ({"a": [normal(5, 8), normal(8)]}, r"a\[1\] = an array of shape \[8\]: must have 2 axes"),
        ({"beta": 1}, "out = None: is read, because beta = 1"),
        ({"out": [normal(5, 6), normal(2, 2)]}, r"out\[1\] = .*: must have shape \[2, 6\]"),
        ({"precision": "tf33"}, "precision = tf33: must be one of"),
    ],
)
def test_lists_that_are_refused(change: dict[str, Any], message: str) -> None:
    given = {"a": [normal(5, 8), normal(2, 8)], "b": [normal(8, 6), normal(8, 6)], **change}
    with pytest.raises((InvalidValue, kernelseam.errors.UnknownName), match=message):
        kernelseam.grouped_mm_list(**given)


def test_strides_are_refused_by_the_callers_names() -> None:
    out = np.lib.stride_tricks.as_strided(normal(8), (2, 6), (0, 4))
    with pytest.raises(
        InvalidValue,
        match=r"out\[1\] = row stride 0: the 2 entries of this axis of out\[1\] share elements.*"
        r"make the row stride of out\[1\] larger",
    ):
        kernelseam.grouped_mm_list(
            [normal(5, 8), normal(2, 8)], [normal(8, 6)] * 2, out=[normal(5, 6), out]
        )


def test_results_that_share_memory_are_refused_by_the_callers_names() -> None:
    a, b, same = [normal(5, 8)] * 3, [normal(8, 6).T.copy().T] * 3, normal(5, 6)
    with pytest.raises(InvalidValue, match=r"out\[2\] = .*: equals out\[0\]"):
        kernelseam.grouped_mm_list(a, b, out=[same, normal(5, 6), same])
    square = normal(8, 8)
    with pytest.raises(InvalidValue, match=r"out\[1\] = .*: equals b\[0\]"):
        kernelseam.grouped_mm_list(
            [normal(5, 8), normal(8, 8)], [square, normal(8, 8)], out=[normal(5, 8), square]
        )


def test_no_products_and_1024_of_them() -> None:
    assert kernelseam.grouped_mm_list([], []) == []
    for options, message in (
        ({"alpha": "1"}, "alpha = "),
        ({"precision": "tf33"}, "precision = tf33: must be one of"),
        ({"out_dtype": "int8"}, "out_dtype = int8: must be one of"),
        ({"beta": 1}, "out = None: is read"),
        ({"backend": 3}, "backend = 3: must be a name"),
        ({"implementation": 3}, "implementation = 3: must be a name"),
    ):
        with pytest.raises(InvalidValue, match=message):
            kernelseam.grouped_mm_list([], [], **options)
    with pytest.raises(InvalidValue, match="implementation = nobody: "):
        kernelseam.grouped_mm_list([normal(0, 3)], [normal(3, 4)], implementation="nobody")
    a, b = [normal(n % 5, 3) for n in range(1024)], [normal(3, 1 + n % 7) for n in range(1024)]
    for x, y, c in zip(a, b, kernelseam.grouped_mm_list(a, b), strict=True):
        np.testing.assert_allclose(c, x @ y, rtol=1e-5, atol=1e-5)


@settings(max_examples=40)
@given(
    dtype=st.sampled_from([kernelseam.DType.float16, kernelseam.DType.float32]),
    transposed=st.tuples(st.booleans(), st.booleans()),
    sizes=st.lists(st.tuples(*[st.integers(0, 40)] * 3), max_size=8),
    beta=st.sampled_from([0.0, -0.5]),
    aligned=st.booleans(),
)
def test_random_problems(
    dtype: Any,
    transposed: tuple[bool, bool],
    sizes: list[tuple[int, int, int]],
    beta: float,
    aligned: bool,
) -> None:
    device = plugins().backend("numpy").runtime.devices()[0]
    case = GroupedPointersCase(
        "random",
        dtype,
        tuple(sizes),
        beta=beta,
        aligned=aligned,
        a_transposed=transposed[0],
        b_transposed=transposed[1],
    )
    run_case(case, Target(device, "numpy", case.operation, True)).require()

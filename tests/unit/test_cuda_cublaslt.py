"""cuBLASLt stood in for on host memory: products computed from what descriptors say, with
attributes of its sizes."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from column_blas import Columns, integers, multiply
from kernelseam.blas import Handles
from kernelseam.contract import Device
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import FLOATING, DType
from kernelseam.errors import DeviceError, OutOfDeviceMemory

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from kernelseam_cuda import blas, blas_lt, cublaslt  # noqa: E402
from kernelseam_cuda.cublaslt import Attribute, LtDescriptor  # noqa: E402

DEVICE = Device("cuda", 0, "sm_90a")
F16, F32 = DType.float16, DType.float32
PROBLEM = GemmProblem(GemmSpec(F16, F16, F32), 4, 5, 6, 2, 3, (72, 24, 6), (90, 30, 5), (60, 20, 5))
KINDS = {2: F16, 14: DType.bfloat16, 0: F32, 1: DType.float64}
SIZES = {
    "MatrixLayout": {5: 4, 6: 8},
    "MatmulDesc": {3: 4, 4: 4, 7: 4, 8: 8, 10: 8},
    "MatmulPreference": {1: 8, 3: 4, 5: 4, 6: 4, 7: 4, 8: 4},
}
"""Bytes of each attribute, by cublasLt.h."""


class Library:
    """cuBLASLt on host memory."""

    def __init__(self) -> None:
        self.made: dict[int, dict[str, Any]] = {}
        self.streams: list[int] = []
        self.asked: list[dict[int, int]] = []
        self.workspaces: list[tuple[Any, int]] = []
        self.workspace_bytes = self.ask_status = self.status = 0
        self.found, self.state, self.refused = 1, 0, ""
        self.ranked, self.states, self.algorithms = [98, 99, 97, 96], dict[int, int](), list[int]()
        """Where several are asked for: in that order, and what the library says of each."""
        self.first: Callable[[int], int] = lambda bias: 99
        """The algorithm where one is asked for, by the bias's address."""
        self.workspace_of = dict[int, int]()

    def __getattr__(self, name: str) -> Any:
        kind, action = re.fullmatch(r"cublasLt(\w+?)(Create|SetAttribute|Destroy)", name).groups()  # type: ignore[union-attr]
        return {"Create": self._create, "SetAttribute": self._set, "Destroy": self._destroy}[
            action
        ](kind)

    def _create(self, kind: str) -> Callable[..., int]:
        def create(out: Any, *arguments: int) -> int:
            if kind == self.refused:
                return 3
            out._obj.value = key = 1000 + len(self.made)
            self.made[key] = {"kind": kind, "with": arguments, "set": {}, "gone": False}
            return 0

        return create

    def _set(self, kind: str) -> Callable[..., int]:
        def put(handle: Any, number: int, value: Any, size: int) -> int:
            assert self.made[handle.value]["kind"] == kind
            if SIZES[kind][number] != size:
                return 7
            self.made[handle.value]["set"][number] = value._obj.value
            return 0

        return put

    def _destroy(self, kind: str) -> Callable[..., int]:
        def destroy(handle: Any) -> int:
            assert self.made[handle.value]["kind"] == kind and not self.made[handle.value]["gone"]
            self.made[handle.value]["gone"] = True
            return 0

        return destroy

    def cublasLtCreate(self, out: Any) -> int:
        out._obj.value = 42
        return 0

    def cublasLtGetStatusName(self, status: int) -> bytes:
        return b"CUBLAS_STATUS_FAKE"

    def cublasLtMatmulAlgoGetHeuristic(self, handle: Any, *given: Any) -> int:
        *described, preference, most, results, count = given
        assert handle.value == 42 and not any(self.made[x.value]["gone"] for x in described)
        bias = self.made[described[0].value]["set"].get(8)
        ranked = [self.first(bias or 0)] if most == 1 else self.ranked[:most]
        self.asked.append({**self.made[preference.value]["set"], "bias": bias})
        count._obj.value = self.found and len(ranked)
        for result, (i, word) in zip(results._obj, enumerate(ranked), strict=False):
            result.state, result.workspace_bytes = (
                self.states.get(word, self.state),
                self.workspace_of.get(word, self.workspace_bytes * (i + 1)),
            )
            result.algorithm[7] = word
        return self.ask_status

    def cublasLtMatmul(self, handle: Any, *given: Any) -> int:
        (
            operation,
            alpha,
            a,
            at_a,
            b,
            at_b,
            beta,
            c,
            at_c,
            d,
            at_d,
            algorithm,
            workspace,
            size,
            stream,
        ) = given
        *zeros, word = (ctypes.c_uint64 * 8).from_address(algorithm)
        assert handle.value == 42 and zeros == [0] * 7
        assert word in (99, *self.ranked, *self.workspace_of)
        self.algorithms.append(word)
        self.streams.append(stream)
        self.workspaces.append((workspace, size))
        product, (compute, scale) = (
            self.made[operation.value]["set"],
            self.made[operation.value]["with"],
        )
        assert compute == {0: 69, 1: 70}.get(self.made[at_a.value]["with"][0], 68) and not any(
            self.made[x.value]["gone"] for x in (operation, at_a, at_b, at_c, at_d)
        )
        scalar = {0: ctypes.c_float, 1: ctypes.c_double}[scale]
        m, n = self.made[at_d.value]["with"][1:3]

        def columns(address: int, layout: Any, turned: int, rows: int, width: int) -> Columns:
            kind, *shape, lead = self.made[layout.value]["with"]
            assert shape == ([width, rows] if turned else [rows, width])
            assert self.made[layout.value]["set"][5] == count
            return Columns(
                address, KINDS[kind], lead, self.made[layout.value]["set"][6], bool(turned)
            )

        count = self.made[at_d.value]["set"][5]
        k = self.made[at_a.value]["with"][1 if product[3] else 2]
        result = columns(d, at_d, 0, m, n)
        bias = None
        if 7 in product:
            assert product[7] == 4
            bias = Columns(product[8], result.dtype, m, product[10])
        multiply(
            m,
            n,
            k,
            count,
            columns(a, at_a, product[3], m, k),
            columns(b, at_b, product[4], k, n),
            result,
            scalar.from_address(alpha).value,
            scalar.from_address(beta).value,
            columns(c, at_c, 0, m, n),
            bias,
        )
        return self.status


class Runtime:
    """As much of one as the implementation asks for."""

    def activate(self, device: Device) -> Any:
        assert device == DEVICE
        return nullcontext()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    fake = Library()
    monkeypatch.setattr(cublaslt, "library", lambda: fake)
    monkeypatch.setattr(cublaslt, "unavailable", lambda: None)
    monkeypatch.setattr(blas_lt, "_handles", Handles(cublaslt.create))
    yield fake


@pytest.fixture
def gemm(library: Library) -> blas_lt.CublasLtGemm:
    return blas_lt.CublasLtGemm(Runtime())  # type: ignore[arg-type]


def steps(x: Any, count: int) -> Any:
    """Strides in elements along the first axes."""
    return tuple(s // x.itemsize for s in x.strides[:count])


def spread(x: Any, *shape: int) -> Any:
    """The same numbers along more axes, by strides of 0."""
    return np.broadcast_to(x, shape)


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("more", ["", "beta", "bias", "residual", "bias residual", "bias beta"])
def test_products_agree(
    gemm: blas_lt.CublasLtGemm,
    library: Library,
    dtype: DType,
    a_transposed: bool,
    b_transposed: bool,
    more: str,
) -> None:
    batch, heads, M, N, K = 2, 3, 5, 7, 6
    # rows with gaps
    a = integers(dtype, batch, heads, *((K, M + 2) if a_transposed else (M, K + 2)))
    b = integers(dtype, batch, heads, *((N, K) if b_transposed else (K, N)))
    c = integers(dtype, batch, heads, M, N + 1)
    bias, residual = integers(dtype, batch, heads, N), integers(dtype, batch, heads, M, N + 3)
    beta = 2.0 if "beta" in more else 0.0
    spec = GemmSpec(
        dtype,
        dtype,
        dtype.accumulator,
        a_transposed,
        b_transposed,
        bias=dtype if "bias" in more else None,
        residual=dtype if "residual" in more else None,
    )
    problem = GemmProblem(
        spec,
        M,
        N,
        K,
        batch,
        heads,
        *(steps(x, 3) for x in (a, b, c)),
        alpha=0.5,
        beta=beta,
        bias_strides=steps(bias, 2),
        residual_strides=steps(residual, 3),
    )
    left = (a[..., :M].swapaxes(2, 3) if a_transposed else a[..., :K]).astype(np.float64)
    right = (b.swapaxes(2, 3) if b_transposed else b).astype(np.float64)
    expected = 0.5 * left @ right + beta * c[..., :N].astype(np.float64)
    if spec.bias:
        expected += bias[:, :, None].astype(np.float64)
    if spec.residual:
        expected += residual[..., :N].astype(np.float64)
    edge = c[..., N:].copy()
    if more in ("bias residual", "bias beta") and dtype is not dtype.accumulator:
        added = "a residual" if spec.residual else "beta·C"
        assert (
            gemm.supports(problem, DEVICE)
            == f"rounds to {dtype} between adding a bias and adding {added}"
        )
        return
    assert gemm.supports(problem, DEVICE) is None
    parts = gemm.build(problem, DEVICE)
    assert parts.workspace_bytes == 0 and len(library.asked) == (2 if spec.bias else 1)
    (step,) = parts.steps
    assert (step.record.kernel, step.record.kind) == ("cublasLtMatmul", "library")
    where = {"A": a, "B": b, "C": c, "bias": bias, "residual": residual}
    step.bind({n: x.ctypes.data for n, x in where.items()}, 0)(77)
    assert np.array_equal(c[..., :N], expected.astype(dtype.numpy))
    assert np.array_equal(c[..., N:], edge)
    assert library.streams == [77] and library.workspaces == [(None, 0)]


def test_keys_that_heads_share_are_broadcast_by_stride_0(
    gemm: blas_lt.CublasLtGemm, library: Library
) -> None:
    heads, M, N, K = 4, 5, 7, 6
    q, k, scores = (
        integers(F16, heads, M, K),
        integers(F16, N, K),
        np.zeros((heads, M, N), np.float32),
    )
    problem = GemmProblem(
        GemmSpec(F16, F32, F32, b_transposed=True),
        M,
        N,
        K,
        1,
        heads,
        (0, M * K, K),
        (0, 0, K),
        (0, M * N, N),
        b_head_group=heads,
    )
    (step,) = gemm.build(problem, DEVICE).steps
    step.bind({"A": q.ctypes.data, "B": k.ctypes.data, "C": scores.ctypes.data}, 0)(0)
    assert np.array_equal(scores, q.astype(np.float32) @ k.astype(np.float32).T)
    strides = [x["set"][6] for x in library.made.values() if x["kind"] == "MatrixLayout"]
    assert strides[-4:] == [0, M * K, M * N, M * N]


def test_one_bias_and_a_residual_that_is_one_matrix(gemm: blas_lt.CublasLtGemm) -> None:
    a, b, c = (
        integers(F32, 2, 3, 5, 6),
        integers(F32, 2, 3, 6, 7),
        np.full((2, 3, 5, 7), np.nan, np.float32),
    )
    bias, residual = spread(integers(F32, 7), 2, 3, 7), spread(integers(F32, 5, 7), 2, 3, 5, 7)
    problem = GemmProblem(
        GemmSpec(F32, F32, F32, bias=F32, residual=F32),
        5,
        7,
        6,
        2,
        3,
        *(steps(x, 3) for x in (a, b, c)),
        bias_strides=steps(bias, 2),
        residual_strides=steps(residual, 3),
    )
    assert problem.bias_strides == (0, 0) and problem.residual_strides == (0, 0, 7)
    assert gemm.supports(problem, DEVICE) is None
    (step,) = gemm.build(problem, DEVICE).steps
    where = {"A": a, "B": b, "C": c, "bias": bias, "residual": residual}
    step.bind({n: x.ctypes.data for n, x in where.items()}, 0)(0)
    assert np.array_equal(c, a @ b + bias[:, :, None] + residual)


def test_a_residual_that_is_the_result(gemm: blas_lt.CublasLtGemm) -> None:
    a, b, c = integers(F32, 6, 5, 6), integers(F32, 6, 6, 7), integers(F32, 6, 5, 7)
    expected = a @ b + c
    problem = GemmProblem(
        GemmSpec(F32, F32, F32, residual=F32),
        5,
        7,
        6,
        6,
        1,
        (30, 0, 6),
        (42, 0, 7),
        (35, 0, 7),
        residual_strides=(35, 0, 7),
    )
    (step,) = gemm.build(problem, DEVICE).steps
    step.bind(
        {"A": a.ctypes.data, "B": b.ctypes.data, "C": c.ctypes.data, "residual": c.ctypes.data}, 0
    )(0)
    assert np.array_equal(c, expected)


# ---------------------------------------------------------------- the choice of an algorithm


def test_the_heuristic_is_queried_once_per_problem(
    gemm: blas_lt.CublasLtGemm, library: Library
) -> None:
    spec = replace(PROBLEM.spec, vector_a=2, vector_b=16, vector_c=2, vector_r=16, residual=F16)
    problem = replace(PROBLEM, spec=spec, residual_strides=(60, 20, 5))
    for _ in range(3):
        assert gemm.supports(problem, DEVICE) is None
        gemm.build(problem, DEVICE)
    # The library's A is our B; partial sums are as wide as the accumulator.
    assert library.asked == [{1: 32 << 20, 3: 2, 5: 16, 6: 2, 7: 16, 8: 2, "bias": None}]


@pytest.mark.parametrize(("offset", "algorithm"), [(0, 99), (16, 99), (2, 50), (8, 50)])
def test_a_bias_that_is_less_aligned_has_an_algorithm_of_its_own(
    gemm: blas_lt.CublasLtGemm, library: Library, offset: int, algorithm: int
) -> None:
    """The heuristic looks at its address, which a plan does not know."""
    library.first = lambda bias: 99 if bias % 16 == 0 else 50
    library.workspace_of = {99: 100, 50: 3000}
    problem = replace(PROBLEM, spec=replace(PROBLEM.spec, bias=F16))
    assert gemm.supports(problem, DEVICE) is None
    parts = gemm.build(problem, DEVICE)
    assert [x["bias"] for x in library.asked] == [16, 2]
    assert parts.workspace_bytes == 3000 + 240, "whichever is bound"
    x = np.zeros(400, np.float16)
    aligned = -(-x.ctypes.data // 16) * 16
    parts.steps[0].bind({**dict.fromkeys("ABC", aligned), "bias": aligned + offset}, 4096)(0)
    assert library.algorithms == [algorithm]
    assert library.workspaces[-1][1] == library.workspace_of[algorithm]


def test_the_workspace_is_aligned_within_the_callers(
    gemm: blas_lt.CublasLtGemm, library: Library
) -> None:
    library.workspace_bytes = 1000
    parts = gemm.build(PROBLEM, DEVICE)
    assert parts.workspace_bytes == 1240
    x = np.zeros(400, np.float16)
    for start in (512, 528, 752):
        parts.steps[0].bind(dict.fromkeys("ABC", x.ctypes.data), start)(0)
        address, size = library.workspaces[-1]
        assert (address % 256, size) == (0, 1000)
        assert start <= address and address + size <= start + parts.workspace_bytes


@pytest.mark.parametrize(
    ("set", "reason"),
    [
        ({"ask_status": 15}, "has no algorithm for it (CUBLAS_STATUS_FAKE)"),
        ({"ask_status": 7}, "has no algorithm for it (CUBLAS_STATUS_FAKE)"),
        ({"found": 0}, "has no algorithm for it"),
        ({"state": 15}, "has no algorithm for it (CUBLAS_STATUS_FAKE)"),
    ],
)
def test_what_the_heuristic_does_not_take_is_refused(
    gemm: blas_lt.CublasLtGemm, library: Library, set: dict[str, int], reason: str
) -> None:
    vars(library).update(set)
    assert gemm.supports(PROBLEM, DEVICE) == reason
    with pytest.raises(DeviceError) as caught:
        gemm.build(PROBLEM, DEVICE)
    assert str(caught.value) == f"cublasLtMatmul {reason}"


def test_its_variants_are_what_the_heuristic_ranks(
    gemm: blas_lt.CublasLtGemm, library: Library
) -> None:
    library.workspace_bytes, library.states = 1000, {97: 15}
    actual = gemm.variants(PROBLEM, DEVICE)
    assert len({v.name for v in actual}) == 3, "97 is refused by the library itself"
    assert {v.cost for v in actual} == {gemm.cost(PROBLEM, DEVICE)}
    x = np.zeros(400, np.float16)
    for v in actual:
        parts = gemm.build_variant(PROBLEM, DEVICE, v.name)
        parts.steps[0].bind(dict.fromkeys("ABC", x.ctypes.data), 4096)(0)
    gemm.build(PROBLEM, DEVICE).steps[0].bind(dict.fromkeys("ABC", x.ctypes.data), 4096)(0)
    assert library.algorithms == [99, 98, 96, 99], "the first is what build takes"
    assert [size for _, size in library.workspaces] == [2000, 1000, 4000, 1000]
    again = blas_lt.CublasLtGemm(Runtime())  # type: ignore[arg-type]
    assert [v.name for v in again.variants(PROBLEM, DEVICE)] == [v.name for v in actual], (
        "names outlive the process"
    )
    assert gemm.variants(replace(PROBLEM, M=0), DEVICE) == ()


def test_what_is_wrong_with_the_library_is_no_refusal(
    gemm: blas_lt.CublasLtGemm, library: Library
) -> None:
    library.ask_status, library.found = 14, 0
    with pytest.raises(
        DeviceError, match=r"^cublasLtMatmulAlgoGetHeuristic failed with CUBLAS_STATUS_FAKE \(14\)$"
    ):
        gemm.supports(PROBLEM, DEVICE)
    library.ask_status, library.found = 0, 1
    assert gemm.supports(PROBLEM, DEVICE) is None  # nothing of the failure was kept


def test_a_failure_names_the_call_and_the_status(
    gemm: blas_lt.CublasLtGemm, library: Library
) -> None:
    (step,) = gemm.build(PROBLEM, DEVICE).steps
    x = np.zeros(400, np.float16)
    launch = step.bind(dict.fromkeys("ABC", x.ctypes.data), 0)
    for status, kind in ((13, DeviceError), (3, OutOfDeviceMemory)):
        library.status = status
        with pytest.raises(
            kind, match=rf"^cublasLtMatmul failed with CUBLAS_STATUS_FAKE \({status}\)$"
        ) as caught:
            launch(0)
        assert type(caught.value) is kind
    library.refused = "MatmulDesc"
    with pytest.raises(
        OutOfDeviceMemory, match=r"^cublasLtMatmulDescCreate failed with CUBLAS_STATUS_FAKE \(3\)$"
    ):
        gemm.build(PROBLEM, DEVICE)
    library.refused = ""
    with pytest.raises(DeviceError, match="^cublasLtMatmulDescSetAttribute of WRONG failed with"):
        LtDescriptor("MatmulDesc", 68, 0, attributes={Attribute("WRONG", 3, ctypes.c_int64): 1})


def test_descriptors_go_with_what_uses_them(gemm: blas_lt.CublasLtGemm, library: Library) -> None:
    problem = replace(PROBLEM, spec=replace(PROBLEM.spec, bias=F16))
    parts = gemm.build(problem, DEVICE)
    x = np.zeros(400, np.float16)
    pointers = dict.fromkeys(("A", "B", "C", "bias"), x.ctypes.data)
    launch = parts.steps[0].bind(pointers, 0)
    del parts
    gc.collect()
    launch(5)  # of descriptors that are gone the library would complain
    kept = sum(not d["gone"] for d in library.made.values())
    assert kept == 5
    del launch
    gc.collect()
    assert all(d["gone"] for d in library.made.values())


# ---------------------------------------------------------------- refusals


BETWEEN = "rounds to float16 between adding a bias and adding {}"
UNEVEN = "takes one stride over all {}, and batch and head are not evenly spaced"
ROWS = "takes rows of a residual that do not overlap, with a row stride up to 2147483647"
TWO = "adds one matrix to a product, and there are beta·C and a residual"
OTHER = "takes a {} of C's dtype, float16, and it is float32"
NOTHING = "always multiplies, and where alpha or K is 0 A and B are not to be read"


@pytest.mark.parametrize(
    ("change", "spec", "reason"),
    [
        ({}, {}, None),
        ({}, {"view": "pointers"}, "takes strided batches only"),
        (
            {},
            {"summed": True, "heads": True},
            "does not take products summed into one C, a segmented C",
        ),
        ({}, {"dtype_c": DType.bfloat16}, "has no float16 product with a bfloat16 result"),
        ({"a_strides": (100, 24, 6)}, {}, UNEVEN.format("matrices")),
        ({"num_heads": 6, "b_head_group": 2}, {}, UNEVEN.format("matrices")),
        ({"alpha": 0.0}, {}, NOTHING),
        ({"K": 0}, {}, NOTHING),
        ({"M": 0}, {}, None),
        ({}, {"bias": F32}, OTHER.format("bias")),
        ({}, {"bias": F32, "dtype_c": F32}, None),
        ({"bias_strides": (15, 5)}, {"bias": F16}, None),
        ({"bias_strides": (0, 5)}, {"bias": F16}, UNEVEN.format("of a bias")),
        ({"residual_strides": (60, 20, 5)}, {"residual": F16}, None),
        ({"residual_strides": (60, 20, 5)}, {"residual": F32}, OTHER.format("residual")),
        ({"residual_strides": (0, 20, 5)}, {"residual": F16}, UNEVEN.format("of a residual")),
        ({"residual_strides": (0, 0, 0)}, {"residual": F16}, ROWS),
        ({"residual_strides": (0, 0, 5), "beta": 1.0}, {"residual": F16}, TWO),
        ({"bias_strides": (0, 0), "beta": 1.0}, {"bias": F32, "dtype_c": F32}, None),
        ({"bias_strides": (0, 0), "beta": 1.0}, {"bias": F16}, BETWEEN.format("beta·C")),
        (
            {"bias_strides": (0, 0), "residual_strides": (60, 20, 5)},
            {"bias": F16, "residual": F16},
            BETWEEN.format("a residual"),
        ),
    ],
)
def test_what_it_takes(
    gemm: blas_lt.CublasLtGemm,
    library: Library,
    change: dict[str, Any],
    spec: dict[str, Any],
    reason: str | None,
) -> None:
    problem = replace(PROBLEM, spec=replace(PROBLEM.spec, **spec), **change)
    assert gemm.supports(problem, DEVICE) == reason
    if 0 in (problem.M, problem.N, problem.matrices):
        assert gemm.build(problem, DEVICE).steps == () and library.asked == []


def test_it_costs_as_much_as_cublas_and_supports_what_that_refuses(
    gemm: blas_lt.CublasLtGemm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blas, "unavailable", lambda: None)
    assert gemm.cost(PROBLEM, DEVICE) == blas.CublasGemm().cost(PROBLEM, DEVICE)
    biased = replace(PROBLEM, spec=replace(PROBLEM.spec, bias=F16))
    assert blas.CublasGemm().supports(biased, DEVICE) == "does not take a bias"
    assert gemm.supports(biased, DEVICE) is None


def test_without_the_library_the_implementation_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, title: str) -> Any:
        raise DeviceError(f"{title} cannot be loaded (gone): install nvidia-cublas")

    monkeypatch.setattr(blas, "load", missing)
    for f in (cublaslt.library, cublaslt.unavailable):
        f.cache_clear()
    try:
        actual = blas_lt.CublasLtGemm(Runtime()).supports(PROBLEM, DEVICE)  # type: ignore[arg-type]
        assert actual == "cuBLASLt cannot be loaded (gone): install nvidia-cublas"
    finally:
        for f in (cublaslt.library, cublaslt.unavailable):
            f.cache_clear()

"""The arguments handed to cuBLAS, computed with as the library would: column-major, with its
strides and scalars."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from column_blas import (
    PRODUCTS,
    SQUARE,
    Product,
    check_lists_that_are_not_read,
    check_products,
    check_products_of_lists,
    integers,
    multiply_as_told,
)
from kernelseam.blas import EXTRAS, Handles
from kernelseam.contract import Device
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec, HeadsSpec
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, OutOfDeviceMemory

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from kernelseam_cuda import blas  # noqa: E402

DEVICE = Device("cuda", 0, "sm_90a")
_KINDS = {2: DType.float16, 14: DType.bfloat16, 0: DType.float32, 1: DType.float64}


class Library:
    """cuBLAS on host memory; remembers the stream that was set when a product was asked for."""

    def __init__(self) -> None:
        self.stream: int | None = None
        self.streams: list[int | None] = []
        self.computes: list[int] = []
        self.modes: list[int] = []
        self.status = self.set_status = self.sets = 0

    def cublasCreate_v2(self, handle: Any) -> int:
        return 0

    def cublasSetMathMode(self, handle: Any, mode: Any) -> int:
        self.modes.append(mode.value)
        return 0

    def cublasSetStream_v2(self, handle: Any, stream: Any) -> int:
        self.stream = stream.value
        self.sets += 1
        return self.set_status

    def cublasGetStatusName(self, status: Any) -> bytes:
        return b"CUBLAS_STATUS_FAKE"

    def cublasGemmStridedBatchedEx(self, handle: Any, *given: Any) -> int:
        return self._multiply("strided", given)

    def cublasGemmEx(self, handle: Any, *given: Any) -> int:
        return self._multiply("one", given)

    def cublasGemmBatchedEx(self, handle: Any, *given: Any) -> int:
        return self._multiply("lists", given)

    def _multiply(self, batch: str, given: Any) -> int:
        values = [x.value for x in given]
        told = multiply_as_told(values, batch, _KINDS, bool, lambda kind: kind in (70, 71))
        self.streams.append(self.stream)
        self.computes.append(told["compute"])
        return self.status


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    fake = Library()
    monkeypatch.setattr(blas, "library", lambda: fake)
    monkeypatch.setattr(blas, "_handles", Handles(blas._create))
    yield fake


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_products_agree(library: Library, product: Product) -> None:
    check_products(blas.CublasGemm(), DEVICE, product)
    assert library.computes == [{DType.float32: 69, DType.float64: 70}.get(product.dtype, 68)]
    assert library.modes == [16]


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_one_matrix_goes_to_the_function_that_is_not_batched(
    library: Library, a_transposed: bool, b_transposed: bool
) -> None:
    M, N, K = 5, 7, 6
    a = integers(DType.float16, *((K, M) if a_transposed else (M, K)))
    b = integers(DType.float16, *((N, K) if b_transposed else (K, N)))
    c = integers(DType.float16, M, N + 1)
    spec = GemmSpec(DType.float16, DType.float16, DType.float32, a_transposed, b_transposed)
    # Strides from matrix to matrix play no part.
    problem = GemmProblem(
        spec,
        M,
        N,
        K,
        1,
        1,
        *((9, 9, x.shape[1]) for x in (a, b, c)),
        alpha=0.5,
        beta=2.0,  # type: ignore[arg-type]
    )
    expected = (
        0.5 * (a.T if a_transposed else a).astype(np.float64) @ (b.T if b_transposed else b)
        + 2.0 * c[:, :N]
    )
    (step,) = blas.CublasGemm().build(problem, DEVICE).steps
    step.bind({"A": a.ctypes.data, "B": b.ctypes.data, "C": c.ctypes.data}, 0)(77)
    assert np.array_equal(c[:, :N], expected.astype(np.float16))
    assert (step.record.kernel, library.streams, library.computes) == ("cublasGemmEx", [77], [68])
    two = replace(problem, num_heads=2, a_strides=(0, 0, problem.a_strides[2]))
    assert blas.CublasGemm().function_of(two) == "cublasGemmStridedBatchedEx"
    listed = blas.CublasBatchedGemm()
    assert (
        listed.function_of(replace(problem, spec=replace(spec, view="pointers")))
        == "cublasGemmBatchedEx"
    )


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_products_of_lists_agree(library: Library, product: Product) -> None:
    check_products_of_lists(blas.CublasBatchedGemm(), DEVICE, "cublasGemmBatchedEx", product)
    assert library.streams == [77]


def test_lists_that_are_not_read_need_not_be_there(library: Library) -> None:
    check_lists_that_are_not_read(blas.CublasBatchedGemm(), DEVICE)


def test_every_product_runs_on_the_stream_it_is_given(library: Library) -> None:
    x = np.ones((4, 4), np.float32)
    (step,) = blas.CublasGemm().build(SQUARE, DEVICE).steps
    assert (step.record.kernel, step.record.kind) == ("cublasGemmEx", "library")
    pointers = dict.fromkeys("ABC", x.ctypes.data)
    first, second = step.bind(pointers, 0), step.bind(pointers, 0)
    for launch, stream in ((first, 7), (second, 2**40), (first, 0)):
        launch(stream)
    assert library.streams == [7, 2**40, None]


def test_a_stream_is_set_where_it_is_another(library: Library) -> None:
    x = np.ones((4, 4), np.float32)
    run = (
        blas.CublasGemm()
        .build(SQUARE, DEVICE)
        .steps[0]
        .bind(dict.fromkeys("ABC", x.ctypes.data), 0)
    )
    for stream in (7, 7, 9, 9, 7):
        run(stream)
    assert (library.streams, library.sets) == ([7, 7, 9, 9, 7], 3)
    library.set_status = 7
    with pytest.raises(DeviceError, match="^cublasSetStream failed with CUBLAS_STATUS_FAKE"):
        run(9)
    library.set_status = 0
    run(7)  # which it may have no more
    assert (library.streams[5:], library.sets) == ([7], 5)


def test_a_failure_names_the_call_and_the_status(library: Library) -> None:
    x = np.ones((4, 4), np.float32)
    (step,) = blas.CublasGemm().build(SQUARE, DEVICE).steps
    launch = step.bind(dict.fromkeys("ABC", x.ctypes.data), 0)
    for status, kind in ((13, DeviceError), (3, OutOfDeviceMemory)):
        library.status = status
        with pytest.raises(kind) as caught:
            launch(0)
        assert type(caught.value) is kind
        assert str(caught.value) == f"cublasGemmEx failed with CUBLAS_STATUS_FAKE ({status})"


def test_without_the_library_the_implementation_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise DeviceError("cuBLAS cannot be loaded (gone): install nvidia-cublas")

    blas.unavailable.cache_clear()
    monkeypatch.setattr(blas, "library", missing)
    try:
        gemm = blas.CublasGemm()
        assert (
            gemm.supports(SQUARE, DEVICE) == "cuBLAS cannot be loaded (gone): install nvidia-cublas"
        )
        assert (
            gemm.supports(replace(SQUARE, M=2**31), DEVICE)
            == "takes extents and row strides up to 2147483647"
        )
    finally:
        blas.unavailable.cache_clear()


LISTS = GemmProblem(
    GemmSpec(DType.float16, DType.float16, DType.float32, view="pointers"),
    8,
    8,
    8,
    2,
    3,
    (0, 0, 8),
    (0, 0, 8),
    (0, 0, 8),
)
NARROW = (
    "takes float16 products of matrices whose rows are known to keep 16-byte alignment or have an "
    "odd stride, and {}_ptrs promises neither (alignment=16 promises it of addresses)"
)


@pytest.mark.parametrize(
    ("change", "spec", "reason"),
    [
        ({}, {}, None),
        ({}, {"view": "strided"}, "takes lists of addresses only"),
        ({}, {"bias": DType.float16}, "does not take a bias"),
        (
            {},
            {"residual": DType.float16, "summed": True},
            "does not take a residual, products summed into one C",
        ),
        ({}, {"dtype_c": DType.bfloat16}, "has no float16 product with a bfloat16 result"),
        (
            {"a_strides": (0, 0, 7)},
            {},
            "takes rows that do not overlap: a row stride is smaller than its row",
        ),
        ({}, {"vector_a": 2}, NARROW.format("A")),
        ({}, {"vector_b": 2}, NARROW.format("B")),
        ({}, {"vector_c": 2}, NARROW.format("C")),
        # no wide access to such rows could be right
        ({"a_strides": (0, 0, 9)}, {"vector_a": 2}, None),
        ({"alpha": 0.0}, {"vector_a": 2, "vector_b": 2}, None),
        ({"alpha": 0.0}, {"vector_c": 2}, NARROW.format("C")),
        ({}, {"dtype_c": DType.float32, "vector_c": 4}, NARROW.format("C")),
        ({}, {"dtype": DType.float32, "dtype_c": DType.float32, "vector_a": 4}, None),
    ],
)
def test_what_it_takes_of_lists(
    change: dict[str, Any],
    spec: dict[str, Any],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blas, "unavailable", lambda: None)
    problem = replace(LISTS, spec=replace(LISTS.spec, **spec), **change)
    assert blas.CublasBatchedGemm().supports(problem, DEVICE) == reason


def test_all_that_makes_a_product_more_than_plain_is_refused_by_name() -> None:
    half = DType.float16
    given: dict[str, Any] = {"bias": half, "residual": half, "row_sums": half, "heads": HeadsSpec()}
    spec = LISTS.spec
    more = {f.name: replace(spec, **{f.name: given.get(f.name, True)}) for f in fields(spec)}
    assert {name for name, changed in more.items() if not changed.plain} == set(EXTRAS)
    for name, words in EXTRAS.items():
        reason = blas.CublasBatchedGemm().supports(replace(LISTS, spec=more[name]), DEVICE)
        assert reason == f"does not take {words}"


def test_each_of_its_functions_is_in_the_wheel() -> None:
    if reason := blas.unavailable():
        pytest.skip(f"cublas is missing: {reason}")
    for gemm in (blas.CublasGemm(), blas.CublasBatchedGemm()):
        assert callable(getattr(blas.library(), gemm.function))
    assert callable(getattr(blas.library(), blas.CublasGemm.single))

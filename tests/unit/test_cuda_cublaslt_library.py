"""cuBLASLt's own word on every attribute, where the library is installed: what it holds is read
back, and numbers are compared with its header. It needs no device."""

from __future__ import annotations

import ctypes
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kernelseam.blas import Handles
from kernelseam.contract import Device
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from kernelseam_cuda import blas, blas_lt, cublaslt  # noqa: E402
from kernelseam_cuda.cublaslt import Attribute, LtDescriptor  # noqa: E402

ATTRIBUTES = [x for x in vars(cublaslt).values() if isinstance(x, Attribute)]
CREATED = {"MatrixLayout": (2, 4, 5, 6), "MatmulDesc": (68, 0), "MatmulPreference": ()}


@pytest.fixture
def real() -> Any:
    if reason := cublaslt.unavailable():
        pytest.skip(f"cublas is missing: {reason}")
    return cublaslt.library()


def value(library: Any, kind: str, described: LtDescriptor, attribute: Attribute) -> Any:
    """What the library holds, read with the size that it says it has."""
    get, size = getattr(library, f"cublasLt{kind}GetAttribute"), ctypes.c_size_t()
    get.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
    )
    assert get(described.handle, attribute.number, None, 0, ctypes.byref(size)) == 0
    assert size.value == ctypes.sizeof(attribute.type)
    held = attribute.type()
    assert (
        get(described.handle, attribute.number, ctypes.byref(held), size, ctypes.byref(size)) == 0
    )
    return held.value


def kind_of(attribute: Attribute) -> str:
    names = {
        "MATRIX_LAYOUT": "MatrixLayout",
        "MATMUL_DESC": "MatmulDesc",
        "MATMUL_PREF": "MatmulPreference",
    }
    return next(
        kind for name, kind in names.items() if attribute.name.startswith(f"CUBLASLT_{name}_")
    )


@pytest.mark.parametrize("attribute", ATTRIBUTES, ids=lambda a: a.name)
def test_the_library_takes_and_returns_each_attribute(real: Any, attribute: Attribute) -> None:
    kind = kind_of(attribute)
    wanted = 2**40 if ctypes.sizeof(attribute.type) == 8 else 1 if "TRANS" in attribute.name else 4
    described = LtDescriptor(kind, *CREATED[kind], attributes={attribute: wanted})
    assert value(real, kind, described, attribute) == wanted
    with pytest.raises(
        DeviceError, match=r"SetAttribute of \w+ failed with CUBLAS_STATUS_INVALID_VALUE \(7\)$"
    ):
        LtDescriptor(kind, *CREATED[kind], attributes={replace(attribute, type=ctypes.c_int8): 1})


def test_the_library_holds_the_products_layouts(real: Any) -> None:
    F16, F32 = DType.float16, DType.float32
    spec = GemmSpec(F16, F32, F32, b_transposed=True, bias=F32, residual=F32)
    problem = GemmProblem(
        spec,
        4,
        5,
        6,
        2,
        3,
        (72, 24, 6),
        (0, 0, 6),
        (60, 20, 5),
        b_head_group=3,
        bias_strides=(15, 5),
        residual_strides=(0, 0, 7),
    )
    layout = [
        *(
            Attribute(n, i, t)
            for i, (n, t) in enumerate(
                (
                    ("TYPE", ctypes.c_int32),
                    ("ORDER", ctypes.c_int32),
                    ("ROWS", ctypes.c_uint64),
                    ("COLS", ctypes.c_uint64),
                    ("LD", ctypes.c_int64),
                )
            )
        ),
        cublaslt.BATCH_COUNT,
        cublaslt.BATCH_STRIDE,
    ]
    actual = [
        [value(real, "MatrixLayout", x, a) for a in layout] for x in blas_lt._layouts(problem)
    ]
    assert actual == [
        [2, 0, 6, 5, 6, 6, 0],  # our B: N×K in memory, one for all
        [2, 0, 6, 4, 6, 6, 24],  # our A
        [0, 0, 5, 4, 7, 6, 0],  # the residual
        [0, 0, 5, 4, 5, 6, 20],
    ]
    operation = blas_lt._operation(problem, 0x1230)
    held = [
        cublaslt.TRANSPOSE_A,
        cublaslt.TRANSPOSE_B,
        cublaslt.EPILOGUE,
        cublaslt.BIAS_ADDRESS,
        cublaslt.BIAS_STRIDE,
    ]
    assert [value(real, "MatmulDesc", operation, a) for a in held] == [1, 0, 4, 0x1230, 5]


def test_numbers_are_those_of_the_librarys_header(real: Any) -> None:
    header = Path(real._name).parents[1] / "include" / "cublasLt.h"
    if not header.exists():
        pytest.skip("the library is installed without its header")
    text = header.read_text(encoding="utf-8", errors="replace")
    numbers = {
        name: int(number)
        for name, number in re.findall(r"^\s*(CUBLASLT_\w+) = (\d+),", text, re.MULTILINE)
    }
    assert {a.name: numbers[a.name] for a in ATTRIBUTES} == {a.name: a.number for a in ATTRIBUTES}
    assert len(ATTRIBUTES) == 13
    for name in ("CUBLASLT_EPILOGUE_BIAS", "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE"):
        assert numbers[name] == getattr(cublaslt, name)
    api = (header.parent / "cublas_api.h").read_text(encoding="utf-8", errors="replace")
    statuses = {int(n): name for name, n in re.findall(r"(CUBLAS_STATUS_\w+)\s*= (\d+)", api)}
    refusals = [f"CUBLAS_STATUS_{n}" for n in ("INVALID_VALUE", "ARCH_MISMATCH", "NOT_SUPPORTED")]
    assert [statuses[s] for s in cublaslt.NO_ALGORITHM] == [
        cublaslt.status_name(s) for s in cublaslt.NO_ALGORITHM
    ]
    assert [statuses[s] for s in cublaslt.NO_ALGORITHM] == refusals
    computes = {name: int(n) for name, n in re.findall(r"(CUBLAS_COMPUTE_\w+) = (\d+)", api)}
    wanted = {"float16": "32F", "bfloat16": "32F", "float32": "32F_PEDANTIC", "float64": "64F"}
    for dtype, number in blas.COMPUTE.items():
        assert computes[f"CUBLAS_COMPUTE_{wanted[dtype.value]}"] == number


def test_the_heuristics_answer_is_as_large_as_the_header_says() -> None:
    actual = cublaslt.HeuristicResult
    assert ctypes.sizeof(actual) == 96
    assert [
        getattr(actual, n).offset for n in ("workspace_bytes", "state", "waves", "reserved")
    ] == [64, 72, 76, 80]


def test_the_library_reads_its_arguments_as_far_as_the_handle(
    real: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is null: more than that takes a device."""
    monkeypatch.setattr(blas_lt, "_handles", Handles(ctypes.c_void_p))
    runtime: Any = SimpleNamespace(activate=lambda device: nullcontext())
    gemm, device, half = blas_lt.CublasLtGemm(runtime), Device("cuda", 0, "sm_90a"), DType.float16
    spec = GemmSpec(half, half, DType.float32, bias=half)
    problem = GemmProblem(spec, 8, 8, 8, 3, 2, *[(128, 64, 8)] * 3, bias_strides=(16, 8))
    with pytest.raises(
        DeviceError,
        match=r"^cublasLtMatmulAlgoGetHeuristic failed with CUBLAS_STATUS_NOT_INITIALIZED",
    ):
        gemm.supports(problem, device)
    algorithm = blas_lt.Algorithm((0,) * 8, 1000)
    monkeypatch.setattr(gemm, "_heuristics", lambda *_: (algorithm,))
    (step,) = gemm.build(problem, device).steps
    launch = step.bind({"A": 1 << 20, "B": 1 << 21, "C": 1 << 22, "bias": 1 << 23}, 1 << 24)
    with pytest.raises(
        DeviceError, match=r"^cublasLtMatmul failed with CUBLAS_STATUS_NOT_INITIALIZED \(1\)$"
    ):
        launch(0)


def test_without_a_device_there_is_no_handle(real: Any) -> None:
    try:
        created = cublaslt.create()
    except DeviceError as e:
        assert str(e) == "cublasLtCreate failed with CUBLAS_STATUS_NOT_INITIALIZED (1)"
    else:
        assert created.value

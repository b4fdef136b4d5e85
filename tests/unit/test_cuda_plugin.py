"""The CUDA plugin without a GPU: argument memory, arrays told apart by attributes, refusals,
errors, doctor."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernelseam.compilation import build
from kernelseam.contract import CONTRACT_VERSION, Device, KernelFacts, LaunchConfig
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.errors import CompileError, DeviceError, NoDevice, OutOfDeviceMemory, UnknownName
from kernelseam.kernels import KERNELS, tiles_of
from kernelseam.kernels.kernel import bundle

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from kernelseam_cuda import archs, arrays, bindings, blas, cubin, launch, plugin  # noqa: E402

DEVICE = Device("cuda", 0, "sm_90a")


def test_importing_the_plugin_imports_no_runtime(python_command: list[str]) -> None:
    code = (
        # .pth files may import cuda
        "import sys; before = set(sys.modules); import kernelseam_cuda.plugin; print([m for m in "
        "set(sys.modules) - before if m.split('.')[0] in ('cuda', 'cupy', 'torch')])"
    )
    done = subprocess.run([*python_command, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_info_and_doctor() -> None:
    info = plugin.kernelseam_info()
    assert (info.name, info.contract_version) == ("cuda", CONTRACT_VERSION)
    report = plugin.kernelseam_doctor()
    assert report["archs"] == [
        *("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103", "sm_120")
    ]
    if not report["devices"]:
        assert report["mode"] in ("compile only", "neither compiles nor runs")
        assert report["no device because"]


def test_every_option_of_a_compilation_is_in_the_binarys_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[bytes] = []

    def refuse(program: object, count: int, options: list[bytes]) -> None:
        used.extend(options)
        raise CompileError("k", "sm_80", "seen enough")

    fake = SimpleNamespace(
        nvrtcVersion=lambda: (0, 13, 0),
        nvrtcCreateProgram=lambda *_: (0, 1),
        nvrtcCompileProgram=refuse,
        nvrtcDestroyProgram=lambda _: (0,),
    )
    monkeypatch.setattr(bindings, "nvrtc", lambda: fake)
    spec = GemmSpec(DType.float16, DType.float16, DType.float32)
    toolchain = plugin.backend().toolchain
    assert toolchain is not None
    sources = bundle(
        KERNELS["gemm"], spec, tiles_of(toolchain, spec, "sm_80")[0], toolchain, "sm_80"
    )
    with pytest.raises(CompileError, match="seen enough"):
        toolchain.compile(sources, "sm_80")
    key = build.binary_key(sources, "sm_80", "cuda", "nvrtc 1.0")
    unkeyed = ["--no-cache"]  # says where the compiler looks, not what it makes
    assert [o.decode() for o in used] == ["--gpu-architecture=sm_80", *archs.OPTIONS, *unkeyed]
    assert sources.options == archs.OPTIONS
    assert (
        build.binary_key(replace(sources, options=archs.OPTIONS[1:]), "sm_80", "cuda", "nvrtc 1.0")
        != key
    )


def test_arguments_are_handed_over_as_one_buffer() -> None:
    size = ctypes.c_size_t(24)
    packed = bytes(range(24))
    buffer, extra = launch.argument_list(packed, size)
    assert [extra[0], extra[2], extra[4]] == [1, 2, None], "buffer, size, end"
    assert ctypes.string_at(extra[1], 24) == packed == bytes(buffer)
    assert ctypes.c_size_t.from_address(extra[3]).value == 24


def test_a_wrong_number_of_argument_bytes_is_refused() -> None:
    with pytest.raises(DeviceError, match="12 bytes of arguments were packed, the kernel takes 16"):
        launch.argument_list(b"\0" * 12, ctypes.c_size_t(16))


class Status(int):
    name = "CUDA_ERROR_FAKE"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A driver whose every function answers with ``status`` and records its arguments."""
    fake = SimpleNamespace(status=0, seen=[])
    fake.cuGetErrorString = lambda status: (0, b"what it means")
    fake.cuThing = lambda *arguments: (fake.seen.append(arguments), (Status(fake.status), 5))[1]
    fake.CUlaunchConfig = SimpleNamespace
    fake.cuLaunchKernelEx = lambda *arguments: (
        fake.seen.append(arguments),
        (Status(fake.status),),
    )[1]
    fake.cuFuncSetAttribute = lambda *arguments: (fake.seen.append(arguments), (Status(0),))[1]
    fake.CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="max shared"
    )
    monkeypatch.setattr(bindings, "driver", lambda: fake)
    yield fake


@pytest.mark.parametrize(
    ("status", "kind"), [(2, OutOfDeviceMemory), (100, NoDevice), (700, DeviceError)]
)
def test_a_status_becomes_an_error_with_call_code_and_meaning(
    driver: SimpleNamespace, status: int, kind: type[Exception]
) -> None:
    driver.status = status
    with pytest.raises(kind) as caught:
        bindings.call("cuThing", 1)
    assert type(caught.value) is kind
    assert str(caught.value) == f"cuThing failed with CUDA_ERROR_FAKE ({status}): what it means"


def facts(*parameters: tuple[int, int], shared: int = 0) -> KernelFacts:
    return KernelFacts("k", 32, 0, 0, shared, 0, parameters)


def test_a_launch_only_launches(driver: SimpleNamespace) -> None:
    kernel = launch.CudaKernel("function", facts((0, 8)))
    run = kernel.prepare(LaunchConfig((3, 1, 1), (128, 1, 1), 1024), b"\0" * 8)
    assert driver.seen == []
    for stream in (77, 99, 77):
        run(stream)
    first, other, again = (config for config, *_ in driver.seen)
    assert first is again and [c.hStream for c in (first, other)] == [77, 99], (
        "a structure for each stream"
    )
    for config, function, places, _ in driver.seen:
        assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (3, 1, 1)
        assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (128, 1, 1)
        assert (config.sharedMemBytes, config.numAttrs, function, places) == (
            1024,
            0,
            "function",
            0,
        )
    driver.status = 1
    with pytest.raises(DeviceError) as caught:
        run(77)
    assert str(caught.value) == (
        "cuLaunchKernelEx failed with CUDA_ERROR_FAKE (1): what it means (grid (3, 1, 1), block "
        "(128, 1, 1), 1024 bytes shared)"
    )


def test_streams_that_come_and_go_are_not_all_remembered(driver: SimpleNamespace) -> None:
    run = launch.CudaKernel("function", facts()).prepare(LaunchConfig((3, 1, 1), (128, 1, 1)), b"")
    streams = (*range(launch._STRUCTURES + 40), launch._STRUCTURES + 39, 0)
    for stream in streams:
        run(stream)
    assert [config.hStream for config, *_ in driver.seen] == [*streams]
    assert driver.seen[-2][0] is driver.seen[-3][0] and driver.seen[-1][0] is not driver.seen[0][0]


def test_more_than_48_kib_of_shared_memory_is_requested_once(driver: SimpleNamespace) -> None:
    kernel = launch.CudaKernel("function", facts(shared=8 * 1024))
    for requested in (40 * 1024, 40 * 1024 + 16, 100_000, 100_000, 1000):
        kernel.prepare(LaunchConfig((1, 1, 1), (32, 1, 1), requested), b"")
    assert driver.seen == [
        ("function", "max shared", 40 * 1024 + 16),
        ("function", "max shared", 100_000),
    ]


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    class ndarray:  # noqa: N801
        def __init__(
            self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, size: int
        ) -> None:
            self.shape, self.strides, self.itemsize = shape, strides, size
            self.dtype, self.data = np.dtype(dtype), SimpleNamespace(ptr=4096, device_id=0)

    pointers = SimpleNamespace(
        cuPointerGetAttribute=lambda what, p: (0, 0) if p == 4096 else (1, None),
        CUpointer_attribute=SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL="device"),
        cuStreamSynchronize=lambda stream: (waited.append(stream), (0,))[1],
    )
    waited: list[int] = []
    monkeypatch.setattr(bindings, "driver", lambda: pointers)
    fake = SimpleNamespace(
        ndarray=ndarray, cuda=SimpleNamespace(runtime=SimpleNamespace(is_hip=False)), waited=waited
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # type: ignore[arg-type]
    return fake


def test_a_cupy_array_is_described_without_a_copy(cupy: SimpleNamespace) -> None:
    info = arrays.describe(cupy.ndarray((2, 3), (24, 4), "float32", 4), [DEVICE])
    assert info is not None
    assert (info.pointer, info.shape, info.strides, info.dtype, info.device, info.kind) == (
        4096,
        (2, 3),
        (6, 1),
        DType.float32,
        DEVICE,
        "cupy",
    )


def test_an_element_type_that_there_is_not_is_named(cupy: SimpleNamespace) -> None:
    with pytest.raises(
        UnknownName, match="dtype = complex64: must be one of float16, bfloat16, float32, float64"
    ):
        arrays.describe(cupy.ndarray((2,), (1,), "complex64", 8), [DEVICE])


def interface(pointer: int, **more: Any) -> object:
    facts = {"data": (pointer, True), "shape": (2, 3), "typestr": "<f8", "version": 3, **more}
    return type("Stranger", (), {"__cuda_array_interface__": facts, "__module__": "strange.lib"})()


def test_a_stranger_is_read_through_the_array_interface(cupy: SimpleNamespace) -> None:
    info = arrays.describe(interface(4096, strides=(48, 16)), [DEVICE])
    assert info is not None
    assert (info.shape, info.strides, info.dtype) == ((2, 3), (6, 2), DType.float64)
    assert (info.kind, info.writable) == ("strange", False)
    assert cupy.waited == []


def test_a_strangers_stream_is_waited_for(cupy: SimpleNamespace) -> None:
    arrays.describe(interface(4096, stream=77), [DEVICE])
    assert cupy.waited == [77]


def test_masks_and_torn_strides_are_refused(
    cupy: SimpleNamespace, refused: Callable[[str, Callable[[], object]], None]
) -> None:
    refused(
        "mask = an array: masked elements have no meaning here. Fill them, and pass the data.",
        lambda: arrays.describe(interface(4096, mask=object()), [DEVICE]),
    )
    refused(
        "strides = (12, 4): must be multiples of the 8-byte element. Copy the field into an "
        "array of its own.",
        lambda: arrays.describe(interface(4096, strides=(12, 4)), [DEVICE]),
    )


@pytest.mark.parametrize("stranger", [interface(8192), 3.0, "text", None])
def test_what_lies_elsewhere_is_not_ours(cupy: SimpleNamespace, stranger: object) -> None:
    assert arrays.describe(stranger, [DEVICE]) is None


def test_without_a_device_nothing_is_ours(cupy: SimpleNamespace) -> None:
    assert arrays.describe(cupy.ndarray((2,), (4,), "float32", 4), []) is None


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 7), "sm_86"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
    ],
)
def test_capabilities_name_archs_of_the_table(capability: tuple[int, int], arch: str) -> None:
    assert archs.BY_CAPABILITY[capability] == arch
    assert archs.row(arch).arch == arch
    assert archs.RATES[arch][DType.float16] > archs.RATES[arch][DType.float32]


PROBLEM = GemmProblem(
    GemmSpec(DType.float16, DType.float16, DType.float32),
    4,
    5,
    6,
    2,
    3,
    (72, 24, 6),
    (90, 30, 5),
    (60, 20, 5),
)


@pytest.mark.parametrize(
    ("change", "strides"),
    [
        ({}, (24, 30, 20)),
        ({"num_heads": 1}, (72, 90, 60)),
        ({"b_head_group": 3, "b_strides": (0, 0, 5)}, (24, 0, 20)),
        ({"batch": 1, "a_strides": (0, 100, 6)}, (100, 30, 20)),
        ({"a_strides": (100, 24, 6)}, None),
        ({"num_heads": 6, "b_head_group": 2}, None),
    ],
)
def test_one_stride_over_all_matrices(
    change: dict[str, Any], strides: tuple[int, int, int] | None
) -> None:
    assert replace(PROBLEM, **change).matrix_strides == strides


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"spec": replace(PROBLEM.spec, view="pointers")}, "takes strided batches only"),
        (
            {"spec": replace(PROBLEM.spec, dtype_c=DType.bfloat16)},
            "has no float16 product with a bfloat16 result",
        ),
        (
            {"spec": replace(PROBLEM.spec, dtype_acc=DType.float64)},
            "does not sum float16 products in float64",
        ),
        (
            {"a_strides": (100, 24, 6)},
            "takes one stride over all matrices, and batch and head are not evenly spaced",
        ),
        ({"M": 2**31}, "takes extents and row strides up to 2147483647"),
        (
            {"a_strides": (72, 24, 3)},
            "takes rows that do not overlap: a row stride is smaller than its row",
        ),
    ],
)
def test_what_the_vendors_blas_takes(
    change: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blas, "unavailable", lambda: None)
    assert blas.CublasGemm().supports(replace(PROBLEM, **change), DEVICE) == reason


def test_a_binary_that_is_no_cubin_is_refused() -> None:
    with pytest.raises(DeviceError, match="the binary is not a cubin"):
        cubin.facts(b"\x7fELF")

"""The runtime on a driver whose device memory is the host's: devices, limits, copies, the current
device, timing."""

from __future__ import annotations

import ctypes
import sys
import timeit
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernelseam.contract import NOT_KNOWN, KernelFacts
from kernelseam.descriptors.common.address_lists import stage
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, InvalidValue, OutOfDeviceMemory

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from kernelseam_cuda import bindings, cubin, runtime  # noqa: E402
from kernelseam_cuda.runtime import CudaRuntime  # noqa: E402
from kernelseam_cuda.toolchain import CudaToolchain  # noqa: E402

ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "CLOCK_RATE": 1_980_000,
    "MEMORY_CLOCK_RATE": 3_201_000,
    "GLOBAL_MEMORY_BUS_WIDTH": 6144,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232_448,
}


class Names:
    """Enumerations whose members are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


class Status(int):
    name = "CUDA_ERROR_FAKE"


class Driver:
    """Two devices. A context is 1 more than its device's index; ``stack`` is the thread's."""

    CUdevice_attribute = CUpointer_attribute = CUfunction_attribute = Names()
    CUstreamCaptureMode = Names()

    def __init__(self) -> None:
        self.stack: list[int] = []
        self.begun = False
        self.log: list[Any] = []
        self.attributes = dict(ATTRIBUTES)
        self.clock, self.version = 0.0, 13000
        self.mode = "CU_STREAM_CAPTURE_MODE_GLOBAL"
        self.captured: set[int] = set()

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        self.begun = True
        return (0,)

    def cuGetErrorString(self, status: int) -> tuple[Any, ...]:
        return 0, b"what it means"

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return 0, 2

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return 0, index

    def cuDeviceGetName(self, size: int, device: int) -> tuple[Any, ...]:
        return 0, f"Card {device}".encode().ljust(size, b"\0")

    def cuDeviceTotalMem(self, device: int) -> tuple[Any, ...]:
        return 0, 2**37

    def cuDeviceGetAttribute(self, name: str, device: int) -> tuple[Any, ...]:
        return 0, self.attributes[name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return 0, device + 1

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return (0, self.stack[-1] if self.stack else 0) if self.begun else (3, None)

    def cuCtxSetCurrent(self, context: int) -> tuple[Any, ...]:
        self.stack[-1:] = [context]
        return (0,)

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        self.stack.append(context)
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return 0, self.stack.pop()

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        self.log.append(("synchronize", self.stack[-1] - 1))
        return (0,)

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        self.log.append(("wait", stream))
        return (0,)

    def cuMemHostAlloc(self, size: int, flags: int) -> tuple[Any, ...]:
        self.pinned = ctypes.create_string_buffer(size)
        self.log.append(("pinned", flags))
        return 0, ctypes.addressof(self.pinned)

    def cuMemcpyHtoDAsync(self, to: int, source: int, size: int, stream: int) -> tuple[Any, ...]:
        assert source == ctypes.addressof(self.pinned) and size <= len(self.pinned)
        ctypes.memmove(to, source, size)
        self.log.append(("copy", stream))
        return (0,)

    def cuMemcpyDtoH(self, to: int, source: int, size: int) -> tuple[Any, ...]:
        ctypes.memmove(to, source, size)
        return (0,)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return 0, self.version

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[Any, ...]:
        before, self.mode = self.mode, mode
        return 0, before

    def cuStreamIsCapturing(self, stream: int) -> tuple[Any, ...]:
        return 0, int(stream in self.captured)

    def cuModuleLoadData(self, binary: bytes) -> tuple[Any, ...]:
        assert self.mode == "CU_STREAM_CAPTURE_MODE_RELAXED"
        self.log.append(("module", self.stack[-1] - 1))
        return 0, "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[Any, ...]:
        return 0, f"function {name.decode()}"

    def cuFuncLoad(self, function: str) -> tuple[Any, ...]:
        self.log.append(("loaded", function))
        return (0,)

    def cuFuncGetAttribute(self, name: str, function: str) -> tuple[Any, ...]:
        reported = {"NUM_REGS": 40, "LOCAL_SIZE_BYTES": 8, "SHARED_SIZE_BYTES": 16}
        return 0, reported[name.removeprefix("CU_FUNC_ATTRIBUTE_")]

    def cuFuncGetParamInfo(self, function: str, index: int) -> tuple[Any, ...]:
        return (0, *((0, 8), (64, 128))[index]) if index < 2 else (Status(1), 0, 0)

    def cuMemsetD8Async(self, pointer: int, value: int, size: int, stream: int) -> tuple[Any, ...]:
        ctypes.memset(pointer, value, size)
        self.log.append(("memset", stream))
        return (0,)

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        event = [0.0]
        return 0, event

    def cuEventRecord(self, event: list[float], stream: int) -> tuple[Any, ...]:
        event[0] = self.clock
        self.log.append(("event", stream))
        return (0,)

    def cuEventElapsedTime(self, start: list[float], stop: list[float]) -> tuple[Any, ...]:
        return 0, stop[0] - start[0]

    def cuEventDestroy(self, event: list[float]) -> tuple[Any, ...]:
        self.log.append("destroyed")
        return (0,)


class ndarray:  # noqa: N801
    """cupy's, over host memory."""

    def __init__(self, host: np.ndarray[Any, Any], device: int) -> None:
        self.host, self.shape, self.strides, self.dtype = host, host.shape, host.strides, host.dtype
        self.data = SimpleNamespace(ptr=host.ctypes.data, device_id=device)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()

    def empty(shape: tuple[int, ...], dtype: Any) -> ndarray:
        if np.prod(shape) > 2**40:
            raise MemoryError("out of memory: 2 TiB")
        return ndarray(np.empty(shape, dtype), fake.stack[-1] - 1)

    stream = SimpleNamespace(ptr=77)
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(is_hip=False), get_current_stream=lambda index: stream
    )
    cupy = SimpleNamespace(ndarray=ndarray, empty=empty, cuda=cuda)
    monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]
    monkeypatch.setattr(bindings, "driver", lambda: fake)
    runtime._primary_context.cache_clear()
    yield fake
    runtime._primary_context.cache_clear()


def test_devices_and_their_limits(driver: Driver) -> None:
    first, second = CudaRuntime().devices()
    assert (str(first), first.name) == ("cuda:0 (sm_90a)", "Card 0")
    assert (str(second), second.name) == ("cuda:1 (sm_90a)", "Card 1")
    limits = first.limits
    assert (limits.compute_units, limits.shared_bytes_per_block, limits.memory_bytes) == (
        132,
        232_448,
        2**37,
    )
    assert limits.bytes_per_second == 2 * 3.201e9 * 6144 / 8
    assert limits.operations_per_second["bfloat16"] == pytest.approx(4096 * 132 * 1.98e9)
    assert limits.operations_per_second["float64"] == pytest.approx(256 * 132 * 1.98e9), (
        "by its matrix units"
    )


def test_versions_of_libraries_are_looked_for_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a class's first call where choices are tuned, whose keys have them."""
    asked: list[str] = []

    def version(name: str) -> str:
        asked.append(name)
        if name == "nvidia-cublas":
            raise bindings.metadata.PackageNotFoundError(name)
        return "12.8"

    monkeypatch.setattr(bindings.metadata, "version", version)
    bindings.version.cache_clear()
    found = [CudaRuntime().versions() for _ in range(2)]
    bindings.version.cache_clear()
    assert found == [{"driver": "13000", "nvidia-cublas-cu12": "12.8"}] * 2
    assert asked == ["nvidia-cublas", "nvidia-cublas-cu12"]


def test_a_card_that_no_row_knows_keeps_its_own_arch(driver: Driver) -> None:
    driver.attributes |= {
        "COMPUTE_CAPABILITY_MAJOR": 7,
        "COMPUTE_CAPABILITY_MINOR": 0,
        "MEMORY_CLOCK_RATE": 0,
    }
    device = CudaRuntime().devices()[0]
    assert device.arch == "sm_70"
    assert device.limits.bytes_per_second == 1e10
    assert device.limits.operations_per_second == {}


def test_no_driver_is_no_device_and_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def cuInit(flags: int) -> tuple[Any, ...]:
        raise RuntimeError("libcuda.so.1 is not here")

    monkeypatch.setattr(bindings, "driver", lambda: SimpleNamespace(cuInit=cuInit))
    cuda_runtime = CudaRuntime()
    assert cuda_runtime.devices() == ()
    assert cuda_runtime.absence == "cuInit failed: libcuda.so.1 is not here"
    assert cuda_runtime.describe(np.ones(3)) is None


@pytest.mark.parametrize("dtype", list(DType), ids=str)
def test_copies_keep_every_bit_and_use_the_streams_order(driver: Driver, dtype: DType) -> None:
    cuda_runtime = CudaRuntime()
    device = cuda_runtime.devices()[1]
    host = np.arange(24).reshape(4, 6).T.astype(dtype.numpy)
    there = cuda_runtime.from_host(host, device)
    info = cuda_runtime.describe(there)
    assert info is not None
    assert (info.shape, info.strides, info.dtype, info.device, info.kind) == (
        (6, 4),
        (4, 1),
        dtype,
        device,
        "cupy",
    )
    assert driver.log == [("pinned", 1), ("copy", 77), ("wait", 77)]
    assert np.array_equal(cuda_runtime.to_host(there), host)
    assert driver.log[3:] == [("synchronize", 1)]
    assert driver.stack == [2]


def test_host_memory_is_staged_in_pinned_memory_piece_by_piece(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One buffer for all copies of all devices: pinned once, and free again when a copy returns."""
    monkeypatch.setattr(runtime, "_STAGED", 64)
    cuda_runtime = CudaRuntime()
    long, short = np.arange(37.0), np.arange(8.0)  # 296 bytes: four pieces and a half
    actual = [
        cuda_runtime.from_host(x, d)
        for x, d in ((long, cuda_runtime.devices()[0]), (short, cuda_runtime.devices()[1]))
    ]
    assert driver.log == [("pinned", 1), *[("copy", 77), ("wait", 77)] * 6]
    assert [cuda_runtime.to_host(x).tolist() for x in actual] == [long.tolist(), short.tolist()]


def test_lists_of_addresses_are_staged_at_bind(driver: Driver) -> None:
    cuda_runtime = CudaRuntime()
    actual = np.array([2**63 + 16, 32, 48], np.uint64)
    held, pointer = stage(actual, cuda_runtime, cuda_runtime.devices()[0])
    assert driver.log == [("pinned", 1), ("copy", 77), ("wait", 77)]
    info = cuda_runtime.describe(held)
    assert info is not None and info.pointer == pointer
    assert cuda_runtime.to_host(held).view(np.uint64).tolist() == actual.tolist()


@pytest.mark.parametrize("current", ["cupy", "torch"])
def test_lists_are_not_staged_while_a_current_stream_is_captured(
    driver: Driver, current: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_runtime = CudaRuntime()
    device = cuda_runtime.devices()[1]
    api = SimpleNamespace(_cuda_getCurrentRawStream=lambda index: 90 + index)
    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True), _C=api)
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    assert not cuda_runtime.is_capturing(device)
    handle = {"cupy": 77, "torch": 91}[current]
    driver.captured.add(handle)
    assert cuda_runtime.is_capturing(device) and cuda_runtime.is_capturing(device, handle)
    assert not cuda_runtime.is_capturing(device, 5)
    with pytest.raises(InvalidValue) as caught:
        stage(np.array([16], np.uint64), cuda_runtime, device)
    assert str(caught.value) == (
        "stream = one that is being captured in a graph: lists of addresses are copied to the "
        "device first, which synchronises. Bind before the capture, over lists in device memory "
        "where they change."
    )
    assert driver.log == []


def test_a_stream_that_a_capture_would_draw_in_counts(driver: Driver) -> None:
    """The legacy stream, beside a stream that is captured and waits for it."""
    cuda_runtime = CudaRuntime()
    device = cuda_runtime.devices()[0]
    driver.cuStreamIsCapturing = lambda stream: (Status(906), None)  # type: ignore[method-assign]
    assert cuda_runtime.is_capturing(device, 0)


def test_strided_and_reversed_arrays_come_back_packed(driver: Driver) -> None:
    cuda_runtime = CudaRuntime()
    cuda_runtime.devices()
    base = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    for view in (
        base[:, ::2, 1:4],
        base[::-1, :, ::-2],
        base[:0],
        np.broadcast_to(base[1], (2, 4, 5)),
        base[1, 2, 3],
    ):
        actual = cuda_runtime.to_host(ndarray(np.asarray(view), 0))
        assert actual.flags.c_contiguous and actual.shape == view.shape
        assert np.array_equal(actual, view)


def test_what_is_elsewhere_does_not_come_back(driver: Driver) -> None:
    with pytest.raises(InvalidValue) as caught:
        CudaRuntime().to_host(np.ones(3))
    assert (
        str(caught.value) == "array = ndarray: must lie on a device of backend cuda. Move it there."
    )


class OlderContext:
    """As cuda-bindings before 12.9.1 have it: equal to itself alone."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __int__(self) -> int:
        return self._address


@pytest.mark.parametrize("context", [int, OlderContext])
def test_a_call_knows_whether_its_device_is_current(
    driver: Driver, context: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_runtime = CudaRuntime()
    device = cuda_runtime.devices()[1]
    monkeypatch.setattr(driver, "cuDevicePrimaryCtxRetain", lambda index: (0, context(index + 1)))
    asked = driver.cuCtxGetCurrent
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (0, context(asked()[1])))
    before, driver.stack[:] = driver.stack[:], [2]
    is_current = cuda_runtime.call_state(device, None).is_current
    assert is_current()
    driver.stack[:] = [1]
    assert not is_current()
    driver.stack[:] = before


def test_out_of_memory_names_the_requested_size(driver: Driver) -> None:
    cuda_runtime = CudaRuntime()
    with pytest.raises(OutOfDeviceMemory) as caught:
        cuda_runtime.empty((2**41,), DType.bfloat16, cuda_runtime.devices()[1])
    assert str(caught.value) == (
        "allocating [2199023255552] of bfloat16 on cuda:1 (sm_90a) failed: out of memory: 2 TiB"
    )
    assert driver.stack == [2]


def test_a_lost_context_is_no_librarys_error(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cupy asks its own runtime for memory, which raises its own error once a launch went
    astray."""

    class CUDARuntimeError(RuntimeError):
        pass

    def refuse(*arguments: object) -> object:
        raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    monkeypatch.setattr(sys.modules["cupy"], "empty", refuse)
    cuda_runtime = CudaRuntime()
    with pytest.raises(DeviceError) as caught:
        cuda_runtime.empty((3, 4), DType.float32, cuda_runtime.devices()[0])
    assert type(caught.value) is DeviceError
    assert str(caught.value) == (
        "allocating [3, 4] of float32 on cuda:0 (sm_90a) failed: cudaErrorIllegalAddress: an "
        "illegal memory access was encountered"
    )


def test_the_device_is_set_and_restored(driver: Driver) -> None:
    cuda_runtime = CudaRuntime()
    first, second = cuda_runtime.devices()
    with cuda_runtime.activate(second):  # a thread without a context gets one, and keeps it
        assert driver.stack == [2]
        with cuda_runtime.activate(second):
            assert driver.stack == [2]
        with pytest.raises(DeviceError), cuda_runtime.activate(first):
            assert driver.stack == [2, 1]
            raise DeviceError("within")
        assert driver.stack == [2]
    assert driver.stack == [2]


def test_a_device_that_another_process_described_can_be_activated(driver: Driver) -> None:
    device = CudaRuntime().devices()[1]
    driver.begun = False
    with CudaRuntime().activate(device):
        assert driver.stack == [2]


def test_activating_the_current_device_is_nearly_free(driver: Driver) -> None:
    cuda_runtime = CudaRuntime()
    device = cuda_runtime.devices()[0]
    driver.stack.append(1)

    def again() -> None:
        with cuda_runtime.activate(device):
            pass

    def context() -> None:
        with cuda_runtime.activate(cuda_runtime.devices()[1]):
            pass

    assert cuda_runtime.activate(device) is cuda_runtime.activate(device), "nothing is made"
    fast, slow = (min(timeit.repeat(f, number=2000, repeat=5)) for f in (again, context))
    assert fast < slow / 1.5, (fast, slow)


def test_times_are_of_each_run_on_the_current_stream(driver: Driver) -> None:
    cuda_runtime = CudaRuntime()
    streams: list[int] = []

    def launch(stream: int) -> None:
        streams.append(stream)
        driver.clock += 2.0 * len(streams)  # milliseconds

    assert cuda_runtime.time(launch, cuda_runtime.devices()[0], 3) == pytest.approx(
        [2e-3, 4e-3, 6e-3]
    )
    assert streams == [77] * 3
    assert driver.log == [("event", 77)] * 6 + [("wait", 77)] + ["destroyed"] * 6


@pytest.mark.parametrize(("version", "loads"), [(13000, [("loaded", "function k")]), (12030, [])])
def test_a_kernel_is_loaded_once_a_device(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, version: int, loads: list[tuple[str, str]]
) -> None:
    driver.version = version
    facts = {"k": KernelFacts("k", 32, 0, 0, 0, 0, ())}
    read: list[bytes] = []
    monkeypatch.setattr(cubin, "facts", lambda binary: (read.append(binary), facts)[1])
    cuda_runtime = CudaRuntime()
    tools = CudaToolchain(cuda_runtime)
    first, second = cuda_runtime.devices()
    kernel = tools.load(b"binary", "k", first)
    assert tools.load(b"binary", "k", first) is kernel
    assert driver.log == [("module", 0), *loads]
    assert tools.load(b"binary", "k", second) is not kernel
    assert driver.log == [("module", 0), *loads, ("module", 1), *loads]
    assert driver.stack == [1]
    if loads:  # the driver's own word, and the binary is not looked into
        reported = KernelFacts("k", 40, NOT_KNOWN, 8, 16, NOT_KNOWN, ((0, 8), (64, 128)))
        assert (kernel.facts, read) == (reported, [])
    else:
        assert (kernel.facts, read) == (facts["k"], [b"binary"])


def test_memory_is_set_in_the_streams_order(driver: Driver) -> None:
    memory = np.full(8, 7, np.uint8)
    cuda_runtime = CudaRuntime()
    launch = cuda_runtime.prepare_memset(memory.ctypes.data + 2, 0, 4, cuda_runtime.devices()[0])
    assert driver.log == [] and memory.tolist() == [7] * 8
    launch(99)
    assert driver.log == [("memset", 99)] and memory.tolist() == [7, 7, 0, 0, 0, 0, 7, 7]
    driver.cuMemsetD8Async = lambda *_: (Status(1),)  # type: ignore[method-assign]
    with pytest.raises(
        DeviceError,
        match=r"^cuMemsetD8Async failed with CUDA_ERROR_FAKE \(1\): what it means \(4 b",
    ):
        cuda_runtime.prepare_memset(memory.ctypes.data, 0, 4, cuda_runtime.devices()[0])(99)

"""Arrays on AMD GPUs told apart by attributes, and DLPack written and read: libraries are stood in
for."""

from __future__ import annotations

import gc
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernelseam.contract import Device
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, OutOfDeviceMemory, UnknownName

pytest.importorskip("kernelseam_rocm", reason="kernelseam-rocm is not installed")
from kernelseam_rocm import arrays, bindings, dlpack  # noqa: E402

DEVICES = (Device("rocm", 0, "gfx942"), Device("rocm", 1, "gfx942"))


class Tensor:
    """What is asked of a torch tensor."""

    def __init__(self, kind: str = "cuda", index: int = 1, dtype: str = "bfloat16") -> None:
        self.device = SimpleNamespace(type=kind, index=index)
        self.shape, self.dtype, self.layout, self.requires_grad = (2, 3), dtype, "strided", False
        self._index = index

    def get_device(self) -> int:
        return self._index

    def data_ptr(self) -> int:
        return 0x1000

    def stride(self) -> tuple[int, ...]:
        return (8, 1)

    def is_neg(self) -> bool:
        return False


def torch(hip: str | None, **more: Any) -> ModuleType:
    module = ModuleType("torch")
    module.__dict__.update(
        Tensor=Tensor,
        strided="strided",
        version=SimpleNamespace(hip=hip, cuda=None),
        is_grad_enabled=lambda: False,
        **more,
    )
    return module


class Ndarray:
    """What is asked of a cupy array."""

    def __init__(self) -> None:
        self.data, self.device = SimpleNamespace(ptr=0x2000), SimpleNamespace(id=0)
        self.shape, self.strides, self.dtype = (4, 5), (40, 4), np.dtype(np.float32)


def cupy(is_hip: bool, **more: Any) -> ModuleType:
    module = ModuleType("cupy")
    stream = SimpleNamespace(ptr=77)
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(is_hip=is_hip), get_current_stream=lambda: stream
    )
    module.__dict__.update(ndarray=Ndarray, cuda=cuda, **more)
    return module


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "cupy"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_torch_on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch("7.2"))
    info = arrays.describe(Tensor(), DEVICES)
    assert info is not None
    assert (info.pointer, info.shape, info.strides) == (0x1000, (2, 3), (8, 1))
    assert (info.dtype, info.device, info.kind) == (DType.bfloat16, DEVICES[1], "torch")
    assert arrays.describe(Tensor("cpu"), DEVICES) is None
    assert arrays.describe(Tensor(), ()) is None


def test_torch_of_another_vendor_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch(None))
    assert arrays.describe(Tensor(), DEVICES) is None
    assert arrays.current_stream(DEVICES[0], "torch") == 0


def test_other_element_types_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch("7.2"))
    with pytest.raises(
        UnknownName, match="dtype = complex64: must be one of float16, bfloat16, float32, float64"
    ):
        arrays.describe(Tensor(dtype="complex64"), DEVICES)


def test_cupy_on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy(True))
    info = arrays.describe(Ndarray(), DEVICES)
    assert info is not None
    assert (info.pointer, info.shape, info.strides) == (0x2000, (4, 5), (10, 1))
    assert (info.dtype, info.device, info.kind) == (DType.float32, DEVICES[0], "cupy")
    assert arrays.current_stream(DEVICES[0], "cupy") == 77


def test_cupy_of_another_vendor_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy(False))
    assert arrays.describe(Ndarray(), DEVICES) is None
    assert arrays.current_stream(DEVICES[0], "cupy") == 0


def test_streams_are_those_of_the_arrays_library(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {0: SimpleNamespace(cuda_stream=5), 1: SimpleNamespace(cuda_stream=6)}
    loaded = torch("7.2", cuda=SimpleNamespace(current_stream=lambda index: streams[index]))
    monkeypatch.setitem(sys.modules, "torch", loaded)
    assert arrays.current_stream(DEVICES[1], "torch") == 6
    assert arrays.current_stream(DEVICES[1], None) == 0
    assert arrays.current_stream(DEVICES[1], "kernelseam") == 0


def test_host_arrays_are_not_ours() -> None:
    for array in (np.zeros(3), [1.0], 3, None):
        assert arrays.describe(array, DEVICES) is None


def test_results_are_made_by_the_arrays_library(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[Any] = []
    monkeypatch.setitem(
        sys.modules,
        "torch",
        torch("7.2", float16="f16", empty=lambda *a, **k: created.append((a, k))),
    )
    monkeypatch.setitem(
        sys.modules, "cupy", cupy(True, empty=lambda *a, **k: created.append((a, k)))
    )
    arrays.empty((2, 3), DType.float16, DEVICES[1], "torch")
    arrays.empty((4,), DType.float32, DEVICES[1], "cupy")
    assert created == [
        (((2, 3),), {"dtype": "f16", "device": "cuda:1"}),
        (((4,),), {"dtype": np.dtype(np.float32)}),
    ]


def test_memory_that_a_library_does_not_get(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    def refuse(*arguments: object, **options: object) -> object:
        raise OutOfMemoryError("tried to allocate 1 TiB")

    monkeypatch.setitem(sys.modules, "torch", torch("7.2", float32="f32", empty=refuse))
    with pytest.raises(OutOfDeviceMemory) as caught:
        arrays.empty((2, 3), DType.float32, DEVICES[0], "torch")
    assert str(caught.value) == (
        "allocating [2, 3] of float32 on rocm:0 (gfx942) failed: tried to allocate 1 TiB"
    )


def test_a_lost_context_is_no_librarys_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> object:
        raise RuntimeError("HIP error: an illegal memory access was encountered")

    monkeypatch.setitem(sys.modules, "torch", torch("7.2", float32="f32", empty=refuse))
    with pytest.raises(DeviceError) as caught:
        arrays.empty((2, 3), DType.float32, DEVICES[0], "torch")
    assert type(caught.value) is DeviceError
    assert str(caught.value) == (
        "allocating [2, 3] of float32 on rocm:0 (gfx942) failed: HIP error: an illegal memory "
        "access was encountered"
    )


class Stranger:
    """An array of a library that nobody knows, exported through DLPack."""

    def __init__(self, device_type: int = dlpack.ROCM, dtype: DType = DType.float16) -> None:
        self._type, self._dtype = device_type, dtype
        self.exports = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._type, 1

    def __dlpack__(self, **options: object) -> Any:
        self.exports += 1
        return dlpack.write(0x3000, (2, 3, 4), self._dtype, 1, self)


@pytest.mark.parametrize("dtype", list(DType))
def test_dlpack_round_trip(dtype: DType) -> None:
    stranger = Stranger(dtype=dtype)
    info = arrays.describe(stranger, DEVICES)
    assert info is not None
    assert (info.pointer, info.shape, info.strides) == (0x3000, (2, 3, 4), (12, 4, 1))
    assert (info.dtype, info.device, info.owner) == (dtype, DEVICES[1], stranger)


def test_an_export_without_a_consumer_is_released() -> None:
    stranger = Stranger()
    arrays.describe(stranger, DEVICES)
    gc.collect()
    assert stranger.exports == 1
    assert not any(stranger in kept for kept in dlpack._exported.values())


def test_a_consumed_export_lives_until_its_consumer_is_done() -> None:
    stranger = Stranger()
    capsule = stranger.__dlpack__()
    address = dlpack._pointer(capsule, dlpack._NAME)
    rename = dlpack.ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [dlpack.ctypes.py_object, dlpack.ctypes.c_char_p]
    rename(capsule, dlpack._USED)  # what a consumer does
    del capsule
    assert any(stranger in kept for kept in dlpack._exported.values())
    managed = dlpack._Managed.from_address(address)
    managed.deleter(dlpack.ctypes.pointer(managed))
    assert not any(stranger in kept for kept in dlpack._exported.values())


def test_strangers_elsewhere_are_not_ours_and_not_exported() -> None:
    stranger = Stranger(device_type=2)
    assert arrays.describe(stranger, DEVICES) is None
    assert stranger.exports == 0


def test_strides_of_empty_arrays() -> None:
    assert dlpack.row_major((2, 0, 3)) == (3, 3, 1)
    assert dlpack.row_major(()) == ()


def test_own_arrays_free_their_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    monkeypatch.setattr(bindings, "call", lambda name, size: 0x4000 + size)
    monkeypatch.setattr(bindings, "hip", lambda: SimpleNamespace(hipFree=freed.append))
    array = arrays.DeviceArray((3, 5), DType.float64, DEVICES[1])
    info = arrays.describe(array, ())
    assert info is not None
    assert (info.pointer, info.strides, info.device) == (0x4000 + 120, (5, 1), DEVICES[1])
    capsule = array.__dlpack__()
    assert array.__dlpack_device__() == (dlpack.ROCM, 1)
    assert dlpack.read(capsule).pointer == 0x4000 + 120
    del array, info
    gc.collect()
    assert freed == []  # the export still uses it
    del capsule
    gc.collect()
    assert freed == [0x4000 + 120]
    arrays.DeviceArray((0, 5), DType.float64, DEVICES[1])
    gc.collect()
    assert len(freed) == 1

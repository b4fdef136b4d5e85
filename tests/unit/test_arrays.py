"""Which runtime answers for an array, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernelseam import arrays
from kernelseam.arrays import torch as torch_arrays
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.plugins import plugins
from refusals import Refused

ENDING = (
    "Pass a NumPy array, a torch tensor or anything with DLPack, and see `kernelseam "
    "doctor` for missing plugins."
)


def test_a_numpy_view_is_seen_as_it_lies() -> None:
    whole = np.zeros((4, 10, 6), np.float16)
    info = arrays.describe(whole[1:3, ::2, 2:5])
    assert info.pointer == whole.ctypes.data + (60 + 2) * 2
    assert (info.shape, info.strides, info.dtype) == ((2, 5, 3), (60, 12, 1), DType.float16)
    assert (info.kind, str(info.device), info.writable) == ("numpy", "numpy:0 (cpu)", True)
    assert info.owner is not whole and arrays.describe(whole).owner is whole


def test_bfloat16_subclasses_broadcasts_and_read_only_arrays() -> None:
    class Named(np.ndarray[Any, Any]):
        pass

    x = np.zeros((2, 3), ml_dtypes.bfloat16).view(Named)
    assert arrays.describe(x).dtype is DType.bfloat16
    wide = np.broadcast_to(np.zeros((1, 3)), (5, 3))
    info = arrays.describe(wide)
    assert (info.strides, info.writable, info.dtype) == ((0, 1), False, DType.float64)
    assert arrays.describe(np.zeros((3, 4))[::-1]).strides == (-4, 1)


@pytest.mark.parametrize("value", [[1.0], 3.0, None, "x"])
def test_what_is_no_array_is_refused(refused: Refused, value: object) -> None:
    known = ", ".join(sorted(plugins().registry.backends))
    refused(
        f"q = builtins.{type(value).__name__}: must be an array of a library and on a device "
        f"known to {known}. {ENDING}",
        lambda: arrays.describe(value, "q"),
    )


def test_a_masked_array_is_refused(refused: Refused) -> None:
    known = ", ".join(sorted(plugins().registry.backends))
    refused(
        "q = numpy.ma.MaskedArray: must be an array of a library and on a device known to "
        f"{known}. {ENDING}".replace("numpy.ma.", type(np.ma.zeros(3)).__module__ + "."),
        lambda: arrays.describe(np.ma.zeros(3), "q"),
    )


class Elsewhere:
    """An array of a library on a device of DLPack's, which may refuse to export it."""

    def __init__(self, device: tuple[int, int], error: Exception) -> None:
        self.device, self.error = device, error

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        raise self.error


def test_devices_that_none_knows_are_named() -> None:
    array = Elsewhere((16, 3), BufferError("no"))
    with pytest.raises(
        InvalidValue, match=r"^q = .*Elsewhere on DLPack's device \(16, 3\): must be"
    ):
        arrays.describe(array, "q")


def test_a_library_that_does_not_export_an_array(refused: Refused) -> None:
    refused(
        "q.__dlpack__ = BufferError on the host: read-only: its library does not export it. Pass a "
        "copy that it exports, or a NumPy array.",
        lambda: arrays.describe(Elsewhere((1, 0), BufferError("read-only")), "q"),
    )


def test_a_dtype_and_a_layout_that_none_takes(refused: Refused) -> None:
    names = "must be one of float16, bfloat16, float32, float64"
    refused(
        f"sinks.dtype = int64: {names}. Convert the array.",
        lambda: arrays.describe(np.zeros(3, np.int64), "sinks"),
    )
    refused(
        f"k.dtype = int64: {names}, or where 8 bits are taken float8_e4m3fn or float8_e4m3fnuz. "
        "Convert the array.",
        lambda: arrays.describe(np.zeros(3, np.int64), "k"),
    )
    refused(
        "block_table.dtype = int64: must be int32. Convert the array.",
        lambda: arrays.describe(np.zeros(3, np.int64), "block_table"),
    )
    refused(
        "mask.dtype = uint8: must be bool. Convert the array.",
        lambda: arrays.describe(np.zeros(3, np.uint8), "mask"),
    )
    refused(
        "k.dtype = >f4: must be in the machine's byte order. Convert with "
        "array.astype(array.dtype.newbyteorder('=')).",
        lambda: arrays.describe(np.zeros(3, ">f4"), "k"),
    )
    record = np.zeros(4, [("a", "u1"), ("b", "f4")])["b"]
    refused(
        "k.strides = (5,): must be multiples of the 4-byte element. Copy the field into an array "
        "of its own.",
        lambda: arrays.describe(record, "k"),
    )


def test_each_vendor_answers_for_its_own(acme: Any) -> None:
    from kernelseam_thirdvendor import AcmeArray

    ours, theirs = np.zeros((2, 2), np.float32), AcmeArray(np.zeros((2, 2), np.float32), 1)
    for _ in range(2):  # by asking, then from memory
        assert str(arrays.describe(theirs).device) == "acme:1 (acme1)"
        assert str(arrays.describe(ours).device) == "numpy:0 (cpu)"
    assert arrays.runtime_of(arrays.describe(theirs)) is acme
    assert arrays.describe(AcmeArray(ours, 0)).device.index == 0


def test_a_type_whose_arrays_change_their_runtime_is_looked_up_again(acme: Any) -> None:
    class Wanderer:
        """An array that is either vendor's, as one library's arrays may be on the host or on a
        device."""

        def __init__(self, on_acme: bool) -> None:
            self.host, self.place = np.zeros(3, np.float32), (2 if on_acme else 1, 0)
            if on_acme:
                self.__cuda_array_interface__ = {**self.host.__array_interface__, "acme": 0}

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.place

        def __dlpack__(self, **options: Any) -> Any:
            return self.host.__dlpack__(**options)

    for on_acme in (True, False, True):
        assert arrays.describe(Wanderer(on_acme)).device.backend == ("acme" if on_acme else "numpy")


def test_the_requested_backend_is_asked_first(acme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros(3, np.float32)
    requested: list[object] = []

    def describe(array: object) -> None:
        requested.append(array)

    monkeypatch.setattr(acme, "describe", describe)
    assert arrays.describe(x, backend="acme").device.backend == "numpy"
    assert requested[0] is x
    arrays.describe(x)
    assert len(requested) == 1  # the host's runtime is first to be asked about NumPy arrays


def test_one_device(acme: Any, refused: Refused) -> None:
    from kernelseam_thirdvendor import AcmeArray

    x = np.zeros(3, np.float32)
    infos = {
        "q": arrays.describe(x),
        "k": arrays.describe(x),
        "v": arrays.describe(AcmeArray(x, 1)),
    }
    refused(
        "v = acme:1 (acme1): must be on the same device as q, which is on numpy:0 (cpu). Move v "
        "or q.",
        lambda: arrays.same_device(infos),
    )
    del infos["v"]
    assert arrays.same_device(infos) == infos["q"].device


def test_tensors_are_allocated_on_the_device_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what allocates on torch's current device, where that is the one."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    asked = list[tuple[Any, ...]]()
    current = [1]
    here = lambda *what: asked.append(what)  # noqa: E731
    anywhere = lambda *what, dtype, device: asked.append((*what, dtype, device))  # noqa: E731
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_gpu", here, raising=False)
    monkeypatch.setattr(torch._C, "_gpu_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch, "empty_strided", anywhere)
    device = SimpleNamespace(type="gpu", index=1)
    like = SimpleNamespace(device=device)
    what = (2, 0, 3), (3, 3, 1), torch.float16

    def allocate() -> tuple[Any, ...]:
        torch_arrays.allocator(like)(*what)
        return asked.pop()

    assert allocate() == what
    current[0] = 0
    assert allocate() == (*what, device)
    monkeypatch.delattr(torch._C, "_gpu_getDevice")
    assert allocate() == (*what, device)
    device.index = None  # there is one, always current
    assert allocate() == what
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_gpu")
    assert allocate() == (*what, device)


@pytest.mark.parametrize(
    ("pools", "expected"),
    [([(0, 0), (0, 0)], True), ([(0, 0), (0, 7)], False), ([(0, 0), None], False), ([], False)],
)
def test_whether_torchs_memory_is_of_its_own_pool(
    pools: list[tuple[int, int] | None], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    segments = [
        {"address": 100 * i, "total_size": 100, "segment_pool_id": pool}
        for i, pool in enumerate(pools)
    ]
    card = SimpleNamespace(memory_snapshot=lambda: segments)
    monkeypatch.setattr(torch, "card", card, raising=False)
    tensor = SimpleNamespace(device=SimpleNamespace(type="card"), data_ptr=lambda: 110)
    assert torch_arrays.lies_in_default_pool(tensor) is expected

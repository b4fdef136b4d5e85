"""The host as a device, and the reference as a plugin."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernelseam import builtin as plugin
from kernelseam import plugins as discovery
from kernelseam._version import __version__
from kernelseam.contract import CONTRACT_VERSION, Backend, Runtime
from kernelseam.dtypes import FLOATING, DType
from kernelseam.reference.runtime import HostRuntime
from kernelseam.reference.scratch import carve, scratch_bytes, shaped
from refusals import Refused

RUNTIME = HostRuntime()


def test_the_device() -> None:
    (device,) = RUNTIME.devices()
    assert (device.backend, device.index, device.arch, str(device)) == (
        "numpy",
        0,
        "cpu",
        "numpy:0 (cpu)",
    )
    assert device.limits.compute_units >= 1
    assert set(device.limits.operations_per_second) == {d.value for d in FLOATING}
    assert isinstance(RUNTIME, Runtime)


@pytest.mark.parametrize("dtype", list(DType))
def test_new_arrays_and_copies(dtype: DType) -> None:
    (device,) = RUNTIME.devices()
    x: Any = RUNTIME.empty((2, 3), dtype, device)
    assert (x.shape, x.dtype, x.flags.c_contiguous) == ((2, 3), np.dtype(dtype.numpy), True)
    source = np.arange(6).reshape(3, 2).T.astype(dtype.numpy)
    copy: Any = RUNTIME.from_host(source, device)
    np.testing.assert_array_equal(copy, source)
    assert copy.flags.c_contiguous and not np.shares_memory(copy, source)
    back = RUNTIME.to_host(source[::-1])
    np.testing.assert_array_equal(back, source[::-1])
    assert back.flags.c_contiguous and not np.shares_memory(back, source)


@pytest.mark.slow("2 GiB are copied")
def test_more_is_read_than_32_bits_count() -> None:
    (device,) = RUNTIME.devices()
    x = np.zeros(2**31 + 3, np.uint8)
    x[-1] = 7
    read = RUNTIME.read(x.ctypes.data, x.size, device)
    assert (read.size, read[-1]) == (x.size, 7)


def test_arrays_of_other_kinds_are_made_and_brought_back() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    (device,) = RUNTIME.devices()
    like = RUNTIME.describe(torch.zeros(3))
    x: Any = RUNTIME.empty((2, 3), DType.bfloat16, device, like)
    assert (type(x), x.dtype, tuple(x.shape)) == (torch.Tensor, torch.bfloat16, (2, 3))
    x[:] = torch.arange(6).reshape(2, 3)
    back = RUNTIME.to_host(x[:, ::2])
    np.testing.assert_array_equal(back, np.array([[0, 2], [3, 5]], ml_dtypes.bfloat16))


def test_what_is_not_in_host_memory_is_not_brought_back(refused: Refused) -> None:
    refused(
        "array = list: must lie in host memory. Ask the runtime of its device.",
        lambda: RUNTIME.to_host([1.0]),
    )


def test_one_stream_and_a_clock() -> None:
    (device,) = RUNTIME.devices()
    assert RUNTIME.current_stream(device) == 0
    RUNTIME.synchronize(device)
    streams: list[int] = []
    seconds = RUNTIME.time(streams.append, device, 3)
    assert streams == [0, 0, 0] and len(seconds) == 3 and min(seconds) >= 0
    with RUNTIME.activate(device), RUNTIME.activate(device):
        pass


def test_the_reference_is_a_plugin_like_any_other() -> None:
    loaded = discovery.discover([])
    assert loaded.failures == ()
    info = loaded.loaded["reference"]
    assert (info.version, info.contract_version) == (__version__, CONTRACT_VERSION)
    backend = loaded.backend("numpy")
    assert isinstance(backend, Backend) and backend.priority < 0
    names = [(i.operation, i.name) for i in loaded.registry.implementations if i.backend == "numpy"]
    assert names == [
        (operation, "numpy")
        for operation in (
            "gemm",
            "grouped_gemm",
            "grouped_gemm_pointers",
            "attention",
            "merge_states",
            "paged_cache",
            "attention_bwd",
            "qkv_projection",
            "output_projection",
            "qkv_projection_bwd",
            "output_projection_bwd",
        )
    ]
    report = loaded.doctor()["reference"]
    assert report["numpy"] == np.__version__ and report["blas"]
    assert plugin.kernelseam_doctor() == report


@pytest.mark.parametrize("start", [0, 4, 60])
def test_scratch_lies_on_cache_lines_within_its_bytes(start: int) -> None:
    sizes = (5, 0, 16, 1)
    memory = np.zeros(scratch_bytes(sizes, DType.float32) + start, np.uint8)
    base = memory.ctypes.data + start
    pieces = carve(base, sizes, DType.float32)
    assert [p.size for p in pieces] == list(sizes)
    for i, piece in enumerate(pieces):
        assert piece.ctypes.data % 64 == 0 or not piece.size
        piece[:] = i + 1
    assert [p.tolist() for p in pieces] == [[1.0] * 5, [], [3.0] * 16, [4.0]]
    assert pieces[-1].ctypes.data + 4 <= memory.ctypes.data + memory.size
    shaped(pieces[2], 2, 3)[1, 2] = 9
    assert pieces[2][5] == 9

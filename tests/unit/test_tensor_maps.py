"""Tensor maps for TMA without a GPU: what is refused and why, the numbers handed to the driver."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelseam.contract import TensorMap
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError
from refusals import cases

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from kernelseam_cuda import bindings, plugin, tensor_maps  # noqa: E402

# k [batch 2, head 3, row 100, column 128], rows of three heads side by side, as a kernel's
# coordinates have it.
K = TensorMap("k", DType.bfloat16, (128, 100, 3, 2), (1, 384, 128, 38400), (64, 64, 1, 1), 128, 256)


def test_a_plain_one_is_accepted() -> None:
    assert tensor_maps.refuse(K, 16) is None


@pytest.mark.parametrize(
    ("change", "alignment", "reason"),
    cases("tensor_maps", "maps", globals()),
)
def test_what_the_hardware_cannot_take_is_refused_with_the_number(
    change: dict[str, Any], alignment: int, reason: str
) -> None:
    assert (
        tensor_maps.refuse(replace(K, **change), alignment) == f"the tensor map of k has {reason}"
    )


def test_the_stride_of_an_axis_of_extent_1_counts_for_nothing() -> None:
    """A batch of one may have any stride: 0, odd, or beyond what TMA can hold."""
    for stride in (0, 1, 7, 2**60):
        one = replace(K, extents=(128, 100, 3, 1), strides=(1, 384, 128, stride))
        assert tensor_maps.refuse(one, 16) is None
    assert (
        tensor_maps.refuse(replace(K, extents=(1, 100, 3, 2), strides=(5, 384, 128, 38400)), 16)
        is None
    )


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5), st.data())
def test_accepted_maps_keep_the_drivers_rules(extents: list[int], data: Any) -> None:
    """Whatever is not refused has numbers that the driver's documentation allows."""
    axes = len(extents)
    strides = data.draw(st.tuples(*[st.sampled_from((0, 1, 8, 24, 300, 1024))] * axes))
    box = data.draw(st.tuples(*[st.sampled_from((0, 2, 8, 32, 256, 257))] * axes))
    dtype = data.draw(st.sampled_from(list(tensor_maps.DTYPES)))
    created = TensorMap(
        "x", dtype, tuple(extents), (1, *strides[1:]), box, data.draw(st.sampled_from((0, 128)))
    )
    if tensor_maps.refuse(created, 16) is None:
        outer = (s * dtype.itemsize for n, s in zip(extents, created.strides, strict=True) if n > 1)
        assert all(s % 16 == 0 and 0 < s < 2**40 for s in [*outer][extents[0] > 1 :])
        assert all(1 <= b <= 256 for b in box) and box[0] * dtype.itemsize % 16 == 0


def test_the_driver_gets_the_numbers_and_its_bytes_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cu = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    seen: list[Any] = []

    def encode(
        place: Any, kind: int, axes: int, address: Any, extents: Any, strides: Any, *rest: Any
    ) -> int:
        assert place.value % 64 == 0
        ctypes.memmove(place, bytes(range(128)), 128)
        u64 = ctypes.c_uint64
        seen.append(
            (
                *(kind, axes, address.value),
                list((u64 * axes).from_address(extents.value)),
                list((u64 * (axes - 1)).from_address(strides.value)),
                *map(list, rest[:2]),
                *rest[2:],
            )
        )
        return 0

    replaced: list[tuple[bytes, int]] = []

    def replace_address(place: Any, address: Any) -> int:
        replaced.append((ctypes.string_at(place, 128), address.value))
        ctypes.memmove(place, b"\7" * 8, 8)
        return 0

    monkeypatch.setattr(tensor_maps, "_encode_tiled", lambda: encode)
    monkeypatch.setattr(tensor_maps, "_replace_address", lambda: replace_address)
    monkeypatch.setattr(tensor_maps, "_encoder", cache(tensor_maps._encoder.__wrapped__))
    toolchain: Any = plugin.backend().toolchain
    assert toolchain.encode_tensor_map(replace(K, offset=32, fill_nan=True), 0x1000) == bytes(
        range(128)
    )
    types, fills = cu.CUtensorMapDataType, cu.CUtensorMapFloatOOBfill
    kinds = [
        int(cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
        int(cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
    ]
    bf16, boxes = int(types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16), ([64, 64, 1, 1], [1] * 4)
    shape = [128, 100, 3, 2], [768, 256, 76800]
    filled = int(fills.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA)
    assert seen == [(bf16, 4, 0x1020, *shape, *boxes, *kinds, filled)]
    # an encoder has everything but extents, strides and address of its template
    encoder = toolchain.tensor_map_encoder(replace(K, extents=(1,) * 4, strides=(1,) * 4))
    for n in (7, 1):
        encoder((128, n, 3, 2), (1, 256, 128, 38400), 0x40)
    unread = 16  # an axis of extent 1 has a stride that nothing reads
    for (*_, extents, strides, _, _, _, _, _, _), n, step in zip(
        seen[1:], (7, 1), (512, unread), strict=True
    ):
        assert (extents, strides) == ([128, n, 3, 2], [step, 256, 76800])
    # extents and strides that came before are encoded, and take another address: by the driver, as
    # this one does not put it first
    replaced.clear()
    count, known = len(seen), bytes(range(128))
    for address in (0x80, 0xC0):
        assert encoder((128, 7, 3, 2), (1, 256, 128, 38400), address) == b"\7" * 8 + known[8:]
    assert replaced == [(known, 0x80), (known, 0xC0)] and len(seen) == count
    # so do those of another operand of the same boxes
    another = toolchain.tensor_map_encoder(replace(K, operand="v", offset=64))
    another((128, 7, 3, 2), (1, 256, 128, 38400), 0x100)
    assert replaced[2:] == [(known, 0x100)] and len(seen) == count
    for n in range(2, 3 + tensor_maps._KNOWN):  # of which the oldest go
        encoder((128, n, 3, 2), (1, 256, 128, 38400), 0x40)
    assert len(seen) == count + tensor_maps._KNOWN
    encoder((128, 1, 3, 2), (1, 256, 128, 38400), 0x40)
    assert len(seen) == count + tensor_maps._KNOWN + 1
    del seen[count:]
    single = replace(K, dtype=DType.float32, box=(32, 64, 1, 1))
    for rounded in (False, True):
        toolchain.encode_tensor_map(replace(single, to_tf32=rounded), 0x1000)
    assert [x[0] for x in seen[3:]] == [
        int(types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32),
        int(types.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32),
    ]
    monkeypatch.setattr(tensor_maps, "_encode_tiled", lambda: lambda *_: 1)
    tensor_maps._encoder.cache_clear()
    monkeypatch.setattr(bindings, "driver", lambda: Failing(cu))
    with pytest.raises(DeviceError, match=r"^cuTensorMapEncodeTiled failed with CUDA_ERROR_INVALI"):
        toolchain.encode_tensor_map(K, 0x1000)
    monkeypatch.setattr(tensor_maps, "_encode_tiled", lambda: lambda *_: 77777)
    tensor_maps._encoder.cache_clear()
    with pytest.raises(DeviceError, match="^cuTensorMapEncodeTiled failed with 77777: unknown$"):
        toolchain.encode_tensor_map(K, 0x1000)


@pytest.mark.parametrize("odd", [0, 1 << 4, 1 << 30, 1 << 47])
def test_an_address_that_is_a_maps_first_bytes_is_put_there_without_the_driver(
    monkeypatch: pytest.MonkeyPatch, odd: int
) -> None:
    """Not where one bit of it also stands elsewhere (``odd``), nor one beyond those looked at."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    asked: list[int] = []

    def replace_address(place: Any, address: Any) -> int:
        content = bytearray(range(128))
        content[:8] = address.value.to_bytes(8, "little")
        content[100] = bool(address.value & odd)
        ctypes.memmove(place, bytes(content), 128)
        asked.append(address.value)
        return 0

    def encode(place: Any, kind: int, axes: int, address: Any, *rest: Any) -> int:
        return replace_address(place, address)

    monkeypatch.setattr(tensor_maps, "_encode_tiled", lambda: encode)
    monkeypatch.setattr(tensor_maps, "_replace_address", lambda: replace_address)
    monkeypatch.setattr(tensor_maps, "_encoder", cache(tensor_maps._encoder.__wrapped__))
    encoder = tensor_maps.encoder(K)
    for first in (0x1030, 0x2030, (1 << 47) + 0x30, 1 << 48):
        asked.clear()
        for address in (first, first + 16):
            found = encoder(K.extents, K.strides, address)
            assert int.from_bytes(found[:8], "little") == address
            assert found[100] == bool(address & odd) and found[8:100] == bytes(range(8, 100))
        by_driver = [x for x in asked if x in (first, first + 16)]
        patched = not odd and first < 1 << 48
        assert len(by_driver) == (first == 0x1030 if patched else 2)
    content = bytes(range(8, 100)) + b"\0" + bytes(range(101, 128))
    found = tensor_maps.tails(K)(K.extents, K.strides, 0x1030)
    assert found == (None if odd else (content, 1 << 48))


class Failing:
    """The bindings, where a status means something without a driver."""

    def __init__(self, cu: Any) -> None:
        self._cu = cu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cu, name)

    def cuGetErrorString(self, status: Any) -> tuple[int, bytes]:
        return 0, b"what it means"


def test_the_names_are_those_of_the_bindings() -> None:
    cu = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    for name in (*tensor_maps.DTYPES.values(), "TFLOAT32"):
        assert hasattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}")
    for name in tensor_maps.SWIZZLES.values():
        assert hasattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{name}")
    for name in tensor_maps.PROMOTIONS.values():
        assert hasattr(cu.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{name}")
    for name in ("NONE", "NAN_REQUEST_ZERO_FMA"):
        assert hasattr(cu.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{name}")


@pytest.mark.parametrize(
    ("arch", "has"), [("sm_80", False), ("sm_89", False), ("sm_90a", True), ("sm_120", True)]
)
def test_archs_before_hopper_have_none(arch: str, has: bool) -> None:
    toolchain = plugin.backend().toolchain
    assert toolchain is not None
    reason = None if has else f"it loads k by a tensor map, {arch} has none"
    assert toolchain.refuse_tensor_map(K, arch, 16) == reason
    row = toolchain.arch_row(arch)
    assert (row.cluster_blocks, row.programmatic_launch) == ((8, True) if has else (1, False))

"""Tensor maps for the TMA unit: what it refuses, and their encoding by the driver.

Rules: the CUDA driver API's cuTensorMapEncodeTiled, with no interleave and every element of a box
taken.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from kernelseam.contract import TENSOR_MAP_BYTES, TensorMap
from kernelseam.dtypes import DType

from kernelseam_cuda import bindings

MAX_AXES, MAX_BOX = 5, 256
MAX_EXTENT, STRIDE_BYTES_END = 2**32, 2**40
ALIGNMENT = 16
"""Bytes: of the first element's address, of every stride, and of a row of the box."""
_EXTENT_1_STRIDE = 16
"""Bytes: the stride passed for an axis of extent 1, whose own stride may be
anything."""

_KNOWN = 1024
"""Extents and strides that are kept encoded, of each kind of box, over any address."""
_ADDRESS_BITS, _ADDRESS_BYTES = 48, 8
_first_bytes = struct.Struct("<Q").pack
"""Of a map that begins with its address."""
Encode = Callable[[tuple[int, ...], tuple[int, ...], int], bytes]
Tail = Callable[[tuple[int, ...], tuple[int, ...], int], tuple[bytes, int] | None]

SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
PROMOTIONS = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}
DTYPES = {
    DType.float16: "FLOAT16",
    DType.bfloat16: "BFLOAT16",
    DType.float32: "FLOAT32",
    DType.float64: "FLOAT64",
    DType.float8_e4m3fn: "UINT8",
}


_CHOICES = "swizzles of 0, 32, 64 and 128 bytes, promotions of 0, 64, 128 and 256"


def refuse(tensor_map: TensorMap, alignment: int) -> str | None:
    """Why the TMA unit cannot take it over an address that is a multiple of ``alignment`` bytes, or
    None."""
    m, size = tensor_map, tensor_map.dtype.itemsize
    axes = len(m.extents)
    if not 1 <= axes <= MAX_AXES or len(m.strides) != axes or len(m.box) != axes:
        return _refusal(
            m,
            f"{axes} extents, {len(m.strides)} strides, a box of {len(m.box)}: 1 to {MAX_AXES}, "
            "as many",
        )
    if m.dtype not in DTYPES:
        return _refusal(m, f"elements of {m.dtype}: {', '.join(d.value for d in DTYPES)}")
    if m.to_tf32 and m.dtype is not DType.float32:
        return _refusal(m, f"elements of {m.dtype} to round to TF32: {DType.float32}")
    if m.swizzle not in SWIZZLES or m.l2_promotion not in PROMOTIONS:
        return _refusal(
            m, f"a swizzle of {m.swizzle} and an L2 promotion of {m.l2_promotion}: {_CHOICES}"
        )
    if alignment % ALIGNMENT or m.offset % ALIGNMENT:
        return _refusal(
            m,
            f"an address aligned to {alignment} bytes and {m.offset} more: multiples of "
            f"{ALIGNMENT}",
        )
    for axis, (n, stride, box) in enumerate(zip(m.extents, m.strides, m.box, strict=True)):
        if not 1 <= n <= MAX_EXTENT:
            return _refusal(m, f"extent {n} of axis {axis}: 1 to 2^32")
        if not 1 <= box <= MAX_BOX:
            return _refusal(m, f"a box of {box} along axis {axis}: 1 to {MAX_BOX}")
        if (
            axis
            and n > 1
            and (stride * size % ALIGNMENT or not 0 < stride * size < STRIDE_BYTES_END)
        ):
            return _refusal(
                m,
                f"a stride of {stride * size} bytes of axis {axis}: a multiple of {ALIGNMENT}, 1 "
                "to 2^40",
            )
    if m.extents[0] > 1 and m.strides[0] != 1:
        return _refusal(m, f"a stride of {m.strides[0]} elements of the innermost axis: 1")
    row = m.box[0] * size
    if row % ALIGNMENT:
        return _refusal(m, f"a box with rows of {row} bytes: a multiple of {ALIGNMENT}")
    if m.swizzle and row > m.swizzle:
        return _refusal(m, f"a box with rows of {row} bytes: no more than its swizzle, {m.swizzle}")
    return None


def _refusal(tensor_map: TensorMap, text: str) -> str:
    """``text``: what it has, a colon, what is taken."""
    has, _, takes = text.rpartition(": ")
    return f"the tensor map of {tensor_map.operand} has {has}; TMA takes {takes}"


def encode(tensor_map: TensorMap, address: int) -> bytes:
    """The 128 bytes, over an operand's address. Raises DeviceError, NoDevice without a driver."""
    return encoder(tensor_map)(tensor_map.extents, tensor_map.strides, address + tensor_map.offset)


def encoder(template: TensorMap) -> Encode:
    """``encode(extents, strides, address)`` for tensor maps that have the rest from a template,
    strides in elements. Raises DeviceError, also for what ``refuse`` refuses.

    The driver is called by ctypes: the bindings make an object of each number, which takes nine
    times as long, and so would ctypes of what it had to convert. Extents and strides that came
    before, of an operand of the same boxes, are not encoded again: another address takes its place,
    by the driver where that does more than to put it first.
    """
    return _encoder(_bare(template))[0]


def tails(template: TensorMap) -> Tail:
    """See kernelseam.contract.AddressFirstEncoder: the rule is what the driver showed."""
    return _encoder(_bare(template))[1]


def _bare(template: TensorMap) -> TensorMap:
    return replace(template, operand="", extents=(), strides=(), offset=0)


@lru_cache(256)
def _encoder(m: TensorMap) -> tuple[Encode, Tail]:
    cu, axes = bindings.driver(), len(m.box)
    call, size = _encode_tiled(), m.dtype.itemsize
    swizzle = getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{SWIZZLES[m.swizzle]}")
    promotion = getattr(
        cu.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{PROMOTIONS[m.l2_promotion]}"
    )
    elements = "TFLOAT32" if m.to_tf32 else DTYPES[m.dtype]
    element_type = int(getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{elements}"))
    interleave = int(cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE)
    fill = "NAN_REQUEST_ZERO_FMA" if m.fill_nan else "NONE"
    filling = int(getattr(cu.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{fill}"))
    box, ones = (ctypes.c_uint32 * axes)(*m.box), (ctypes.c_uint32 * axes)(*[1] * axes)
    kinds = (interleave, int(swizzle), int(promotion), filling)
    numbers = struct.Struct(f"<{axes}Q{axes - 1}Q")
    free, known = list[_Scratch](), dict[tuple[tuple[int, ...], ...], bytes]()
    plain_end = -1

    def encode(extents: tuple[int, ...], strides: tuple[int, ...], address: int) -> bytes:
        nonlocal plain_end
        elsewhere = known.get((extents, strides))
        if elsewhere is not None and address < plain_end:
            return _first_bytes(address) + elsewhere[_ADDRESS_BYTES:]
        try:
            own = free.pop()
        except IndexError:
            own = _Scratch(numbers.size, 8 * axes)
        own.address.value = address
        if elsewhere is not None:
            own.content.raw = elsewhere
            status = _replace_address()(own.map, own.address)
        else:
            steps = list[int]()
            for n, s in zip(extents[1:], strides[1:], strict=True):  # no frame of Python's
                steps.append(_EXTENT_1_STRIDE if n == 1 else s * size)
            numbers.pack_into(own.numbers, 0, *extents, *steps)
            places = own.address, own.extents, own.strides
            status = call(own.map, element_type, axes, *places, box, ones, *kinds)
        encoded: bytes = own.content.raw
        if status:
            free.append(own)
            name = "cuTensorMapEncodeTiled" if elsewhere is None else "cuTensorMapReplaceAddress"
            bindings.fail(name, status)
        if elsewhere is None:
            if plain_end < 0:
                plain_end = _plain_end(own, encoded)
            while len(known) >= _KNOWN:
                known.pop(next(iter(known), ((), ())), None)
            known[extents, strides] = encoded
        free.append(own)
        return encoded

    def tail(
        extents: tuple[int, ...], strides: tuple[int, ...], address: int
    ) -> tuple[bytes, int] | None:
        encoded = known.get((extents, strides)) or encode(extents, strides, address)
        return (encoded[_ADDRESS_BYTES:], plain_end) if plain_end > 0 else None

    return encode, tail


class _Scratch:
    """Memory for one encoding: its numbers, and the tensor map, which is aligned to 64 bytes; and
    what the driver is passed of them."""

    def __init__(self, size: int, strides: int) -> None:
        self.numbers = ctypes.create_string_buffer(size)
        at = ctypes.addressof(self.numbers)
        self.address = ctypes.c_void_p()
        self.extents, self.strides = ctypes.c_void_p(at), ctypes.c_void_p(at + strides)
        self._memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + 64)
        place = -(-ctypes.addressof(self._memory) // 64) * 64
        self.map = ctypes.c_void_p(place)
        self.content: Any = (ctypes.c_char * TENSOR_MAP_BYTES).from_address(place)


def _plain_end(own: _Scratch, encoded: bytes) -> int:
    """Below it an address is a map's first bytes, and no others depend on it, as the driver shows
    where it replaces each bit of an address, and all; 0 where it does not. Only the driver knows
    what a map looks like, but to ask it for every address takes several times as long."""
    bits = [1 << i for i in range(ALIGNMENT.bit_length() - 1, _ADDRESS_BITS)]
    for address in (*bits, sum(bits)):
        own.content.raw, own.address.value = encoded, address
        status = _replace_address()(own.map, own.address)
        if status or own.content.raw != _first_bytes(address) + encoded[_ADDRESS_BYTES:]:
            return 0
    return 1 << _ADDRESS_BITS


@cache
def _replace_address() -> Any:
    """The driver's cuTensorMapReplaceAddress(map, address)."""
    return bindings.by_ctypes("cuTensorMapReplaceAddress")


@cache
def _encode_tiled() -> Any:
    """The driver's cuTensorMapEncodeTiled(map, dtype, axes, address, extents, strides, box, steps,
    four enumerations): pointers as objects of ctypes, all else as ints."""
    return bindings.by_ctypes("cuTensorMapEncodeTiled")

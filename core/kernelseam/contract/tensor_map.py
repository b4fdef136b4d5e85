"""Tensor maps (TMA descriptors) as a kernel definition declares them, without an address."""

from __future__ import annotations

from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError
from kernelseam.frozen import dataclass

TENSOR_MAP_BYTES = 128


@dataclass(frozen=True)
class TensorMap:
    """The box that a kernel's tile loads and stores transfer of one operand. Axes are innermost
    first, as in the kernel's coordinates.

    A toolchain checks it against the hardware's limits, and encodes it for an address.
    """

    operand: str
    """The plan's operand; as for a pointer, a launch may replace it by another or by part of the
    workspace."""
    dtype: DType
    extents: tuple[int, ...]
    """In elements. Elements of a box beyond them are filled on loads and not stored."""
    strides: tuple[int, ...]
    """In elements, one an axis; the first is 1. Strides of axes of extent 1 are ignored."""
    box: tuple[int, ...]
    """In elements: the extents of one transfer."""
    swizzle: int = 0
    """Bytes of the pattern in which shared memory is permuted: 0 (none), 32, 64 or 128."""
    l2_promotion: int = 0
    """Bytes that a miss loads into the L2 cache: 0 (no promotion), 64, 128 or 256."""
    offset: int = 0
    """Bytes from the operand's address to the first element."""
    fill_nan: bool = False
    """Whether elements beyond the extents are NaN; else 0."""
    to_tf32: bool = False
    """Whether loads round float32 to TF32."""


class WithoutTensorMaps:
    """A mixin for toolchains of backends without tensor maps."""

    backend: str

    def refuse_tensor_map(self, tensor_map: TensorMap, arch: str, alignment: int) -> str | None:
        return f"it loads {tensor_map.operand} by a tensor map, {arch} has none"

    def encode_tensor_map(self, tensor_map: TensorMap, address: int) -> bytes:
        raise DeviceError(
            f"backend {self.backend} has no tensor maps: {tensor_map.operand} cannot have one"
        )

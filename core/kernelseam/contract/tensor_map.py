"""Tensor maps: a tile load as a kernel definition declares it, before any address is known."""

from __future__ import annotations

from dataclasses import dataclass

from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError

TENSOR_MAP_BYTES = 128


@dataclass(frozen=True)
class TensorMap:
    """How a kernel's tile loads and stores walk one operand. Axes come innermost first, as in the
    kernel's coordinates.

    A toolchain says what its hardware refuses of it, and encodes it over an address.
    """

    operand: str
    """The plan's operand; a launch may put another, or part of the workspace, in its place, as for
    a pointer."""
    dtype: DType
    extents: tuple[int, ...]
    """In elements. What a box covers beyond them is filled, and not stored."""
    strides: tuple[int, ...]
    """In elements, one an axis; the first is 1. That of an axis of extent 1 counts for nothing."""
    box: tuple[int, ...]
    """In elements: what one load brings."""
    swizzle: int = 0
    """Bytes of the pattern in which shared memory is permuted: 0 (none), 32, 64 or 128."""
    l2_promotion: int = 0
    """Bytes that a miss brings into the L2 cache: 0 (no more than asked), 64, 128 or 256."""
    offset: int = 0
    """Bytes from the operand's address to the first element."""
    fill_nan: bool = False
    """Whether elements beyond the extents are NaN; else 0."""


class WithoutTensorMaps:
    """The part of a toolchain whose backend has no tensor maps."""

    backend: str

    def refuse_tensor_map(self, tensor_map: TensorMap, arch: str, alignment: int) -> str | None:
        return f"it loads {tensor_map.operand} by a tensor map, {arch} has none"

    def encode_tensor_map(self, tensor_map: TensorMap, address: int) -> bytes:
        raise DeviceError(
            f"backend {self.backend} has no tensor maps: {tensor_map.operand} cannot have one"
        )

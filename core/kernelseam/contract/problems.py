"""Problems, their operands, and predicted costs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from kernelseam.dtypes import DType
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass


@dataclass(frozen=True)
class OperandRule:
    """A plan's requirements of one operand."""

    name: str
    dtype: DType | None
    """None: a list of addresses (8 bytes an entry)."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, one an axis. A shape with a 0 is never read and its address may be null."""
    alignment: int
    """Bytes that the address must be a multiple of."""
    written: bool = False
    optional: bool = False
    may_alias: str = ""
    """The written operand that it may alias: with the same address, dtype, shape and strides. Other
    overlap is refused."""
    same_as: str = ""
    """The operand of which it is a part that begins where that begins: with the same address."""

    @cached_property
    def span(self) -> int:
        """Elements from the first to one past the last that is accessed; 0 of an empty operand."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def same_layout_as(self, other: OperandRule) -> bool:
        """Whether it has the dtype, shape and strides of another operand; strides of axes of extent
        1 do not count."""
        steps = (
            zip(self.shape, self.strides, other.strides, strict=True)
            if self.shape == other.shape
            else ()
        )
        return (
            self.dtype is other.dtype
            and self.shape == other.shape
            and all(s == t for n, s, t in steps if n > 1)
        )


class Problem(Protocol):
    """Spec, extents and strides of one operation: hashable, without pointers."""

    @property
    def operation(self) -> str: ...

    @property
    def spec(self) -> Hashable: ...

    @property
    def operands(self) -> tuple[OperandRule, ...]: ...

    @property
    def operations(self) -> int:
        """Floating-point operations, a multiply-add counted as two."""

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes that must cross memory: every input read once, every output written
        once."""

    @property
    def compute_dtype(self) -> DType:
        """The dtype whose rate bounds the operations."""


@dataclass(frozen=True)
class Cost:
    """A prediction; dispatch compares ``seconds``."""

    bytes: int
    operations: int
    seconds: float

"""Moves between tokens and the pages of a cache, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.samples.common import SHORT, CommonCase
from kernelseam.samples.operand_layout import OperandLayout


@dataclass(frozen=True)
class CacheCase(CommonCase):
    """Rows of k and v between tokens and pages. Field names are the descriptor's."""

    name: str
    dtype: DType
    direction: str = "append"
    dtype_pages: DType | None = None
    """None: dtype."""
    batch: int = 3
    S: int = 5
    packed: tuple[int, ...] = ()
    """Lengths of packed sequences, in place of batch and S; two rows before and two after belong to
    none."""
    num_heads: int = 0
    """Of q; 0: there is none."""
    kv_heads: int = 2
    head_dim: int = 64
    value_dim: int = 64
    page_size: int = 4
    places: str = "table"
    """Or "slots", some of them negative, int32; "slots64": int64."""
    position: str = "lengths"
    """Or "given", shuffled with gaps; or ""."""
    rotary: str = ""
    rotary_dim: int | None = None
    """None: head_dim."""
    norm: DType | None = None
    scaled: str = ""
    in_place: bool = False
    """q_out is q."""
    operand_layouts: tuple[tuple[str, OperandLayout], ...] = ()
    data: str = "normal"
    """Or "wide": magnitudes from 2⁻²⁰ to 2¹⁰, beyond what 8 bits hold; "nan": some are NaN;
    "zeros": every second row is 0."""

    operation = "paged_cache"

    @property
    def pages_dtype(self) -> DType:
        return self.dtype_pages or self.dtype

    @property
    def lead(self) -> tuple[int, int]:
        """(batch, S) of the tokens."""
        return (1, sum(self.packed) + 4) if self.packed else (self.batch, self.S)

    @property
    def rotated(self) -> int:
        """rotary_dim; 0 without rotation."""
        return (self.rotary_dim or self.head_dim) if self.rotary else 0

    def operand_layout(self, name: str) -> OperandLayout:
        return dict(self.operand_layouts).get(name, OperandLayout())


def case(
    kind: str,
    what: str = "",
    operand_layouts: Mapping[str, OperandLayout] | None = None,
    **fields: Any,
) -> CacheCase:
    """``kind`` abbreviates the dtype; "e4m3" is of the pages' dtype, too."""
    dtype = SHORT.get(kind) or fields.pop("dtype")
    name = "-".join(filter(None, ("paged-cache", fields.get("direction", "append"), kind, what)))
    return CacheCase(name, dtype, operand_layouts=tuple((operand_layouts or {}).items()), **fields)

"""Projections as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.samples.common import SHORT, CommonCase
from kernelseam.samples.operand_layout import OperandLayout

PADDING = 2
"""Rows after packed sequences."""


@dataclass(frozen=True)
class ProjectionCase(CommonCase):
    """A projection before or after an attention, or its gradients. Field names are the
    descriptors'."""

    name: str
    operation: str
    dtype: DType
    batch: int = 2
    S: int = 33
    hidden: int = 72
    num_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    bias: DType | None = None
    """In cases of gradients: the dtype of d_bias."""
    residual: DType | None = None
    in_place: bool = False
    """The residual is out itself."""
    dtype_out: DType | None = None
    operand_layouts: tuple[tuple[str, OperandLayout], ...] = ()
    """Memory layouts by operand; others are head-major, aligned and without gaps."""
    packed: bool = False
    """q, k and v (or dq, dk and dv) are slices of one [B, S, H + 2·H_kv, D] array."""
    rotary: str = ""
    rotary_dim: int | None = None
    """None: head_dim."""
    positions: bool = False
    """Positions are read from memory: shuffled, different for each entry, with gaps between
    them."""
    first_position: int = 0
    page_size: int = 0
    """k and v are paged: shuffled pages, some of them unused, and a block table with invalid
    entries elsewhere."""
    sequences: tuple[int, ...] = ()
    """Lengths of packed sequences: batch is 1, and rows beyond their sum belong to none."""
    cached: bool = False
    """An entry's tokens are the last of its keys, which are counted in memory; the first entry has
    fewer keys than tokens."""
    slots: bool = False
    """Slots say where k and v go in pages, in place of a block table; some are negative."""
    dtype_pages: DType | None = None
    """None: that of q."""
    scaled: str = ""
    """What has scales in pages of 8 bits: "heads" or "tokens"."""
    gradients: tuple[str, ...] = ("d_input", "d_weight")
    """The requested gradients, besides d_bias; d_input stands for d_attn_out, too."""
    data: str = "normal"
    """"normal" N(0,1), "positive" U(0,1), "integers" −3…3 (results must agree bit for bit)."""

    @property
    def out_dtype(self) -> DType:
        """The dtype of a forward's results."""
        return self.dtype_out or self.dtype

    @property
    def appended(self) -> bool:
        """Whether k and v are written to pages by a launch of their own."""
        own = (self.sequences, self.cached, self.slots, self.dtype_pages, self.scaled)
        return bool(self.page_size) and any(own)

    @property
    def appends_rotate(self) -> bool:
        """Whether that launch rotates q and k."""
        counted = self.cached or bool(self.sequences)
        return bool(self.rotary) and counted and not self.positions

    @property
    def rotated(self) -> int:
        """rotary_dim; 0 without a rotary embedding."""
        return (self.rotary_dim or self.head_dim) if self.rotary else 0

    @property
    def width(self) -> int:
        """Columns of q, k and v together, or of attn_out."""
        kv = 2 * self.kv_heads if self.operation.startswith("qkv") else 0
        return (self.num_heads + kv) * self.head_dim

    @property
    def exact(self) -> bool:
        """Whether results must equal the oracle's bit for bit."""
        return self.data == "integers"

    def operand_layout(self, name: str) -> OperandLayout:
        return dict(self.operand_layouts).get(name, OperandLayout())


def case(
    operation: str,
    kind: str,
    what: str = "",
    operand_layouts: Mapping[str, OperandLayout] | None = None,
    **fields: Any,
) -> ProjectionCase:
    """``kind`` abbreviates the dtype; ``operand_layouts``: by operand."""
    if sequences := fields.get("sequences", ()):
        fields |= {"batch": 1, "S": sum(sequences) + PADDING}
    name = "-".join(filter(None, (operation.replace("_", "-"), kind, what)))
    return ProjectionCase(
        name,
        operation,
        SHORT[kind],
        operand_layouts=tuple((operand_layouts or {}).items()),
        **fields,
    )

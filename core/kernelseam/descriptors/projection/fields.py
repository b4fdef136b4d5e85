"""The fields that descriptors of rotated q, k and v share: a projection, and a cache's pages."""

from __future__ import annotations

from dataclasses import field

from kernelseam.descriptors.common.strided import P, StridedDescriptor
from kernelseam.descriptors.common.validation import choice, extent
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass

STYLES = ("halves", "pairs")


def rotation_style(field: str, value: object) -> str:
    """Which elements a rotary embedding pairs. Raises InvalidValue."""
    return choice(field, value, STYLES, "Name what is paired")


@dataclass(frozen=True, eq=False, kw_only=True)
class RotatedRows(StridedDescriptor[P]):
    """Rows of q, k and v, what rotates them, and where their tokens lie in pages, as the
    descriptors document them; of these the rotation is validated here."""

    q: object = field(default=None, repr=False)
    k: object = field(default=None, repr=False)
    v: object = field(default=None, repr=False)
    cos: object = field(default=None, repr=False)
    sin: object = field(default=None, repr=False)
    positions: object = field(default=None, repr=False)
    block_table: object = field(default=None, repr=False)
    slot_mapping: object = field(default=None, repr=False)
    kv_lengths: object = field(default=None, repr=False)
    cu_seqlens: object = field(default=None, repr=False)
    k_scales: object = field(default=None, repr=False)
    v_scales: object = field(default=None, repr=False)
    rotary_style: str | None = None
    rotary_dim: int | None = None
    max_position: int | None = None
    table_width: int | None = None
    sequences: int | None = None
    scales: str | None = None
    dtype: DType | str | None = None
    dtype_pages: DType | str | None = None
    dtype_slots: DType | str | None = None
    stride_q_batch: int | None = None
    stride_q_head: int | None = None
    stride_q_row: int | None = None
    stride_k_batch: int | None = None
    stride_k_head: int | None = None
    stride_k_row: int | None = None
    stride_v_batch: int | None = None
    stride_v_head: int | None = None
    stride_v_row: int | None = None
    stride_cos_row: int | None = None
    stride_positions_batch: int | None = None
    stride_positions_row: int | None = None
    stride_table_row: int | None = None
    stride_slots_batch: int | None = None
    stride_slots_row: int | None = None
    stride_k_scales_page: int | None = None
    stride_k_scales_head: int | None = None
    stride_k_scales_row: int | None = None
    stride_v_scales_page: int | None = None
    stride_v_scales_head: int | None = None
    stride_v_scales_row: int | None = None

    def _rotation(self, dim: int) -> tuple[str, int, int]:
        """(style, rotary_dim, max_position); "" and 0 without rotary embedding."""
        for name, other in (("cos", "sin"), ("sin", "cos")):
            if getattr(self, name) is None and getattr(self, other) is not None:
                raise InvalidValue(
                    name, None, f"belongs to {other}", f"Give both, or leave {other} out"
                )
        if self.cos is None:
            return "", 0, 0
        style = "halves" if self.rotary_style is None else self.rotary_style
        style = rotation_style("rotary_style", style)
        for name in ("rotary_dim", "max_position"):
            if getattr(self, name) is None:
                raise InvalidValue(
                    name,
                    None,
                    "must be given where elements are rotated",
                    "Give the extents of cos",
                )
        rotated = extent("rotary_dim", self.rotary_dim, 2)
        if rotated % 2 or rotated > dim:
            raise InvalidValue(
                "rotary_dim",
                rotated,
                f"must be even and at most head_dim = {dim}",
                "cos has rotary_dim / 2 columns",
            )
        return style, rotated, extent("max_position", self.max_position)

"""Strides of the attention forward's operands: those given, validated, and the packed ones in place
of those left out."""

from __future__ import annotations

from kernelseam.descriptors.attention.forward_fields import AttentionFields
from kernelseam.descriptors.common.validation import packed, three, two
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue


def row_strides(
    given: AttentionFields, name: str, shape: tuple[int, int, int, int], view: str, dtype: DType
) -> tuple[int, int, int]:
    """(batch, head, row). Where left out, heads of packed and paged memory pack within rows."""
    batch, head, row = given._valid(name, dtype)
    if view == "strided":
        outer, head, row, _ = packed(shape, (batch, head, row, 1))
        return outer, head, row
    outer, row, head, _ = packed((shape[0], shape[2], shape[1], shape[3]), (batch, row, head, 1))
    return no_batch(given, name, outer) if view == "packed" else outer, head, row


def no_batch(given: AttentionFields, name: str, stride_batch: int) -> int:
    """0, the stride of an axis that packed rows do not have; refused where it is given."""
    if given._given(name)[0] is not None:
        raise InvalidValue(
            f"stride_{name}_batch", stride_batch, "packed rows have no batch", "Leave it out"
        )
    return 0


def plane_strides(
    given: AttentionFields, name: str, shape: tuple[int, int, int, int], dtype: DType | None
) -> tuple[int, int, int, int]:
    """(batch, head, row, column) of bias or mask; zeros where there is none (``dtype`` is None)."""
    if dtype is None:
        return (0, 0, 0, 0)
    a, b, c, d = packed(shape, given._valid(name, dtype))
    return a, b, c, d


def slope_strides(given: AttentionFields, batch: int, heads: int) -> tuple[int, int]:
    """(batch, head) of the ALiBi slopes; zeros where there are none."""
    if given.alibi_slopes is None:
        return 0, 0
    outer, inner = packed((batch, heads), given._valid("alibi_slopes", DType.float32))
    return outer, inner


def scale_strides(
    given: AttentionFields, name: str, field: str, view: str, extents: tuple[int, int, int]
) -> tuple[int, int, int]:
    """(batch, head, block) of the scales of q, k or v, of ``extents`` (batch or pages, heads,
    blocks); ``field`` says how many rows share one. Where left out, heads of packed and paged
    memory pack within blocks."""
    outer, heads, blocks = extents
    batch, head, block = given._valid(name, DType.float32)
    if getattr(given, field) is None:
        if block is not None:
            raise InvalidValue(
                f"stride_{name}_block",
                block,
                f"describes blocks of {'queries' if name == 'q_scales' else 'keys'}",
                f"Give {field} too",
            )
        return (*two(packed((outer, heads), (batch, head))), 0)
    if view == "strided":
        return three(packed(extents, (batch, head, block)))
    batch, block, head = packed((outer, blocks, heads), (batch, block, head))
    return (no_batch(given, name, batch) if view == "packed" else batch), head, block

"""Strides of the attention forward's operands: those given, validated, and the packed ones in place
of those left out."""

from __future__ import annotations

from kernelseam.descriptors.attention.forward_fields import STRIDE_FIELDS, AttentionFields
from kernelseam.descriptors.common.validation import packed, stride, three, two
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue


def given_strides(given: AttentionFields, name: str) -> list[int | None]:
    """An operand's stride fields, as they are."""
    return [getattr(given, field_name) for field_name in STRIDE_FIELDS.get(name, ())]


def axis_strides(given: AttentionFields, name: str) -> list[int | None]:
    """The stride fields of the axes that an operand has: packed rows have no batch, and scales
    without blocks no block."""
    strides = given_strides(given, name)
    queries = name in ("q", "out", "lse", "q_scales")
    keys = name in ("k", "v", "k_scales", "v_scales")
    per_block = given.q_scale_block if queries else given.scale_block
    if name.endswith("_scales") and per_block is None:
        return strides[:-1]
    packed_rows = (queries and given.cu_seqlens_q is not None) or (
        keys and given.cu_seqlens_k is not None
    )
    return strides[1:] if packed_rows else strides


def checked_strides(given: AttentionFields, name: str, dtype: DType) -> list[int | None]:
    """The given strides, validated."""
    return [
        None if s is None else stride(field_name, s, dtype)
        for field_name, s in zip(STRIDE_FIELDS[name], given_strides(given, name), strict=True)
    ]


def row_strides(
    given: AttentionFields, name: str, shape: tuple[int, int, int, int], view: str, dtype: DType
) -> tuple[int, int, int]:
    """(batch, head, row). Where left out, heads of packed and paged memory pack within rows."""
    batch, head, row = checked_strides(given, name, dtype)
    if view == "strided":
        outer, head, row, _ = packed(shape, (batch, head, row, 1))
        return outer, head, row
    outer, row, head, _ = packed((shape[0], shape[2], shape[1], shape[3]), (batch, row, head, 1))
    return no_batch(given, name, outer) if view == "packed" else outer, head, row


def no_batch(given: AttentionFields, name: str, stride_batch: int) -> int:
    """0, the stride of an axis that packed rows do not have; refused where it is given."""
    if given_strides(given, name)[0] is not None:
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
    a, b, c, d = packed(shape, checked_strides(given, name, dtype))
    return a, b, c, d


def slope_strides(given: AttentionFields, batch: int, heads: int) -> tuple[int, int]:
    """(batch, head) of the ALiBi slopes; zeros where there are none."""
    if given.alibi_slopes is None:
        return 0, 0
    outer, inner = packed((batch, heads), checked_strides(given, "alibi_slopes", DType.float32))
    return outer, inner


def scale_strides(
    given: AttentionFields, name: str, field: str, view: str, extents: tuple[int, int, int]
) -> tuple[int, int, int]:
    """(batch, head, block) of the scales of q, k or v, of ``extents`` (batch or pages, heads,
    blocks); ``field`` says how many rows share one. Where left out, heads of packed and paged
    memory pack within blocks."""
    outer, heads, blocks = extents
    batch, head, block = checked_strides(given, name, DType.float32)
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

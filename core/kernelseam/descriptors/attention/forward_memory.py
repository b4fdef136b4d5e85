"""The memory of the attention forward's rows: strided, packed or paged."""

from __future__ import annotations

from kernelseam.descriptors.attention.forward_fields import AttentionFields
from kernelseam.descriptors.common.validation import extent
from kernelseam.errors import InvalidValue


def views(given: AttentionFields) -> tuple[str, str]:
    """(of q and out, of k and v): "strided", "packed" or "paged"."""
    if given.block_table is not None and given.cu_seqlens_k is not None:
        raise InvalidValue(
            "cu_seqlens_k",
            "given",
            "pages have their own lengths",
            "Give kv_lengths in its place",
        )
    if given.block_table is not None and given.kv_lengths is None:
        raise InvalidValue(
            "kv_lengths", None, "must tell how many keys each row of block_table has", "Give it"
        )
    if given.kv_lengths is not None and given.cu_seqlens_k is not None:
        raise InvalidValue(
            "kv_lengths",
            "given",
            "cu_seqlens_k tells the lengths already",
            "Give one of the two",
        )
    kv = (
        "paged"
        if given.block_table is not None
        else "strided"
        if given.cu_seqlens_k is None
        else "packed"
    )
    return "strided" if given.cu_seqlens_q is None else "packed", kv


def total_rows(given: AttentionFields, letter: str, view: str) -> int:
    """The rows of packed q or k, 0 where they are not packed; ``letter``: "q" or "k"."""
    name = f"total_{letter}"
    value = getattr(given, name)
    if view != "packed":
        if value is not None:
            raise InvalidValue(
                name,
                value,
                f"counts the rows of packed {letter}",
                f"Give cu_seqlens_{letter} too",
            )
        return 0
    if value is None:
        raise InvalidValue(name, None, f"must say how many rows packed {letter} has", "Give it")
    return extent(name, value)


def paging(given: AttentionFields, view: str, s_k: int) -> tuple[int, int, int]:
    """(pages, page_size, table_width), zeros where keys are not paged."""
    for name in ("pages", "page_size", "table_width"):
        value = getattr(given, name)
        if view != "paged" and value is not None:
            raise InvalidValue(name, value, "describes paged keys", "Give block_table too")
        if view == "paged" and value is None and name != "table_width":
            raise InvalidValue(name, None, "must be given for paged keys", "Give it")
    if view != "paged":
        return 0, 0, 0
    size = extent("page_size", given.page_size, 1)
    needed = -(-s_k // size)
    width = needed if given.table_width is None else extent("table_width", given.table_width)
    if width < needed:
        raise InvalidValue(
            "table_width",
            width,
            f"must have room for S_k = {s_k} keys in pages of {size}: {needed}",
            "Make the table wider, or S_k smaller",
        )
    return extent("pages", given.pages), size, width

"""How k and v of a projection are written to pages where the product's epilogue does not write
them: as an append to a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.descriptors.cache.cache import PagedCache
from kernelseam.descriptors.cache.problem import PagedCacheProblem
from kernelseam.descriptors.common.wording import Wording
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue

OPERANDS = ("slot_mapping", "kv_lengths", "cu_seqlens", "k_scales", "v_scales")
"""Operands that only an append takes."""
_NUMBERS = (
    *("sequences", "scales", "table_width", "dtype_slots", "stride_table_row"),
    *("stride_slots_batch", "stride_slots_row"),
    *(f"stride_{x}_scales_{axis}" for x in "kv" for axis in ("page", "head", "row")),
)
_ROTATION = ("cos", "sin", "rotary_style", "rotary_dim", "max_position", "stride_cos_row")
_WORDING = Wording({"k_pages": "k", "v_pages": "v", "q_out": "q"})
_STRIDES = {
    f"stride_{x}_pages_{axis}": f"stride_{x}_{'batch' if axis == 'page' else axis}"
    for x in "kv"
    for axis in ("page", "head", "row")
}


def is_appended(d: Any, out: DType, pages: DType) -> bool:
    """Whether k and v of a ``QkvProjection`` are written to pages by a launch of their own."""
    return pages is not out or any(getattr(d, name) is not None for name in OPERANDS)


def appends_rotate(d: Any) -> bool:
    """Whether the append rotates q and k, too: where it alone knows the tokens' positions."""
    counted = d.kv_lengths is not None or d.cu_seqlens is not None
    return d.cos is not None and d.positions is None and counted


def check_unpaged(given: Mapping[str, object]) -> None:
    """Refuse operands of an append, by their names in the call, where k and v are not paged."""
    for name, x in given.items():
        if x is not None:
            remedy = "Give block_table or slot_mapping, or leave it out"
            if name.startswith("cu_seqlens"):
                remedy = "Give positions instead, by which packed rows are rotated"
            raise InvalidValue(name, "given", "k and v are not written to pages", remedy)


def append_problem(
    d: Any,
    extents: Mapping[str, Any],
    out: DType,
    pages: DType,
    strides: Mapping[str, tuple[int, ...]],
) -> PagedCacheProblem:
    """The append of k and v, rows [batch, kv_heads, S, head_dim] of ``out``, to a projection's
    pages. ``extents``: fields of ``PagedCache``; ``strides``: of q, of the rows of k and v, and of
    the pages (k_pages, v_pages). Raises InvalidValue as ``PagedCache``, in the projection's
    words."""
    given: dict[str, Any] = {n: getattr(d, n) for n in (*OPERANDS, "block_table", *_NUMBERS)}
    for name in "kv":
        given[name] = 0
        given[f"{name}_pages"] = getattr(d, name)
    if d.slot_mapping is None and d.positions is not None:
        for name in ("positions", "stride_positions_batch", "stride_positions_row"):
            given[name] = getattr(d, name)
    if appends_rotate(d):
        given |= {n: getattr(d, n) for n in _ROTATION}
        q = 0 if d.q is None else d.q
        given |= {"q": q, "q_out": q, "num_heads": extents["num_heads"]}
        strides = {**strides, "q_out": strides["q"]}
    for name, steps in strides.items():
        if name in given:
            given |= dict(zip(PagedCache.stride_fields(name), steps, strict=True))
    fields = {n: x for n, x in extents.items() if n != "num_heads"}
    try:
        append = PagedCache(**given, **fields, dtype=out, dtype_pages=pages)
    except InvalidValue as e:
        known = _WORDING.reworded(e)
        if e.field in _STRIDES:
            known = type(e)(_STRIDES[e.field], e.value, known.rule, known.remedy)
        raise known from None
    return append.problem()

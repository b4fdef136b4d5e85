"""Which operands of a paged cache go together."""

from __future__ import annotations

from typing import Any

from kernelseam.descriptors.common.validation import choice, extent
from kernelseam.errors import InvalidValue

DIRECTIONS = ("append", "gather", "copy")
_TO_APPEND = ("q", "positions", "cos", "sin", "q_norm", "k_norm")
"""Operands that only an append takes."""
_OF: dict[str, tuple[str, ...]] = {
    "q": ("num_heads",),
    "slot_mapping": ("dtype_slots",),
    "block_table": ("table_width",),
    "cu_seqlens": ("sequences",),
    "cos": ("rotary_style", "rotary_dim", "max_position"),
    "k_norm": ("eps", "dtype_norm"),
    **dict.fromkeys(("positions", "k_scales", "v_scales"), ()),
}
"""Operand → fields that describe it."""
_DEFAULTS = ("dtype_slots", "dtype_norm", "rotary_style", "eps")
"""Fields among them that need not be given."""
_COMPARED = ("batch", "S", "page_size", "value_dim", "sequences")
"""Extents that the rules here and the descriptor compare: numbers, first of all."""
_PAIRS = (
    ("cos", "sin"),
    ("q", "q_out"),
    ("k_scales", "scales"),
)


def check_operands(d: Any) -> None:
    """Raise InvalidValue for operands of a ``PagedCache`` that are missing, that exclude each
    other, or that nothing asks for, and for fields of operands that are not there."""
    direction = choice("direction", d.direction, DIRECTIONS, "Name one of these")
    for name in _COMPARED:
        if (count := getattr(d, name)) is not None:
            extent(name, count)
    if direction != "append":
        for name in _TO_APPEND:
            _refuse_given(d, name, "is for an append", "Leave it out")
    for one, other in _PAIRS:
        _together(d, one, other)
    if d.value_dim != 0:
        _together(d, "k_scales", "v_scales")
    else:
        for name in ("v", "v_pages", "v_scales"):
            _refuse_given(d, name, "there is no v, as value_dim = 0", "Leave it out")
            d._refuse_idle(name)
    for name, fields in _OF.items():
        d._refuse_idle(name, *fields)
        for field in fields if getattr(d, name) is not None else ():
            if getattr(d, field) is None and field not in _DEFAULTS:
                raise InvalidValue(field, None, f"must be given with {name}", "Give it")
    _check_norms(d)
    if direction == "copy":
        _needs(d, "sources", "must say which pages are copied")
        for name in ("kv_lengths", "cu_seqlens", "slot_mapping", "k_scales", "v_scales"):
            _refuse_given(d, name, "whole pages are copied", "Leave it out")
        if d.page_size != d.S:
            raise InvalidValue("S", d.S, f"must be page_size = {d.page_size}", "Pages are copied")
    else:
        _refuse_given(d, "sources", "names pages to be copied", "Leave it out")
    _check_places(d)


def _check_places(d: Any) -> None:
    if (d.slot_mapping is None) == (d.block_table is None):
        value = None if d.slot_mapping is None else "given"
        remedy = "Give slot_mapping or block_table"
        raise InvalidValue("slot_mapping", value, "one of the two says the places", remedy)
    if d.slot_mapping is not None:
        for name in ("kv_lengths", "cu_seqlens"):
            _refuse_given(d, name, "slot_mapping says the places", "Leave it out")
        if d.cos is not None:
            _needs(d, "positions", "rotation needs positions, which slots do not tell")
        else:
            _refuse_given(d, "positions", "slot_mapping says the places", "Leave it out")
    if d.positions is not None:
        _refuse_given(d, "kv_lengths", "positions say it", "Give one of the two")
    if d.cu_seqlens is not None and d.batch != 1:
        raise InvalidValue("batch", d.batch, "must be 1 of packed rows", "Give their number as S")


def _check_norms(d: Any) -> None:
    if d.q_norm is not None and d.q is None:
        raise InvalidValue("q_norm", "given", "there is no q", "Give q, or leave it out")
    if d.q is not None:
        _together(d, "q_norm", "k_norm")
        if d.cos is None and d.k_norm is None:
            rule = "is neither rotated nor normalised"
            raise InvalidValue("q", "given", rule, "Give cos and sin, or weights, or leave it out")


def _refuse_given(d: Any, name: str, rule: str, remedy: str) -> None:
    if getattr(d, name) is not None:
        raise InvalidValue(name, "given", rule, remedy)


def _needs(d: Any, name: str, rule: str) -> None:
    if getattr(d, name) is None:
        raise InvalidValue(name, None, rule, "Give it (0: it will be bound)")


def _together(d: Any, one: str, other: str) -> None:
    for name, known in ((one, other), (other, one)):
        if getattr(d, name) is None and getattr(d, known) is not None:
            raise InvalidValue(
                name, None, f"belongs to {known}", f"Give both, or leave {known} out"
            )

"""Fields of a paged cache's descriptor from arrays: their shapes and strides; nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.descriptors.common.layouts import KV_LAYOUTS, LAYOUTS
from kernelseam.descriptors.projection.arrays import Read, infos_of, labels_of
from kernelseam.errors import InvalidValue

_OPTIONAL = (
    *("q", "q_out", "slot_mapping", "block_table", "kv_lengths", "positions", "cu_seqlens"),
    *("cos", "sin", "q_norm", "k_norm", "k_scales", "v_scales"),
)


def cache_fields(
    arrays: Mapping[str, object], layout: str, kv_layout: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Extents and strides for the descriptor, and the views in place of the arrays; ``options`` are
    passed on. Raises InvalidValue for ranks and extents that do not fit."""
    labels = labels_of("layout", layout, LAYOUTS)
    pages = labels_of("kv_layout", kv_layout, KV_LAYOUTS)
    options = dict(options)
    given = {**arrays, **{n: options.pop(n, None) for n in _OPTIONAL}}
    infos = infos_of(given, "k", "k_pages")
    for one, other in (("v", "v_pages"), ("v_pages", "v")):
        if one in infos and other not in infos:
            raise InvalidValue(other, None, f"belongs to {one}", "Give both, or neither")
    read, lead = Read(infos), "B "
    if len(infos["k"].shape) == 3:  # one entry
        lead, labels = "", labels.replace("B ", "")
        read.known["B"] = 1
    for name, heads in (("k", "H_kv"), ("v", "H_kv"), ("q", "H"), ("q_out", "H")):
        if name in infos:
            _matrix(read, name, labels, heads, "batch")
    for name in ("k_pages", "v_pages"):
        if name in infos:
            _matrix(read, name, pages, "H_kv", "page")
    known = read.known
    for name in ("k_scales", "v_scales"):
        if name in infos:
            read.scales(name, pages)
    read.places(lead)
    for name in ("q_norm", "k_norm"):
        if name in infos:
            read.take(name, "D", {})
    read.rotation()
    extents = {"batch": "B", "S": "S", "kv_heads": "H_kv", "head_dim": "D"}
    extents |= {"pages": "P", "page_size": "N"}
    if "q" in infos:
        extents["num_heads"] = "H"
    whole = {n: known[label] for n, label in extents.items()}
    return {**read.fields, **whole, "value_dim": known.get("D_v", 0), **options}


def _matrix(read: Read, name: str, labels: str, heads: str, outer: str) -> None:
    """k, v, q and their pages; the columns of v are its own."""
    shown = labels.replace("H", heads)
    if name.startswith("v"):
        shown = shown.replace("D", "D_v")
    axes = {"B": "batch", "P": outer, heads: "head", "S": "row", "N": "row"}
    read.take(name, shown, axes)

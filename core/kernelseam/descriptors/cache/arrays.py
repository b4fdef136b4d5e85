"""Fields of a paged cache's descriptor from arrays: their shapes and strides; nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.descriptors.common.layouts import KV_LAYOUTS, LAYOUTS
from kernelseam.descriptors.common.operands import canonical
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
            _scales(read, name, pages)
    for name, called in (("slot_mapping", "slots"), ("positions", "positions")):
        if name in infos:
            read.take(name, f"{lead}S", {"B": "batch", "S": "row"}, called)
    entries = "B"
    if "cu_seqlens" in infos:
        entries = "sequences"
        read.take("cu_seqlens", "sequences+1", {})
        known["sequences"] = read.fields["sequences"] = known["sequences+1"] - 1
    if "kv_lengths" in infos:
        read.take("kv_lengths", entries, {})
    if "block_table" in infos:
        read.take("block_table", f"{entries} width", {entries: "row"}, "table")
        read.fields["table_width"] = known["width"]
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


def _scales(read: Read, name: str, pages: str) -> None:
    """[H_kv] or one for all heads, given; with pages' axes, written."""
    info, heads = read.infos[name], read.known["H_kv"]
    known = read.fields.get("scales")
    if len(info.shape) == 3:
        labels = pages.replace("H", "H_kv").replace(" D", "")
        axes = {"P": "page", "H_kv": "head", "N": "row"}
        _take_any(read, name, labels, axes)
        read.fields["scales"] = "tokens"
    elif info.shape in ((), (1,), (heads,)):
        step = info.strides[0] if info.shape == (heads,) and heads > 1 else 0
        read.fields |= {
            f"stride_{name}_{a}": s
            for a, s in zip(("page", "head", "row"), (0, step, 0), strict=True)
        }
        read.fields["scales"] = "heads"
    else:
        raise InvalidValue(
            name,
            f"an array of shape {list(info.shape)}",
            f"must be [H_kv={heads}], one number, or as the pages have rows",
            "Give the scales of heads, or memory for those of tokens",
        )
    if known not in (None, read.fields["scales"]):
        rule = f"k_scales are of {known}"
        raise InvalidValue(name, f"of {read.fields['scales']}", rule, "Let them be alike")


def _take_any(read: Read, name: str, labels: str, axes: Mapping[str, str]) -> None:
    """An operand whose axes may all be apart."""
    info, names = read.infos[name], labels.split()
    wanted = [read.known[n] for n in names]
    if list(info.shape) != wanted:
        shown = ", ".join(f"{n}={x}" for n, x in zip(names, wanted, strict=True))
        raise InvalidValue(
            name, f"an array of shape {list(info.shape)}", f"must be [{shown}]", "Check the axes"
        )
    for label, step in zip(names, canonical(info), strict=True):
        read.fields[f"stride_{name}_{axes[label]}"] = step

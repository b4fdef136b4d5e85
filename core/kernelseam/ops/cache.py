"""Rows of k and v between tokens and the pages of a cache, on arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors.cache.cache import PagedCache
from kernelseam.descriptors.cache.options import AppendOptions, GatherOptions
from kernelseam.descriptors.common.layouts import KV_LAYOUTS, LAYOUTS, order
from kernelseam.descriptors.common.operands import canonical
from kernelseam.descriptors.common.options import read_values, values_of
from kernelseam.descriptors.common.wording import Wording
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.ops.calling import operate
from kernelseam.ops.operation import Operation, check_rank, not_none
from kernelseam.ops.projection import rotary_tables
from kernelseam.ops.signatures import Array


def append_paged(
    k: Array,
    v: Array | None,
    k_pages: Array,
    v_pages: Array | None,
    *,
    slot_mapping: Any = None,
    block_table: Any = None,
    kv_lengths: Any = None,
    positions: Any = None,
    cu_seqlens_q: Any = None,
    q: Array | None = None,
    rotary: tuple[Any, Any] | None = None,
    rotary_style: str = "halves",
    q_norm: Any = None,
    k_norm: Any = None,
    norm_eps: float = 1e-6,
    k_scales: Any = None,
    v_scales: Any = None,
    layout: str = "bshd",
    kv_layout: str = "nhd",
    out: Array | None = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> Array | None:
    """Write new tokens' k and v into the pages of a cache, in one launch; if asked, normalise and
    rotate q and k first, and round to 8 bits.

    ``k`` [B, S, H_kv, D] and ``v`` [B, S, H_kv, D_v] (``layout`` "bshd"; "bhsd": the head before
    the token), or [T, H_kv, D] of packed rows. ``k_pages`` [pages, page_size, H_kv, D] and
    ``v_pages``, as ``attention_paged`` takes them (``kv_layout`` "hnd": the head before the row of
    a page), are written. v and v_pages may both be None. float16, bfloat16, float32 or float64, any
    strides with a contiguous last axis; pages may have another dtype, float8_e4m3fn too.

    Where a token goes, either by ``slot_mapping`` [B, S] or [T], int32 or int64: page · page_size +
    row. Or by ``block_table`` int32 [B, width]: position p of an entry is in row p % page_size of
    page block_table[b, p // page_size]. p is ``positions`` int32 [B, S] or [T]; else, with
    ``kv_lengths`` int32 [B], which count the new tokens, too, these are the last S; else token s is
    at s. Packed rows need ``cu_seqlens_q`` int32 [B + 1]: entry b has rows cu_seqlens_q[b] to
    cu_seqlens_q[b + 1] − 1. A token without a place is skipped: a negative slot, a position below 0
    or beyond the table, a row of no entry. Its row of q is not written either (in a new array it is
    undefined). Where two tokens share a place, either may remain.

    ``q`` [B, S, H, D] or [T, H, D] takes the same steps below as k, and is returned; ``out``: an
    array for it, which may be q itself. First RMS norms over each head, x·weight / √(mean x² +
    ``norm_eps``), with weights ``q_norm`` and ``k_norm`` [D] (Gemma's are 1 + weight). Then
    rotation by ``rotary``, (cosines, sines) float32 [positions, n / 2], at p (with slots: at
    ``positions``), as in ``fused_qkv_projection``. Pages of 8 bits hold k / scale and v / scale,
    rounded to nearest and saturated. ``k_scales`` and ``v_scales`` float32: [H_kv] or one number,
    given; or [pages, page_size, H_kv] (in ``kv_layout``'s order), which are written: a token's and
    head's largest magnitude over e4m3's (448; fnuz 240). One below 2⁻¹²⁰ counts as that. Without
    scales they are 1. ``attention_paged`` takes the pages with these (``scale_block=1`` for those
    of tokens). All is computed in float32, float64 of float64, and rounded once.

    ``backend``, ``implementation`` and ``stream`` as in ``attention``. Returns q (``out`` where it
    was given), None without q. Raises InvalidValue for what does not fit together, Unsupported with
    each implementation's reason.
    """
    if out is not None and q is None:
        raise InvalidValue("out", "given", "is for q", "Give q, or leave it out")
    arrays = {
        "k": k,
        "k_pages": k_pages,
        **not_none(
            v=v,
            v_pages=v_pages,
            slot_mapping=slot_mapping,
            block_table=block_table,
            kv_lengths=kv_lengths,
            positions=positions,
            cu_seqlens=cu_seqlens_q,
            q=q,
            q_norm=q_norm,
            k_norm=k_norm,
            k_scales=k_scales,
            v_scales=v_scales,
            q_out=out,
            **rotary_tables(rotary, rotary_style),
        ),
    }
    options = _append_values(
        layout=layout, kv_layout=kv_layout, rotary_style=rotary_style, norm_eps=norm_eps
    )
    results = operate(
        append_work, arrays, options, backend, implementation, stream, _APPEND_WORDING
    )
    return results["q_out"] if out is None and q is not None else out


def append_work(operation: Operation, *values: Any) -> None:
    """``values``: those of ``AppendOptions``."""
    asked, infos = read_values(AppendOptions, values), operation.infos
    _check_ranks(infos, asked.layout, asked.kv_layout, "k")
    if "k_norm" not in infos and asked.norm_eps != AppendOptions.norm_eps:
        rule, remedy = "has no effect without k_norm", "Give k_norm, or leave it out"
        raise InvalidValue("norm_eps", asked.norm_eps, rule, remedy)
    if "q" in infos and "q_out" not in infos:
        operation.new_result("q_out", infos["q"].shape, infos["q"].dtype, "q")
    options: dict[str, Any] = {
        "rotary_style": asked.rotary_style if "cos" in infos else None,
        "eps": asked.norm_eps if "k_norm" in infos else None,
    }
    _launch(operation, asked.layout, asked.kv_layout, options)


def gather_paged(
    k_pages: Array,
    v_pages: Array | None,
    *,
    slot_mapping: Any = None,
    block_table: Any = None,
    kv_lengths: Any = None,
    cu_seqlens_k: Any = None,
    total_k: int | None = None,
    max_seqlen_k: int | None = None,
    k_scales: Any = None,
    v_scales: Any = None,
    layout: str = "bshd",
    kv_layout: str = "nhd",
    out: tuple[Array, Array | None] | None = None,
    out_dtype: DType | str | None = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> tuple[Array, Array | None]:
    """Read k and v of sequences out of the pages of a cache, in one launch: what ``append_paged``
    wrote.

    Pages, ``block_table`` [B, width], ``slot_mapping``, scales and the layouts as there. The rows
    of entry b are those of positions 0 to ``kv_lengths``[b] − 1 (without it, of all S); the
    results [B, S, H_kv, D] and [B, S, H_kv, D_v], S being ``max_seqlen_k``, at least the longest of
    kv_lengths, by default what the table has room for. With ``cu_seqlens_k`` int32 [B + 1] they are
    packed, [``total_k``, H_kv, D], and entry b has cu_seqlens_k[b + 1] − cu_seqlens_k[b] rows. Rows
    beyond an entry's are not written. Pages of 8 bits are multiplied by their scales, and rounded
    to ``out_dtype``, which is theirs by default: then they are copied, and take no scales.

    ``out``: arrays (k, v) for the results; else new ones. Returns (k, v); v is None where v_pages
    is. Raises as ``append_paged``.
    """
    given = (None, None) if out is None else _pair("out", out)
    arrays = {
        "k_pages": k_pages,
        **not_none(
            v_pages=v_pages,
            slot_mapping=slot_mapping,
            block_table=block_table,
            kv_lengths=kv_lengths,
            cu_seqlens=cu_seqlens_k,
            k_scales=k_scales,
            v_scales=v_scales,
            k=given[0],
            v=given[1],
        ),
    }
    options = _gather_values(
        layout=layout,
        kv_layout=kv_layout,
        total_k=total_k,
        max_seqlen_k=max_seqlen_k,
        out_dtype=out_dtype,
    )
    results = operate(
        gather_work, arrays, options, backend, implementation, stream, _GATHER_WORDING
    )
    k: Any = results.get("k", given[0])
    return k, results.get("v", given[1])


def gather_work(operation: Operation, *values: Any) -> None:
    """``values``: those of ``GatherOptions``."""
    asked, infos = read_values(GatherOptions, values), operation.infos
    _check_ranks(infos, asked.layout, asked.kv_layout, "k_pages")
    dtype = None if asked.out_dtype is None else DType.of(asked.out_dtype, "out_dtype", fp8=True)
    rows = _rows_option(infos, asked)
    for name in ("k", "v"):
        pages = infos.get(f"{name}_pages")
        if pages is None:
            continue
        if name not in infos:
            made = dtype or pages.dtype
            if made.is_fp8 and (made is not pages.dtype or "k_scales" in infos):
                scaled = "multiplied by scales" if "k_scales" in infos else f"of {pages.dtype}"
                rule, remedy = f"pages are {scaled}: rows are of 16 or 32 bits", "Give such a dtype"
                raise InvalidValue("out_dtype", made, rule, remedy)
            shape = _gathered(infos, pages, asked)
            operation.new_result(name, shape, made, f"{name}_pages", "out_dtype")
            continue
        remedy = "Give one of the two"
        if dtype not in (None, infos[name].dtype):
            rule = f"the array of {name} is of {infos[name].dtype}"
            raise InvalidValue("out_dtype", dtype, rule, remedy)
        shape = list(infos[name].shape)
        if rows and shape != _gathered(infos, pages, asked):
            rule = f"the array of {name} is of shape {shape}"
            raise InvalidValue(rows, getattr(asked, rows), rule, remedy)
    _launch(operation, asked.layout, asked.kv_layout, {"direction": "gather"})


def _rows_option(infos: Mapping[str, ArrayInfo], asked: GatherOptions) -> str | None:
    """The option that is given for the results' rows."""
    used = "max_seqlen_k" if "block_table" in infos else None
    used = "total_k" if "cu_seqlens" in infos else used
    for option, what in (
        ("total_k", "rows that cu_seqlens packs"),
        ("max_seqlen_k", "entries of a block table whose rows are not packed"),
    ):
        value = getattr(asked, option)
        if value is not None and option != used:
            raise InvalidValue(option, value, f"is for {what}", "Leave it out")
    return used if used and getattr(asked, used) is not None else None


def _gathered(infos: Mapping[str, ArrayInfo], pages: ArrayInfo, asked: GatherOptions) -> list[int]:
    """The shape of a result."""
    axes = KV_LAYOUTS[asked.kv_layout].split()
    heads, dim, size = (pages.shape[axes.index(label)] for label in ("H", "D", "N"))
    extents = {"H": heads, "D": dim}
    if "slot_mapping" in infos:
        slots = infos["slot_mapping"]
        labels = ("B", "S") if len(slots.shape) == 2 else ("S",)
        check_rank("slot_mapping", slots, labels)
        extents |= dict(zip(labels, slots.shape, strict=True))
    elif "cu_seqlens" in infos:
        if asked.total_k is None:
            rule = "must say how many rows packed results have"
            raise InvalidValue("total_k", None, rule, "Give it, or arrays for the results (out)")
        extents["S"] = asked.total_k
    elif "block_table" in infos:
        check_rank("block_table", infos["block_table"], ("B", "width"))
        batch, width = infos["block_table"].shape
        extents |= {
            "B": batch,
            "S": width * size if asked.max_seqlen_k is None else asked.max_seqlen_k,
        }
    else:
        return [0, heads, dim]  # the descriptor refuses it
    return [extents[label] for label in LAYOUTS[asked.layout].split() if label in extents]


def copy_pages(
    k_pages: Array,
    v_pages: Array | None,
    sources: Array,
    destinations: Array,
    *,
    kv_layout: str = "nhd",
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> None:
    """Copy pages within a cache, of k and v in one launch: page sources[i] to page destinations[i].

    ``k_pages`` [pages, page_size, H_kv, D] and ``v_pages`` as ``attention_paged`` takes them, of
    any dtype, 8 bits too; v_pages may be None. ``sources`` and ``destinations`` int32 [n]; those of
    destinations differ, and none of them is a source. Raises as ``append_paged``.
    """
    arrays = {
        "k_pages": k_pages,
        **not_none(v_pages=v_pages),
        "sources": sources,
        "block_table": destinations,
    }
    operate(copy_work, arrays, (kv_layout,), backend, implementation, stream, _COPY_WORDING)


def copy_work(operation: Operation, kv_layout: str) -> None:
    infos, kv_layout = operation.infos, order("kv_layout", kv_layout, KV_LAYOUTS)
    _check_ranks(infos, "bshd", kv_layout, "k_pages")
    for name in ("sources", "block_table"):
        check_rank(name, infos[name], ("n",))
    if infos["sources"].shape != infos["block_table"].shape:
        raise InvalidValue(
            "sources",
            f"an array of shape {list(infos['sources'].shape)}",
            f"must be as long as destinations, {list(infos['block_table'].shape)}",
            "Give a source for each destination",
        )
    labels = KV_LAYOUTS[kv_layout].split()

    def descriptor() -> PagedCache:
        fields: dict[str, Any] = dict(infos)
        for name in ("k", "v"):
            if f"{name}_pages" not in infos:
                continue
            info = fields[name] = infos[f"{name}_pages"]
            steps = dict(zip(labels, canonical(info), strict=True))
            for axis, label in (("head", "H"), ("row", "N")):
                fields[f"stride_{name}_{axis}"] = steps[label]
                fields[f"stride_{name}_pages_{axis}"] = steps[label]
            fields[f"stride_{name}_batch"] = fields[f"stride_{name}_pages_page"] = steps["P"]
        extents = dict(zip(labels, infos["k_pages"].shape, strict=True))
        values = infos.get("v_pages")
        return PagedCache(
            **fields,
            direction="copy",
            batch=infos["sources"].shape[0],
            S=extents["N"],
            kv_heads=extents["H"],
            head_dim=extents["D"],
            value_dim=0 if values is None else values.shape[-1],
            pages=extents["P"],
            page_size=extents["N"],
            table_width=1,
            stride_table_row=canonical(infos["block_table"])[0],
        )

    operands = {**infos, "k": infos["k_pages"]}
    if "v_pages" in infos:
        operands["v"] = infos["v_pages"]
    operation.launch(operands, descriptor, {"k": "k_pages", "v": "v_pages"})


def _check_ranks(infos: Mapping[str, ArrayInfo], layout: str, kv_layout: str, first: str) -> None:
    labels, pages = LAYOUTS[layout].split(), KV_LAYOUTS[kv_layout].split()
    if first == "k" and len(infos["k"].shape) != 3:
        check_rank("k", infos["k"], labels)
    for name in ("k_pages", "v_pages"):
        if name in infos:
            check_rank(name, infos[name], pages)


def _launch(operation: Operation, layout: str, kv_layout: str, options: dict[str, Any]) -> None:
    infos = operation.infos
    given: dict[str, Any] = {**dict.fromkeys(("v", "v_pages")), **infos}
    operation.launch(
        infos,
        lambda: PagedCache.from_arrays(**given, layout=layout, kv_layout=kv_layout, **options),
    )


def _pair(name: str, value: object) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidValue(name, type(value).__name__, "must be (k, v)", "Pass two arrays")
    return value[0], value[1]


_append_values, _gather_values = values_of(AppendOptions), values_of(GatherOptions)
_TABLES = {
    "cos and sin": "rotary",
    "cos": "rotary[0]",
    "sin": "rotary[1]",
    "max_position": "rotary's rows",
    "eps": "norm_eps",
}
_DERIVED = {
    **dict.fromkeys(("batch", "S", "batch·S", "kv_heads", "head_dim"), "k"),
    **dict.fromkeys(("pages", "page_size"), "k_pages"),
    "value_dim": "v",
    "num_heads": "q",
    "table_width": "block_table",
    "sequences": "cu_seqlens",
    **dict.fromkeys(("rotary_dim", "max_position"), "cos"),
}
"""Field that is read from an array → the operand of that array."""
_APPEND_WORDING = Wording({**_TABLES, "cu_seqlens": "cu_seqlens_q", "q_out": "out"}, _DERIVED)
_GATHER_WORDING = Wording({"cu_seqlens": "cu_seqlens_k", "k": "out[0]", "v": "out[1]"}, _DERIVED)
_COPY_WORDING = Wording({"block_table": "destinations", "k": "k_pages", "v": "v_pages"}, _DERIVED)

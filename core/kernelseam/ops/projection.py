"""The projections before and after an attention, on arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack, cast, overload

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors import OutputProjection, QkvProjection
from kernelseam.descriptors.common.layouts import KV_LAYOUTS, LAYOUTS
from kernelseam.descriptors.common.options import read_values, values_of
from kernelseam.descriptors.common.validation import extent
from kernelseam.descriptors.common.wording import Wording
from kernelseam.descriptors.projection.append import check_unpaged
from kernelseam.descriptors.projection.options import OutputOptions, QkvOptions
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.ops.calling import operate
from kernelseam.ops.operation import Operation, check_rank, not_none
from kernelseam.ops.signatures import Array, QkvArrays


@overload
def fused_qkv_projection(
    input: Array,
    weight: Array,
    bias: Array | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    *,
    k_pages: None = None,
    v_pages: None = None,
    **options: Unpack[QkvArrays],
) -> tuple[Array, Array, Array]: ...


@overload
def fused_qkv_projection(
    input: Array,
    weight: Array,
    bias: Array | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    *,
    k_pages: Array,
    v_pages: Array,
    **options: Unpack[QkvArrays],
) -> Array: ...


def fused_qkv_projection(
    input: Array,
    weight: Array,
    bias: Any = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    *,
    layout: str = "bhsd",
    rotary: tuple[Any, Any] | None = None,
    rotary_style: str = "halves",
    positions: Any = None,
    first_position: int = 0,
    k_pages: Any = None,
    v_pages: Any = None,
    block_table: Any = None,
    slot_mapping: Any = None,
    kv_lengths: Any = None,
    cu_seqlens_q: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    kv_layout: str = "nhd",
    out: Any = None,
    out_dtype: DType | str | None = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> Array | tuple[Array, Array, Array]:
    """q, k and v = input·weightᵀ + bias in one launch, or two, split into heads.

    ``input`` [B, S, hidden]; ``weight`` [(num_heads + 2·num_kv_heads)·head_dim, hidden] as
    torch.nn.Linear has it: the rows that make q first, then k's, then v's, head after head;
    ``bias`` as long as the weight has rows, or None. ``num_kv_heads`` defaults to num_heads,
    ``head_dim`` to what the weight's rows say. Arrays of float16, bfloat16, float32 or float64 from
    NumPy, torch or any library with DLPack, all on one device, with any strides and a contiguous
    last axis; nothing is copied. The bias may be of another dtype, no wider than float32 (float64
    of float64), in which products are summed; results are rounded once.

    ``layout`` "bhsd": q [B, num_heads, S, head_dim], k and v [B, num_kv_heads, S, head_dim];
    "bshd": the head after the token. An input [T, hidden], as the rows of packed sequences are,
    gives q [T, num_heads, head_dim] with "bshd", and [num_heads, T, head_dim] with "bhsd".

    ``rotary``: cosines and sines, float32 [positions, n / 2]. They rotate the first n elements of
    every head of q and k, n at most head_dim, by the row of the token's position: elements i and i
    + n/2 together (``rotary_style`` "halves", as of GPT-NeoX and Llama), or 2i and 2i + 1 ("pairs",
    as of GPT-J). ``positions``: int32 [B, S] ([T] for an input [T, hidden]); else token s of every
    entry is at ``first_position`` + s. Each ``first_position`` has its own plan: give positions
    where they change from call to call.

    ``k_pages`` and ``v_pages`` [pages, page_size, num_kv_heads, head_dim] with ``block_table``
    int32 [B, width], as ``attention_paged`` takes them (``kv_layout`` "hnd": the head before the
    row of a page): k and v of the token at position p of entry b are written to row p % page_size
    of page block_table[b, p // page_size], and q alone is returned. Where two tokens have the
    same position, which one stays is undefined.

    Pages may also be written as ``append_paged`` writes them, by a second launch: at slots,
    ``slot_mapping`` [B, S] or [T], int32 or int64, in place of the block table; at the end of a
    cache, where ``kv_lengths`` int32 [B] count the new tokens, too; of packed rows, input [T,
    hidden] with ``cu_seqlens_q`` int32 [B + 1] and a row of the block table for each sequence; in
    float8_e4m3fn, with ``k_scales`` and ``v_scales`` float32, [num_kv_heads] or one number, given,
    or [pages, page_size, num_kv_heads], written: those of each token and head. A token without a
    place is skipped. k and v are then rounded to q's dtype and to that of the pages; where
    kv_lengths or cu_seqlens_q say the positions, q and k are also rounded before they are rotated,
    and q of a token without a place is not rotated.

    ``out``: arrays (q, k, v) for the results, with pages the array of q; else new ones of input's
    kind, of ``out_dtype`` (input's, with pages the pages' unless these are of 8 bits).
    ``backend``, ``implementation`` and ``stream`` as in ``attention``.

    Returns (q, k, v), or q where k and v go to pages. Raises InvalidValue for what does not fit
    together, Unsupported with each implementation's reason.
    """
    paged = _paged(k_pages, v_pages, block_table, slot_mapping)
    # without a call, as every projection passes here
    counted = kv_lengths is not None or cu_seqlens_q is not None
    if not paged and (counted or k_scales is not None or v_scales is not None):
        given = {"kv_lengths": kv_lengths, "cu_seqlens_q": cu_seqlens_q}
        check_unpaged({**given, "k_scales": k_scales, "v_scales": v_scales})
    arrays = {
        "input": input,
        "weight": weight,
        **not_none(
            bias=bias,
            positions=positions,
            block_table=block_table,
            slot_mapping=slot_mapping,
            kv_lengths=kv_lengths,
            cu_seqlens=cu_seqlens_q,
            k_scales=k_scales,
            v_scales=v_scales,
            **rotary_tables(rotary, rotary_style),
        ),
        **({"k": k_pages, "v": v_pages} if paged else {}),
        **_results(out, paged),
    }
    options = _qkv_values(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layout=layout,
        kv_layout=kv_layout,
        rotary_style=rotary_style,
        first_position=first_position,
        out_dtype=out_dtype,
    )
    results = operate(
        qkv_work, arrays, options, backend, implementation, stream, _WORDINGS[paged, out is None]
    )
    result: Array | tuple[Array, Array, Array] = out
    if out is None:
        result = results["q"] if paged else (results["q"], results["k"], results["v"])
    return result


def qkv_work(operation: Operation, *values: Any) -> None:
    """``values``: those of ``QkvOptions``."""
    asked = read_values(QkvOptions, values)
    labels, pages = LAYOUTS[asked.layout], KV_LAYOUTS[asked.kv_layout]
    infos = operation.infos
    paged, first = "block_table" in infos or "slot_mapping" in infos, infos["input"]
    if not paged and asked.kv_layout != QkvOptions.kv_layout:
        rule, remedy = "is the order of a page's axes", "Give pages, or leave it out"
        raise InvalidValue("kv_layout", asked.kv_layout, rule, remedy)
    if len(first.shape) == 2:
        labels = labels.replace("B ", "")
    else:
        check_rank("input", first, ("B", "S", "hidden"))
    check_rank("weight", infos["weight"], ("columns", "hidden"))
    heads, kv_heads, dim = head_counts(
        asked.num_heads, asked.num_kv_heads, asked.head_dim, infos["weight"].shape[0]
    )
    default = infos["k"].dtype if paged and not infos["k"].dtype.is_fp8 else first.dtype
    dtype = _out_dtype(asked.out_dtype, infos, "q", default)
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        if name not in infos:
            extents = dict(
                zip(
                    ("B", "S"),
                    first.shape[-3:-1] if "B" in labels else (1, first.shape[0]),
                    strict=True,
                )
            )
            extents |= {"H": count, "D": dim}
            operation.new_result(
                name, [extents[label] for label in labels.split()], dtype, "input", "out_dtype"
            )
        else:
            _check_heads(name, infos[name], pages if paged and name != "q" else labels, count, dim)
    # Extents come from the arrays, which were checked against these numbers.
    options: dict[str, Any] = {
        "rotary_style": asked.rotary_style if "cos" in infos else None,
        **{n: getattr(asked, n) for n in ("first_position", "layout", "kv_layout")},
    }
    operation.launch(
        infos, lambda: QkvProjection.from_arrays(**cast(dict[str, Any], infos), **options)
    )


def fused_output_projection_residual(
    attn_out: Array,
    weight: Array,
    bias: Any = None,
    residual: Any = None,
    *,
    layout: str = "bhsd",
    out: Any = None,
    out_dtype: DType | str | None = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> Array:
    """attn_out·weightᵀ + bias + residual in one launch.

    ``attn_out`` [B, S, columns] or [T, columns], or with its heads as ``attention`` returns them:
    [B, H, S, D] (``layout`` "bhsd") or [B, S, H, D] ("bshd"); a token's columns are its heads one
    after the other. ``weight`` [hidden, columns] as torch.nn.Linear has it; ``bias`` [hidden] or
    None; ``residual`` [B, S, hidden] (or [T, hidden]) or None, which may be broadcast by strides of
    0. Bias and residual may be of other dtypes, no wider than float32 (float64 of float64), in
    which all is summed before the one rounding. Any strides with a contiguous last axis; nothing is
    copied.

    ``out``: an array for the result, which may be the residual itself; else a new one of attn_out's
    kind, of ``out_dtype`` (attn_out's). ``backend``, ``implementation`` and ``stream`` as in
    ``attention``.

    Returns the result [B, S, hidden] ([T, hidden]; ``out`` where it was given). Raises InvalidValue
    for what does not fit together, Unsupported with each implementation's reason.
    """
    arrays = {
        "attn_out": attn_out,
        "weight": weight,
        **not_none(bias=bias, residual=residual, out=out),
    }
    results = operate(
        output_work,
        arrays,
        _output_values(layout=layout, out_dtype=out_dtype),
        backend,
        implementation,
        stream,
    )
    result: Array = results["out"] if out is None else out
    return result


def output_work(operation: Operation, *values: Any) -> None:
    """``values``: those of ``OutputOptions``."""
    asked, infos = read_values(OutputOptions, values), operation.infos
    labels = LAYOUTS[asked.layout].split()
    first = infos["attn_out"]
    check_rank("weight", infos["weight"], ("hidden", "columns"))
    if len(first.shape) not in (2, 3):
        check_rank("attn_out", first, labels)
    dtype = _out_dtype(asked.out_dtype, infos, "out", first.dtype)
    if "out" not in infos:
        lead = first.shape[:-1]
        if len(first.shape) == 4:
            extents = dict(zip(labels, first.shape, strict=True))
            lead = (extents["B"], extents["S"])
        operation.new_result(
            "out", (*lead, infos["weight"].shape[0]), dtype, "attn_out", "out_dtype"
        )
    operation.launch(
        infos,
        lambda: OutputProjection.from_arrays(**cast(dict[str, Any], infos), layout=asked.layout),
    )


def query_heads(field: str, value: object) -> int:
    """The number of query heads, which has no default."""
    if value is None:
        raise InvalidValue(field, None, "must be the number of query heads", "Give it")
    return extent(field, value, 1)


def head_counts(
    num_heads: object, num_kv_heads: object, head_dim: object, columns: int
) -> tuple[int, int, int]:
    """(num_heads, num_kv_heads, head_dim) of a weight with so many rows; values left out are
    derived."""
    heads = query_heads("num_heads", num_heads)
    kv_heads = heads if num_kv_heads is None else extent("num_kv_heads", num_kv_heads, 1)
    total = heads + 2 * kv_heads
    dim = columns // total if head_dim is None else extent("head_dim", head_dim, 1)
    if total * dim != columns or not dim:
        raise InvalidValue(
            "weight",
            f"an array of {columns} rows",
            "must have (num_heads + 2·num_kv_heads)·head_dim rows, "
            f"{total}·{'head_dim' if head_dim is None else dim}",
            "Check the numbers of heads and head_dim",
        )
    return heads, kv_heads, dim


def _check_heads(name: str, info: ArrayInfo, labels: str, heads: int, dim: int) -> None:
    """Raise InvalidValue where the caller's array for a result has another number or size of
    heads."""
    axes = labels.split()
    check_rank(name, info, axes)
    for field, label, wanted in (
        ("num_heads" if name == "q" else "num_kv_heads", "H", heads),
        ("head_dim", "D", dim),
    ):
        if (extent := info.shape[axes.index(label)]) != wanted:
            raise InvalidValue(
                field, wanted, f"the array of {name} has {extent}", "Give one of the two"
            )


def _paged(k_pages: object, v_pages: object, block_table: object, slot_mapping: object) -> bool:
    """Whether k and v go to pages: k_pages, v_pages and what says the places are given together."""
    arrays = {"k_pages": k_pages, "v_pages": v_pages, "block_table": block_table}
    if block_table is None and slot_mapping is not None:
        del arrays["block_table"]
        arrays["slot_mapping"] = slot_mapping
    present = [n for n, x in arrays.items() if x is not None]
    for name, x in arrays.items():
        if present and x is None:
            raise InvalidValue(
                name, None, f"is used with {' and '.join(present)}", "Give all three, or none"
            )
    return bool(present)


def rotary_tables(rotary: object, style: object) -> dict[str, Any]:
    """Cosines and sines as operands. Raises InvalidValue for what is no pair of arrays."""
    if rotary is None:
        if style != "halves":
            raise InvalidValue(
                "rotary_style",
                style,
                "has no effect without rotary",
                "Give rotary, or leave it out",
            )
        return {}
    if not isinstance(rotary, tuple | list) or len(rotary) != 2:
        raise InvalidValue(
            "rotary", type(rotary).__name__, "must be (cosines, sines)", "Pass two arrays"
        )
    for i, x in enumerate(cast(Sequence[object], rotary)):
        if x is None:
            raise InvalidValue(
                f"rotary[{i}]",
                None,
                "must be an array",
                "Give cosines and sines, or leave rotary out",
            )
    return dict(zip(("cos", "sin"), rotary, strict=True))


def _wording(paged: bool, makes_results: bool) -> Wording:
    """Operands' names in errors, as the caller knows them."""
    names = {
        "cos and sin": "rotary",
        "cos": "rotary[0]",
        "sin": "rotary[1]",
        "max_position": "rotary's rows",
        "kv_heads": "num_kv_heads",
        "cu_seqlens": "cu_seqlens_q",
    }
    if paged:
        names |= {"k": "k_pages", "v": "v_pages", **({} if makes_results else {"q": "out"})}
    elif not makes_results:
        names |= {"q": "out[0]", "k": "out[1]", "v": "out[2]"}
    derived = {
        **dict.fromkeys(("batch", "S", "hidden", "batch·S"), "input"),
        "table_width": "block_table",
        "sequences": "cu_seqlens",
        "dtype_slots": "slot_mapping",
        **dict.fromkeys(("rotary_dim", "max_position"), "cos"),
        **dict.fromkeys(("pages", "page_size"), "k"),
    }
    return Wording(names, derived)


_WORDINGS = {(x, y): _wording(x, y) for x in (True, False) for y in (True, False)}


def _results(out: object, paged: bool) -> dict[str, Any]:
    if out is None:
        return {}
    if paged:
        if isinstance(out, tuple | list):
            raise InvalidValue(
                "out",
                type(out).__name__,
                "must be the array of q where k and v go to pages",
                "Pass it",
            )
        return {"q": out}
    if (
        not isinstance(out, tuple | list)
        or len(out) != 3
        or any(x is None for x in cast(Sequence[object], out))
    ):
        raise InvalidValue("out", type(out).__name__, "must be (q, k, v)", "Pass three arrays")
    return dict(zip(("q", "k", "v"), cast(Sequence[object], out), strict=True))


def _out_dtype(
    requested: DType | str | None, infos: Mapping[str, ArrayInfo], name: str, default: DType
) -> DType:
    """The results' dtype: as requested, which must match arrays given for results."""
    given = infos[name].dtype if name in infos else None
    if requested is None:
        return default if given is None else DType.of(given, f"{name}.dtype")
    dtype = DType.of(requested, "out_dtype")
    if given is not None and dtype is not given:
        raise InvalidValue(
            "out_dtype", dtype, f"{name} is an array of {given}", "Give one of the two"
        )
    return dtype


_qkv_values, _output_values = values_of(QkvOptions), values_of(OutputOptions)

"""Fields of an attention's descriptor from arrays: their shapes and strides; nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors.attention.problem import AttentionProblem, scaled_row
from kernelseam.descriptors.common.layouts import KV_LAYOUTS, LAYOUTS, order
from kernelseam.descriptors.common.operands import axes, canonical, describe_arrays
from kernelseam.descriptors.common.validation import extent, packed
from kernelseam.errors import InvalidValue

PACKED = "T H D"


def fields_of(
    arrays: Mapping[str, object],
    layout: str,
    kv_layout: str,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    scale_block: int | None = None,
    q_scale_block: int | None = None,
    row_scale_block: int | None = None,
) -> dict[str, Any]:
    """Extents and strides for the descriptor, and the views in place of the arrays.

    ``arrays``: the operands by their names in the descriptor. Raises InvalidValue for ranks and
    extents that do not fit.
    """
    order("layout", layout, LAYOUTS)
    order("kv_layout", kv_layout, KV_LAYOUTS)
    infos = dict(zip(arrays, describe_arrays(**arrays), strict=True))
    fields: dict[str, Any] = dict(infos)
    packed_q, packed_k, paged = (
        n in infos for n in ("cu_seqlens_q", "cu_seqlens_k", "block_table")
    )
    for name, value, there, of, missing in (
        ("max_seqlen_q", max_seqlen_q, packed_q, "packed queries", "cu_seqlens_q"),
        (
            "max_seqlen_k",
            max_seqlen_k,
            packed_k or paged,
            "packed or paged keys",
            "cu_seqlens_k or block_table",
        ),
        (
            "kv_layout",
            None if kv_layout == "nhd" else kv_layout,
            paged,
            "paged keys",
            "block_table",
        ),
    ):
        if value is not None and not there:
            raise InvalidValue(
                name, value, f"is about {of}", f"Give {missing} too, or leave it out"
            )
    query_axes = PACKED if packed_q else LAYOUTS[layout]
    key_axes = KV_LAYOUTS[kv_layout] if paged else PACKED if packed_k else LAYOUTS[layout]
    q = _read(fields, "q", query_axes, infos["q"], {"H": "H", "S": "S_q", "D": "D"}, {})
    q_known: dict[str, int] = dict(q)
    letters = {"B": "B", "H": "H_kv", "S": "S_k", "T": "T_k", "P": "P", "N": "N"}
    width = q["D"]
    if row_scale_block:
        width = scaled_row(q["D"], infos["v"].shape[-1], row_scale_block)
    of_k = {**q_known, "D": width}
    k = _read(fields, "k", key_axes, infos["k"], {**letters, "D": "D"}, of_k)
    v = _read(fields, "v", key_axes, infos["v"], {**letters, "D": "D_v"}, {**of_k, **k})
    batch = q.get("B", k.get("B"))
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in infos:
            (entries,) = axes(name, infos[name], "B+1", {} if batch is None else {"B+1": batch + 1})
            if not entries:
                raise InvalidValue(
                    name,
                    "an array of shape [0]",
                    "must be [B+1]",
                    "One offset, 0, says that B is 0",
                )
            batch = entries - 1
    if batch is None:
        (batch, _) = axes("block_table", infos["block_table"], "B width", {})
    _read(
        fields,
        "out",
        query_axes,
        infos["out"],
        {"H": "H", "S": "S_q", "D": "D_v", "T": "T"},
        {**q, "D_v": v["D_v"]},
    )
    s_q = _longest("max_seqlen_q", max_seqlen_q) if packed_q else q["S_q"]
    if paged:
        width = axes("block_table", infos["block_table"], "B width", {"B": batch})[1]
        s_k = width * k["N"] if max_seqlen_k is None else extent("max_seqlen_k", max_seqlen_k)
        fields.update(pages=k["P"], page_size=k["N"], table_width=width)
        fields["stride_table_row"] = canonical(infos["block_table"])[0]
    else:
        s_k = _longest("max_seqlen_k", max_seqlen_k) if packed_k else k["S_k"]
        if packed_k:
            fields["total_k"] = k["T_k"]
    if packed_q:
        fields["total_q"] = q["T"]
    heads = q["H"]
    if "lse" in infos:
        lse_axes = "H T" if packed_q else "B H S_q"
        axes(
            "lse", infos["lse"], lse_axes, {"B": batch, "H": heads, "S_q": s_q, "T": q.get("T", 0)}
        )
        *outer, head, _ = canonical(infos["lse"])
        fields.update(stride_lse_batch=outer[0] if outer else None, stride_lse_head=head)
    plane = (("batch", batch), ("head", heads), ("row", s_q), ("column", s_k))
    for name in ("bias", "mask"):
        if name in infos:
            _broadcast(fields, name, name, infos[name], plane)
    for name in ("k_scales", "v_scales"):
        if name in infos:
            _scales(fields, name, infos[name], key_axes, scale_block, {"B": batch, **k})
    if "q_scales" in infos:
        of_q = {"B": batch, "H_kv": k["H_kv"], **q}
        _scales(fields, "q_scales", infos["q_scales"], query_axes, q_scale_block, of_q)
    if "alibi_slopes" in infos:
        _broadcast(fields, "alibi_slopes", "alibi", infos["alibi_slopes"], plane[:2])
    for name, known in (
        ("sinks", ("H", heads)),
        ("prefix_lengths", ("B", batch)),
        ("kv_lengths", ("B", batch)),
    ):
        if name in infos:
            axes(name, infos[name], known[0], dict([known]))
    return {
        **fields,
        "batch": batch,
        "num_heads": heads,
        "kv_heads": k["H_kv"],
        "S_q": s_q,
        "S_k": s_k,
        "head_dim": q["D"],
        "value_dim": v["D_v"],
    }


def gradient_fields(
    arrays: Mapping[str, object], forward: AttentionProblem, layout: str
) -> dict[str, Any]:
    """Strides of what AttentionBwd has beside its forward, and the views in place of the arrays.

    ``arrays``: dout, dq, dk, dv, dbias and dsinks, as far as they are given, laid out as out, q, k
    and v. Raises InvalidValue for ranks and extents that do not fit.
    """
    infos = dict(zip(arrays, describe_arrays(**arrays), strict=True))
    fields: dict[str, Any] = dict(infos)
    p, dense = forward, LAYOUTS[order("layout", layout, LAYOUTS)]
    views = {"q": p.spec.q_view, "k": p.spec.kv_view}
    known = {"B": p.batch, "H": p.num_heads, "S_q": p.S_q, "T": p.total_q}
    known |= {"H_kv": p.kv_heads, "S_k": p.S_k, "T_k": p.total_k}
    known |= {"D": p.spec.head_dim, "D_v": p.spec.value_dim}
    keys = {"H": "H_kv", "S": "S_k", "T": "T_k"}
    for name, side, letters in (
        ("dout", "q", {"S": "S_q", "D": "D_v"}),
        ("dq", "q", {"S": "S_q"}),
        ("dk", "k", keys),
        ("dv", "k", {**keys, "D": "D_v"}),
    ):
        if name in infos:
            labels = PACKED if views[side] == "packed" else dense
            _read(fields, name, labels, infos[name], letters, known)
    if "dbias" in infos:
        plane = ("batch", p.batch), ("head", p.num_heads), ("row", p.S_q), ("column", p.S_k)
        own = [(a, n if s else 1) for (a, n), s in zip(plane, p.bias_strides, strict=True)]
        _broadcast(fields, "dbias", "dbias", infos["dbias"], own)
    if "dscores" in infos:
        axes("dscores", infos["dscores"], "B H S_q S_k", known)
    if "dsinks" in infos:
        axes("dsinks", infos["dsinks"], "H", known)
    return fields


def _read(
    fields: dict[str, Any],
    name: str,
    labels: str,
    info: ArrayInfo,
    names: Mapping[str, str],
    known: Mapping[str, int],
) -> dict[str, int]:
    """An operand's extents by label, agreeing with those known; its strides go to ``fields``."""
    shown = [names.get(label, label) for label in labels.split()]
    extents = dict(zip(shown, axes(name, info, " ".join(shown), known), strict=True))
    strides = dict(zip(labels.split(), canonical(info), strict=True))
    outer = strides.get("B", strides.get("P"))
    row = next(strides[label] for label in ("S", "N", "T") if label in strides)
    fields.update({f"stride_{name}_head": strides["H"], f"stride_{name}_row": row})
    if outer is not None:
        fields[f"stride_{name}_batch"] = outer
    return extents


def _scales(
    fields: dict[str, Any],
    name: str,
    info: ArrayInfo,
    row_axes: str,
    block: int | None,
    known: Mapping[str, int],
) -> None:
    """Strides of the scales of q, k or v: they repeat to [B, H_kv], or with a ``block`` of rows
    have the axes of the operand without the last, blocks in the place of rows."""
    if block is None:
        _broadcast(fields, name, name, info, (("batch", known["B"]), ("head", known["H_kv"])))
        return
    queries = name == "q_scales"
    block = extent("q_scale_block" if queries else "scale_block", block, 1)
    row = next(a for a in row_axes.split() if a in "SNT")
    head, names = ("H", {"S": "S_q"}) if queries else ("H_kv", {"S": "S_k", "T": "T_k"})
    rows = known[names.get(row, row)]
    letters = {"H": head, row: "blocks"}
    labels = [letters.get(a, a) for a in row_axes.split()[:-1]]
    axes(name, info, " ".join(labels), {**known, "blocks": -(-rows // block)}, rows=False)
    strides = dict(zip(labels, canonical(info), strict=True))
    outer = strides.get("B", strides.get("P"))
    fields.update(
        {
            f"stride_{name}_batch": outer,
            f"stride_{name}_head": strides[head],
            f"stride_{name}_block": strides["blocks"],
        }
    )


def _longest(name: str, value: int | None) -> int:
    if value is None:
        raise InvalidValue(
            name,
            None,
            "must say how long the longest sequence is",
            "Give it: the offsets are not read",
        )
    return extent(name, value)


def _broadcast(
    fields: dict[str, Any],
    name: str,
    stride_name: str,
    info: ArrayInfo,
    plane: Sequence[tuple[str, int]],
) -> None:
    """Strides of an array that repeats along axes of extent 1 and along those that it lacks, as
    NumPy has it."""
    lacking = len(plane) - len(info.shape)
    fits = lacking >= 0 and all(
        n in (1, whole) for n, (_, whole) in zip(info.shape, plane[max(lacking, 0) :], strict=False)
    )
    if not fits:
        names = ", ".join({"row": "query", "column": "key"}.get(axis, axis) for axis, _ in plane)
        raise InvalidValue(
            name,
            f"an array of shape {list(info.shape)}",
            f"must repeat to {[n for _, n in plane]}",
            f"Its axes are {names}, from the right; extent 1 repeats",
        )
    # An empty array's own strides say nothing: its axes repeat only where their extent is 1.
    strides = packed(info.shape, [None] * len(info.shape)) if 0 in info.shape else info.strides
    for i, (axis, _) in enumerate(plane):
        here = i - lacking
        repeats = here < 0 or info.shape[here] == 1
        fields[f"stride_{stride_name}_{axis}"] = 0 if repeats else strides[here]

"""The problem of the attention forward, from its descriptor's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors.attention.forward_fields import OPTIONAL, AttentionFields
from kernelseam.descriptors.attention.forward_memory import paging, total_rows, views
from kernelseam.descriptors.attention.forward_strides import (
    no_batch,
    plane_strides,
    row_strides,
    scale_strides,
    slope_strides,
)
from kernelseam.descriptors.attention.mods import by_options
from kernelseam.descriptors.attention.options import ScoreNumbers
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec, scaled_row
from kernelseam.descriptors.common.captured import captured_fields
from kernelseam.descriptors.common.extents import default_scale
from kernelseam.descriptors.common.operands import dtype_of, pointer, required
from kernelseam.descriptors.common.options import checked, scalars_of
from kernelseam.descriptors.common.precision import precision_of
from kernelseam.descriptors.common.validation import (
    MAX_EXTENT,
    extent,
    integer,
    multiple,
    packed,
    stride,
    vector_bytes,
)
from kernelseam.dtypes import E4M3, DType
from kernelseam.errors import InvalidValue
from kernelseam.expressions.text import structure_of, text_of

KEY_SCALES = ("k_scales", "v_scales")
SCALES = ("q_scales", *KEY_SCALES)


def problem_of(
    given: AttentionFields, infos: Mapping[str, ArrayInfo], functions_as_options: bool = True
) -> AttentionProblem:
    """The problem of these fields. ``infos``: the views of those operands that are arrays.
    ``functions_as_options``: what options say of a score_mod and a mask_mod is options. Raises
    InvalidValue where no such problem exists."""
    dtype, dtype_q, dtype_kv = _dtypes(given, infos)
    given._refuse_idle("bias", "dtype_bias")
    for name in ("mask", "alibi_slopes", *SCALES, "block_table"):
        given._refuse_idle(name)
    dtype_out = _dtype_or_float32(given, "out", dtype, infos)
    batch, heads = extent("batch", given.batch), extent("num_heads", given.num_heads)
    kv_heads = heads if given.kv_heads is None else extent("kv_heads", given.kv_heads)
    s_q, s_k = extent("S_q", given.S_q), extent("S_k", given.S_k)
    d = extent("head_dim", given.head_dim)
    d_v = d if given.value_dim is None else extent("value_dim", given.value_dim)
    multiple("num_heads", heads, "kv_heads", kv_heads)
    integer("batch·num_heads", batch * heads, 0, MAX_EXTENT, "Split the batch over several calls")
    options = checked(given)
    numbers = {n: options[n] for n in scalars_of(ScoreNumbers)}
    values: dict[str, Any] = {n: 0.0 if x is None else x for n, x in numbers.items()}
    lse = options["return_lse"] or given.lse is not None
    q_view, kv_view = views(given)
    total_q, total_k = total_rows(given, "q", q_view), total_rows(given, "k", kv_view)
    pages, page_size, width = paging(given, kv_view, s_k)
    query_rows = (1, total_q) if q_view == "packed" else (batch, s_q)
    key_rows = {"packed": (1, total_k), "paged": (pages, page_size)}.get(kv_view, (batch, s_k))
    row_scale_block, key_width = options["row_scale_block"], d
    if row_scale_block is not None:
        _check_row_scales(given, options, dtype, dtype_kv, d, d_v)
        key_width = scaled_row(d, d_v, row_scale_block)
    shapes = {
        "q": (query_rows[0], heads, query_rows[1], d),
        "k": (key_rows[0], kv_heads, key_rows[1], key_width),
        "v": (key_rows[0], kv_heads, key_rows[1], d_v),
        "out": (query_rows[0], heads, query_rows[1], d_v),
    }
    strides, vector = {}, 16
    for name, shape in shapes.items():
        operand_dtype = {"q": dtype_q or dtype, "out": dtype_out}.get(name, dtype_kv or dtype)
        view = kv_view if name in "kv" else q_view
        strides[name] = row_strides(given, name, shape, view, operand_dtype)
        address = pointer(name, getattr(given, name), infos)
        width_bytes = vector_bytes(operand_dtype, shape, strides[name], address)
        vector = min(vector, width_bytes if width_bytes == 16 else dtype.itemsize)
    for name in ("lse", *OPTIONAL):
        pointer(name, getattr(given, name), infos)
    lse_shape = (query_rows[0], heads, query_rows[1])
    lse_batch, lse_head, _ = packed(lse_shape, (*given._valid("lse", dtype.accumulator), 1))
    if q_view == "packed":
        lse_batch = no_batch(given, "lse", lse_batch)
    bias = None if given.bias is None else _dtype_or_float32(given, "bias", dtype, infos)
    mask = None if given.mask is None else DType.boolean
    left, right = options["window"] or (None, None)
    right = 0 if options["causal"] else right
    windowed = left is not None or (right is not None and right != 0)
    plane = (batch, heads, s_q, s_k)
    q_scales, kv_scales = _scaled(given, dtype_q, dtype_kv)
    expression = given.expression
    used: dict[str, Any] = {n: x is not None for n, x in numbers.items()}
    spec = AttentionSpec(
        dtype,
        d,
        d_v,
        causal=right == 0 and not windowed,
        lse=lse,
        vector=vector,
        window=windowed,
        prefix=given.prefix_lengths is not None,
        alibi=given.alibi_slopes is not None,
        **used,
        bias=bias,
        mask=given.mask is not None,
        sinks=given.sinks is not None,
        q_view=q_view,
        kv_view=kv_view,
        lengths=given.kv_lengths is not None,
        dtype_out=None if dtype_out is dtype else dtype_out,
        batch_invariant=options["batch_invariant"],
        prefix_groups=_prefix_groups(options["prefix_groups"], kv_view) > 0,
        dtype_kv=dtype_kv,
        kv_scales=kv_scales,
        dtype_q=dtype_q,
        q_scales=q_scales,
        precision=precision_of(options["precision"], dtype, "q, k and v"),
        latent=_latent(options["latent"], shapes["k"], d_v, strides["k"], strides["v"]),
        row_scale_block=row_scale_block,
        expression=None if expression is None else text_of(expression.structure),
    )
    problem = AttentionProblem(
        spec,
        batch,
        heads,
        kv_heads,
        s_q,
        s_k,
        q_strides=strides["q"],
        k_strides=strides["k"],
        v_strides=strides["v"],
        out_strides=strides["out"],
        lse_strides=(lse_batch, lse_head) if lse else (0, 0),
        scale=default_scale(d) if options["scale"] is None else options["scale"],
        left=left,
        right=right,
        **values,
        bias_strides=plane_strides(given, "bias", plane, bias),
        mask_strides=plane_strides(given, "mask", plane, mask),
        alibi_strides=slope_strides(given, batch, heads),
        total_q=total_q,
        total_k=total_k,
        pages=pages,
        page_size=page_size,
        table_width=width,
        table_stride=_table_stride(given, width) if kv_view == "paged" else 0,
        prefix_groups=options["prefix_groups"] or 0,
        scale_block=options["scale_block"] or 0,
        q_scale_block=options["q_scale_block"] or 0,
        **captured_fields(expression, infos, min(batch, heads, s_q) > 0),
    )
    _check_blocks(problem)
    if functions_as_options:
        problem = by_options(problem)
    spec = problem.spec
    if spec.q_scales:
        extents = problem.q_scale_extents
        walk = scale_strides(given, "q_scales", "q_scale_block", q_view, extents)
        problem = replace(problem, q_scale_strides=walk)
    if not spec.kv_scales:
        return problem
    if kv_view == "paged" and problem.scale_block > page_size:
        rule = f"must be at most page_size, {page_size}"
        raise InvalidValue("scale_block", problem.scale_block, rule, "Give each page's rows scales")
    outer, blocks = problem.scale_extents
    k_scales, v_scales = (
        scale_strides(given, name, "scale_block", kv_view, (outer, kv_heads, blocks))
        for name in KEY_SCALES
    )
    return replace(problem, k_scale_strides=k_scales, v_scale_strides=v_scales)


def _check_blocks(p: AttentionProblem) -> None:
    """Refuse a block mask of other extents."""
    if p.spec.expression is None:
        return
    structure = structure_of(p.spec.expression)
    if structure.blocks is None:
        return
    q_len, kv_len = map(int, p.captured_numbers[-2:])
    batch, heads = p.captured_extents[-1][:2]
    for name, own, of_mask in (("batch", p.batch, batch), ("heads", p.num_heads, heads)):
        if of_mask not in (1, own):
            raise InvalidValue(
                "block_mask",
                f"of {name} = {of_mask}",
                f"must be of {name} = {own}, as q is, or 1",
                f"Make it for {name} = {own}",
            )
    exact = bool({"q_len", "kv_len"} & structure.visible.reads)
    ragged = "packed" in (p.spec.q_view, p.spec.kv_view) or p.spec.lengths
    for name, own, of_mask in (("S_q", p.S_q, q_len), ("S_k", p.S_k, kv_len)):
        if own > of_mask or (exact and own != of_mask):
            raise InvalidValue(
                "block_mask",
                f"for {'queries' if name == 'S_q' else 'keys'} up to {of_mask}",
                f"must be for {name} = {own}" + " exactly, as its mask_mod reads lengths" * exact,
                "Make it for these lengths",
            )
    if exact and ragged:
        raise InvalidValue(
            "block_mask",
            "its mask_mod reads q_len or kv_len",
            "entries of other lengths have other blocks",
            "Give the mask_mod in its place",
        )


def _dtypes(
    given: AttentionFields, infos: Mapping[str, ArrayInfo]
) -> tuple[DType, DType | None, DType | None]:
    """(what is computed in, that of q, that of k and v): None where it is the first."""
    if (dtype_q := _of_8_bits(given, infos, "dtype_q", "q")) is not None:
        return _dtype_of_result(given, infos, dtype_q), dtype_q, dtype_q
    stored = _of_8_bits(given, infos, "dtype_kv", "kv")
    if stored is None:
        dtype = dtype_of("dtype", given.dtype, infos, ("q", "k", "v"))
        dtype = required("dtype", dtype, "q, k, v and out")
        _refuse_other("dtype_q", given.dtype_q, dtype, "dtype is")
        _refuse_other("dtype_kv", given.dtype_kv, dtype, "q's")
        return dtype, None, None
    dtype = required("dtype", dtype_of("dtype", given.dtype, infos, ("q",)), "q and out")
    _refuse_other("dtype_q", given.dtype_q, dtype, "dtype is")
    for name in "kv":
        if name in infos and infos[name].dtype is not stored:
            raise InvalidValue(
                name,
                f"an array of {infos[name].dtype}",
                f"must be {stored} as {'k' if name == 'v' and 'k' in infos else 'dtype_kv'} is",
                "Convert the array: k and v share their dtype",
            )
    if dtype.itemsize != 2:
        raise InvalidValue(
            "dtype",
            dtype,
            f"must be float16 or bfloat16 where k and v are {stored}",
            "Convert q, or k and v",
        )
    return dtype, None, stored


def _of_8_bits(
    given: AttentionFields, infos: Mapping[str, ArrayInfo], field: str, names: str
) -> DType | None:
    """The dtype of 8 bits that q, or k and v, are said to have or that one of their arrays has."""
    if (value := getattr(given, field)) is not None:
        named = DType.of(value, field, floating=False, fp8=True)
        return named if named.is_fp8 else None
    return next((infos[n].dtype for n in names if n in infos and infos[n].dtype.is_fp8), None)


def _refuse_other(field: str, value: object, dtype: DType, other: str) -> None:
    """Refuse a dtype of q, or of k and v, that is neither one of 8 bits nor the other operand's."""
    if value is None or (named := DType.of(value, field, floating=False, fp8=True)) is dtype:
        return
    kinds = ", ".join(map(str, E4M3))
    raise InvalidValue(
        field,
        named,
        f"must be {dtype} as {other}, or one of {kinds}",
        f"Convert {'q' if field == 'dtype_q' else 'k and v'}",
    )


def _dtype_of_result(
    given: AttentionFields, infos: Mapping[str, ArrayInfo], stored: DType
) -> DType:
    """The dtype of 16 bits of an attention whose q, k and v are all ``stored``."""
    for name in "qkv":
        if name in infos and infos[name].dtype is not stored:
            raise InvalidValue(
                name,
                f"an array of {infos[name].dtype}",
                f"must be {stored} as {'dtype_q' if name == 'q' else 'q'} is",
                "Convert the array: with q of 8 bits, q, k and v share their dtype",
            )
    if given.dtype_kv is not None:
        kv = DType.of(given.dtype_kv, "dtype_kv", floating=False)
        if kv is not stored:
            rule = f"must be {stored} as q's"
            raise InvalidValue("dtype_kv", kv, rule, "Leave it out, or convert q")
    dtype = DType.bfloat16
    if given.dtype is not None:
        dtype = DType.of(given.dtype, "dtype")
    elif "out" in infos and infos["out"].dtype.itemsize == 2:
        dtype = infos["out"].dtype
    if dtype.itemsize != 2:
        rule = f"must be float16 or bfloat16 where q, k and v are {stored}"
        raise InvalidValue("dtype", dtype, rule, "Give dtype_out='float32' for a wider result")
    return dtype


def _scaled(
    given: AttentionFields, dtype_q: DType | None, dtype_kv: DType | None
) -> tuple[str | None, str | None]:
    """What has a scale of its own, of q and of k and v; None without scales."""
    needed = KEY_SCALES if dtype_q is None else SCALES
    there = [n for n in SCALES if getattr(given, n) is not None]
    for name in there:
        stored, operands, field = (
            (dtype_q, "q", "dtype_q") if name == "q_scales" else (dtype_kv, "k and v", "dtype_kv")
        )
        if stored is None:
            raise InvalidValue(
                name,
                "given",
                f"scales are for {operands} of 8 bits",
                f"Leave it out, or give {field}",
            )
        if missing := [n for n in needed if n not in there]:
            raise InvalidValue(
                missing[0], None, f"must be given where {name} is", "Give it: ones change nothing"
            )
    for field, of in (("q_scale_block", "q_scales"), ("scale_block", "k_scales and v_scales")):
        if (block := getattr(given, field)) is not None and of.split()[0] not in there:
            raise InvalidValue(field, block, "is about scales", f"Give {of} too")
    q, kv = (None if n not in there else "heads" for n in ("q_scales", "k_scales"))
    return (
        q if given.q_scale_block is None else "blocks",
        kv if given.scale_block is None else "blocks",
    )


def _latent(
    latent: bool,
    shape: tuple[int, ...],
    d_v: int,
    k: tuple[int, ...],
    v: tuple[int, ...],
) -> bool:
    """Whether v is the first columns of k, of that shape, with its strides; those of axes of extent
    1 do not count. Addresses are compared at bind."""
    d = shape[-1]
    if latent and d_v > d:
        raise InvalidValue(
            "latent",
            True,
            f"v is the first columns of k, and value_dim = {d_v} of head_dim = {d}",
            "Leave it out",
        )
    if latent and any(n > 1 and s != t for n, s, t in zip(shape[:3], k, v, strict=True)):
        raise InvalidValue(
            "latent",
            True,
            f"v is the first columns of k, and its strides are {v}, those of k {k}",
            "Give v as a view of k, or leave it out",
        )
    return latent


def _check_row_scales(
    given: AttentionFields,
    options: Mapping[str, Any],
    dtype: DType,
    dtype_kv: DType | None,
    d: int,
    d_v: int,
) -> None:
    """Refuse rows of a latent k that cannot have scales of so many columns."""
    block = options["row_scale_block"]
    said = f"{block}"
    if not options["latent"]:
        rule = "is about latent keys, whose first columns are the values"
        raise InvalidValue("row_scale_block", said, rule, "Give latent=True, or leave it out")
    if dtype_kv is not DType.float8_e4m3fn or dtype is not DType.bfloat16:
        rule = f"rows are float8_e4m3fn, then bfloat16 as q: q is {dtype}, k {dtype_kv or dtype}"
        raise InvalidValue("row_scale_block", said, rule, "Give k as such rows, or leave it out")
    if given.q_scales is not None or given.k_scales is not None or given.dtype_q is not None:
        rule = "says that scales lie in the rows of k, and others are given, or q is of 8 bits"
        raise InvalidValue("row_scale_block", said, rule, "Leave one of them out")
    if d_v % block or d_v > d:
        rule = f"must divide value_dim, {d_v} of head_dim {d}"
        raise InvalidValue("row_scale_block", said, rule, "FlashMLA's rows have 128 of 512")


def _prefix_groups(groups: int | None, kv_view: str) -> int:
    """How many groups; 0 for none."""
    if groups is not None and kv_view != "paged":
        rule = "is about pages that entries have in common"
        raise InvalidValue("prefix_groups", groups, rule, "Give a block_table, or leave it out")
    return groups or 0


def _table_stride(given: AttentionFields, width: int) -> int:
    """Elements between two rows of the block table."""
    if given.stride_table_row is None:
        return width
    return stride("stride_table_row", given.stride_table_row, DType.int32)


def _dtype_or_float32(
    given: AttentionFields, name: str, dtype: DType, infos: Mapping[str, ArrayInfo]
) -> DType:
    """The element type of out or bias: q's, or float32."""
    result_dtype = (
        dtype_of(f"dtype_{name}", getattr(given, f"dtype_{name}"), infos, (name,)) or dtype
    )
    if result_dtype not in (dtype, DType.float32):
        rule = "must be float32" if dtype is DType.float32 else f"must be {dtype} or float32"
        if name in infos:
            raise InvalidValue(name, f"an array of {result_dtype}", rule, "Convert the array")
        raise InvalidValue(f"dtype_{name}", result_dtype, rule, "Leave it out for q's dtype")
    return result_dtype

"""``torch.ops.kernelseam.fused_qkv_projection``, the same into pages, and
``fused_output_projection_residual``, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelseam.descriptors.common.options import scalars_of
from kernelseam.descriptors.projection.options import OutputOptions, QkvGradientOptions, QkvOptions
from kernelseam.interop.torch_function import check_bwd_implementation, with_rows
from kernelseam.interop.torch_library import flops
from kernelseam.interop.torch_library.batches import Batched, each, fold, unfold
from kernelseam.interop.torch_library.define import (
    absent_result,
    define,
    fake_result_like,
    fake_results_like,
    of_rank,
    refuse_gradients,
    refuse_second_derivative,
    result_like,
    results_like,
)
from kernelseam.interop.torch_library.dtypes import dtype_name
from kernelseam.interop.torch_library.schemas import CHOSEN, given_by, schema_of, tensors_of
from kernelseam.interop.torch_library.transforms import differentiated
from kernelseam.interop.torch_rotary import inverse_rotations
from kernelseam.ops import projection, projection_bwd
from kernelseam.ops.projection import query_heads

Tensor = Any

OPERANDS = ("input", "weight", "bias", "cos", "sin", "positions")
RESULTS = ("q", "k", "v")
QKV = (*OPERANDS, *RESULTS)
PAGED = (
    *("input", "weight", "k_pages", "v_pages", "block_table", *OPERANDS[2:], "q"),
    *("slot_mapping", "kv_lengths", "cu_seqlens", "k_scales", "v_scales"),
)
OUTPUT = ("attn_out", "weight", "bias", "residual", "out")
_LAYOUT = schema_of(OutputOptions(), "layout")
_OF_OUTPUT = schema_of(OutputOptions(), *scalars_of(OutputOptions))
_OF_QKV = schema_of(QkvOptions(), *scalars_of(QkvOptions))
_BIAS_DTYPE = schema_of(QkvGradientOptions(), "bias_dtype")


def _qkv_given(names: tuple[str, ...], tensors: Any) -> dict[str, Any]:
    """Operands as the function on arrays takes them, with new memory for results that are
    given."""
    given = given_by(names, tensors)
    if "cos" in given or "sin" in given:
        given["rotary"] = given.pop("cos", None), given.pop("sin", None)
    if "cu_seqlens" in given:
        given["cu_seqlens_q"] = given.pop("cu_seqlens")
    out = tuple(results_like({n: given.pop(n) for n in RESULTS if n in given}).values())
    if out:
        given["out"] = out[0] if names is PAGED else out
    return given


def _qkv_compute(
    *tensors: Tensor, out_dtype: Any = None, bwd_implementation: str | None = None, **options: Any
) -> Any:
    given = _qkv_given(QKV, tensors)
    check_bwd_implementation(bwd_implementation, "qkv_projection_bwd", "input", given)
    with torch.no_grad():
        return projection.fused_qkv_projection(**given, **options, out_dtype=dtype_name(out_dtype))


def _heads(weight: Tensor, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    heads: Any = options.get("num_heads")
    if heads is None:
        query_heads("num_heads", heads)
    kv_heads: Any = options.get("num_kv_heads")
    kv_heads = heads if kv_heads is None else kv_heads
    dim: Any = options.get("head_dim")
    return heads, kv_heads, weight.shape[0] // (heads + 2 * kv_heads) if dim is None else dim


def _split(x: Tensor, heads: Any, dim: Any, layout: str, dtype: Any) -> Tensor:
    *lead, tokens, _ = x.shape
    rows = (heads, tokens) if layout == "bhsd" else (tokens, heads)
    return x.new_empty((*lead, *rows, dim), dtype=dtype)


def _qkv_fake(input: Tensor, weight: Tensor, *rest: Tensor, **options: Any) -> Any:
    given = [x for x in rest[len(OPERANDS) - 2 :] if x is not None]
    if given:
        return tuple(fake_results_like(dict(zip(RESULTS, given, strict=True))).values())
    of_rank("input", input, 2, 3)
    of_rank("weight", weight, 2)
    heads, kv_heads, dim = _heads(weight, options)
    layout, dtype = options.get("layout", "bhsd"), options.get("out_dtype") or input.dtype
    return tuple(_split(input, n, dim, layout, dtype) for n in (heads, kv_heads, kv_heads))


def _qkv_setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    refuse_gradients(ctx, QKV, ("input", "weight", "bias"))
    options = ctx.options = dict(keyword_only_inputs)
    input, weight, bias, *rotation = inputs[: len(OPERANDS)]
    of_input, of_weight, *_ = ctx.wanted
    ctx.dtype, ctx.bias_dtype = input.dtype, None if bias is None else bias.dtype
    ctx.heads = _heads(weight, options)
    ctx.save_for_backward(input if of_weight else None, weight if of_input else None, *rotation)


def _qkv_backward(operator: Any) -> Any:
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> Any:
        input, weight, cos, sin, positions = ctx.saved_tensors
        options = ctx.options
        dq, dk, dv = (x.to(ctx.dtype) for x in (dq, dk, dv))
        if cos is not None:
            dq, dk = inverse_rotations(dq, dk, cos, sin, positions, options)
        of_input, of_weight, of_bias, *_ = ctx.wanted
        sizes = dict(zip(("num_heads", "num_kv_heads", "head_dim"), ctx.heads, strict=True))
        asked = _asked((of_input, of_weight, of_bias), ctx.bias_dtype, options)
        result = operator(dq, dk, dv, input, weight, **sizes, **asked)
        wanted = of_input, of_weight, of_bias
        own = [x if w else None for x, w in zip(result, wanted, strict=True)]
        return *own, *[None] * (len(QKV) - len(own))

    return backward


def _asked(wanted: tuple[Any, ...], bias_dtype: Any, options: Any) -> dict[str, Any]:
    """Options of an operator of gradients: which of the input's, the weight's and the bias's are
    wanted, and what the projection's own say."""
    of_input, of_weight, of_bias = wanted
    return {
        "has_bias": of_bias,
        "input_gradient": of_input,
        "weight_gradient": of_weight,
        "layout": options["layout"],
        "bias_dtype": bias_dtype if of_bias else None,
        "backend": options["backend"],
        "implementation": options["bwd_implementation"],
    }


def _bwd_compute(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """What computes gradients by a function on arrays, where those of results are the first
    ``count`` tensors. torch leaves out the last where they are None."""

    def compute(*tensors: Tensor, bias_dtype: Any = None, **options: Any) -> Any:
        left_out = (None,) * (count + 2 - len(tensors))
        given = (*map(with_rows, tensors[:count]), *tensors[count:], *left_out)
        with torch.no_grad():
            result = function(*given, bias_dtype=dtype_name(bias_dtype), **options)
        return tuple(absent_result(given[0]) if x is None else x for x in result[:3])

    return compute


def _bwd_faked(like: Tensor, shapes: tuple[Any, ...], options: Any) -> Any:
    """Gradients of the input, the weight and the bias, None for a shape that is not known."""
    wanted = (options[n] for n in ("input_gradient", "weight_gradient", "has_bias"))
    dtypes = None, None, options.get("bias_dtype")
    return tuple(
        absent_result(like)
        if shape is None or not w
        else like.new_empty(shape, dtype=dtype or like.dtype)
        for shape, w, dtype in zip(shapes, wanted, dtypes, strict=True)
    )


def _qkv_bwd_fake(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    input: Tensor | None = None,
    weight: Tensor | None = None,
    **options: Any,
) -> Any:
    width = (options["num_heads"] + 2 * options["num_kv_heads"]) * options["head_dim"]
    tokens = dq.shape[-2 if options.get("layout", "bhsd") == "bhsd" else -3]
    d_input = None if weight is None else (*dq.shape[:-3], tokens, weight.shape[1])
    d_weight = None if input is None else (width, input.shape[-1])
    return _bwd_faked(dq, (d_input, d_weight, (width,)), options)


def _batched(operator: Any, names: tuple[str, ...], of_rows: tuple[str, ...]) -> Any:
    """One input after the other in one batch, where weights and tables are the same for all and
    inputs have a batch; operands ``of_rows`` have one as well."""

    def batched(info: Any, in_dims: Any, *args: Any, **options: Any) -> Batched:
        given = [(n in of_rows, x, d) for n, x, d in zip(names, args, in_dims, strict=False)]
        rank = args[0].dim() - (in_dims[0] is not None)
        if rank == 2 or any(d is not None and not rows for rows, _, d in given):
            return each(operator, info.batch_size, in_dims, args, options)
        whole = [fold(x, d, info.batch_size) if rows else x for rows, x, d in given]
        return unfold(operator(*whole, **options), info.batch_size)

    return batched


_qkv_bwd_compute = _bwd_compute(projection_bwd.fused_qkv_projection_bwd, len(RESULTS))
FUSED_QKV_BWD = define(
    "fused_qkv_projection_bwd(Tensor dq, Tensor dk, Tensor dv, Tensor? input=None, "
    "Tensor? weight=None, *, bool has_bias, SymInt num_heads, SymInt num_kv_heads, "
    f"SymInt head_dim, bool input_gradient, bool weight_gradient, {_LAYOUT}, "
    f"{_BIAS_DTYPE}, {CHOSEN}) -> (Tensor, Tensor, Tensor)",
    _qkv_bwd_compute,
    _qkv_bwd_fake,
    backward=refuse_second_derivative("fused_qkv_projection"),
    flops=flops.qkv_bwd,
)
QKV_DIFFERENTIATED = differentiated(
    "fused_qkv_projection", _qkv_compute, _qkv_setup, _qkv_backward(_qkv_bwd_compute)
)
FUSED_QKV: Callable[..., Any] = define(
    f"fused_qkv_projection({tensors_of('input', 'weight', optional=QKV[2:])}, *, "
    f"{_OF_QKV}, {CHOSEN}, "
    "str? bwd_implementation=None) -> (Tensor, Tensor, Tensor)",
    _qkv_compute,
    _qkv_fake,
    setup=_qkv_setup,
    backward=_qkv_backward(FUSED_QKV_BWD),
    batched=_batched(
        lambda *x, **given: FUSED_QKV(*x, **given), QKV, ("input", "positions", *RESULTS)
    ),
    flops=flops.projection,
)


def _paged_compute(*tensors: Tensor, out_dtype: Any = None, **options: Any) -> Tensor:
    return projection.fused_qkv_projection(
        **_qkv_given(PAGED, tensors), out_dtype=dtype_name(out_dtype), **options
    )


def _paged_fake(*tensors: Tensor, **options: Any) -> Tensor:
    given = dict(zip(PAGED, tensors, strict=False))
    q = given.get("q")
    if q is not None:
        return fake_result_like(q)
    of_rank("input", given["input"], 2, 3)
    heads, _, dim = _heads(of_rank("weight", given["weight"], 2), options)
    pages = given["k_pages"].dtype
    default = given["input"].dtype if torch.finfo(pages).bits == 8 else pages
    dtype = options.get("out_dtype") or default
    return _split(given["input"], heads, dim, options.get("layout", "bhsd"), dtype)


FUSED_QKV_PAGED = define(
    "fused_qkv_projection_paged(Tensor input, Tensor weight, Tensor(a!) k_pages, "
    "Tensor(b!) v_pages, Tensor? block_table=None, Tensor? bias=None, Tensor? cos=None, "
    "Tensor? sin=None, Tensor? positions=None, Tensor? q=None, Tensor? slot_mapping=None, "
    "Tensor? kv_lengths=None, Tensor? cu_seqlens=None, Tensor(c!)? k_scales=None, "
    "Tensor(d!)? v_scales=None, *, "
    f"{_OF_QKV}, {CHOSEN}) "
    "-> Tensor",
    _paged_compute,
    _paged_fake,
    flops=flops.projection,
)


def _output_compute(
    *tensors: Tensor, out_dtype: Any = None, bwd_implementation: str | None = None, **options: Any
) -> Tensor:
    given = given_by(OUTPUT, tensors)
    if "out" in given:
        given["out"] = result_like(given["out"])
    check_bwd_implementation(bwd_implementation, "output_projection_bwd", "attn_out", given)
    with torch.no_grad():
        return projection.fused_output_projection_residual(
            **given, **options, out_dtype=dtype_name(out_dtype)
        )


def _output_fake(attn_out: Tensor, weight: Tensor, *rest: Tensor, **options: Any) -> Tensor:
    out = rest[len(OUTPUT) - 3 :]
    if out and out[0] is not None:
        return fake_result_like(out[0])
    of_rank("attn_out", attn_out, 2, 3, 4)
    lead = attn_out.shape[:-1]
    if len(lead) == 3:
        lead = (lead[0], lead[2 if options.get("layout", "bhsd") == "bhsd" else 1])
    hidden = of_rank("weight", weight, 2).shape[0]
    return attn_out.new_empty((*lead, hidden), dtype=options.get("out_dtype") or attn_out.dtype)


def _output_setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    refuse_gradients(ctx, OUTPUT, OUTPUT[:-1])
    attn_out, weight, *_ = inputs
    of_attn_out, of_weight, of_bias, *_ = ctx.wanted
    ctx.options = keyword_only_inputs
    ctx.dtypes = [None if x is None else x.dtype for x in inputs]
    ctx.save_for_backward(
        attn_out if of_attn_out or of_weight or of_bias else None, weight if of_attn_out else None
    )


def _output_backward(operator: Any) -> Any:
    def backward(ctx: Any, d_output: Tensor) -> Any:
        attn_out, weight = ctx.saved_tensors
        wanted = ctx.wanted
        result: Any = None, None, None
        if any(wanted[:3]):
            asked = _asked(wanted[:3], ctx.dtypes[2], ctx.options)
            result = operator(d_output.to(ctx.dtypes[0]), attn_out, weight, **asked)
        d_residual = d_output.to(ctx.dtypes[3]) if wanted[3] else None
        own = [x if w else None for x, w in zip(result, wanted, strict=False)]
        return *own, d_residual, None

    return backward


def _output_bwd_fake(
    d_output: Tensor, attn_out: Tensor, weight: Tensor | None = None, **options: Any
) -> Any:
    hidden, columns = d_output.shape[-1], attn_out.shape[-1]
    if attn_out.dim() == 4:
        columns = columns * attn_out.shape[1 if options.get("layout", "bhsd") == "bhsd" else 2]
    return _bwd_faked(d_output, (attn_out.shape, (hidden, columns), (hidden,)), options)


_output_bwd_compute = _bwd_compute(projection_bwd.fused_output_projection_residual_bwd, 1)
FUSED_OUTPUT_BWD = define(
    "fused_output_projection_residual_bwd(Tensor d_output, Tensor attn_out, Tensor? weight=None, "
    f"*, bool has_bias, bool input_gradient, bool weight_gradient, {_LAYOUT}, "
    f"{_BIAS_DTYPE}, {CHOSEN}) -> (Tensor, Tensor, Tensor)",
    _output_bwd_compute,
    _output_bwd_fake,
    backward=refuse_second_derivative("fused_output_projection_residual"),
    flops=flops.output_bwd,
)
OUTPUT_DIFFERENTIATED = differentiated(
    "fused_output_projection_residual",
    _output_compute,
    _output_setup,
    _output_backward(_output_bwd_compute),
)
FUSED_OUTPUT: Callable[..., Any] = define(
    "fused_output_projection_residual("
    f"{tensors_of('attn_out', 'weight', optional=OUTPUT[2:])}, *, {_OF_OUTPUT}, "
    f"{CHOSEN}, str? bwd_implementation=None) -> Tensor",
    _output_compute,
    _output_fake,
    setup=_output_setup,
    backward=_output_backward(FUSED_OUTPUT_BWD),
    batched=_batched(
        lambda *x, **given: FUSED_OUTPUT(*x, **given), OUTPUT, ("attn_out", "residual", "out")
    ),
    flops=flops.projection,
)

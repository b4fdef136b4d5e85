"""The functions on arrays, where torch traces them: their options as the operators take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernelseam.descriptors.attention.options import AttentionOptions, GradientOptions
from kernelseam.descriptors.common.options import scalars_of
from kernelseam.descriptors.gemm.fields import scale_block_of
from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_library import attention, gemm, grouped, merge, projection
from kernelseam.interop.torch_library.define import unrepeated
from kernelseam.interop.torch_library.dtypes import dtype_name
from kernelseam.ops import attention_bwd as attention_bwd_ops
from kernelseam.ops import gemm as gemm_ops
from kernelseam.ops import gemm_bwd as gemm_bwd_ops
from kernelseam.ops import grouped_gemm as grouped_ops
from kernelseam.ops import merge as merge_ops
from kernelseam.ops import projection as projection_ops
from kernelseam.ops import projection_bwd as projection_bwd_ops
from kernelseam.ops.attention_work import attention_work

Tensor = Any
Arrays = Mapping[str, Tensor]
Results = dict[str, Any]
_SCALARS, _OF_GRADIENTS = scalars_of(AttentionOptions), scalars_of(GradientOptions)


def _filled(arrays: Arrays, results: Results) -> Results:
    """Copy results to the arrays that are given for them, which they have the layout of."""
    for name, x in results.items():
        if name in arrays:
            arrays[name].copy_(x)
    return results


def _window(window: Any) -> dict[str, Any]:
    left, right = (None, None) if window is None else window
    return {"window_left": left, "window_right": right}


def _ordered(arrays: Arrays, names: tuple[str, ...]) -> list[Tensor | None]:
    return [arrays.get(n) for n in names]


def _refuse_functions(values: Any, names: tuple[str, ...]) -> None:
    if len(values) > len(names):
        raise InvalidValue(
            "score_mod, mask_mod",
            "given",
            "are not supported where torch traces, compiles or transforms the call",
            "Call it outside, for example under torch.compiler.disable",
        )


def _attention(arrays: Arrays, values: Any, backend: Any, implementation: Any) -> Results:
    _refuse_functions(values, _SCALARS)
    options = dict(zip(_SCALARS, values, strict=True))
    paged, packed = "block_table" in arrays, "cu_seqlens_q" in arrays
    names: tuple[str, ...]
    if paged:
        operator, names = attention.ATTENTION_PAGED, attention.PAGED
        arrays = {**arrays, "k_pages": arrays["k"], "v_pages": arrays["v"]}
    elif packed:
        operator, names = attention.ATTENTION_VARLEN, attention.FORWARD_VARLEN
    else:
        operator, names = attention.ATTENTION, attention.FORWARD_DENSE
    taken = attention.TAKEN[names]
    given = {n: x for n, x in options.items() if n in taken}
    out, lse = operator(
        *_ordered(arrays, names),
        **given,
        **_window(options["window"]),
        backend=backend,
        implementation=implementation,
    )
    return _filled(arrays, {"out": out, "lse": lse})


def _attention_bwd(arrays: Arrays, values: Any, backend: Any, implementation: Any) -> Results:
    _refuse_functions(values, _OF_GRADIENTS)
    given = dict(zip(_OF_GRADIENTS, values, strict=True))
    packed = "cu_seqlens_q" in arrays or "cu_seqlens_k" in arrays
    _check_axis("dout", arrays["dout"])
    of_q = getattr(arrays["q"], "dtype", None)
    for name in ("dout", "out"):
        if getattr(arrays[name], "dtype", of_q) != of_q:
            raise InvalidValue(
                name,
                f"an array of {dtype_name(arrays[name].dtype)}",
                f"must be {dtype_name(of_q)} as q is",
                "Convert it",
            )
    operator, names = (
        (attention.VARLEN_BWD, attention.VARLEN)
        if packed
        else (attention.ATTENTION_BWD, attention.DENSE)
    )
    window = _window(given.pop("window"))
    if packed:
        del given["layout"]
    made = operator(
        arrays["dout"],
        None,
        arrays["out"],
        arrays["lse"],
        *_ordered(arrays, names),
        **given,
        **window,
        backend=backend,
        implementation=implementation,
    )
    results = dict(zip(("dq", "dk", "dv", "dbias", "dsinks"), made, strict=True))
    if not given["bias_gradient"]:
        del results["dbias"]
    elif "bias" in arrays:  # the operator's has the bias's whole shape
        results["dbias"] = results["dbias"].sum_to_size(unrepeated(arrays["bias"]))
    if not given["sink_gradient"]:
        del results["dsinks"]
    return results


def _product(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Results:
    batched, a_transposed, b_transposed, alpha, beta, out_dtype, precision, scale_block = options
    gemm_ops.check_added(beta, "out" in arrays)
    scale_block_of(scale_block, "a_scales" in arrays or "b_scales" in arrays)
    operator = gemm.BMM if batched else gemm.MATMUL2D
    out = operator(
        *_ordered(arrays, gemm.OPERANDS),
        a_transposed=a_transposed,
        b_transposed=b_transposed,
        alpha=alpha,
        beta=beta,
        out_dtype=out_dtype,
        precision=precision,
        scale_block=scale_block,
        backend=backend,
        implementation=implementation,
    )
    return _filled(arrays, {"out": out})


def _product_bwd(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Results:
    batched, a_transposed, b_transposed, alpha, beta, of_a, of_b, sums, out_dtype = options
    for name in ("da", "db"):
        if name in arrays:
            raise InvalidValue(
                name, "given", "a traced call makes new gradients", "Leave it out, or add outside"
            )
    gemm_ops.check_added(beta, False, "da")
    _check_axis("dc", arrays["dc"], 2)
    operator = gemm.BMM_BWD if batched else gemm.MATMUL2D_BWD
    da, db = operator(
        arrays["dc"],
        arrays["a"],
        arrays["b"],
        a_gradient=of_a,
        b_gradient=of_b,
        sum_repeats=sums,
        out_dtype=out_dtype,
        a_transposed=a_transposed,
        b_transposed=b_transposed,
        alpha=alpha,
        backend=backend,
        implementation=implementation,
    )
    return _asked(("da", "db"), (da, db), (of_a, of_b))


def _grouped(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Results:
    alpha, beta, out_dtype, precision, scale_block = options
    gemm_ops.check_added(beta, "out" in arrays)
    scale_block_of(scale_block, "a_scales" in arrays or "b_scales" in arrays)
    out = grouped.GROUPED_MM(
        *_ordered(arrays, grouped.OPERANDS),
        alpha=alpha,
        beta=beta,
        out_dtype=out_dtype,
        precision=precision,
        scale_block=scale_block,
        backend=backend,
        implementation=implementation,
    )
    return _filled(arrays, {"out": out})


def _merged(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Results:
    out, lse = merge.MERGE_STATES(
        *_ordered(arrays, ("outs", "lses", "out")),
        out_dtype=options[0],
        backend=backend,
        implementation=implementation,
    )
    return _filled(arrays, {"out": out, "lse": lse})


def _qkv(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Results:
    heads, kv_heads, dim, layout, kv_layout, rotary_style, first_position, out_dtype = options
    given = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "layout": layout,
        "kv_layout": kv_layout,
        "rotary_style": "halves" if rotary_style is None else rotary_style,
        "first_position": first_position,
        "out_dtype": out_dtype,
        "backend": backend,
        "implementation": implementation,
    }
    if "block_table" in arrays:
        operands = {**arrays, "k_pages": arrays["k"], "v_pages": arrays["v"]}
        result = projection.FUSED_QKV_PAGED(*_ordered(operands, projection.PAGED), **given)
        return _filled(arrays, {"q": result})
    result = projection.FUSED_QKV(*_ordered(arrays, projection.QKV), **given)
    return _filled(arrays, dict(zip(projection.RESULTS, result, strict=True)))


def _qkv_bwd(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Results:
    has_bias, heads, kv_heads, dim, layout, of_input, of_weight, bias_dtype = options
    for name in ("dq", "dk", "dv"):
        _check_axis(name, arrays[name])
    made = projection.FUSED_QKV_BWD(
        *_ordered(arrays, ("dq", "dk", "dv", "input", "weight")),
        has_bias=has_bias,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        layout=layout,
        input_gradient=of_input,
        weight_gradient=of_weight,
        bias_dtype=bias_dtype,
        backend=backend,
        implementation=implementation,
    )
    return _asked(("d_input", "d_weight", "d_bias"), made, (of_input, of_weight, has_bias))


def _check_axis(name: str, x: Tensor, axes: int = 1) -> None:
    """Refuse a gradient none of whose last ``axes`` is contiguous, as the functions on arrays do:
    the operators copy it, for torch's own gradients may repeat one number."""
    if not isinstance(x, torch.Tensor):  # which the operator refuses
        return
    last = zip(x.shape[-axes:], x.stride()[-axes:], strict=True)
    if 0 not in x.shape and all(n > 1 and s != 1 for n, s in last):
        which = "the last axis" if axes == 1 else "one of the two matrix axes"
        raise InvalidValue(
            name,
            f"strides {list(x.stride())}",
            f"{which} must be contiguous (stride 1)",
            "Copy the array into a contiguous one",
        )


def _asked(names: tuple[str, ...], made: Any, asked: tuple[bool, ...]) -> Results:
    return {n: x for n, x, a in zip(names, made, asked, strict=True) if a}


def _output(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Results:
    layout, out_dtype = options
    out = projection.FUSED_OUTPUT(
        *_ordered(arrays, projection.OUTPUT),
        layout=layout,
        out_dtype=out_dtype,
        backend=backend,
        implementation=implementation,
    )
    return _filled(arrays, {"out": out})


def _output_bwd(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Results:
    has_bias, layout, of_attn_out, of_weight, bias_dtype = options
    _check_axis("d_output", arrays["d_output"])
    made = projection.FUSED_OUTPUT_BWD(
        *_ordered(arrays, ("d_output", "attn_out", "weight")),
        has_bias=has_bias,
        layout=layout,
        input_gradient=of_attn_out,
        weight_gradient=of_weight,
        bias_dtype=bias_dtype,
        backend=backend,
        implementation=implementation,
    )
    return _asked(("d_attn_out", "d_weight", "d_bias"), made, (of_attn_out, of_weight, has_bias))


OPERATORS: dict[Any, Any] = {
    attention_work: _attention,
    attention_bwd_ops.gradient_work: _attention_bwd,
    gemm_ops.gemm_work: _product,
    gemm_bwd_ops.gradient_work: _product_bwd,
    grouped_ops.grouped_work: _grouped,
    merge_ops.merge_work: _merged,
    projection_ops.qkv_work: _qkv,
    projection_ops.output_work: _output,
    projection_bwd_ops.qkv_work: _qkv_bwd,
    projection_bwd_ops.output_work: _output_bwd,
}

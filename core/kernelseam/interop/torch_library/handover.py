"""The functions on arrays, where torch traces them: their options as the operators take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernelseam.interop.torch_library import attention, gemm, merge, projection
from kernelseam.interop.torch_library.dtypes import accumulator, torch_dtype
from kernelseam.ops import gemm as gemm_ops
from kernelseam.ops import merge as merge_ops
from kernelseam.ops import projection as projection_ops
from kernelseam.ops.attention_options import Options
from kernelseam.ops.attention_work import attention_work

Tensor = Any
Arrays = Mapping[str, Tensor]
Results = dict[str, Any]


def _out_dtype(asked: Any, arrays: Arrays) -> Any:
    """That of an array that is given for the result, and else what is asked for."""
    return torch_dtype(asked) if "out" not in arrays else arrays["out"].dtype


def _filled(arrays: Arrays, results: Results) -> Results:
    """Copy a result to the array that is given for it."""
    if "out" in arrays:
        arrays["out"].copy_(results.pop("out"))
    return results


def _window(window: Any) -> dict[str, Any]:
    left, right = (None, None) if window is None else window
    return {"window_left": left, "window_right": right}


def _ordered(arrays: Arrays, names: tuple[str, ...]) -> list[Tensor | None]:
    return [arrays.get(n) for n in names]


def _attention(arrays: Arrays, values: Any, backend: Any, implementation: Any) -> Results:
    options = Options(*values)
    paged, packed = "block_table" in arrays, "cu_seqlens_q" in arrays
    names: tuple[str, ...]
    if paged:
        operator, names = attention.ATTENTION_PAGED, attention.PAGED
        arrays = {**arrays, "k_pages": arrays["k"], "v_pages": arrays["v"]}
    elif packed:
        operator, names = attention.ATTENTION_VARLEN, attention.SCALED_VARLEN
    else:
        operator, names = attention.ATTENTION, attention.SCALED_DENSE
    taken = attention.TAKEN[names]
    given = {n: x for n, x in zip(Options._fields, options, strict=True) if n in taken}
    given["out_dtype"] = _out_dtype(options.out_dtype, arrays)
    given["return_lse"] = options.return_lse or (not paged and _differentiated(arrays))
    out, lse = operator(
        *_ordered(arrays, names),
        **given,
        **_window(options.window),
        backend=backend,
        implementation=implementation,
    )
    if "out" in arrays and packed and not paged:  # rows of no sequence stay as they are
        offsets, into = arrays["cu_seqlens_q"], arrays["out"]
        row = torch.arange(into.shape[0], device=into.device)
        inside = (row >= offsets[0]) & (row < offsets[-1])
        out = torch.where(inside[:, None, None], out, into)
    return _filled(arrays, {"out": out, "lse": lse})


def _differentiated(arrays: Arrays) -> bool:
    """Whether gradients may be wanted, which start from the LSE."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in arrays.values())


def _product(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Results:
    batched, a_transposed, b_transposed, alpha, beta, out_dtype, precision, scale_block = options
    residual = arrays.get("residual")
    if beta != 0 and "out" in arrays:  # summed as wide as the product is
        added = beta * arrays["out"].to(accumulator(arrays["a"].dtype))
        residual = added if residual is None else added + residual
    operator = gemm.BMM if batched else gemm.MATMUL2D
    out = operator(
        arrays["a"],
        arrays["b"],
        arrays.get("bias"),
        residual,
        arrays.get("a_scales"),
        arrays.get("b_scales"),
        a_transposed=a_transposed,
        b_transposed=b_transposed,
        alpha=alpha,
        out_dtype=_out_dtype(out_dtype, arrays),
        precision=precision,
        scale_block=scale_block,
        backend=backend,
        implementation=implementation,
    )
    return _filled(arrays, {"out": out})


def _merged(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Results:
    out, lse = merge.MERGE_STATES(
        arrays["outs"],
        arrays["lses"],
        out_dtype=_out_dtype(options[0], arrays),
        backend=backend,
        implementation=implementation,
    )
    return _filled(arrays, {"out": out, "lse": lse})


def _qkv(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Results:
    heads, kv_heads, dim, layout, kv_layout, rotary_style, first_position, out_dtype = options
    dtype = torch_dtype(out_dtype) if "q" not in arrays else arrays["q"].dtype
    given = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "layout": layout,
        "rotary_style": rotary_style or "halves",
        "first_position": first_position,
        "out_dtype": dtype,
        "backend": backend,
        "implementation": implementation,
    }
    if "block_table" in arrays:
        result = projection.FUSED_QKV_PAGED(
            *_ordered(
                {**arrays, "k_pages": arrays["k"], "v_pages": arrays["v"]},
                ("input", "weight", "k_pages", "v_pages", "block_table", *projection.QKV[2:]),
            ),
            kv_layout=kv_layout,
            **given,
        )
        results = {"q": result}
    else:
        result = projection.FUSED_QKV(*_ordered(arrays, projection.QKV), **given)
        results = dict(zip(("q", "k", "v"), result, strict=True))
    for name, x in results.items():
        if name in arrays:
            arrays[name].copy_(x)
    return results


def _output(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Results:
    layout, out_dtype = options
    out = projection.FUSED_OUTPUT(
        *_ordered(arrays, projection.OUTPUT),
        layout=layout,
        out_dtype=_out_dtype(out_dtype, arrays),
        backend=backend,
        implementation=implementation,
    )
    return _filled(arrays, {"out": out})


OPERATORS: dict[Any, Any] = {
    attention_work: _attention,
    gemm_ops.gemm_work: _product,
    merge_ops.merge_work: _merged,
    projection_ops.qkv_work: _qkv,
    projection_ops.output_work: _output,
}

"""The functions on arrays, where torch traces them: their options as the operators take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_library import attention, gemm, merge, projection
from kernelseam.interop.torch_library.dtypes import accumulator, torch_dtype
from kernelseam.ops import attention as attention_ops
from kernelseam.ops import gemm as gemm_ops
from kernelseam.ops import merge as merge_ops
from kernelseam.ops import projection as projection_ops

Tensor = Any
Arrays = Mapping[str, Tensor]
Made = dict[str, Any]


def _out_dtype(asked: Any, arrays: Arrays) -> Any:
    """That of an array that is given for the result, and else what is asked for."""
    return torch_dtype(asked) if "out" not in arrays else arrays["out"].dtype


def _filled(arrays: Arrays, made: Made) -> Made:
    """Copy a result to the array that is given for it."""
    if "out" in arrays:
        arrays["out"].copy_(made.pop("out"))
    return made


def _window(window: Any) -> Made:
    left, right = (None, None) if window is None else window
    return {"window_left": left, "window_right": right}


def _ordered(arrays: Arrays, names: tuple[str, ...]) -> list[Tensor | None]:
    return [arrays.get(n) for n in names]


def _dense(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Made:
    # latent only allows what an operator does not do
    out_dtype, return_lse, causal, window, scale, softcap, layout, block, invariant, _ = options
    _refuse_scales(arrays, block)
    out, lse = attention.ATTENTION(
        *_ordered(arrays, attention.DENSE),
        causal=causal,
        **_window(window),
        scale=scale,
        softcap=softcap,
        layout=layout,
        out_dtype=_out_dtype(out_dtype, arrays),
        return_lse=return_lse or _differentiated(arrays),
        batch_invariant=invariant,
        backend=backend,
        implementation=implementation,
    )
    return _filled(arrays, {"out": out, "lse": lse})


def _refuse_scales(arrays: Arrays, scale_block: int | None) -> None:
    """Only the operator over pages has scales."""
    for name, value in (*arrays.items(), ("scale_block", scale_block)):
        if name in ("k_scales", "v_scales", "scale_block") and value is not None:
            raise InvalidValue(
                name,
                "given",
                "traced calls take scales of k and v in attention_paged alone",
                "Call it outside of what is traced",
            )


def _differentiated(arrays: Arrays) -> bool:
    """Whether gradients may be wanted, which start from the LSE."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in arrays.values())


def _varlen(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Made:
    (
        out_dtype,
        return_lse,
        causal,
        window,
        scale,
        softcap,
        longest_q,
        longest_k,
        scale_block,
        invariant,
    ) = options
    _refuse_scales(arrays, scale_block)
    out, lse = attention.ATTENTION_VARLEN(
        *_ordered(arrays, attention.VARLEN),
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        causal=causal,
        **_window(window),
        scale=scale,
        softcap=softcap,
        out_dtype=_out_dtype(out_dtype, arrays),
        return_lse=return_lse or _differentiated(arrays),
        batch_invariant=invariant,
        backend=backend,
        implementation=implementation,
    )
    if "out" in arrays:  # rows of no sequence stay as they are
        offsets, given = arrays["cu_seqlens_q"], arrays["out"]
        row = torch.arange(given.shape[0], device=given.device)
        inside = (row >= offsets[0]) & (row < offsets[-1])
        out = torch.where(inside[:, None, None], out, given)
    return _filled(arrays, {"out": out, "lse": lse})


def _paged(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Made:
    (
        out_dtype,
        return_lse,
        causal,
        window,
        scale,
        softcap,
        layout,
        kv_layout,
        longest_q,
        longest_k,
        scale_block,
        invariant,
        _,
    ) = options
    pages = {"k_pages": arrays["k"], "v_pages": arrays["v"]}
    out, lse = attention.ATTENTION_PAGED(
        *_ordered({**arrays, **pages}, attention.PAGED),
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        causal=causal,
        **_window(window),
        scale=scale,
        softcap=softcap,
        layout=layout,
        kv_layout=kv_layout,
        scale_block=scale_block,
        out_dtype=_out_dtype(out_dtype, arrays),
        return_lse=return_lse,
        batch_invariant=invariant,
        backend=backend,
        implementation=implementation,
    )
    return _filled(arrays, {"out": out, "lse": lse})


def _product(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Made:
    batched, a_transposed, b_transposed, alpha, beta, out_dtype, precision = options
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
        a_transposed=a_transposed,
        b_transposed=b_transposed,
        alpha=alpha,
        out_dtype=_out_dtype(out_dtype, arrays),
        precision=precision,
        backend=backend,
        implementation=implementation,
    )
    return _filled(arrays, {"out": out})


def _merged(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Made:
    out, lse = merge.MERGE_STATES(
        arrays["outs"],
        arrays["lses"],
        out_dtype=_out_dtype(options[0], arrays),
        backend=backend,
        implementation=implementation,
    )
    return _filled(arrays, {"out": out, "lse": lse})


def _qkv(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Made:
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
        made = projection.FUSED_QKV_PAGED(
            *_ordered(
                {**arrays, "k_pages": arrays["k"], "v_pages": arrays["v"]},
                ("input", "weight", "k_pages", "v_pages", "block_table", *projection.QKV[2:]),
            ),
            kv_layout=kv_layout,
            **given,
        )
        results = {"q": made}
    else:
        made = projection.FUSED_QKV(*_ordered(arrays, projection.QKV), **given)
        results = dict(zip(("q", "k", "v"), made, strict=True))
    for name, x in results.items():
        if name in arrays:
            arrays[name].copy_(x)
    return results


def _output(arrays: Arrays, options: Any, backend: Any, implementation: Any) -> Made:
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
    attention_ops.DENSE_WORK: _dense,
    attention_ops.PACKED_WORK: _varlen,
    attention_ops.PAGED_WORK: _paged,
    gemm_ops.gemm_work: _product,
    merge_ops.merge_work: _merged,
    projection_ops.qkv_work: _qkv,
    projection_ops.output_work: _output,
}

"""Attention on arrays."""

from __future__ import annotations

from typing import Any

from kernelseam.descriptors import Attention
from kernelseam.descriptors.validation import finite, flag
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.ops.calling import fresh, handed_back, rank, run, views

_AXES = {"bhsd": ("B", "H", "S", "D"), "bshd": ("B", "S", "H", "D")}


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bhsd",
    out: Any = None,
    return_lse: bool = False,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> Any:
    """softmax(scale·q·kᵀ)·v over the last two axes of q [B, H, S_q, D], k [B, H_kv, S_k, D], v [B, H_kv, S_k, D_v].

    ``layout`` "bshd": the head after the row, in all of them and in the result. Any strides with a contiguous last
    axis; nothing is copied. Arrays of float16, bfloat16, float32 or float64, all of one dtype, from NumPy, torch or
    any library with DLPack, all on one device. H is a multiple of H_kv: query head h uses KV head h // (H / H_kv).

    ``causal``: query i sees key j iff j ≤ i + (S_k − S_q). A query that sees no key gives zeros (and −inf in the LSE).
    ``scale`` defaults to 1/√D. ``out``: an array for the result, else a new one of q's kind. ``return_lse``: also
    return ln Σexp(scale·q·k) over the visible keys, [B, H, S_q], float32. ``backend`` must be that of the arrays'
    device; ``implementation`` names one of its ways; ``stream`` is an int, an object with ``__cuda_stream__``, or None
    for the array library's current one; results of a call on another stream must be kept until that stream has passed.

    Returns the result [B, H, S_q, D_v] (``out`` where it was given), or (result, lse).
    Raises InvalidValue for what does not fit together, Unsupported with each implementation's reason.
    """
    if not isinstance(layout, str) or layout not in _AXES:
        raise InvalidValue("layout", layout, f"must be one of {', '.join(_AXES)}", "Name the order of the axes")
    causal, return_lse = flag("causal", causal), flag("return_lse", return_lse)
    scale = None if scale is None else finite("scale", scale)
    infos = views(backend, q=q, k=k, v=v, out=out)
    axes = _AXES[layout]
    for name, info in infos.items():
        rank(name, info, axes)
    first = infos["q"]
    shape = first.shape
    if out is None:
        infos["out"] = fresh("out", (*shape[:3], infos["v"].shape[3]), first.dtype, first)
    if return_lse:
        heads, rows = axes.index("H"), axes.index("S")
        infos["lse"] = fresh("lse", (shape[0], shape[heads], shape[rows]), DType.float32, first)
    run(
        infos, ("attention", causal, scale, layout),
        lambda: Attention.from_arrays(**infos, causal=causal, scale=scale, layout=layout), implementation, stream,
    )
    result = handed_back(infos["out"], first, stream) if out is None else out
    return (result, handed_back(infos["lse"], first, stream)) if return_lse else result

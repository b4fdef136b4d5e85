"""Kernel definition of fp8.h: keys, values and queries in 8-bit floats, and their scales."""

from __future__ import annotations

from kernelseam.contract import ArchRow
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.kernels.attention.arguments import STRIDES
from kernelseam.kernels.config import Constants
from kernelseam.kernels.elements import (
    DEVICE_TYPE,
    INT32,
    divider_parameter,
    divider_values,
    refuse_stored,
)
from kernelseam.kernels.signature import Signature, Structure

_SCALES = {None: 0, "heads": 1, "blocks": 2}
"""As fp8.h counts them."""
_NAMES = ("k_scales", "v_scales")
SCALE_AXES = (*STRIDES[:2], "block")


def scales_structure(name: str) -> Structure:
    """Scales: an address, and its strides."""
    return Structure(
        (
            (name, "pointer"),
            *((f"{name}_{axis}", "i64" if axis == "batch" else "i32") for axis in SCALE_AXES),
        ),
        ("base", *SCALE_AXES),
    )


KV_SCALES = Structure(
    (
        *((name[0], scales_structure(name)) for name in _NAMES),
        ("block", divider_parameter("scale_block")),
    )
)
_QUERY_BLOCK = "q_scale_block"
QUERY_SCALES = Structure(
    (*scales_structure("q_scales").members, ("q_scale_rows", divider_parameter(_QUERY_BLOCK))),
    ("base", *SCALE_AXES, "rows"),
)


def with_scales(signature: Signature, spec: AttentionSpec) -> Signature:
    """A kernel's signature, with the scales where a spec has them."""
    if not spec.kv_scales:
        return signature
    more = (("kv_scales", KV_SCALES), *((("queries", QUERY_SCALES),) if spec.q_scales else ()))
    return Signature((*signature.parameters, *more), flat=signature.flat)


def fp8_constants(spec: AttentionSpec) -> Constants:
    return {
        "KV": DEVICE_TYPE[spec.kv],
        "KV_SCALES": _SCALES[spec.kv_scales],
        "Q": DEVICE_TYPE[spec.q],
        "Q_SCALES": _SCALES[spec.q_scales],
    }


def fp8_values(p: AttentionProblem) -> dict[str, int | float]:
    """Strides of scales, and how many keys share one."""
    if not p.spec.kv_scales:
        return {}
    walks = dict(zip(_NAMES, (p.k_scale_strides, p.v_scale_strides), strict=True))
    values = divider_values("scale_block", max(p.scale_block, 1))
    if p.spec.q_scales:
        walks["q_scales"] = p.q_scale_strides
        values |= divider_values(_QUERY_BLOCK, max(p.q_scale_block, 1))
    strides = {
        f"{name}_{axis}": stride
        for name, walk in walks.items()
        for axis, stride in zip(SCALE_AXES, walk, strict=True)
    }
    return {**strides, **values}


def query_bytes(spec: AttentionSpec, widened: bool) -> int:
    """Bytes of an element of q in shared memory, where a platform converts (``widened``) what it
    stores."""
    return spec.dtype.itemsize if widened else spec.q.itemsize


def refuse_fp8(p: AttentionProblem, row: ArchRow) -> str | None:
    """Why a kernel does not take keys and values as they are stored on an arch."""
    if (stored := p.spec.dtype_kv) is None:
        return None
    who = "k and v" if p.spec.dtype_q is None else "q, k and v"
    if reason := refuse_stored(who, stored, row):
        return reason
    for name, strides in (
        ("q_scales", p.q_scale_strides),
        ("k_scales", p.k_scale_strides),
        ("v_scales", p.v_scale_strides),
    ):
        for axis, stride in zip(SCALE_AXES[1:], strides[1:], strict=True):
            if stride >= INT32:
                return f"stride_{name}_{axis} = {stride}: it takes less than 2^31"
    if p.spec.kv_scales == "blocks" and p.k_scale_strides != p.v_scale_strides:
        return (
            f"k_scales has strides {p.k_scale_strides} and v_scales {p.v_scale_strides}: of blocks "
            "it takes the same"
        )
    for name, block in (("scale_block", p.scale_block), ("q_scale_block", p.q_scale_block)):
        if block >= INT32:
            return f"{name} = {block}: it takes less than 2^31"
    if p.spec.q_scales == "blocks" and p.spec.q_view == "packed" and p.total_q >= INT32:
        return f"total_q = {p.total_q}: with scales of blocks it takes less than 2^31"
    if p.spec.kv_scales == "blocks" and p.spec.kv_view == "packed" and p.total_k >= INT32:
        return f"total_k = {p.total_k}: with scales of blocks it takes less than 2^31"
    return None

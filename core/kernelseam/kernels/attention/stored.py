"""Kernel definition of stored.h: keys and values of 8 bits, and their scales."""

from __future__ import annotations

from kernelseam.contract import ArchRow
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.kernels.attention.arguments import STRIDES
from kernelseam.kernels.elements import DEVICE_TYPE, INT32, divider_parameter, divider_values
from kernelseam.kernels.signature import Signature, Structure

_SCALES = {None: 0, "heads": 1, "blocks": 2}
"""As stored.h counts them."""
_NAMES = ("k_scales", "v_scales")
_AXES = (*STRIDES[:2], "block")


def _scales(name: str) -> Structure:
    """Scales: an address, and its strides."""
    return Structure(
        (
            (name, "pointer"),
            *((f"{name}_{axis}", "i64" if axis == "batch" else "i32") for axis in _AXES),
        ),
        ("base", *_AXES),
    )


STORED_SCALES = Structure(
    (
        *((name[0], _scales(name)) for name in _NAMES),
        ("block", divider_parameter("scale_block")),
    )
)


def with_scales(signature: Signature, spec: AttentionSpec) -> Signature:
    """A kernel's signature, with the scales where a spec has them."""
    if not spec.kv_scales:
        return signature
    return Signature((*signature.parameters, ("stored", STORED_SCALES)), flat=signature.flat)


def stored_defines(spec: AttentionSpec) -> dict[str, object]:
    """The constants."""
    return {"KV": DEVICE_TYPE[spec.kv], "KV_SCALES": _SCALES[spec.kv_scales]}


def stored_values(p: AttentionProblem) -> dict[str, int | float]:
    """Strides of scales, and how many keys share one."""
    if not p.spec.kv_scales:
        return {}
    strides = {
        f"{name}_{axis}": stride
        for name, walk in zip(_NAMES, (p.k_scale_strides, p.v_scale_strides), strict=True)
        for axis, stride in zip(_AXES, walk, strict=True)
    }
    return {**strides, **divider_values("scale_block", max(p.scale_block, 1))}


def stored_pointers(spec: AttentionSpec) -> tuple[str, ...]:
    """Pointer parameters, named as their operands."""
    return _NAMES if spec.kv_scales else ()


def refuse_stored(p: AttentionProblem, row: ArchRow) -> str | None:
    """Why a kernel does not take keys and values as they are stored on an arch."""
    if (stored := p.spec.dtype_kv) is None:
        return None
    if stored not in row.stored_dtypes:
        known = ", ".join(sorted(map(str, row.stored_dtypes)))
        if known:
            return f"k and v are {stored}: {row.arch} converts {known}"
        return f"k and v are {stored}: {row.arch} has no instructions that convert it"
    for name, strides in (("k_scales", p.k_scale_strides), ("v_scales", p.v_scale_strides)):
        for axis, stride in zip(_AXES[1:], strides[1:], strict=True):
            if stride >= INT32:
                return f"stride_{name}_{axis} = {stride}: it takes less than 2^31"
    if p.spec.kv_scales == "blocks" and p.k_scale_strides != p.v_scale_strides:
        return (
            f"k_scales has strides {p.k_scale_strides} and v_scales {p.v_scale_strides}: of blocks "
            "it takes the same"
        )
    if p.scale_block >= INT32:
        return f"scale_block = {p.scale_block}: it takes less than 2^31"
    if p.spec.kv_scales == "blocks" and p.spec.kv_view == "packed" and p.total_k >= INT32:
        return f"total_k = {p.total_k}: with scales of blocks it takes less than 2^31"
    return None

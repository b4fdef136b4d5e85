"""For which specs the tests compile cuda_kernels/sm90/attention/forward.h, and the table of kernel
facts has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kernelseam.descriptors.attention.problem import AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.kernels.covered import UNIFORM, Covered
from kernelseam.kernels.definition import KernelDefinition

from kernelseam_cuda.sm90.attention_blocks import VISIBLE_BLOCKS

COVERED_DIMS = {
    (8, 24): False,
    (40, 40): True,
    (64, 128): False,
    (80, 72): True,
    (112, 112): False,
    (160, 160): True,
    (136, 184): False,
    (232, 200): False,
}
"""Of the head dims that do not fill their tiles, those that are compiled by checks: of every run,
or of some."""


def covering(kernel: KernelDefinition, widths: tuple[tuple[int, int], ...]) -> Iterator[Covered]:
    """Every dtype and width of tiles with and without a causal mask; head dims that do not fill
    them; every option; packed sequences."""
    f16, bf16 = DType.float16, DType.bfloat16
    for both in widths:
        yield Covered(kernel, AttentionSpec(bf16, *both, True, True))
        yield Covered(kernel, AttentionSpec(f16, *both))
    for both, often in COVERED_DIMS.items():
        part = AttentionSpec(bf16, *both, lse=True)
        yield Covered(
            kernel, replace(part, causal=True, q_view="packed", kv_view="packed"), often=False
        )
        yield Covered(kernel, replace(part, softcap=True), often=often)
    plain = AttentionSpec(bf16, 128, 128, lse=True)
    packed = replace(plain, q_view="packed", kv_view="packed")
    yield Covered(kernel, replace(packed, causal=True))
    yield Covered(kernel, replace(plain, window=True, **UNIFORM, lengths=True))
    yield Covered(
        kernel,
        AttentionSpec(f16, 64, 64, window=True, softcap=True, q_view="packed", kv_view="packed"),
    )
    yield Covered(kernel, replace(plain, causal=True), grouped=True, often=False)
    for both in widths:
        part = AttentionSpec(bf16, *both, lse=True, dtype_out=DType.float32)
        yield Covered(kernel, part, often=both == (64, 64))
        whole = both == (128, 128)
        yield Covered(kernel, replace(part, causal=True), grouped=True, often=whole)
    parts = replace(plain, dtype_out=DType.float32)
    parts = replace(parts, window=True, **UNIFORM)
    yield Covered(kernel, parts, often=False)
    yield Covered(kernel, replace(parts, q_view="packed", kv_view="packed"), often=False)
    yield Covered(kernel, replace(parts, kv_view="paged", lengths=True), True, often=False)
    yield Covered(kernel, replace(plain, window=True), often=False)
    yield Covered(kernel, replace(packed, window=True), often=False)
    paged = replace(plain, kv_view="paged", lengths=True)
    yield Covered(kernel, replace(paged, causal=True, q_view="packed"))
    yield Covered(kernel, replace(paged, causal=True, q_view="packed"), grouped=True, often=False)
    yield Covered(kernel, replace(paged, window=True, **UNIFORM), often=False)
    for both in widths:
        spec = AttentionSpec(f16, *both, True, True, q_view="packed", kv_view="paged")
        yield Covered(kernel, replace(spec, lengths=True), often=both == (96, 96))
    yield Covered(kernel, replace(plain, **UNIFORM), often=False)
    yield Covered(kernel, replace(plain, lengths=True, causal=True), often=False)
    yield Covered(
        kernel, AttentionSpec(bf16, 256, 256, window=True, softcap=True, lse=True), often=False
    )
    for more in _BY_ELEMENT:
        yield Covered(kernel, replace(plain, **more))
    narrow = replace(plain, head_dim=64, value_dim=64)
    for more in _BY_ELEMENT[:3]:
        yield Covered(kernel, replace(narrow, **more), often=False)
    for both, more in _BY_ELEMENT_ELSEWHERE:
        spec = replace(plain, head_dim=both[0], value_dim=both[1], **more)
        yield Covered(kernel, spec, often=False)
    yield Covered(kernel, replace(paged, expression=MASKED), grouped=True, often=False)
    for more in ({"mask": True}, {"expression": SLOPED}):
        yield Covered(VISIBLE_BLOCKS, replace(plain, **more))


SLOPED = (
    '0 coordinate FLOAT "score"; 1 coordinate INT32 "q_idx"; 2 coordinate INT32 "kv_idx"; '
    "3 sub INT32 1 2; 4 cast FLOAT 3; 5 constant FLOAT 0.5; 6 mul FLOAT 4 5; 7 sub FLOAT 0 6; "
    "8 le BOOLEAN 2 1; score 7; visible 8"
)
"""score - 0.5 * (q_idx - kv_idx), where q_idx >= kv_idx."""
MASKED = (
    '0 coordinate INT32 "kv_idx"; 1 coordinate FLOAT "score"; 2 constant INT32 9; '
    "3 lt BOOLEAN 0 2; score 1; visible 3"
)
"""kv_idx < 9: rows of several heads may share a tile."""
_BY_ELEMENT: tuple[dict[str, Any], ...] = (
    {"bias": DType.bfloat16},
    {"bias": DType.float32, "causal": True},
    {"mask": True},
    {"mask": True, "bias": DType.bfloat16},
    {"alibi": True},
    {"alibi": True, "causal": True},
    {"causal": True, "prefix": True},
    {"expression": SLOPED},
)
"""Scores and masks by element, and a prefix."""
_PACKED: dict[str, Any] = {"q_view": "packed", "kv_view": "packed"}
_BY_ELEMENT_ELSEWHERE: tuple[tuple[tuple[int, int], dict[str, Any]], ...] = (
    ((128, 128), {"mask": True, "bias": DType.float32}),
    ((128, 128), {"mask": True, "causal": True, "prefix": True}),
    ((96, 96), {"mask": True}),
    ((96, 96), {"expression": SLOPED, **_PACKED}),
    ((128, 128), {"mask": True, "lengths": True}),
    ((128, 128), {"bias": DType.bfloat16, "causal": True, **_PACKED}),
    ((128, 128), {"alibi": True, "causal": True, "kv_view": "paged", "lengths": True}),
    ((192, 128), {"expression": SLOPED, "kv_view": "paged", "lengths": True}),
    ((128, 128), {"mask": True, "softcap": True}),
    ((256, 256), {"mask": True}),
    ((256, 256), {"alibi": True, "causal": True}),
)
"""The same of other head dims and rows, and masks beside others."""

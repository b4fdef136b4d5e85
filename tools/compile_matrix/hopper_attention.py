"""Specs of Hopper's attention kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from kernelseam.descriptors.attention.backward_problem import AttentionBwdSpec
from kernelseam.descriptors.attention.problem import AttentionSpec
from kernelseam.dtypes import DType
from kernelseam_cuda.sm90 import (
    HopperAttention,
    HopperAttentionBwd,
    HopperE4m3Attention,
    HopperLatent,
)
from kernelseam_cuda.sm90.attention_blocks import VISIBLE_BLOCKS, has_mask_mod
from kernelseam_cuda.sm90.attention_bwd_rows import (
    PART_SUMS,
    QUERY_GRADIENT,
    ROW_VALUES,
    WIDTHS,
    tiles_of,
)
from kernelseam_cuda.sm90.attention_query_lists import QUERY_LISTS
from kernelseam_cuda.sm90.attention_score_gradient import SCORE_GRADIENT
from kernelseam_cuda.sm90.latent import DIMS, MERGE, ROW_SCALE_BLOCK

from compile_matrix.covered import UNIFORM, Covered

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


def attention(kernel: Any) -> Iterator[Covered]:
    """Every dtype and width of tiles with and without a causal mask; head dims that do not fill
    them; every option; packed sequences."""
    f16, bf16 = DType.float16, DType.bfloat16
    widths: tuple[tuple[int, int], ...] = kernel.widths
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


def attention_e4m3(kernel: Any) -> Iterator[Covered]:
    """Every head dim with and without a causal mask and scales; every option; packed
    sequences; pages."""
    e4m3, bf16 = DType.float8_e4m3fn, DType.bfloat16
    for dim, _ in kernel.widths:
        plain = AttentionSpec(DType.float16, dim, dim, dtype_q=e4m3, dtype_kv=e4m3)
        yield Covered(kernel, plain)
        scaled = replace(plain, dtype=bf16, lse=True, q_scales="heads", kv_scales="heads")
        yield Covered(kernel, replace(scaled, causal=True))
        yield Covered(kernel, replace(scaled, softcap=True, lengths=True), often=dim == 64)
        if dim == 128:
            yield Covered(kernel, replace(scaled, window=True, sinks=True))
            packed = replace(scaled, q_view="packed", kv_view="packed")
            yield Covered(kernel, replace(packed, causal=True), often=False)
        paged = replace(scaled, causal=True, kv_view="paged", lengths=True)
        yield Covered(kernel, replace(paged, q_view="packed"), often=dim == 256)


def latent(kernel: Any) -> Iterator[Covered]:
    """Both dtypes; pages, lengths; with and without a causal mask and an LSE."""
    for dims in DIMS:
        paged = AttentionSpec(
            DType.bfloat16,
            *dims,
            causal=True,
            lse=True,
            kv_view="paged",
            lengths=True,
            latent=True,
        )
        strided = replace(paged, dtype=DType.float16, kv_view="strided", lse=False)
        for spec in (
            paged,
            strided,
            replace(paged, q_view="packed"),
            replace(strided, q_view="packed", kv_view="packed", lengths=False),
            replace(paged, causal=False),
            replace(paged, dtype_kv=DType.float8_e4m3fn, row_scale_block=ROW_SCALE_BLOCK),
        ):
            yield Covered(kernel, spec)
            yield Covered(MERGE, spec)


def attention_bwd(kernel: Any) -> Iterator[Covered]:
    """Every dtype and width of tiles with and without a causal mask, in order and in any; head
    dims that do not fill them; every option; packed sequences; and the two small kernels."""
    f16, bf16 = DType.float16, DType.bfloat16
    for dims, often in COVERED_DIMS.items():
        plain = AttentionSpec(f16, *dims, lse=True)
        packed = replace(plain, dtype=bf16, causal=True, q_view="packed", kv_view="packed")
        main = kernel.main(tiles_of(plain)[0])
        yield Covered(main, AttentionBwdSpec(packed), often=often)
        yield Covered(main, AttentionBwdSpec(plain, deterministic=False), often=False)
        for small in (ROW_VALUES, QUERY_GRADIENT):
            yield Covered(small, AttentionBwdSpec(packed), often=False)
    for dims in WIDTHS:
        main = kernel.main(tiles_of(AttentionSpec(f16, *dims, lse=True))[0])
        causal = AttentionSpec(bf16, *dims, True, True)
        yield Covered(main, AttentionBwdSpec(causal))
        yield Covered(
            main, AttentionBwdSpec(AttentionSpec(f16, *dims, lse=True), deterministic=False)
        )
        often = dims in ((64, 64), (128, 128), (256, 256))
        yield Covered(main, AttentionBwdSpec(AttentionSpec(bf16, *dims, lse=True)), often=often)
        yield Covered(main, AttentionBwdSpec(causal, deterministic=False), often=False)
        every = replace(causal, causal=False, window=True, softcap=True, lengths=True)
        yield Covered(main, AttentionBwdSpec(every))
        packed = replace(causal, q_view="packed", kv_view="packed")
        yield Covered(main, AttentionBwdSpec(packed), often=False)
        window = replace(packed, dtype=f16, causal=False, window=True)
        yield Covered(main, AttentionBwdSpec(window, deterministic=False))
        for small in (ROW_VALUES, QUERY_GRADIENT):
            yield Covered(small, AttentionBwdSpec(AttentionSpec(f16, *dims, lse=True)))
            yield Covered(small, AttentionBwdSpec(packed))
        yield Covered(PART_SUMS, AttentionBwdSpec(causal))
    for elements, gradient, often in (
        (AttentionSpec(bf16, 128, 128, lse=True, bias=bf16), True, True),
        (AttentionSpec(f16, 64, 64, True, True, bias=f16), True, False),
        (AttentionSpec(bf16, 128, 128, True, True, prefix=True, bias=DType.float32), True, False),
        (AttentionSpec(bf16, 128, 128, lse=True, mask=True), False, True),
        (AttentionSpec(f16, 64, 64, lse=True, mask=True, bias=f16), True, False),
        (AttentionSpec(bf16, 128, 128, lse=True, alibi=True, bias=bf16), True, False),
        (AttentionSpec(f16, 64, 64, lse=True, window=True, bias=DType.float32), True, False),
        (
            AttentionSpec(
                bf16, 128, 128, True, True, alibi=True, q_view="packed", kv_view="packed"
            ),
            False,
            False,
        ),
        (AttentionSpec(bf16, 128, 128, True, True, expression=MASKED), False, True),
        (AttentionSpec(bf16, 128, 128, True, True, prefix=True), False, False),
        (AttentionSpec(f16, 64, 64, lse=True, expression=SLOPED), False, False),
    ):
        of_bias = AttentionBwdSpec(elements, bias_gradient=gradient)
        yield Covered(kernel, of_bias, often=often)
        if gradient:
            yield Covered(SCORE_GRADIENT, of_bias, often=often)
        if has_mask_mod(elements):
            yield Covered(QUERY_LISTS, of_bias, often=often)


SPECS: dict[type, Callable[[Any], Iterator[Covered]]] = {
    HopperAttention: attention,
    HopperE4m3Attention: attention_e4m3,
    HopperAttentionBwd: attention_bwd,
    HopperLatent: latent,
}

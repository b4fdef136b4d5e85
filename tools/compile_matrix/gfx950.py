"""Specs of gfx950's attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kernelseam.descriptors.attention.problem import AttentionSpec
from kernelseam.dtypes import DType
from kernelseam_rocm.gfx950 import DIMS

from compile_matrix.covered import Covered


def attention(kernel: Any) -> Iterator[Covered]:
    """Every dtype and head dim, with and without a causal mask; packed sequences; lengths."""
    f16, bf16 = DType.float16, DType.bfloat16
    for dim in DIMS:
        yield Covered(kernel, AttentionSpec(bf16, dim, dim))
        yield Covered(kernel, AttentionSpec(f16, dim, dim, True, True))
        yield Covered(kernel, AttentionSpec(bf16, dim, dim, True, True), often=False)
        yield Covered(kernel, AttentionSpec(f16, dim, dim), often=False)
    plain = AttentionSpec(bf16, 128, 128, lse=True)
    packed = replace(plain, q_view="packed", kv_view="packed")
    yield Covered(kernel, replace(packed, causal=True))
    yield Covered(kernel, replace(plain, causal=True, lengths=True), often=False)
    for dim in DIMS:
        paged = replace(AttentionSpec(bf16, dim, dim), q_view="packed", kv_view="paged")
        yield Covered(kernel, replace(paged, causal=True, lengths=True))
        yield Covered(kernel, AttentionSpec(bf16, dim, dim, window=True))
        yield Covered(kernel, replace(paged, window=True, lengths=True), often=False)

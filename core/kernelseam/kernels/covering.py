"""Specs that between them touch every way through the shared kernels: what is compiled for every arch in tests."""

from __future__ import annotations

from itertools import product

from kernelseam.descriptors.attention_problem import AttentionSpec
from kernelseam.descriptors.gemm_problem import GemmSpec
from kernelseam.dtypes import DType


def covering_specs() -> tuple[GemmSpec | AttentionSpec, ...]:
    """GEMM: every dtype with every transpose case, pointer lists, narrow rows, float32 results.

    Attention: every dtype with head dims from 32 to 256, different ones for keys and values, odd ones, causal or not,
    with LSE or not.
    """
    f16, bf16, f32, f64 = DType.float16, DType.bfloat16, DType.float32, DType.float64
    specs: list[GemmSpec | AttentionSpec] = []
    for dtype, a, b in product((f16, bf16, f32, f64), (False, True), (False, True)):
        specs.append(GemmSpec(dtype, dtype, dtype.accumulator, a, b))
    for dtype in (f16, bf16):
        specs.append(GemmSpec(dtype, f32, f32, False, True))
        specs.append(GemmSpec(dtype, dtype, f32, False, False, "pointers"))
        specs.append(GemmSpec(dtype, dtype, f32, False, True, "strided", 2, 2, 2))
    specs.append(GemmSpec(f32, f32, f32, True, False, "pointers", 4, 4, 4))
    specs.append(GemmSpec(f64, f64, f64, False, True, "strided", 8, 8, 8))
    for dtype, (dim, value_dim) in product(
        (f16, bf16), ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
    ):
        causal = dtype is bf16
        specs.append(AttentionSpec(dtype, dim, value_dim, causal, not causal))
    specs += [
        AttentionSpec(bf16, 64, 64, False), AttentionSpec(bf16, 128, 128, False),
        AttentionSpec(bf16, 128, 128, True, True),
        AttentionSpec(f16, 40, 72, True, True, 2), AttentionSpec(bf16, 80, 80, False, True, 16),
        AttentionSpec(f16, 128, 128, True, True, 2), AttentionSpec(f16, 250, 251, False, False, 2),
        AttentionSpec(f32, 32, 32, True, True), AttentionSpec(f32, 64, 64, False, True),
        AttentionSpec(f32, 128, 128, True, False), AttentionSpec(f32, 256, 256, True, True),
        AttentionSpec(f32, 50, 30, False, False, 4),
    ]
    return tuple(specs)

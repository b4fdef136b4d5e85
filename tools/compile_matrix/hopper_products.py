"""Specs of Hopper's products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from kernelseam import epilogues
from kernelseam.descriptors.gemm.grouped_pointers_problem import GroupedGemmPointersSpec
from kernelseam.descriptors.gemm.grouped_problem import INDICES, GroupedGemmSpec
from kernelseam.descriptors.gemm.problem import GemmSpec, HeadsSpec
from kernelseam.dtypes import DType
from kernelseam.expressions.epilogues import epilogue_text
from kernelseam_cuda.sm90 import (
    HEADS,
    HopperGemm,
    HopperGroupedGemm,
    HopperListedGemm,
    HopperProjection,
    HopperTf32Gemm,
)
from kernelseam_cuda.sm90.grouped_lists import LIST_MAPS

from compile_matrix.covered import Covered


def gemm(kernel: Any) -> Iterator[Covered]:
    """Both dtypes, every transposition, view, option and kind of sum; and whether every run of the
    tests compiles it."""
    f16, bf16, f32 = DType.float16, DType.bfloat16, DType.float32
    plain = GemmSpec(bf16, bf16, f32)
    added: dict[str, Any] = {"bias": bf16, "residual": bf16}
    summed = replace(plain, summed=True)
    joined = replace(plain, a_transposed=True, summed=True, row_sums=bf16)
    sums = GemmSpec(f16, f16, f32, a_transposed=True, segmented=True, row_sums=f16)
    e4m3 = DType.float8_e4m3fn
    stored = GemmSpec(e4m3, bf16, f32, b_transposed=True)
    by_row: list[epilogues.One] = ["silu", epilogues.quantized(np.ones(2, np.float32))]
    deep = replace(stored, scales=True, scale_block=(1, 128, 128))
    single = GemmSpec(f32, f32, f32, b_transposed=True, precision="tf32")
    written = replace(plain, bias=bf16, preactivation=True)
    loaded: list[epilogues.One] = ["gelu", epilogues.residual(np.zeros((1, 1), np.float16))]
    neighbours = epilogues.gated(
        lambda gate, up, m, n, batch: epilogues.gelu(gate) * up, interleaved=True
    )
    number = np.empty((1, 1), np.float32)
    sums_of: list[epilogues.One] = [
        epilogues.row_sums(number[0], lambda acc, m, n, batch: acc * acc),
        epilogues.column_sums(number[0]),
        epilogues.amax(number, block=(1, 64)),
    ]
    often = (
        replace(plain, b_transposed=True, **added),
        GemmSpec(f16, f16, f32, a_transposed=True, view="pointers"),
        replace(summed, b_transposed=True, **added),
        sums,
        GemmSpec(bf16, f32, f32, bias=f32, residual=f32),
        replace(stored, scales=True, **added),
        deep,
        single,
        with_epilogue(loaded, replace(written, b_transposed=True, residual=bf16)),
        with_epilogue(["gelu", *sums_of], replace(written, b_transposed=True)),
        with_epilogue(by_row, replace(plain, dtype_c=e4m3, b_transposed=True)),
    )
    others = (
        replace(summed, segmented=True),
        replace(joined, segmented=True, joined="a"),
        replace(joined, joined="b"),
        replace(plain, segmented=True, joined="k"),
        replace(sums, summed=True, segmented=False, row_sums=f32),
        GemmSpec(f16, f32, f32, b_transposed=True, view="pointers"),
        plain,
        GemmSpec(f16, f16, f32, b_transposed=True),
        replace(plain, a_transposed=True, b_transposed=True, bias=f32),
        replace(stored, scales=True, view="pointers"),
        replace(deep, **added),
        replace(stored, dtype_c=f32, view="pointers"),
        replace(stored, dtype_c=f16, summed=True),
        replace(single, view="pointers", bias=f32, residual=f32),
        replace(plain, view="pointers", **added),
        with_epilogue("silu", replace(plain, b_transposed=True, residual=bf16)),
        with_epilogue("swiglu", replace(plain, b_transposed=True, bias=bf16)),
        with_epilogue("swiglu", replace(plain, b_transposed=True, preactivation=True)),
        with_epilogue("swiglu", written),
        with_epilogue("swiglu", replace(written, b_transposed=True)),
        with_epilogue(neighbours, replace(plain, dtype_c=f32, b_transposed=True)),
        with_epilogue([neighbours, *sums_of[:2]], replace(plain, b_transposed=True)),
        with_epilogue("gelu_tanh", GemmSpec(f16, f16, f32, view="pointers", preactivation=True)),
        with_epilogue("silu", replace(summed, a_transposed=True)),
        with_epilogue("swiglu", replace(plain, dtype_c=e4m3, b_transposed=True)),
        with_epilogue(neighbours, replace(plain, dtype_c=e4m3)),
        replace(plain, dtype_c=e4m3, bias=f32),
        replace(stored, dtype_c=e4m3, scales=True),
        replace(deep, dtype_c=e4m3),
    )
    yield from (Covered(kernel, spec) for spec in often)
    yield from (Covered(kernel, spec, often=False) for spec in others)


def with_epilogue(epilogue: epilogues.Epilogue, spec: GemmSpec) -> GemmSpec:
    structure = epilogues.epilogue_expression(epilogue).structure
    return replace(spec, epilogue=epilogue_text(structure))


def grouped(kernel: Any) -> Iterator[Covered]:
    """Every axis, every kind of factor."""
    f16, bf16, f32 = DType.float16, DType.bfloat16, DType.float32

    def one(
        along: str, product: GemmSpec, often: bool = False, indices: tuple[str, ...] = ()
    ) -> Covered:
        return Covered(kernel, GroupedGemmSpec(along, product, indices), often=often)

    plain = GemmSpec(bf16, bf16, f32)
    yield one("m", plain, True)
    yield one("m", GemmSpec(f16, f32, f32, b_transposed=True))
    yield one("n", plain, True)
    yield one("n", GemmSpec(f16, f32, f32, b_transposed=True))
    yield one("k", replace(plain, a_transposed=True), True)
    yield one("k", GemmSpec(f16, f32, f32, a_transposed=True))
    yield one("m", GemmSpec(f32, f32, f32, b_transposed=True, precision="tf32"))
    stored = GemmSpec(DType.float8_e4m3fn, bf16, f32, b_transposed=True, scales=True)
    yield one("m", stored, True)
    yield one("m", replace(stored, scale_block=(1, 128, 128)))
    yield one("m", plain, True, INDICES)
    yield one("m", GemmSpec(f16, f32, f32, b_transposed=True), indices=INDICES[:1])
    yield one("m", plain, indices=INDICES[1:])
    yield one("m", stored, indices=INDICES)
    gated, transposed = with_epilogue("swiglu", plain), replace(plain, b_transposed=True)
    both = replace(transposed, preactivation=True)
    yield one("m", gated, True)
    yield one("m", gated, indices=INDICES[:1])
    yield one("m", with_epilogue("swiglu", both))
    yield one("m", with_epilogue("swiglu", both), True, INDICES[:1])
    yield one("m", with_epilogue("silu", both))
    yield one("m", with_epilogue("gelu", transposed), indices=INDICES)


def listed(kernel: Any) -> Iterator[Covered]:
    f16, bf16, f32 = DType.float16, DType.bfloat16, DType.float32
    for product in (
        GemmSpec(bf16, bf16, f32, view="pointers"),
        GemmSpec(bf16, bf16, f32, b_transposed=True, view="pointers"),
        GemmSpec(f16, f32, f32, a_transposed=True, view="pointers"),
    ):
        spec = GroupedGemmPointersSpec(product)
        yield Covered(kernel, spec, often=not product.a_transposed)
    yield Covered(LIST_MAPS, spec)


def tf32(kernel: Any) -> Iterator[Covered]:
    """Both precisions, what is multiplied from where, every view and option."""
    f32 = DType.float32
    for precision in ("tf32", "tf32x3"):
        plain = GemmSpec(f32, f32, f32, precision=precision)
        more = replace(plain, b_transposed=True, bias=f32, residual=f32, vector_c=4, vector_r=4)
        yield Covered(kernel, plain)
        yield Covered(kernel, replace(more, view="pointers"))
        yield Covered(kernel, replace(plain, b_transposed=True), often=False)
        yield Covered(kernel, replace(plain, bias=f32, residual=f32), often=False)
        yield Covered(
            kernel, replace(plain, a_transposed=True, b_transposed=True, bias=f32), often=False
        )


def heads(kernel: Any) -> Iterator[Covered]:
    """Every rotation, positions and pages, with and without a bias."""
    f16, bf16, f32 = DType.float16, DType.bfloat16, DType.float32
    plain = GemmSpec(bf16, bf16, f32, b_transposed=True, heads=HeadsSpec())
    yield Covered(kernel, replace(plain, bias=bf16, heads=HeadsSpec("halves")))
    paged = HeadsSpec("halves", positions=True, paged=True)
    yield Covered(kernel, GemmSpec(f16, f16, f32, b_transposed=True, bias=f32, heads=paged))
    yield Covered(kernel, replace(plain, heads=HeadsSpec("pairs", positions=True)), often=False)
    yield Covered(kernel, replace(plain, bias=bf16), often=False)
    yield Covered(kernel, replace(plain, b_transposed=False), often=False)


def _projection(kernel: Any) -> Iterator[Covered]:
    """Those of q, k and v split into heads; other projections have no kernels of their own."""
    return heads(HEADS) if kernel.operation == "qkv_projection" else iter(())


SPECS: dict[type, Callable[[Any], Iterator[Covered]]] = {
    HopperGemm: gemm,
    HopperGroupedGemm: grouped,
    HopperListedGemm: listed,
    HopperTf32Gemm: tf32,
    HopperProjection: _projection,
}

"""Specs that together cover every code path of the shared kernels, for every arch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from kernelseam import epilogues
from kernelseam.descriptors.attention.backward_problem import AttentionBwdSpec
from kernelseam.descriptors.attention.merge_problem import MergeSpec
from kernelseam.descriptors.attention.problem import AttentionSpec
from kernelseam.descriptors.cache.problem import PagedCacheSpec
from kernelseam.descriptors.common.precision import PRECISIONS
from kernelseam.descriptors.gemm.grouped_pointers_problem import GroupedGemmPointersSpec
from kernelseam.descriptors.gemm.grouped_problem import INDICES, GroupedGemmSpec
from kernelseam.descriptors.gemm.problem import GemmSpec, HeadsSpec
from kernelseam.dtypes import E4M3, DType
from kernelseam.expressions.epilogues import epilogue_text
from kernelseam.kernels.attention.backward import AttentionBwdDefinition
from kernelseam.kernels.attention.decode import DECODE
from kernelseam.kernels.attention.forward import AttentionDefinition
from kernelseam.kernels.attention.merge import MERGE
from kernelseam.kernels.attention.prefix_tables import COMMON_PAGES, PREFIX_TABLES, TableSpec
from kernelseam.kernels.attention.query_gradient import QUERY_GRADIENT, QueryGradientSpec
from kernelseam.kernels.attention.row_kernels import (
    ROW_DELTA,
    SINK_GRADIENT,
    SUM_AXES,
    DeltaSpec,
    SinkSpec,
    SumSpec,
)
from kernelseam.kernels.cache.cache import CACHE
from kernelseam.kernels.gemm.bag_sums import BAG_SUMS, BagSumsSpec
from kernelseam.kernels.gemm.gemm import GemmDefinition
from kernelseam.kernels.gemm.gemv import GEMV
from kernelseam.kernels.gemm.grouped import GroupedGemmDefinition
from kernelseam.kernels.gemm.grouped_pointers import GroupedGemmPointersDefinition
from kernelseam.kernels.gemm.reductions import MANY, REDUCE, SOME, ReduceSpec

from compile_matrix.covered import UNIFORM, Covered

F16, BF16, F32, F64 = DType.float16, DType.bfloat16, DType.float32, DType.float64
GEMM, FORWARD, BACKWARD = GemmDefinition(), AttentionDefinition(), AttentionBwdDefinition()
GROUPED, LISTED = GroupedGemmDefinition(), GroupedGemmPointersDefinition()
EVERY: dict[str, Any] = dict.fromkeys(
    ("window", "prefix", "alibi", "softcap", "mask", "sinks"), True
)
"""All options that change scores, except a bias."""


def shared() -> Iterator[Covered]:
    """GEMM: every dtype with every transpose case, every precision that an arch has, pointer lists,
    narrow rows, float32 results, sums, bias and residual, heads; groups along each axis.

    Attention: every dtype with head dims from 32 to 576, different ones for keys and values, odd
    ones, causal or not, with LSE or not; every option alone or with those that models give it;
    every view; few queries over many keys. Its gradients: every dtype, head dims from 64 to 256,
    with and without options. And the small kernels beside them.
    """
    yield from _gemms()
    yield from _grouped()
    yield from _attentions()
    yield from _variants()
    yield from _gradients()
    yield from _small()
    yield from _decoding()
    yield from _few_rows()
    yield from _reductions()
    yield from _stored()


def _epilogues() -> Iterator[Covered]:
    """An activation; numbers and arrays that functions capture; pairs; what an epilogue is of; sums
    and maxima."""
    by_row, matrix = np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float16)
    captures: list[epilogues.One] = [epilogues.column_bias(by_row), "gelu", epilogues.softcap(1.0)]
    interleaved = epilogues.gated(
        lambda gate, up, m, n, batch: epilogues.gelu(gate) * up, interleaved=True
    )

    def spec(epilogue: epilogues.Epilogue, plain: GemmSpec) -> GemmSpec:
        structure = epilogues.epilogue_expression(epilogue).structure
        return replace(plain, epilogue=epilogue_text(structure))

    yield Covered(GEMM, spec(captures, GemmSpec(BF16, BF16, F32, b_transposed=True, bias=BF16)))
    of_pairs = GemmSpec(F16, F16, F32, b_transposed=True, preactivation=True)
    yield Covered(GEMM, spec("swiglu", of_pairs))
    yield Covered(GEMM, spec("swiglu", replace(of_pairs, b_transposed=False)), often=False)
    yield Covered(GEMM, spec([interleaved, epilogues.residual(matrix)], of_pairs), often=False)
    yield Covered(GEMM, spec("geglu_tanh", GemmSpec(F32, F32, F32)), often=False)
    reduced: list[epilogues.One] = [
        epilogues.column_sums(by_row[0]),
        epilogues.row_sums(by_row, lambda acc, m, n, batch: acc * acc),
        epilogues.amax(by_row[0]),
    ]
    yield Covered(GEMM, spec(["gelu", *reduced], GemmSpec(BF16, BF16, F32, b_transposed=True)))
    for gate in ("swiglu", interleaved):
        yield Covered(GEMM, spec([gate, *reduced[:2]], GemmSpec(F16, F16, F32)), often=False)
    yield Covered(GEMM, spec(reduced, GemmSpec(F32, F32, F32)), often=False)


def _gemms() -> Iterator[Covered]:
    transposed, dtypes = (False, True), (F16, BF16, F32, F64)
    specs = [
        GemmSpec(d, d, d.accumulator, a, b) for d, a, b in product(dtypes, transposed, transposed)
    ]
    for dtype in (F16, BF16):
        specs.append(GemmSpec(dtype, F32, F32, False, True))
        specs.append(GemmSpec(dtype, dtype, F32, False, False, "pointers"))
        specs.append(GemmSpec(dtype, dtype, F32, False, True, "strided", 2, 2, 2))
    specs.append(GemmSpec(F32, F32, F32, True, False, "pointers", 4, 4, 4))
    specs.append(GemmSpec(F64, F64, F64, False, True, "strided", 8, 8, 8))
    yield from (Covered(GEMM, s) for s in specs)
    # Bias and residual, sums of products, and the products of projections.
    yield Covered(
        GEMM, GemmSpec(F16, F32, F32, bias=F16, residual=F32, view="pointers", summed=True)
    )
    yield Covered(
        GEMM, GemmSpec(BF16, BF16, F32, b_transposed=True, bias=BF16, residual=BF16), often=False
    )
    yield Covered(GEMM, GemmSpec(F64, F64, F64, summed=True, bias=F64, residual=F64), often=False)
    yield from _epilogues()
    for precision in PRECISIONS:
        yield Covered(GEMM, GemmSpec(F32, F32, F32, precision=precision))
        yield Covered(GEMM, GemmSpec(F32, F32, F32, False, True, precision=precision), often=False)
        listed = GemmSpec(
            F32, F32, F32, True, True, "pointers", 4, 4, 4, summed=True, precision=precision
        )
        yield Covered(GEMM, listed, often=False)
        yield Covered(
            GEMM, GemmSpec(F32, F32, F32, True, bias=F32, residual=F32, precision=precision)
        )
    # Factors of 8 bits: of each arch the dtype that it multiplies.
    for stored in E4M3:
        yield Covered(GEMM, GemmSpec(stored, BF16, F32, b_transposed=True, scales=True, bias=BF16))
        yield Covered(GEMM, GemmSpec(stored, F32, F32, True, view="pointers", summed=True))
        deep = GemmSpec(stored, BF16, F32, b_transposed=True, scales=True)
        yield Covered(GEMM, replace(deep, scale_block=(1, 128, 128)), often=False)
        narrow = GemmSpec(stored, F16, F32, False, True, "strided", 1, 1, 2)
        yield Covered(GEMM, narrow, often=False)
    for dtype in (F16, F32):
        acc = dtype.accumulator
        half_split, interleaved = HeadsSpec("halves", True, True), HeadsSpec("pairs")
        yield Covered(
            GEMM, GemmSpec(dtype, dtype, acc, b_transposed=True, bias=dtype, heads=half_split)
        )
        narrow = GemmSpec(
            dtype, dtype, acc, b_transposed=True, vector_c=dtype.itemsize, heads=interleaved
        )
        yield Covered(GEMM, narrow, often=False)
        yield Covered(GEMM, GemmSpec(dtype, dtype, acc, summed=True, segmented=True))
        yield Covered(
            GEMM, GemmSpec(dtype, dtype, acc, True, summed=True, segmented=True, row_sums=dtype)
        )


def _grouped() -> Iterator[Covered]:
    def one(
        along: str, product: GemmSpec, often: bool = True, indices: tuple[str, ...] = ()
    ) -> Covered:
        return Covered(GROUPED, GroupedGemmSpec(along, product, indices), often=often)

    yield one("m", GemmSpec(BF16, BF16, F32))
    yield one("m", GemmSpec(F16, F32, F32, b_transposed=True), False)
    yield one("m", GemmSpec(BF16, BF16, F32, b_transposed=True), indices=INDICES)
    yield one("m", GemmSpec(F32, F32, F32), False, INDICES)
    yield one("m", GemmSpec(F32, F32, F32, True, True, "strided", 4))
    yield one("n", GemmSpec(BF16, BF16, F32, False, False, "strided", 16, 2, 2))
    yield one("k", GemmSpec(BF16, BF16, F32, a_transposed=True))
    yield one("k", GemmSpec(F32, F32, F32, False, True, "strided", 4, 4), False)
    for stored in E4M3:
        scaled = GemmSpec(stored, BF16, F32, b_transposed=True, scales=True)
        yield one("m", scaled, False)
        yield one("m", replace(scaled, scale_block=(1, 128, 128)), False)
    for listed, often in (
        (GemmSpec(BF16, BF16, F32, view="pointers"), True),
        (GemmSpec(BF16, F32, F32, False, True, "pointers", 2, 2, 4), False),
        (GemmSpec(F32, F32, F32, True, False, "pointers"), False),
    ):
        yield Covered(LISTED, GroupedGemmPointersSpec(listed), often=often)


def _attentions() -> Iterator[Covered]:
    dims = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
    specs = [
        AttentionSpec(d, *both, d is BF16, d is not BF16) for d, both in product((F16, BF16), dims)
    ]
    specs += [
        AttentionSpec(BF16, 64, 64, False),
        AttentionSpec(BF16, 128, 128, False),
        AttentionSpec(BF16, 128, 128, True, True),
        AttentionSpec(F16, 40, 72, True, True, 2),
        AttentionSpec(BF16, 80, 80, False, True, 16),
        AttentionSpec(F16, 128, 128, True, True, 2),
        AttentionSpec(F16, 250, 251, False, False, 2),
        AttentionSpec(F32, 32, 32, True, True),
        AttentionSpec(F32, 64, 64, False, True),
        AttentionSpec(F32, 128, 128, True, False),
        AttentionSpec(F32, 256, 256, True, True),
        AttentionSpec(F32, 50, 30, False, False, 4),
    ]
    yield from (Covered(FORWARD, s) for s in specs)
    for precision in PRECISIONS:
        for dim in (32, 64, 128, 256):
            spec = AttentionSpec(F32, dim, dim, dim > 64, True, precision=precision)
            yield Covered(FORWARD, spec, often=precision == "tf32x3")
        changed = AttentionSpec(F32, 128, 128, lse=True, bias=F32, precision=precision, **EVERY)
        yield Covered(FORWARD, changed)
        yield Covered(FORWARD, replace(changed, head_dim=256, value_dim=256), often=False)
        packed = AttentionSpec(F32, 50, 30, True, q_view="packed", kv_view="packed", vector=4)
        yield Covered(FORWARD, replace(packed, precision=precision), True, often=False)


def _variants() -> Iterator[Covered]:
    def one(spec: AttentionSpec, grouped: bool = False, often: bool = False) -> Covered:
        return Covered(FORWARD, spec, grouped, often)

    pages: dict[str, Any] = {"kv_view": "paged", "lengths": True}
    yield one(
        AttentionSpec(F16, 128, 128, lse=True, bias=F32, alibi=True, **UNIFORM),
        often=True,
    )
    yield one(
        AttentionSpec(BF16, 128, 128, lse=True, window=True, sinks=True, q_view="packed", **pages),
        True,
        often=True,
    )
    yield one(AttentionSpec(BF16, 64, 64, lse=True, window=True, sinks=True, **pages), True)
    yield one(AttentionSpec(F16, 128, 128, window=True, **UNIFORM))
    yield one(AttentionSpec(BF16, 256, 256, window=True, softcap=True))
    yield one(AttentionSpec(F16, 64, 64, lse=True, bias=F16, mask=True), often=True)
    yield one(AttentionSpec(BF16, 128, 128, True, alibi=True, prefix=True))
    yield one(AttentionSpec(BF16, 128, 128, True, True, q_view="packed", kv_view="packed"))
    yield one(AttentionSpec(F16, 64, 64, True, q_view="packed", kv_view="paged"), True)
    yield one(AttentionSpec(F16, 128, 128, lse=True, q_view="pointers", kv_view="pointers"))
    yield one(AttentionSpec(F16, 128, 128, True, True, dtype_out=F32), True)
    yield one(AttentionSpec(BF16, 576, 512, True, True, **pages), True)
    yield one(AttentionSpec(F32, 64, 64, lse=True, bias=F32, **EVERY))
    yield one(AttentionSpec(F32, 128, 128, True, **pages), True)


def _decoding() -> Iterator[Covered]:
    """Both dtypes, head dims from 64 to 256, options alone and together, every view."""
    f16, bf16 = DType.float16, DType.bfloat16
    paged: dict[str, Any] = {"kv_view": "paged", "lengths": True}
    plain = AttentionSpec(bf16, 128, 128, lse=True, **paged)
    for dim in (64, 96, 128, 256):
        yield Covered(DECODE, AttentionSpec(bf16, dim, dim, **paged), often=dim in (64, 128))
    yield Covered(DECODE, AttentionSpec(f16, 192, 128, True, True, **paged), often=False)
    yield Covered(DECODE, replace(plain, causal=True, q_view="packed"))
    yield Covered(DECODE, replace(plain, window=True, **UNIFORM), often=False)
    yield Covered(
        DECODE,
        replace(plain, kv_view="strided", causal=True, dtype_out=DType.float32),
        often=False,
    )
    yield Covered(
        DECODE, AttentionSpec(f16, 40, 72, lse=True, vector=2, bias=f16, mask=True), often=False
    )


def _few_rows() -> Iterator[Covered]:
    """Every dtype, both ways through W, lists, narrow rows, bias and residual."""
    f16, bf16, f32, f64 = DType.float16, DType.bfloat16, DType.float32, DType.float64
    added = GemmSpec(bf16, f32, f32, view="pointers", bias=bf16, residual=f32)
    yield Covered(GEMV, GemmSpec(f16, f16, f32, b_transposed=True))
    yield Covered(GEMV, added)
    yield Covered(GEMV, GemmSpec(f32, f32, f32, True, True, "strided", 4, 4, 4))
    yield Covered(GEMV, GemmSpec(f64, f64, f64), often=False)
    yield Covered(GEMV, GemmSpec(bf16, bf16, f32, True, False), often=False)


def _reductions() -> Iterator[Covered]:
    for elements in (1, SOME, MANY):
        yield Covered(REDUCE, ReduceSpec(elements < MANY, elements))


def _stored() -> Iterator[Covered]:
    """Keys and values of 8 bits, and queries of 8 bits: of each arch the dtype that it converts."""
    pages: dict[str, Any] = {"kv_view": "paged", "lengths": True}
    for stored in E4M3:
        heads: dict[str, Any] = {"dtype_kv": stored, "kv_scales": "heads"}
        blocks: dict[str, Any] = {"dtype_kv": stored, "kv_scales": "blocks"}
        yield Covered(FORWARD, AttentionSpec(F16, 128, 128, True, True, **heads))
        yield Covered(
            FORWARD, AttentionSpec(BF16, 128, 128, q_view="packed", **pages, **blocks), True
        )
        for spec in (
            AttentionSpec(BF16, 64, 64, True, dtype_kv=stored),
            AttentionSpec(BF16, 256, 256, True, **pages, **blocks),
            AttentionSpec(F16, 40, 72, lse=True, vector=2, mask=True, **blocks),
            AttentionSpec(BF16, 576, 512, True, **pages, **heads),
        ):
            yield Covered(FORWARD, spec, often=False)
        queries: dict[str, Any] = {"dtype_q": stored, "q_scales": "heads"}
        rows: dict[str, Any] = {"dtype_q": stored, "q_scales": "blocks"}
        yield Covered(FORWARD, AttentionSpec(BF16, 128, 128, True, True, **heads, **queries))
        for spec in (
            AttentionSpec(BF16, 64, 64, dtype_kv=stored, dtype_q=stored),
            AttentionSpec(F16, 256, 256, True, **heads, **queries),
            AttentionSpec(F16, 40, 72, lse=True, vector=2, softcap=True, **blocks, **rows),
        ):
            yield Covered(FORWARD, spec, often=False)
        yield Covered(DECODE, AttentionSpec(BF16, 128, 128, **pages, **heads, **rows), often=False)
        yield Covered(DECODE, AttentionSpec(BF16, 128, 128, True, **pages, **heads))
        yield Covered(DECODE, AttentionSpec(F16, 64, 64, lse=True, **pages, **blocks))
        for spec in (
            AttentionSpec(F16, 128, 128, dtype_kv=stored, **pages),
            AttentionSpec(BF16, 128, 128, window=True, **UNIFORM, **pages, **blocks),
            AttentionSpec(F16, 40, 72, lse=True, vector=2, bias=F16, mask=True, **blocks),
            AttentionSpec(BF16, 256, 256, **pages, **blocks),
        ):
            yield Covered(DECODE, spec, often=False)


def _gradients() -> Iterator[Covered]:
    def one(
        spec: AttentionSpec, bias: bool = False, often: bool = False, deterministic: bool = True
    ) -> Covered:
        whole = AttentionBwdSpec(replace(spec, lse=True), bias, deterministic=deterministic)
        return Covered(BACKWARD, whole, often=often)

    yield one(AttentionSpec(BF16, 128, 128, True, q_view="packed", kv_view="packed"), often=True)
    yield one(AttentionSpec(F16, 64, 64, bias=F16, mask=True), True, often=True)
    yield one(AttentionSpec(F32, 128, 128, bias=F32, softcap=True), True, often=True)
    yield one(AttentionSpec(F16, 64, 64, True))
    yield one(AttentionSpec(F16, 128, 128))
    yield one(AttentionSpec(F16, 128, 128, window=True, **UNIFORM))
    yield one(AttentionSpec(BF16, 256, 256, True))
    yield one(AttentionSpec(F16, 250, 72, True, vector=2))
    yield one(AttentionSpec(F32, 64, 64, True, alibi=True, prefix=True))
    yield one(AttentionSpec(F32, 256, 256, True))
    yield one(
        AttentionSpec(BF16, 128, 128, True, q_view="packed", kv_view="packed"),
        often=True,
        deterministic=False,
    )
    yield one(AttentionSpec(F16, 64, 64, True), deterministic=False)
    yield one(AttentionSpec(F16, 128, 128), deterministic=False)
    yield one(AttentionSpec(F16, 64, 64, bias=F16, mask=True), True, deterministic=False)
    yield one(AttentionSpec(F16, 128, 128, window=True, **UNIFORM), deterministic=False)
    yield one(AttentionSpec(BF16, 256, 256, True), deterministic=False)
    yield one(AttentionSpec(F16, 40, 72, vector=2), deterministic=False)
    yield one(
        AttentionSpec(F32, 64, 64, bias=F32, softcap=True), True, often=True, deterministic=False
    )
    yield one(AttentionSpec(F32, 128, 128, True), deterministic=False)
    yield one(AttentionSpec(BF16, 512, 512, True))
    yield one(AttentionSpec(F32, 512, 512))
    for precision in PRECISIONS:
        often = precision == "tf32x3"
        for dim in (64, 128, 256):
            plain = AttentionSpec(F32, dim, dim, True, precision=precision)
            changed = replace(plain, causal=False, bias=F32, softcap=True, mask=True)
            for spec in (plain, changed):
                yield one(spec, spec is changed, often)
                if dim < 256:
                    yield one(spec, spec is changed, often, deterministic=False)


def _small() -> Iterator[Covered]:
    yield Covered(MERGE, MergeSpec(F32, F16, 128))
    yield Covered(MERGE, MergeSpec(F16, F16, 33, False, 2, packed=True))
    yield Covered(MERGE, MergeSpec(F32, BF16, 512, pointers=True))
    yield Covered(ROW_DELTA, DeltaSpec(F16, 128, False))
    yield Covered(ROW_DELTA, DeltaSpec(F32, 50, True))
    yield Covered(QUERY_GRADIENT, QueryGradientSpec(F16, 64))
    yield Covered(QUERY_GRADIENT, QueryGradientSpec(F32, 50, True, 4))
    yield Covered(QUERY_GRADIENT, QueryGradientSpec(F32, 64, precision="tf32x3"))
    yield Covered(SINK_GRADIENT, SinkSpec(True))
    for alone in (False, True):
        yield Covered(SUM_AXES, SumSpec(BF16, alone))
    yield Covered(BAG_SUMS, BagSumsSpec(BF16))
    yield Covered(BAG_SUMS, BagSumsSpec(F16, 2))
    yield Covered(BAG_SUMS, BagSumsSpec(F32), often=False)
    for kernel in (COMMON_PAGES, PREFIX_TABLES):
        yield Covered(kernel, TableSpec(packed=False))
        yield Covered(kernel, TableSpec(packed=True), often=False)
    yield from (Covered(CACHE, s) for s in _caches())


def _caches() -> Iterator[PagedCacheSpec]:
    """Rows between tokens and pages: copied, transformed, rounded to 8 bits."""
    of_q: dict[str, Any] = {"q": True, "rotary": "halves", "norm": BF16}
    table: dict[str, Any] = {"position": "lengths", "packed": True}
    yield PagedCacheSpec(BF16, BF16, 128, 128, slots=DType.int64)
    yield PagedCacheSpec(BF16, BF16, 128, 128, rotary_dim=128, **table, **of_q)
    yield PagedCacheSpec(F16, F16, 64, 0, q=True, rotary="pairs", rotary_dim=32, position="given")
    yield PagedCacheSpec(F32, F32, 36, 20, rotary="halves", rotary_dim=12, norm=F32, vector=4)
    for stored in E4M3:
        yield PagedCacheSpec(
            BF16, stored, 128, 128, rotary_dim=128, scaled="tokens", **table, **of_q
        )
        yield PagedCacheSpec(F16, stored, 256, 256, "gather", scaled="heads")
        yield PagedCacheSpec(stored, stored, 128, 128, "copy")

"""Gradients of projections as Hopper's GEMM makes them: where the shared kernel has a product for
each head, one whose rows or columns are the elements of all heads, as far as that takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from kernelseam.descriptors.gemm.problem import GemmProblem, HeadsProblem, HeadsSpec
from kernelseam.kernels.projection import products
from kernelseam.kernels.projection.products import Product

from kernelseam_cuda import archs
from kernelseam_cuda.sm90.gemm import HopperGemm
from kernelseam_cuda.sm90.heads import HopperHeads

_ROW = archs.row("sm_90a")


def joined(kernel: HopperGemm, product: Product, problem: GemmProblem) -> Product:
    """The product over ``problem`` instead of its own, unless the kernel refuses that."""
    refused = kernel.refuse(problem, _ROW)
    return product if refused else replace(product, problem=problem)


def summed_over_heads(x: GemmProblem) -> GemmProblem:
    """A sum of a product for each head as one product, K of which counts all heads' elements."""
    return replace(
        x,
        spec=replace(x.spec, summed=False, joined="k"),
        K=x.K * x.num_heads,
        num_heads=1,
        c_head_group=1,
        joined_heads=x.num_heads,
        b_strides=(0, 0, x.b_strides[2]),
    )


def output(gemm: HopperGemm) -> Callable[[Any], Iterator[Product]]:
    """One product also where heads lie apart."""

    def products_of(p: Any) -> Iterator[Product]:
        for product in products.output(p):
            x = product.problem
            if x.num_heads > 1:
                yield joined(gemm, product, summed_over_heads(x))
            else:
                yield product

    return products_of


def qkv_bwd(gemm: HopperGemm) -> Callable[[Any], Iterator[Product]]:
    """The heads of dq, dk and dv joined: d_input's sums run over their elements, d_weight's rows
    are their elements."""

    def products_of(p: Any) -> Iterator[Product]:
        for product in products.qkv_bwd(p):
            x = product.problem
            if product.name == "d_input":
                yield joined(gemm, product, summed_over_heads(x))
            elif product.name == "d_weight" and x.num_heads > 1:
                yield joined(
                    gemm,
                    product,
                    replace(
                        x,
                        spec=replace(x.spec, joined="a"),
                        M=x.M * x.num_heads,
                        num_heads=1,
                        joined_heads=x.num_heads,
                        c_strides=(0, 0, x.c_strides[2]),
                        sums_strides=(0, 0),
                    ),
                )
            else:
                yield product

    return products_of


def output_bwd(gemm: HopperGemm, heads: HopperHeads) -> Callable[[Any], Iterator[Product]]:
    """Where heads lie apart: d_attn_out as one product whose columns are heads, d_weight as one
    whose columns are the elements of the heads of attn_out."""

    def products_of(p: Any) -> Iterator[Product]:
        for product in products.output_bwd(p):
            x = product.problem
            if x.num_heads == 1:
                yield product
            elif product.name == "d_attn_out":
                placed = HeadsProblem(
                    x.num_heads,
                    0,
                    x.N,
                    p.S,
                    p.d_attn_out_strides,
                    (0, 0, 0),
                    (0, 0, 0),
                )
                yield joined(
                    heads,
                    product,
                    replace(
                        x,
                        spec=replace(x.spec, heads=HeadsSpec()),
                        N=x.N * x.num_heads,
                        num_heads=1,
                        b_strides=(0, 0, x.b_strides[2]),
                        c_strides=(0, 0, 0),
                        heads=placed,
                    ),
                )
            else:
                yield joined(
                    gemm,
                    product,
                    replace(
                        x,
                        spec=replace(x.spec, joined="b"),
                        N=x.N * x.num_heads,
                        num_heads=1,
                        joined_heads=x.num_heads,
                        c_strides=(0, 0, x.c_strides[2]),
                    ),
                )

    return products_of

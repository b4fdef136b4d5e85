"""Bands of a tall product: what is walked together, so that it is in the cache."""

from __future__ import annotations

from dataclasses import replace

from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.kernels.elements import divide_up
from kernelseam.kernels.gemm.tile import GemmTile

_MOST, _LEAST = 16, 8
"""Rows of tiles of a band. The blocks that run at once then have about as many columns of them."""


def in_bands(p: GemmProblem, tile: GemmTile) -> GemmProblem:
    """A single tall product a batch as one of several heads, its bands, which share B.

    Tiles are counted down the rows first: of a product with more rows of tiles than blocks run at
    once, these read nearly all of A for every column or two. Walked band after band they read a
    few rows and a few columns. As it is where rows cannot be divided evenly, where heads or lists
    tell where a matrix lies, and with scales or sums of rows.
    """
    rows = divide_up(p.M, tile.bm)
    one = p.num_heads == 1 and p.summed == 1 and p.spec.view == "strided"
    other = p.segments or p.heads or p.spec.scales or p.spec.row_sums
    tall = rows > _MOST and p.M % tile.bm == 0 and tile.bn < p.N
    band = next((n for n in range(_MOST, _LEAST - 1, -1) if rows % n == 0), 0)
    if not one or other or not tall or not band:
        return p
    m = band * tile.bm

    def strides(of: tuple[int, int, int]) -> tuple[int, int, int]:
        return of[0], m * of[2], of[2]

    a = p.a_strides
    return replace(
        p,
        M=m,
        num_heads=rows // band,
        a_strides=(a[0], m, a[2]) if p.spec.a_transposed else strides(a),
        b_strides=(p.b_strides[0], 0, p.b_strides[2]),
        c_strides=strides(p.c_strides),
        residual_strides=strides(p.residual_strides),
        preactivation_strides=strides(p.preactivation_strides),
        bias_strides=(p.bias_strides[0], 0),
    )

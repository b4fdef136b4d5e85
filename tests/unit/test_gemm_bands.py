"""A tall product's bands: which products are walked so, and that every row is in one band."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.kernels.gemm.bands import in_bands
from kernelseam.kernels.gemm.tile import GemmTile

F16, F32 = DType.float16, DType.float32
SPEC = GemmSpec(F16, F16, F32, b_transposed=True, residual=F16, bias=F16)
TILE = GemmTile(frozenset({F16}), 128, 128, 64, 2, 2, 2)


def product(rows: int, n: int = 384, **of: object) -> GemmProblem:
    p = GemmProblem(
        SPEC,
        M=rows,
        N=n,
        K=64,
        batch=2,
        num_heads=1,
        a_strides=(10**7, 5, 72),
        b_strides=(10**6, 3, 64),
        c_strides=(10**8, 7, 400),
        bias_strides=(400, 9),
        residual_strides=(0, 11, 392),
    )
    return replace(p, **of)  # type: ignore[arg-type]


def test_a_linear_layers_bands_are_heads_that_share_b() -> None:
    p = in_bands(product(16384), TILE)
    assert (p.M, p.num_heads, p.batch) == (2048, 8, 2)
    assert p.a_strides == (10**7, 2048 * 72, 72)
    assert p.b_strides == (10**6, 0, 64)
    assert p.c_strides == (10**8, 2048 * 400, 400)
    assert p.residual_strides == (0, 2048 * 392, 392)
    assert p.bias_strides == (400, 0)


def test_columns_of_a_transposed_a_are_its_rows() -> None:
    p = product(2304, spec=replace(SPEC, a_transposed=True))
    assert in_bands(p, TILE).a_strides == (10**7, 1152, 72)


@pytest.mark.parametrize(
    "p",
    [
        product(2048),  # 16 rows of tiles: a band
        product(128 * 17),  # no divisor
        product(4096 - 1),
        product(4096, n=128),  # one column of tiles
        product(4096, num_heads=2),
        product(4096, num_heads=2, c_head_group=2),
        product(4096, c_batch_group=2),
        product(4096, spec=replace(SPEC, view="pointers")),
        product(4096, spec=replace(SPEC, row_sums=F32)),
    ],
)
def test_what_stays_as_it_is(p: GemmProblem) -> None:
    assert in_bands(p, TILE) is p


@given(st.integers(1, 400), st.integers(0, 127), st.booleans())
def test_every_row_is_of_one_band(tiles: int, ragged: int, transposed: bool) -> None:
    p = product(tiles * 128 - ragged, spec=replace(SPEC, a_transposed=transposed))
    q = in_bands(p, TILE)
    step = 1 if transposed else p.a_strides[2]
    rows = [h * q.a_strides[1] + m * step for h in range(q.num_heads) for m in (0, q.M - 1)]
    ends = [x * step for h in range(q.num_heads) for x in (h * q.M, (h + 1) * q.M - 1)]
    assert q.M * q.num_heads == p.M
    assert q is p or rows == ends
    assert TILE.count(q) == TILE.count(p)
    assert q is p or 8 <= q.M // 128 <= 16

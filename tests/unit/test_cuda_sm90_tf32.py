"""The kernel definition of Hopper's products by way of TF32: what it takes, what it is launched
with. Nothing here needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hopper import ROW, with_rates
from kernelseam.costs import predicted
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam_cuda import tensor_maps
from kernelseam_cuda.sm90.tf32 import HopperTf32Gemm
from kernelseam_cuda.sm90.tf32_tiles import TF32, HopperTf32Tile

KERNEL = HopperTf32Gemm()
H200 = with_rates(float32=66.9e12)
F16, F32, F64 = DType.float16, DType.float32, DType.float64


def problem(
    M: int = 512, N: int = 384, K: int = 256, batch: int = 4, heads: int = 3, **spec: object
) -> GemmProblem:
    """Packed matrices."""
    plain = {"dtype": F32, "dtype_c": F32, "dtype_acc": F32, "precision": "tf32"}
    s = GemmSpec(**{**plain, **spec})
    a_row, b_row = (M if s.a_transposed else K), (K if s.b_transposed else N)
    lists = s.view == "pointers"

    def strides(row: int, size: int) -> tuple[int, int, int]:
        return (0, 0, row) if lists else (heads * size, size, row)

    a, b, c = strides(a_row, M * K), strides(b_row, N * K), strides(N, M * N)
    return GemmProblem(
        s, M, N, K, batch, heads, a, b, c, residual_strides=c if s.residual else (0, 0, 0)
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": None}, "it multiplies float32 with a precision of tf32 or tf32x3"),
        ({"summed": True}, "summed is not supported by this kernel"),
        ({"row_sums": F32}, "row_sums is not supported by this kernel"),
        ({"segmented": True}, "segmented is not supported by this kernel"),
        ({"joined": "a"}, "joined is not supported by this kernel"),
        ({"dtype_c": F64}, "its result is of float32, not float64"),
        ({"residual": F16}, "its residual is of float32, not float16"),
        (
            {"a_transposed": True},
            "neither A nor B lies along K, as one factor must for its instructions",
        ),
        ({"vector_a": 4}, "rows of A at multiples of 4 bytes: TMA takes multiples of 16"),
        ({"vector_b": 4}, "rows of B at multiples of 4 bytes: TMA takes multiples of 16"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(
    changes: dict[str, object], reason: str
) -> None:
    assert KERNEL.refuse(problem(**changes), ROW) == reason


def test_what_it_takes() -> None:
    for a_transposed, b_transposed in ((False, False), (False, True), (True, True)):
        for precision in ("tf32", "tf32x3"):
            for view in ("strided", "pointers"):
                way = {"a_transposed": a_transposed, "b_transposed": b_transposed}
                p = problem(precision=precision, view=view, **way)
                assert KERNEL.refuse(p, ROW) is None
    narrow = problem(vector_c=4, residual=F32, vector_r=4, bias=F16)
    assert KERNEL.refuse(narrow, ROW) is None, "C and the residual are no part of a tensor map"


def test_problems_are_refused_by_their_numbers() -> None:
    nothing = [problem(M=0), problem(N=0), problem(K=0), replace(problem(), alpha=0.0)]
    assert {KERNEL.refuse(p, ROW) for p in nothing} == {"there is nothing to multiply"}
    assert (
        KERNEL.refuse(problem(N=2**30, batch=1, heads=1), ROW)
        == "N = 1073741824: it takes less than 2**30"
    )
    many = problem(M=1, N=4, K=4, batch=2**31 - 2**16, heads=1)
    assert KERNEL.refuse(many, ROW) == "it needs 2147418112 tiles or more"


def tiles(precision: str) -> tuple[HopperTf32Tile, ...]:
    return tuple(t for t in TF32 if t.precision == precision)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("view", ["strided", "pointers"])
@pytest.mark.parametrize(
    ("a_transposed", "b_transposed"), [(False, False), (False, True), (True, True)]
)
def test_the_hardware_takes_every_map_of_every_tile(
    precision: str, view: str, a_transposed: bool, b_transposed: bool
) -> None:
    p = problem(
        precision=precision, view=view, a_transposed=a_transposed, b_transposed=b_transposed
    )
    for tile in KERNEL.tiles(p.spec, ROW):
        maps = KERNEL.tensor_maps(p, tile, H200)
        assert [tensor_maps.refuse(m, 16) for m in maps.values()] == [None] * 2
        assert {m.to_tf32 for m in maps.values()} == {precision == "tf32"}, "split parts are exact"
        assert tile.shared_bytes <= ROW.shared_bytes_per_block // tile.blocks
        assert (tile.bm, tile.bn) == (
            (64 * tile.groups, tile.columns) if b_transposed else (tile.columns, 64 * tile.groups)
        )


def test_the_factor_that_lies_along_k_is_the_right_one() -> None:
    """The right factor's box is a tile's whole side, of the left one's panels where it lies along
    its rows."""
    nt = problem(b_transposed=True)
    tile = KERNEL.tiles(nt.spec, ROW)[0]
    maps = KERNEL.tensor_maps(nt, tile, H200)
    assert [(m.operand, m.box[:2]) for m in maps.values()] == [
        ("A", (32, tile.bm)),
        ("B", (32, tile.bn)),
    ]
    nn = problem()
    turned = KERNEL.tiles(nn.spec, ROW)[0]
    maps = KERNEL.tensor_maps(nn, turned, H200)
    assert [(m.operand, m.box[:2]) for m in maps.values()] == [
        ("B", (32, 32)),
        ("A", (32, turned.bm)),
    ]
    constants = KERNEL.constants(nn.spec, turned, ROW)
    assert (constants["SWAP_AB"], constants["LEFT_TRANSPOSED"]) == (True, True)
    tt = problem(a_transposed=True, b_transposed=True)
    maps = KERNEL.tensor_maps(tt, tile, H200)
    assert [(m.operand, m.box[:2]) for m in maps.values()] == [
        ("A", (32, 32)),
        ("B", (32, tile.bn)),
    ]
    constants = KERNEL.constants(tt.spec, tile, ROW)
    assert (constants["SWAP_AB"], constants["LEFT_TRANSPOSED"]) == (False, True)


def test_strides_of_what_is_read_and_written_without_a_map_are_arguments() -> None:
    p = replace(problem(residual=F32, bias=F32), bias_strides=(7, 5))
    values = KERNEL.values(p, KERNEL.tile(p, ROW, H200), H200)
    assert (values["c_batch"], values["c_head"], values["c_row"]) == p.c_strides
    found = (values["residual_batch"], values["residual_head"], values["residual_row"])
    assert found == p.residual_strides
    assert (values["bias_batch"], values["bias_head"]) == (7, 5)
    assert values["slices"] == 8


def test_a_list_is_walked_from_the_workspace_on() -> None:
    p = problem(view="pointers")
    launches = KERNEL.launches(p, KERNEL.tile(p, ROW, H200), H200)
    assert launches.workspace_bytes == 256
    assert launches.kernels[0].workspace == {"left_map": 0, "right_map": 0, "origin": 0}
    assert KERNEL.launches(problem(), KERNEL.tile(problem(), ROW, H200), H200).workspace_bytes == 0


def test_tiles_have_names_of_their_own() -> None:
    for precision in ("tf32", "tf32x3"):
        assert len({t.name for t in tiles(precision)}) == len(tiles(precision))


def test_a_grid_is_no_more_than_there_are_tiles() -> None:
    for tile in TF32:
        big, small = problem(M=8192, N=8192), problem(M=8, N=8, batch=1, heads=1)
        assert KERNEL.grid(big, tile, H200) == 132 * tile.blocks
        assert KERNEL.grid(small, tile, H200) == 1


MEASURED = (
    ("tf32", 384, 512, 64, 512, False, 126),
    ("tf32", 256, 2048, 128, 2048, False, 1212),
    ("tf32", 4096, 64, 64, 64, False, 53),
    ("tf32", 64, 1024, 1024, 1024, False, 426),
    ("tf32", 1, 4096, 4096, 4096, False, 372),
    ("tf32x3", 384, 512, 512, 64, True, 221),
    ("tf32x3", 384, 512, 64, 512, False, 201),
    ("tf32x3", 64, 1024, 1024, 1024, False, 1434),
    ("tf32x3", 1, 4096, 4096, 4096, True, 1388),
)
"""Matrices, M, N, K, whether B lies along K, µs of the best tile on an H200."""


@pytest.mark.parametrize("row", MEASURED, ids=lambda r: "-".join(map(str, r)))
def test_predicted_times_are_those_measured(
    row: tuple[str, int, int, int, int, bool, int],
) -> None:
    precision, batch, M, N, K, b_transposed, us = row
    p = problem(M, N, K, batch, 1, precision=precision, b_transposed=b_transposed)
    work = KERNEL.work(p, KERNEL.tile(p, ROW, H200), H200)
    assert predicted(work, ROW.costs, H200.limits) * 1e6 == pytest.approx(us, rel=0.16)

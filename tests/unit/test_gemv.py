"""The kernel definition of GEMV: which side it takes for vectors, its tiles and arguments, and what
it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kernelseam.contract import Device, DeviceLimits
from kernelseam.descriptors import BatchedGemmPointers, BatchedGemmStrided
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.kernels import GEMV

archs = pytest.importorskip("kernelseam_cuda.archs", reason="kernelseam-cuda is not installed")
ROW = archs.row("sm_90a")
LIMITS = DeviceLimits(132, 227 << 10, 0, 4.9e12, {"float32": 6.7e13, "float64": 6.7e13})
DEVICE = Device("cuda", 0, "sm_90a", limits=LIMITS)


def problem(M: int, N: int, K: int = 64, **more: Any) -> GemmProblem:
    fields: dict[str, Any] = {"dtype": "float16", "batch": 2, "num_heads": 3, **more}
    return BatchedGemmStrided(M=M, N=N, K=K, **fields).problem()


@pytest.mark.parametrize(
    ("M", "N", "vectors", "of_a"),
    [(1, 512, 1, False), (2, 8, 2, False), (3, 9, 4, False), (512, 1, 1, True), (9, 4, 4, True)],
)
def test_the_shorter_side_is_vectors(M: int, N: int, vectors: int, of_a: bool) -> None:
    tile = GEMV.tile(problem(M, N), ROW, DEVICE)
    assert (tile.vectors, tile.of_a) == (vectors, of_a)
    assert GEMV.values(problem(M, N), tile, DEVICE)["vectors"] == min(M, N)


def test_arguments_of_either_side() -> None:
    rows = problem(2, 100, K=72, b_transposed=True, num_heads=6, b_head_group=2)
    tile = GEMV.tile(rows, ROW, DEVICE)
    values = GEMV.values(rows, tile, DEVICE)
    assert [values[n] for n in ("x_f", "x_k", "w_row", "y_f", "y_n")] == [72, 1, 72, 100, 1]
    assert [values[n] for n in ("bias_f", "bias_n", "N", "K")] == [0, 1, 100, 72]
    assert [values[n] for n in ("x_head_group", "w_head_group")] == [1, 2]
    assert tile.along_k and tile.x_vector(rows.spec) == 16
    columns = problem(100, 2, K=72, num_heads=6, b_head_group=2)
    tile = GEMV.tile(columns, ROW, DEVICE)
    values = GEMV.values(columns, tile, DEVICE)
    assert [values[n] for n in ("x_f", "x_k", "w_row", "y_f", "y_n")] == [1, 2, 72, 1, 2]
    assert [values[n] for n in ("bias_f", "bias_n", "N", "K")] == [1, 0, 100, 72]
    assert [values[n] for n in ("x_head_group", "w_head_group")] == [2, 1]
    assert tile.along_k and tile.x_vector(columns.spec) == 0
    (launch,) = GEMV.launches(columns, tile, DEVICE).kernels
    assert launch.operands == {"x": "B", "w": "A"}
    lists = BatchedGemmPointers(M=9, N=1, K=8, dtype="float32", batch=4).problem()
    (launch,) = GEMV.launches(lists, GEMV.tile(lists, ROW, DEVICE), DEVICE).kernels
    assert launch.operands == {"x": "B_ptrs", "w": "A_ptrs"}


@pytest.mark.parametrize(
    ("M", "N", "b_transposed", "blocks"),
    [
        (1, 512, True, 6 * 8),  # 16 groups of 8 lanes, 4 rows each
        (1, 513, True, 6 * 9),
        (1, 64, False, 6),  # 8 lanes, 8 columns each
        (4, 72, False, 12),
        (0, 64, True, 0),
        (1, 0, True, 0),
    ],
)
def test_blocks(M: int, N: int, b_transposed: bool, blocks: int) -> None:
    made = problem(M, N, b_transposed=b_transposed)
    tile = next(t for t in GEMV.variants(made, ROW, DEVICE).values() if t.lanes == 8)
    assert GEMV.grid(made, replace(tile, of_a=False), DEVICE) == blocks


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"M": 5, "N": 6}, "M = 5 and N = 6: one of them must be at most 4"),
        ({"M": 1, "N": 8, "dtype": "float32", "precision": "tf32"}, "it has no tf32 products"),
        (
            {"M": 1, "N": 8, "batch": 4, "c_batch_group": 2},
            "it has no summed",
        ),
        (
            {"M": 1, "N": 8, "dtype": "float8_e4m3fn", "dtype_c": "bfloat16"},
            "it has no products of float8_e4m3fn",
        ),
        (
            {"M": 1, "N": 8, "dtype": "float64", "dtype_c": "float32"},
            "sums of float64 are stored as float64 alone, not as float32",
        ),
        ({"M": 2, "N": 8, "stride_c_row": 1 << 31}, "stride_c_row = 2147483648 elements"),
    ],
)
def test_refusals(more: dict[str, Any], words: str) -> None:
    assert words in str(GEMV.refuse(problem(**more), ROW))
    assert GEMV.refuse(problem(4, 100), ROW) is None
    assert GEMV.refuse(problem(4, 100), replace(ROW, tiles={})) == "no tile of sm_90a takes float16"

"""How a GEMM's float32 is multiplied: the option, the reference, what libraries are asked for, the
bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam import BatchedGemmPointers, BatchedGemmStrided
from kernelseam.contract import ArchRow
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.kernels import GemmTile
from kernelseam.kernels.gemm.gemm import GemmDefinition
from kernelseam.oracle import check, formulas, tolerances
from kernelseam.reference.gemm_blocks import round_to_tf32

FIELDS: dict[str, Any] = {"M": 8, "N": 12, "K": 4}
SINGLE = frozenset({DType.float32})


@pytest.mark.parametrize("kind", [BatchedGemmStrided, BatchedGemmPointers])
@pytest.mark.parametrize(
    ("given", "kept"), [(None, None), ("ieee", None), ("tf32", "tf32"), ("tf32x3", "tf32x3")]
)
def test_a_precision_is_part_of_the_spec(kind: Any, given: str | None, kept: str | None) -> None:
    spec = kind(**FIELDS, dtype="float32", precision=given).problem().spec
    assert spec.precision == kept
    assert str(spec).endswith(f" precision={kept}") is (kept is not None)


@pytest.mark.parametrize("kind", [BatchedGemmStrided, BatchedGemmPointers])
@pytest.mark.parametrize(
    ("dtype", "given", "message"),
    [
        (
            "float32",
            "fp32",
            (
                "precision = fp32: must be one of ieee, tf32, tf32x3. Name one of these, or leave "
                "precision out"
            ),
        ),
        (
            "float16",
            "tf32",
            (
                "precision = tf32: is a way to multiply float32, and A and B are float16. Leave "
                "precision out"
            ),
        ),
        (
            "float64",
            "tf32x3",
            (
                "precision = tf32x3: is a way to multiply float32, and A and B are float64. Leave "
                "precision out"
            ),
        ),
        (
            "float32",
            3,
            (
                "precision = 3: must be one of ieee, tf32, tf32x3. Name one of these, or leave "
                "precision out"
            ),
        ),
    ],
)
def test_what_is_no_precision_is_refused(kind: Any, dtype: str, given: Any, message: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        kind(**FIELDS, dtype=dtype, precision=given)
    assert str(caught.value).startswith(message)


def test_other_dtypes_may_be_ieee() -> None:
    assert (
        BatchedGemmStrided(**FIELDS, dtype="float16", precision="ieee").problem().spec.precision
        is None
    )


def test_evenly_spaced_lists_keep_their_precision() -> None:
    a, b, c = (np.zeros((3, 4, 4), np.float32) for _ in range(3))
    lists = {
        f"{n}_ptrs": x.ctypes.data + np.arange(3) * 64
        for n, x in zip("ABC", (a, b, c), strict=True)
    }
    gemm = BatchedGemmPointers(
        M=4, N=4, K=4, num_heads=3, dtype="float32", precision="tf32", **lists
    )
    simpler, why = gemm.simplified()
    assert why and simpler.problem().spec.precision == "tf32"


def test_rounding_to_tf32_is_to_nearest_ties_away() -> None:
    one = np.float32(1)
    x = np.array(
        [
            1 + 2**-10,
            1 + 2**-11,
            -1 - 2**-11,
            1 + 2**-11 - 2**-23,
            1 + 3 * 2**-11,
            0,
            -0.0,
            np.inf,
            -np.inf,
            2**-149,
        ],
        np.float32,
    )
    nan = np.array([0x7FFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    round_to_tf32(x)
    round_to_tf32(nan)
    up = one + np.float32(2**-10)
    assert x.tolist() == [up, up, -up, 1, 1 + 2**-9, 0, 0, np.inf, -np.inf, 0]
    assert np.signbit(x[6]) and np.isnan(nan).all()


@pytest.mark.parametrize("dims", [(5, 33, 20), (2, 3, 5, 33, 20)])
def test_numpy_rounds_to_the_requested_precision(dims: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    *lead, M, K, N = dims
    a, b = (rng.standard_normal((*lead, *s), np.float32) for s in ((M, K), (K, N)))
    of = kernelseam.bmm if lead else kernelseam.matmul2d
    kept = a.copy(), b.copy()
    plain, ieee, short, split = (of(a, b, precision=p) for p in (None, "ieee", "tf32", "tf32x3"))
    assert (a == kept[0]).all() and (b == kept[1]).all()
    assert (plain == ieee).all() and (plain == split).all() and (plain != short).mean() > 0.9
    for x in kept:
        round_to_tf32(x)
    assert np.abs(short - kept[0] @ kept[1]).max() < 1e-5
    assert 1e-5 < np.abs(short - plain).max() < 1e-2


def test_calls_of_another_precision_are_others() -> None:
    a = np.full((4, 4), 1 + 2**-12, np.float32)
    first, second = (kernelseam.matmul2d(a, a, precision=p) for p in (None, "tf32"))
    assert (first != 4).all() and (second == 4).all()
    with pytest.raises(InvalidValue, match="precision = tf32: is a way to multiply float32"):
        kernelseam.matmul2d(a.astype(np.float16), a.astype(np.float16), precision="tf32")


def test_an_arch_without_tiles_for_it_refuses_by_name() -> None:
    tiles = {
        "gemm": (
            GemmTile(SINGLE, 64, 64, 16, 2, 2, 2),
            GemmTile(SINGLE, 32, 32, 32, 1, 2, 2, precision="tf32"),
        )
    }
    row = ArchRow("fake1", 32, 1 << 17, 255, "fake.h", (), frozenset(), tiles)
    kernel = GemmDefinition()

    def problem(precision: str | None) -> Any:
        return BatchedGemmStrided(**FIELDS, dtype="float32", precision=precision).problem()

    assert kernel.refuse(problem("tf32x3"), row) == "has no tf32x3 products on fake1"
    for precision, bk in ((None, 16), ("tf32", 32)):
        assert kernel.refuse(problem(precision), row) is None
        (tile,) = kernel.tiles(problem(precision).spec, row)
        assert tile.bk == bk
    spec = problem("tf32").spec
    assert kernel.constants(spec, tiles["gemm"][1], row)["PRECISION"] == 1
    assert kernel.constants(problem(None).spec, tiles["gemm"][0], row)["PRECISION"] == 0


def test_a_plain_tile_is_for_plain_products() -> None:
    tiles = {
        "gemm": (
            GemmTile(SINGLE, 64, 64, 16, 2, 2, 2, plain=True),
            GemmTile(SINGLE, 32, 32, 16, 1, 2, 2),
        )
    }
    row = ArchRow("fake1", 32, 1 << 17, 255, "fake.h", (), frozenset(), tiles)
    plain = BatchedGemmStrided(**FIELDS, dtype="float32").problem().spec
    added = BatchedGemmStrided(**FIELDS, dtype="float32", bias=0).problem().spec
    assert [t.bm for t in GemmDefinition().tiles(plain, row)] == [64, 32]
    assert [t.bm for t in GemmDefinition().tiles(added, row)] == [32]


def test_of_amds_archs_gfx942_alone_has_it() -> None:
    archs = pytest.importorskip("kernelseam_rocm.archs", reason="kernelseam-rocm is not installed")
    problem = BatchedGemmStrided(**FIELDS, dtype="float32", precision="tf32").problem()
    for arch, row in archs.ROWS.items():
        reason = None if arch == "gfx942" else f"has no tf32 products on {arch}"
        assert GemmDefinition().refuse(problem, row) == reason
    tiles = GemmDefinition().tiles(problem.spec, archs.row("gfx942"))
    assert [t.name for t in tiles] == [
        *("128x64x32-2x2-1", "64x64x32-2x2-1", "32x32x32-2x2-1", "16x16x32-1x1-1-4t"),
    ]


def test_cublas_uses_tf32_only_where_requested() -> None:
    blas = pytest.importorskip("kernelseam_cuda.blas", reason="kernelseam-cuda is not installed")
    assert blas.compute_type(DType.float32, None) == 69  # CUBLAS_COMPUTE_32F_PEDANTIC
    assert blas.compute_type(DType.float32, "tf32") == 77  # CUBLAS_COMPUTE_32F_FAST_TF32
    assert blas.compute_type(DType.float16, None) == 68
    from kernelseam.blas import column_major_gemm

    gemm = BatchedGemmStrided(**FIELDS, dtype="float32", precision="tf32").problem()
    product = column_major_gemm(gemm, dict.fromkeys("ABC", 1 << 12))
    assert blas.arguments(product, 0, 0)[-2].value == 77


def test_libraries_refuse_what_they_do_not_have() -> None:
    blas = pytest.importorskip("kernelseam_cuda.blas", reason="kernelseam-cuda is not installed")
    from kernelseam.contract import Device

    problem = BatchedGemmStrided(**FIELDS, dtype="float32", precision="tf32x3").problem()
    assert (
        blas.CublasGemm().supports(problem, Device("cuda", 0, "sm_90a")) == "has no tf32x3 products"
    )
    rocm = pytest.importorskip("kernelseam_rocm.blas", reason="kernelseam-rocm is not installed")
    gemm = BatchedGemmStrided(**FIELDS, dtype="float32", precision="tf32").problem()
    assert rocm.HipBlasGemm().supports(gemm, Device("rocm", 0, "gfx942")) == "has no tf32 products"


def test_the_bounds() -> None:
    out, magnitude, products = np.array([[3.0]]), np.array([[7.0]]), np.array([[5.0]])
    result, u = formulas.GemmResult(out, magnitude, products), 2.0**-24

    def bound(precision: str | None, of: formulas.GemmResult = result) -> float:
        return float(
            tolerances.gemm(of, 12, DType.float32, DType.float32, precision=precision)[0, 0]
        )

    rounded = 2 * u * 3 + 2.0**-149
    assert bound(None) == pytest.approx(rounded + 4 * 4 * u * 7, rel=1e-12)
    assert bound("tf32") == pytest.approx(bound(None) + 2 * 2.0**-10 * 5, rel=1e-12)
    assert bound("tf32", formulas.GemmResult(out, magnitude)) == pytest.approx(
        bound(None) + 2.0**-9 * 7, rel=1e-12
    )
    assert bound("tf32x3") == pytest.approx(rounded + 8 * 4 * u * 7, rel=1e-12)


def test_what_is_added_gets_no_part_of_the_rounding() -> None:
    a = np.ones((1, 1), np.float32)
    bias = np.full((1, 1), 4096, np.float32)
    out = a + bias[0]
    for off, passed in ((2.0**-9 * 0.9, True), (2.0**-9 * 3, False)):
        assert (
            check.gemm(a, a, (out + off).astype(np.float32), bias=bias[0], precision="tf32").passed
            is passed
        )
        assert not check.gemm(a, a, (out + 2.0**-8).astype(np.float32), bias=bias[0]).passed


def test_the_command_takes_it(command: Callable[..., tuple[int, str, str]]) -> None:
    options = ("gemm", "--m", 32, "--n", 32, "--k", 32, "--dtype", "float32", "--verify")
    for precision in ("ieee", "tf32", "tf32x3"):
        assert command(*options, "--precision", precision)[0] == 0
    status, _, output = command(*options, "--precision", "half")
    assert status == 2 and "precision = half: must be one of ieee, tf32, tf32x3" in output

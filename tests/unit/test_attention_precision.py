"""How an attention's float32 is multiplied: the option, what archs have of it, the bounds."""

from __future__ import annotations

from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam import Attention
from kernelseam.contract import ArchRow
from kernelseam.descriptors.attention.backward_problem import AttentionBwdSpec
from kernelseam.descriptors.attention.options import SpecOption
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.kernels import AttentionTile, BackwardTile
from kernelseam.kernels.attention.backward_tile import backward_tiles
from kernelseam.kernels.attention.forward import AttentionDefinition
from kernelseam.oracle import check, formulas, tolerances
from kernelseam.reference.gemm_blocks import round_to_tf32

SHAPE: dict[str, Any] = {"batch": 1, "num_heads": 2, "S_q": 8, "S_k": 12, "head_dim": 16}
SINGLE = frozenset({DType.float32})


@pytest.mark.parametrize(
    ("given", "kept"), [(None, None), ("ieee", None), ("tf32", "tf32"), ("tf32x3", "tf32x3")]
)
def test_a_precision_is_part_of_the_spec(given: str | None, kept: str | None) -> None:
    spec = Attention(**SHAPE, dtype="float32", precision=given).problem().spec
    assert spec.precision == kept
    assert (SpecOption.precision in spec.options) is (kept is not None)
    assert str(spec) == f"attention float32{' precision=' + kept if kept else ''} dim=16"


@pytest.mark.parametrize(
    ("dtype", "given", "message"),
    [
        (
            "float32",
            "fp32",
            "precision = fp32: must be one of ieee, tf32, tf32x3. Name one of these, or leave",
        ),
        (
            "bfloat16",
            "tf32x3",
            "precision = tf32x3: is a way to multiply float32, and q, k and v are bfloat16. Leave",
        ),
    ],
)
def test_what_is_no_precision_is_refused(dtype: str, given: str, message: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        Attention(**SHAPE, dtype=dtype, precision=given)
    assert str(caught.value).startswith(message)


def test_an_arch_has_it_by_its_tiles() -> None:
    tiles = {
        "attention": (
            AttentionTile(SINGLE, 64, 4, 16, 32, 2),
            AttentionTile(SINGLE, 64, 4, 16, 64, 2, precision="tf32x3"),
        ),
        "attention_bwd": (
            BackwardTile(SINGLE, 64, 4, 16, 32, 2),
            BackwardTile(SINGLE, 64, 4, 16, 16, 2, one_layout=False, precision="tf32x3"),
        ),
    }
    row = ArchRow("fake1", 32, 1 << 17, 255, "fake.h", (), frozenset(), tiles)
    kernel = AttentionDefinition()

    def problem(precision: str | None) -> Any:
        return Attention(**SHAPE, dtype="float32", precision=precision).problem()

    assert kernel.refuse(problem("tf32"), row) == "it has no tf32 products on fake1"
    for precision, bn, products in ((None, 32, 0), ("tf32x3", 64, 3)):
        assert kernel.refuse(problem(precision), row) is None
        spec = problem(precision).spec
        (tile,) = kernel.tiles(spec, row)
        assert tile.bn == bn
        assert kernel.constants(spec, tile, row)["PRECISION"] == products
        (backward,) = backward_tiles(AttentionBwdSpec(spec), row)
        assert backward.precision == precision


def test_a_tile_that_lies_differently_as_either_factor_is_there_twice() -> None:
    spec = AttentionBwdSpec(Attention(**SHAPE, dtype="float32", precision="tf32x3").problem().spec)
    one, two = (
        BackwardTile(SINGLE, 64, 4, 16, 16, 2, one_layout=same, precision="tf32x3")
        for same in (True, False)
    )
    ring = 2 * 16 * (16 + 16) * 4
    assert two.shared_bytes(spec) - one.shared_bytes(spec) == ring


def _errors(precision: str, rounded: bool) -> tuple[bool, bool]:
    """Verdicts of a float64 attention of operands that are rounded to TF32, or not: within the
    bound of a precision, and within float32's."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, 64), np.float32) for n in (40, 300, 300))
    x, y, z = (a.copy() for a in (q, k, v))
    if rounded:
        for a in (x, y, z):
            round_to_tf32(a)
    found = formulas.attention(x, y, z, False, 0.125)
    out, lse = found.out.astype(np.float32), found.lse.astype(np.float32)
    of = check.attention(q, k, v, out, lse, causal=False, precision=precision)
    plain = check.attention(q, k, v, out, lse, causal=False)
    return of.passed, plain.passed


def test_bounds_tell_roundings_apart() -> None:
    assert _errors("tf32", True) == (True, False)
    assert _errors("tf32x3", True) == (False, False)
    assert _errors("tf32x3", False) == (True, True)


def test_split_products_have_twice_the_bound_of_float32() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 1, 9, 16), np.float32) for _ in range(3))
    result = formulas.attention(q, k, v, False, 0.25)
    f32 = DType.float32
    plain, of_lse = tolerances.attention(result, 9, 16, f32, f32)
    split, split_lse = tolerances.attention(result, 9, 16, f32, f32, precision="tf32x3")
    assert (split_lse == 2 * of_lse).all() and (split > 1.5 * plain).all()
    assert (split < 2 * plain).all()


def test_gradients_take_the_precision_of_their_attention() -> None:
    rng = np.random.default_rng(2)
    q, k, v, dout = (rng.standard_normal((1, 2, 8, 16), np.float32) for _ in range(4))
    out, lse = kernelseam.attention(q, k, v, precision="tf32x3", return_lse=True)
    of = kernelseam.attention_bwd(dout, q, k, v, out, lse, precision="tf32x3")
    plain = kernelseam.attention_bwd(dout, q, k, v, out, lse)
    assert all((x == y).all() for x, y in zip(of[:3], plain[:3], strict=True))
    with pytest.raises(InvalidValue, match="precision = tf32: is a way to multiply float32"):
        kernelseam.attention(*(x.astype(np.float16) for x in (q, k, v)), precision="tf32")

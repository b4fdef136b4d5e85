"""Projections as GEMMs: one launch a product, nothing copied, all tokens as rows of one matrix
where they can be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from kernelseam import OutputProjection, OutputProjectionBwd, QkvProjection, QkvProjectionBwd
from kernelseam.contract import ArchRow, Device, DeviceLimits
from kernelseam.descriptors.gemm.problem import GemmProblem, HeadsSpec, Segment
from kernelseam.dtypes import DType
from kernelseam.kernels import GemmTile, shared_implementations
from kernelseam.kernels.projection import products
from kernelseam.kernels.projection.projection import PROJECTIONS
from projection_fields import ALL, OUT, OUT_ALL, QKV

F16, F32, F64 = DType.float16, DType.float32, DType.float64
DEVICE = Device("fake", 0, "fake1", "", DeviceLimits(compute_units=8))
TILE = GemmTile(frozenset({F16, F64}), 32, 32, 32, 1, 2, 2)
ROW = ArchRow("fake1", 32, 96 * 1024, 255, "fake.h", (), frozenset({F16}), {"gemm": (TILE,)})


class Toolchain:
    """As far as a composition asks it."""

    backend, archs = "fake", ("fake1",)

    def arch_row(self, arch: str) -> ArchRow:
        return ROW


def token_major(heads: int, *names: str) -> dict[str, int]:
    """Of [2, 5, heads, 8] arrays."""
    walk = {"batch": 5 * heads * 8, "head": 8, "row": heads * 8}
    return {f"stride_{n}_{axis}": s for n in names for axis, s in walk.items()}


def one(found: Iterator[products.Product]) -> products.Product:
    (product,) = found
    return product


def gemm(found: Iterator[products.Product]) -> GemmProblem:
    return one(found).problem


# ---------------------------------------------------------------- forwards


def test_q_k_and_v_are_one_product_of_all_tokens() -> None:
    product = one(
        products.qkv(
            QkvProjection(**QKV, bias=0, cos=0, sin=0, rotary_dim=8, max_position=5).problem()
        )
    )
    p = product.problem
    assert (p.M, p.N, p.K, p.batch, p.num_heads) == (10, 64, 24, 1, 1)
    assert p.spec.b_transposed and p.spec.bias is F16 and p.spec.heads == HeadsSpec("halves")
    assert p.heads is not None and (p.heads.tokens, p.heads.q_strides) == (5, (160, 40, 8))
    assert (p.a_strides, p.b_strides) == ((120, 0, 24), (0, 0, 24))
    assert product.operands == {
        "a": "input",
        "b": "weight",
        "c": "q",
        "c1": "k",
        "c2": "v",
        "bias": "bias",
        "cosines": "cos",
        "sines": "sin",
        "positions": "positions",
        "table": "block_table",
    }


@pytest.mark.parametrize(
    ("more", "batch", "M", "row"),
    [
        ({"stride_input_batch": 240}, 2, 5, 24),
        ({"stride_input_batch": 240, "S": 1}, 1, 2, 240),
        ({"stride_input_batch": 0}, 2, 5, 24),
        ({"stride_input_row": 0, "stride_input_batch": 0}, 1, 10, 0),
        ({"batch": 1, "stride_input_row": 40}, 1, 5, 40),
        ({"batch": 0}, 1, 0, 24),
        ({"S": 0}, 1, 0, 24),
        ({"S": 1, "stride_input_batch": 1 << 31}, 2, 1, 24),
    ],
)
def test_evenly_spaced_tokens_are_rows_of_one_matrix(
    more: dict[str, Any], batch: int, M: int, row: int
) -> None:
    p = gemm(products.qkv(QkvProjection(**{**QKV, **more}).problem()))
    assert (p.batch, p.M, p.a_strides[2]) == (batch, M, row)


def test_heads_with_gaps_are_summed() -> None:
    """Head-major results of an attention: a product a head, all in one launch."""
    p = gemm(products.output(OutputProjection(**OUT, bias=0, residual=0).problem()))
    assert (p.M, p.N, p.K, p.batch, p.num_heads, p.c_head_group) == (5, 24, 8, 2, 4, 4)
    assert (
        p.spec.summed
        and p.results == 2
        and p.b_strides == (0, 8, 32)
        and p.a_strides == (160, 40, 8)
    )
    assert p.c_strides == p.residual_strides == (120, 0, 24) and (p.spec.bias, p.spec.residual) == (
        F16,
        F16,
    )
    narrow = gemm(products.output(OutputProjection(**{**OUT, "head_dim": 6}).problem()))
    assert (narrow.spec.vector_b, p.spec.vector_b) == (2, 16)  # a head's columns begin at 12 bytes


def test_heads_side_by_side_are_one_row() -> None:
    p = gemm(
        products.output(OutputProjection(**OUT, residual=0, **token_major(4, "attn_out")).problem())
    )
    assert (p.M, p.N, p.K, p.batch, p.num_heads) == (10, 24, 32, 1, 1) and not p.spec.summed
    for more in (
        {"stride_residual_batch": 0},
        {"stride_out_batch": 240},
        {"stride_attn_out_batch": 320},
    ):
        given = {**OUT, **token_major(4, "attn_out"), "residual": 0, **more}
        p = gemm(products.output(OutputProjection(**given).problem()))
        assert (p.batch, p.M, p.K) == (2, 5, 32), more
    given = {
        **token_major(4, "attn_out"),
        "residual": 0,
        "stride_residual_batch": 0,
        "stride_residual_row": 0,
    }
    p = gemm(products.output(OutputProjection(**OUT, **given).problem()))
    assert (p.batch, p.M, p.residual_strides) == (1, 10, (0, 0, 0))


# ---------------------------------------------------------------- gradients


def test_gradients_read_dq_dk_and_dv_in_place() -> None:
    d_input, d_weight = products.qkv_bwd(QkvProjectionBwd(**QKV, **ALL).problem())
    p = d_input.problem
    assert (p.M, p.N, p.K, p.batch, p.num_heads, p.c_head_group) == (5, 24, 8, 2, 8, 8)
    assert p.segments == (
        Segment(4, (160, 40, 8)),
        Segment(2, (80, 40, 8)),
        Segment(2, (80, 40, 8)),
    )
    assert p.spec.segmented and p.spec.summed and p.b_strides == (0, 8 * 24, 24) and p.results == 2
    assert d_input.operands == {"a": "dq", "a1": "dk", "a2": "dv", "b": "weight", "c": "d_input"}
    p = d_weight.problem
    assert (p.M, p.N, p.K, p.batch, p.num_heads, p.c_batch_group) == (8, 24, 5, 2, 8, 2)
    assert (
        p.spec.a_transposed
        and p.spec.row_sums is F16
        and p.sums_strides == (0, 8)
        and p.results == 8
    )
    assert p.c_strides == (0, 8 * 24, 24) and p.b_strides == (120, 0, 24)
    assert d_weight.operands["sums"] == "d_bias" and not d_weight.workspace


def test_adjacent_heads_in_all_three_are_one_segment() -> None:
    given = {**token_major(4, "dq"), **token_major(2, "dk", "dv")}
    d_input, d_weight = products.qkv_bwd(QkvProjectionBwd(**QKV, **ALL, **given).problem())
    p = d_input.problem
    assert (p.M, p.K, p.batch, p.num_heads) == (10, 16, 1, 4)
    assert [(s.heads, s.strides[1:]) for s in p.segments] == [
        (2, (16, 32)),
        (1, (16, 16)),
        (1, (16, 16)),
    ]
    p = d_weight.problem
    assert (p.M, p.K, p.batch, p.num_heads, p.c_batch_group) == (
        16,
        10,
        1,
        4,
        1,
    ) and not p.spec.summed
    assert p.sums_strides == (0, 16)
    d_input, _ = products.qkv_bwd(QkvProjectionBwd(**QKV, **ALL, **token_major(4, "dq")).problem())
    assert (d_input.problem.K, d_input.problem.num_heads) == (8, 8)


def test_gradients_of_the_output() -> None:
    d_attn_out, d_weight = products.output_bwd(OutputProjectionBwd(**OUT, **OUT_ALL).problem())
    p = d_attn_out.problem
    assert (p.M, p.N, p.K, p.batch, p.num_heads) == (5, 8, 24, 2, 4)
    assert p.a_strides == (120, 0, 24) and p.b_strides == (0, 8, 32) and p.c_strides == (160, 40, 8)
    p = d_weight.problem
    assert (p.M, p.N, p.K, p.num_heads, p.c_batch_group) == (24, 8, 5, 4, 2)
    assert (
        p.spec.a_transposed
        and p.c_strides == (0, 8, 32)
        and p.sums_strides == (0, 0)
        and p.spec.row_sums is F16
    )
    given = token_major(4, "attn_out", "d_attn_out")
    for product in products.output_bwd(OutputProjectionBwd(**OUT, **OUT_ALL, **given).problem()):
        assert (product.problem.N, product.problem.batch, product.problem.num_heads) == (32, 1, 1)


def test_only_requested_gradients_are_launched() -> None:
    for asked, names in (
        (("d_input",), ["d_input"]),
        (("d_weight",), ["d_weight"]),
        (("d_weight", "d_bias"), ["d_weight"]),
        (("d_input", "d_bias"), ["d_input", "d_bias"]),
        (("d_bias",), ["d_bias"]),
    ):
        found = list(products.qkv_bwd(QkvProjectionBwd(**QKV, **dict.fromkeys(asked, 0)).problem()))
        assert [x.name for x in found] == names
        assert all(x.problem.spec.row_sums is None for x in found) == ("d_bias" not in asked)
        asked = tuple(n.replace("d_input", "d_attn_out") for n in asked)
        found = list(
            products.output_bwd(OutputProjectionBwd(**OUT, **dict.fromkeys(asked, 0)).problem())
        )
        assert [x.name.replace("d_attn_out", "d_input") for x in found] == names


def test_a_bias_s_gradient_alone_is_a_product_of_a_few_columns() -> None:
    """What is summed with itself, the product left in the workspace."""
    product = one(products.qkv_bwd(QkvProjectionBwd(**QKV, d_bias=0).problem()))
    assert product.operands == {"a": "dq", "a1": "dk", "a2": "dv", "b": "dq", "sums": "d_bias"}
    assert (product.problem.N, product.workspace, product.workspace_bytes) == (
        8,
        {"c": 0},
        8 * 8 * 8 * 2,
    )
    assert product.problem.b_strides == (160, 0, 8)
    product = one(
        products.output_bwd(OutputProjectionBwd(**{**OUT, "hidden": 3}, d_bias=0).problem())
    )
    assert (product.problem.M, product.problem.N, product.workspace_bytes) == (3, 3, 256)
    no_columns = list(products.qkv_bwd(QkvProjectionBwd(**{**QKV, "hidden": 0}, **ALL).problem()))
    assert [x.name for x in no_columns] == ["d_input", "d_bias"]


# ---------------------------------------------------------------- the composition


def problems() -> list[Any]:
    return [
        QkvProjection(**QKV).problem(),
        OutputProjection(**OUT).problem(),
        QkvProjectionBwd(**QKV, **ALL).problem(),
        OutputProjectionBwd(**OUT, **OUT_ALL).problem(),
    ]


def test_every_toolchain_gets_them() -> None:
    toolchain: Any = Toolchain()
    asked = {p.operation for p in problems()}
    found: dict[str, Any] = {
        i.operation: i for i in shared_implementations(toolchain) if i.operation in asked
    }
    assert {i.name for i in found.values()} == {"shared"}
    assert [len(found[p.operation].launches(p, DEVICE).steps) for p in problems()] == [1, 1, 2, 2]
    for p in problems():
        assert found[p.operation].supports(p, DEVICE) is None
        assert 0 < found[p.operation].cost(p, DEVICE).seconds < 1


def test_refusals_name_the_product() -> None:
    qkv, output, qkv_bwd, output_bwd = PROJECTIONS
    bare = replace(ROW, tiles={"gemm": (replace(TILE, dtypes=frozenset({F32})),)})
    for composition, problem, name in zip(
        PROJECTIONS, problems(), ("q, k and v", "out", "d_input", "d_attn_out"), strict=True
    ):
        assert (
            composition.operation == problem.operation and composition.refuse(problem, ROW) is None
        )
        assert (
            composition.refuse(problem, bare)
            == f"{name}: no tile of fake1 takes float16 to float16"
        )
    rotated: dict[str, Any] = {"cos": 0, "sin": 0, "rotary_dim": 8, "max_position": 5}
    assert qkv.refuse(QkvProjection(**{**QKV, **rotated, "head_dim": 9}).problem(), ROW) == (
        "head_dim = 9 is odd: elements that are rotated together lie in one pair of columns"
    )
    assert qkv.refuse(QkvProjection(**QKV, **rotated, stride_cos_row=1 << 31).problem(), ROW) == (
        "stride_cos_row = 2147483648 elements: shared kernels take row strides below 2^31"
    )
    double = {**OUT, "dtype": "float64"}
    assert output.refuse(OutputProjection(**double).problem(), ROW) is None
    assert output.refuse(OutputProjection(**double, dtype_out="float32").problem(), ROW) == (
        "out: sums of float64 are stored as float64 alone, not as float32"
    )
    for composition, made in (
        (qkv_bwd, QkvProjectionBwd(**{**QKV, "dtype": "float64"}, d_bias=0, dtype_bias="float32")),
        (output_bwd, OutputProjectionBwd(**double, d_bias=0, dtype_bias="float32")),
    ):
        assert (
            composition.refuse(made.problem(), ROW)
            == "d_bias: sums of float64 are stored as float64 alone, not as float32"
        )


def test_narrow_rows_are_predicted_to_be_slower() -> None:
    output, rates = PROJECTIONS[1], []
    for problem in (problems()[1], OutputProjection(**OUT, stride_out_row=25).problem()):
        (launch,) = output.launches(problem, output.tile(problem, ROW, DEVICE), DEVICE).steps
        rates.append(launch.kernel.work(launch.problem, launch.tile, DEVICE).rate)
    assert rates[1] == pytest.approx(0.45 * rates[0])

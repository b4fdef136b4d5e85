"""Projections whose products Hopper's GEMM makes, where it takes them. Nothing here needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kernelseam import (
    OutputProjection,
    OutputProjectionBwd,
    QkvProjection,
    QkvProjectionBwd,
)
from kernelseam.kernels.gemm.gemm import GemmDefinition
from kernelseam.kernels.projection import products

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from h200_rows import H200  # noqa: E402
from kernelseam_cuda import archs  # noqa: E402
from kernelseam_cuda.sm90 import KERNELS, HopperGemm, HopperHeads  # noqa: E402
from kernelseam_cuda.sm90.tiles import HopperGemmTile  # noqa: E402

ROW = archs.row("sm_90a")
LARGE: dict[str, Any] = {
    "batch": 4,
    "S": 4096,
    "hidden": 4096,
    "num_heads": 32,
    "head_dim": 128,
    "dtype": "bfloat16",
    # tokens first, so that the heads of a token are one row
    "stride_attn_out_batch": 4096 * 4096,
    "stride_attn_out_head": 128,
    "stride_attn_out_row": 4096,
}


def composition_of(operation: str) -> Any:
    (composition,) = (k for k in KERNELS if k.operation == operation)
    return composition


def test_a_large_output_projection_is_one_product_by_tma() -> None:
    composition = composition_of("output_projection")
    problem = OutputProjection(**LARGE, bias=0, residual=0).problem()
    assert composition.refuse(problem, ROW) is None
    (launch,) = composition.launches(problem, composition.tile(problem, ROW, H200), H200).steps
    assert isinstance(launch.kernel, HopperGemm) and (launch.problem.M, launch.problem.N) == (
        16384,
        4096,
    )
    walked = {p: launch.operands[p] for p in ("a_map", "b_map", "c_map", "residual_map")}
    assert walked == {
        "a_map": "attn_out",
        "b_map": "weight",
        "c_map": "out",
        "residual_map": "residual",
    }


def test_a_map_without_an_operand_of_its_own_walks_the_result() -> None:
    composition = composition_of("output_projection")
    problem = OutputProjection(**LARGE).problem()
    (launch,) = composition.launches(problem, composition.tile(problem, ROW, H200), H200).steps
    assert launch.operands["residual_map"] == "out"


def test_gradients_of_heads_that_lie_apart_are_one_product_each() -> None:
    """d_attn_out's columns are heads; d_weight's are the elements of attn_out's."""
    composition = composition_of("output_projection_bwd")
    apart = {
        f"stride_{name}_{axis}": stride
        for name in ("attn_out", "d_attn_out")
        for axis, stride in (("batch", 32 * 4096 * 128), ("head", 4096 * 128), ("row", 128))
    }
    problem = OutputProjectionBwd(
        **{**LARGE, **apart}, d_attn_out=0, d_weight=0, d_bias=0
    ).problem()
    assert composition.refuse(problem, ROW) is None
    first, second = composition.launches(problem, composition.tile(problem, ROW, H200), H200).steps
    assert isinstance(first.kernel, HopperHeads) and isinstance(second.kernel, HopperGemm)
    assert (first.problem.N, first.problem.heads.num_heads) == (4096, 32)
    assert {first.operands[m] for m in ("c_map", "c1_map", "c2_map")} == {"d_attn_out"}
    assert (second.problem.spec.joined, second.problem.N) == ("b", 4096)
    assert (second.operands["b_map"], second.operands["sums"]) == ("attn_out", "d_bias")
    names = list(composition.variants(problem, ROW, H200))
    assert names[0].startswith("sm90 ") and "+" in names[0] and len(names) == len(set(names))


def qkv_bwd(**changes: Any) -> Any:
    fields = {"batch": 2, "S": 256, "hidden": 512, "num_heads": 4, "kv_heads": 2, "head_dim": 128}
    asked = dict.fromkeys(("d_input", "d_weight", "d_bias"), 0)
    return QkvProjectionBwd(**{**fields, **asked, "dtype": "bfloat16", **changes}).problem()


def test_gradients_by_q_k_and_v_join_their_heads() -> None:
    composition, problem = composition_of("qkv_projection_bwd"), qkv_bwd()
    assert composition.refuse(problem, ROW) is None
    first, second = composition.launches(problem, composition.tile(problem, ROW, H200), H200).steps
    assert (first.problem.spec.joined, first.problem.K, first.problem.spec.summed) == (
        "k",
        1024,
        False,
    )
    assert (second.problem.spec.joined, second.problem.M, second.problem.spec.summed) == (
        "a",
        1024,
        True,
    )
    for step in (first, second):
        assert [step.operands[m] for m in ("a_map", "a1_map", "a2_map")] == ["dq", "dk", "dv"]


def test_heads_that_no_box_divides_are_a_product_each() -> None:
    composition, problem = composition_of("qkv_projection_bwd"), qkv_bwd(head_dim=96)
    first, second = composition.launches(problem, composition.tile(problem, ROW, H200), H200).steps
    assert (first.problem.spec.joined, first.problem.spec.summed) == (None, True)
    assert (second.problem.spec.joined, second.problem.num_heads) == (None, 8)


def test_a_gradient_of_the_bias_alone_goes_to_the_workspace_through_its_map() -> None:
    composition = composition_of("qkv_projection_bwd")
    problem = qkv_bwd(d_input=None, d_weight=None)
    launches = composition.launches(problem, composition.tile(problem, ROW, H200), H200)
    (launch,) = launches.steps
    if isinstance(launch.kernel, HopperGemm):
        assert launch.workspace["c_map"] == launch.workspace["c"] == 0
    assert launches.workspace_bytes > 0


def test_an_output_of_heads_that_lie_apart_is_one_product() -> None:
    composition = composition_of("output_projection")
    apart = {**LARGE, "stride_attn_out_batch": 32 * 4096 * 128, "stride_attn_out_head": 4096 * 128}
    problem = OutputProjection(**{**apart, "stride_attn_out_row": 128}).problem()
    assert composition.refuse(problem, ROW) is None
    (launch,) = composition.launches(problem, composition.tile(problem, ROW, H200), H200).steps
    assert (launch.problem.spec.joined, launch.problem.K, launch.problem.batch) == ("k", 4096, 4)


def test_what_hoppers_kernel_takes_no_part_in_is_refused() -> None:
    assert composition_of("output_projection").refuse(
        OutputProjection(**{**LARGE, "dtype": "float32"}).problem(), ROW
    ) == ("none of its products is for gemm_sm90")


def qkv(**changes: Any) -> Any:
    fields = {"batch": 2, "S": 256, "hidden": 512, "num_heads": 4, "kv_heads": 2, "head_dim": 128}
    return QkvProjection(**{**fields, "dtype": "bfloat16", **changes}).problem()


TURNED = {"cos": 0, "sin": 0, "max_position": 4096}


def launch_of(problem: Any) -> Any:
    composition = composition_of("qkv_projection")
    assert composition.refuse(problem, ROW) is None
    (launch,) = composition.launches(problem, composition.tile(problem, ROW, H200), H200).steps
    assert isinstance(launch.kernel, HopperHeads)
    return launch


def offered(problem: Any) -> tuple[HopperGemmTile, ...]:
    (product,) = products.qkv(problem)
    assert HopperHeads().refuse(product.problem, ROW) is None
    return HopperHeads().offered(product.problem)


def stores(problem: Any) -> set[str]:
    return {t.store for t in offered(problem)}


def test_q_k_and_v_have_a_map_each_where_tma_stores_them() -> None:
    launch = launch_of(qkv(S=16384, batch=1, num_heads=32, kv_heads=8, hidden=4096))
    assert launch.tile.store == "tma"
    assert [launch.operands[m] for m in ("c_map", "c1_map", "c2_map")] == ["q", "k", "v"]
    maps = launch.kernel.tensor_maps(launch.problem, launch.tile, H200)
    assert maps["c_map"].extents == (128, 16384, 32, 1) and maps["c_map"].box == (64, 64, 1, 1)
    assert [maps[m].extents[2] for m in ("c1_map", "c2_map")] == [8, 8]


def test_halves_are_stored_by_32_columns_and_the_weight_comes_in_units() -> None:
    launch = launch_of(qkv(S=512, batch=1, rotary_dim=128, **TURNED))
    tma = next(t for t in launch.kernel.offered(launch.problem) if t.store == "tma")
    maps = launch.kernel.tensor_maps(launch.problem, tma, H200)
    assert (maps["c_map"].box, maps["c_map"].swizzle) == ((32, 64, 1, 1), 64)
    assert maps["b_map"].box == (64, 32, 1, 1)
    pairs = launch_of(qkv(S=512, batch=1, rotary_dim=128, rotary_style="pairs", **TURNED))
    maps = pairs.kernel.tensor_maps(pairs.problem, tma, H200)
    assert (maps["c_map"].box, maps["c_map"].swizzle) == ((64, 64, 1, 1), 128)


@pytest.mark.parametrize(("tokens", "hides"), [(4096, True), (512, False)])
def test_one_consumer_turns_its_tile_while_the_other_multiplies(tokens: int, hides: bool) -> None:
    """Where most tiles have one behind them."""
    large = {"batch": 1, "hidden": 4096, "num_heads": 32, "kv_heads": 8, "head_dim": 128}
    tile = launch_of(qkv(S=tokens, **large, rotary_dim=128, **TURNED)).tile
    assert tile.ping_pong is hides
    assert not launch_of(qkv(S=tokens, **large)).tile.ping_pong


def test_warps_store_what_boxes_do_not_hold() -> None:
    both = {"tma", "rows"}
    assert stores(qkv()) == both, "entries of whole boxes"
    assert stores(qkv(S=100)) == {"rows"}, "entries end within a box"
    assert stores(qkv(S=100, batch=1)) == both, "one entry, cut off at its end"
    assert stores(qkv(S=100, stride_input_batch=100 * 512 + 64)) == both, "a matrix an entry"
    assert stores(qkv(head_dim=96)) == {"rows"}
    pages = {"block_table": 0, "pages": 64, "page_size": 16, "table_width": 32}
    assert stores(qkv(**pages)) == {"rows"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 20}, "head_dim = 20: it takes multiples of 8"),
        (
            {"head_dim": 40, "rotary_dim": 40, **TURNED},
            "rotary_dim = 40 of head_dim = 40 by halves: it takes multiples of 64",
        ),
        (
            {"head_dim": 64, "rotary_dim": 24, **TURNED},
            "rotary_dim = 24 of head_dim = 64 by halves: it takes multiples of 64",
        ),
        (
            {"dtype_out": "float32"},
            "its heads are of 16 bits, of bfloat16 in and out, not of float32",
        ),
        ({"stride_q_row": 130}, "rows of C at multiples of 2 bytes: TMA takes multiples of 16"),
        ({"dtype": "float32"}, "it multiplies float32 in tf32, not in float32"),
    ],
)
def test_what_heads_are_not_taken_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    problem = qkv(**changes)
    (product,) = products.qkv(problem)
    assert HopperHeads().refuse(product.problem, ROW) == reason
    assert composition_of("qkv_projection").refuse(problem, ROW) == (
        "none of its products is for gemm_sm90"
    )


def test_other_kernels_leave_what_is_hoppers_alone() -> None:
    (product,) = products.qkv(qkv())
    assert HopperGemm().refuse(product.problem, ROW) == "heads is not supported by this kernel"
    natural = replace(product.problem, spec=replace(product.problem.spec, b_transposed=False))
    assert (
        GemmDefinition().refuse(natural, ROW)
        == "it makes heads of a weight [columns, hidden] alone"
    )
    joined = replace(product.problem, spec=replace(natural.spec, heads=None, joined="k"))
    assert GemmDefinition().refuse(joined, ROW) == "it does not join heads along K"


UNIT = 32


def element(column: int, dim: int, turned_heads: int, rotary_dim: int) -> int:
    """Order.element of heads.h in Python: the element of its head that a column holds."""
    c = column % dim
    if column >= turned_heads * dim or c >= rotary_dim:
        return c
    return c // (2 * UNIT) * UNIT + c % UNIT + (c // UNIT & 1) * (rotary_dim // 2)


def test_columns_hold_every_element_once_and_pairs_a_unit_apart() -> None:
    dim, rotary_dim, heads, rotated = 128, 64, 4, 3
    for head in range(heads):
        columns = range(head * dim, (head + 1) * dim)
        found = {c: element(c, dim, rotated, rotary_dim) for c in columns}
        assert sorted(found.values()) == list(range(dim))
        for c in columns if head < rotated else ():
            if c % dim < rotary_dim and c // UNIT % 2 == 0:
                assert found[c + UNIT] == found[c] + rotary_dim // 2
                first = c % dim // (2 * UNIT) * (2 * UNIT)
                assert found[c] == first // 2 + c % UNIT, "the row of its cosine"

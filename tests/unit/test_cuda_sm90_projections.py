"""Projections whose products Hopper's GEMM makes, where it takes them. Nothing here needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from kernelseam import OutputProjection, OutputProjectionBwd

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from h200_rows import H200  # noqa: E402
from kernelseam_cuda import archs  # noqa: E402
from kernelseam_cuda.sm90 import KERNELS, HopperGemm  # noqa: E402

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
GRADIENTS = {
    "stride_d_attn_out_batch": 4096 * 4096,
    "stride_d_attn_out_head": 128,
    "stride_d_attn_out_row": 4096,
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


def test_each_gradient_has_the_kernel_that_takes_it() -> None:
    composition = composition_of("output_projection_bwd")
    problem = OutputProjectionBwd(
        **LARGE, **GRADIENTS, d_attn_out=0, d_weight=0, d_bias=0
    ).problem()
    assert composition.refuse(problem, ROW) is None
    first, second = composition.launches(problem, composition.tile(problem, ROW, H200), H200).steps
    assert (first.kernel.name, second.kernel.name) == ("sm90", "shared"), (
        "sums of rows are the shared kernel's"
    )
    names = list(composition.variants(problem, ROW, H200))
    assert names[0].startswith("sm90 ") and "+" in names[0] and len(names) == len(set(names))


def test_what_hoppers_kernel_takes_no_part_in_is_refused() -> None:
    apart = {**LARGE, "stride_attn_out_head": 4096 * 128, "stride_attn_out_row": 128}
    assert composition_of("output_projection").refuse(OutputProjection(**apart).problem(), ROW) == (
        "none of its products is for gemm_sm90"
    )
    assert composition_of("output_projection").refuse(
        OutputProjection(**{**LARGE, "dtype": "float32"}).problem(), ROW
    ) == ("none of its products is for gemm_sm90")

"""The kernel definition of Hopper's attention of e4m3: what it takes, what it is launched with.
Nothing here needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from h200_rows import H200 as MEASURED
from hopper import H200, ROW
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.kernels import KernelImplementation
from kernelseam_cuda import tensor_maps
from kernelseam_cuda.plugin import backend
from kernelseam_cuda.sm90 import HopperAttention, HopperE4m3Attention
from kernelseam_cuda.sm90.attention_e4m3_tiles import E4M3_ATTENTION

E4M3 = HopperE4m3Attention()
STORED = dict.fromkeys(("dtype_q", "dtype_kv"), DType.float8_e4m3fn)
SCALED = {**STORED, "q_scales": "heads", "kv_scales": "heads"}


def problem(dim: int = 128, S: int = 4096, batch: int = 4, **spec: object) -> AttentionProblem:
    """Rows as [batch, sequence, head, dim] has them, 16 heads over 4."""
    s = AttentionSpec(
        **{
            "dtype": DType.bfloat16,
            "head_dim": dim,
            "value_dim": dim,
            "lse": True,
            **STORED,
            **spec,
        }
    )
    q, k = (S * 16 * dim, dim, 16 * dim), (S * 4 * dim, dim, 4 * dim)
    scales = {f"{n}_scale_strides": (4, 1, 0) for n in "qkv"} if s.q_scales else {}
    return AttentionProblem(s, batch, 16, 4, S, S, q, k, k, q, (16 * S, S), dim**-0.5, **scales)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"dtype_q": None, "dtype_kv": None},
            "q is of bfloat16: it takes float8_e4m3fn",
        ),
        ({"dtype_q": None}, "q is of bfloat16: it takes float8_e4m3fn"),
        (
            dict.fromkeys(("dtype_q", "dtype_kv"), DType.float8_e4m3fnuz),
            "q is of float8_e4m3fnuz: it takes float8_e4m3fn",
        ),
        (
            {"q_scales": "blocks", "kv_scales": "heads"},
            "blocks of queries or of keys have scales of their own: it takes one a head",
        ),
        (
            {"q_scales": "heads", "kv_scales": "blocks"},
            "blocks of queries or of keys have scales of their own: it takes one a head",
        ),
        ({"dtype_out": DType.float32}, "its result is of bfloat16, not float32"),
        ({"head_dim": 96, "value_dim": 96}, "head dims 96: it takes 64, 128, 256"),
        ({"head_dim": 192, "value_dim": 128}, "head dims 192/128: it takes 64, 128, 256"),
        ({"mask": True, "alibi": True}, "alibi, mask are not supported by this kernel"),
        ({"vector": 8}, "rows at multiples of 8 bytes: TMA takes multiples of 16"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(
    changes: dict[str, object], reason: str
) -> None:
    assert E4M3.refuse(problem(**changes), ROW) == reason


def test_the_kernel_of_16_bits_does_not_take_queries_of_8() -> None:
    assert (
        HopperAttention().refuse(problem(), ROW)
        == "dtype_kv, dtype_q are not supported by this kernel"
    )


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_maps_have_panels_of_128_bytes_or_rows_of_64(dim: int) -> None:
    p = problem(dim)
    assert E4M3.refuse(p, ROW) is None
    for tile in E4M3.tiles(p.spec, ROW):
        maps = E4M3.tensor_maps(p, tile, H200)
        panel = min(dim, 128)
        for name, rows in (("q_map", 64), ("k_map", tile.bn), ("v_map", tile.bn)):
            m = maps[name]
            assert (m.dtype, m.box, m.swizzle) == (
                DType.float8_e4m3fn,
                (panel, rows, 1, 1),
                panel,
            )
            assert tensor_maps.refuse(m, 16) is None
        out = maps["out_map"]
        assert (out.dtype, out.box, out.swizzle) == (DType.bfloat16, (64, 16, 1, 1), 128)


def test_consumers_of_head_dim_64_are_as_many_as_what_hides_keys_leaves_registers_for() -> None:
    for changes, rows in (
        ({}, 256),
        ({"softcap": True}, 256),
        ({"causal": True}, 192),
        ({"causal": True, "softcap": True}, 192),
        ({"causal": True, "S": 2048}, 192),
        ({"causal": True, "S": 2047}, 128),
        ({"causal": True, "S": 1024, "batch_invariant": True}, 192),
        ({"causal": True, "lengths": True}, 128),
        ({"causal": True, "q_view": "packed", "kv_view": "packed"}, 128),
        ({"window": True}, 128),
        ({"lengths": True}, 128),
        ({"q_view": "packed", "kv_view": "packed"}, 128),
    ):
        p = problem(64, **changes)
        assert E4M3.tile(p, ROW, H200).bm == rows, changes


def test_sums_move_to_shared_memory_after_2048_keys() -> None:
    for tile in E4M3_ATTENTION:
        assert tile.sum_blocks * tile.bn == 2048
        assert tile.shared_bytes <= ROW.shared_bytes_per_block


def test_scales_are_an_argument_where_there_are_some() -> None:
    plain, scaled = problem(), problem(**SCALED)
    tile = E4M3.tile(plain, ROW, H200)
    names = [{n for n, _ in E4M3.signature(p.spec).parameters} for p in (plain, scaled)]
    assert names[1] - names[0] == {"scales"}
    scales = {"q_scales", "k_scales", "v_scales"}
    assert not scales & set(E4M3.pointers(plain.spec))
    assert scales <= set(E4M3.pointers(scaled.spec))
    repeated = replace(scaled, k_scale_strides=(0, 0, 0))
    values = E4M3.values(repeated, tile, H200)
    assert [values[f"{n}_head"] for n in ("q_scales", "k_scales", "v_scales")] == [1, 0, 1]
    assert not E4M3.constants(plain.spec, tile, ROW)["Q_SCALES"]
    assert E4M3.constants(scaled.spec, tile, ROW)["Q_SCALES"]


@pytest.mark.parametrize(("dim", "TFLOPs"), [(64, 700), (128, 920), (256, 1000)])
def test_the_cost_model_predicts_what_was_measured(dim: int, TFLOPs: float) -> None:
    """benchmarks/results/h200-attention-e4m3.md: 16,384 keys, no mask."""
    s = AttentionSpec(DType.bfloat16, dim, dim, **STORED)
    heads, S = 2048 // dim, 16384
    walk = (S * heads * dim, dim, heads * dim)
    p = AttentionProblem(s, 1, heads, heads, S, S, walk, walk, walk, walk, (0, 0), dim**-0.5)
    toolchain = backend().toolchain
    assert toolchain is not None
    cost = KernelImplementation(E4M3, toolchain).cost(p, MEASURED)
    measured = 4 * heads * S * S * dim / (TFLOPs * 1e12)
    assert cost.seconds == pytest.approx(measured, rel=0.08)

"""Hopper's gradients under a mask_mod: whose lists of queries are made, where they
lie, and what is refused. Nothing here needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from attention_problems import attention_problem
from compile_matrix.hopper_attention import MASKED
from hopper import H200, ROW, gradients
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.dtypes import DType
from kernelseam_cuda.sm90.attention_blocks import VISIBLE_BLOCKS
from kernelseam_cuda.sm90.attention_bwd import HopperAttentionBwd
from kernelseam_cuda.sm90.attention_query_lists import QUERY_LISTS

KERNEL = HopperAttentionBwd()

ABSENT = (
    "bias",
    "mask",
    "alibi_slopes",
    "prefix_lengths",
    "kv_lengths",
    "cu_seqlens_q",
    "cu_seqlens_k",
)
"""Operands of options that are off: their addresses are 0."""


def _reading(axis: str) -> str:
    return (
        f'0 coordinate INT32 "{axis}"; 1 coordinate FLOAT "score"; 2 constant INT32 9; '
        "3 lt BOOLEAN 0 2; score 1; visible 3"
    )


def problem(
    S_q: int = 1000, S_k: int = 2000, expression: str | None = MASKED, **spec: Any
) -> AttentionBwdProblem:
    p = attention_problem(S_q, S_k, batch=3, expression=expression, **spec)
    return gradients(p)


@pytest.mark.parametrize(
    ("expression", "spec", "lists"),
    [
        (MASKED, {"causal": True, "prefix": True}, 3),
        (MASKED, {}, 1),
        (MASKED, {"lengths": True}, 3),
        (MASKED, {"q_view": "packed", "kv_view": "packed"}, 3),
        (_reading("b"), {}, 3),
    ],
)
@pytest.mark.parametrize(("dim", "step"), [(128, 64), (64, 128)])
def test_lists_are_made_of_what_the_mask_tells_apart(
    expression: str | None, spec: dict[str, Any], lists: int, dim: int, step: int
) -> None:
    p = problem(expression=expression, head_dim=dim, value_dim=dim, **spec)
    assert KERNEL.refuse(p, ROW) is None
    tile = KERNEL.tile(p, ROW, H200)
    made = KERNEL.launches(p, tile, H200)
    blocks, listing, _, main, _ = made.kernels
    assert (blocks.kernel, listing.kernel, main.kernel) == (VISIBLE_BLOCKS, QUERY_LISTS, KERNEL)
    assert (blocks.tile.bm, blocks.tile.bn) == (step, 128), "a step's queries, a tile's keys"
    assert blocks.tile.in_cluster, "blocks are put in no order, which would take a counter"
    # sixteen tiles of keys, and of each a number and as many blocks of queries
    values, length = QUERY_LISTS.values(p, tile, H200), 1 + -(-1000 // step)
    assert (values["total"], values["key_tiles"]) == (16 * lists, 16)
    assert values["lists_batch"] == (16 * length if lists > 1 else 0)
    assert values["lists_tile"] == length
    assert QUERY_LISTS.grid(p, tile, H200) == 4 * lists, "a warp a tile"
    at = [blocks.workspace["blocks"], listing.workspace["lists"]]
    assert listing.workspace["blocks"] == at[0] and main.workspace["lists"] == at[1]
    # a word says 32 tiles of keys, and each block of queries has a word and its place
    assert at[1] - at[0] >= lists * (length - 1) * 2 * 8
    assert made.workspace_bytes - at[1] >= 4 * 16 * lists * length
    assert KERNEL.values(p, tile, H200)["lists_tile"] == length
    operands = {x.name for x in p.operands}
    for x in made.kernels:  # each argument has its value
        values = x.kernel.values(x.problem, x.tile, H200)
        for name, kind, _ in x.kernel.signature(x.problem.spec).scalars:
            if kind == "pointer":
                operand = x.kernel.pointers(x.problem.spec).get(name, name)
                assert name in x.workspace or operand in operands or operand in ABSENT, name
            elif kind != "tensor_map":
                assert name in values, (x.kernel.entry, name)


def test_sums_under_a_mask_mod_always_have_an_order() -> None:
    p = problem()
    free = AttentionBwdSpec(p.forward.spec, deterministic=False)
    assert [t.in_order for t in KERNEL.tiles(free, ROW)] == [True]
    for changes in ({}, {"prefix": True}):
        plain = replace(free, forward=replace(p.forward.spec, expression=None, **changes))
        assert [t.in_order for t in KERNEL.tiles(plain, ROW)] == [False, True]


@pytest.mark.parametrize(
    ("p", "reason"),
    [
        (problem(expression=_reading("h")), "a mask_mod that tells heads apart"),
        (problem(bias=DType.bfloat16), "a mask_mod beside a bias or a mask in memory"),
        (problem(mask=True), "a mask_mod beside a bias or a mask in memory"),
        (
            problem(prefix=True, head_dim=192),
            "scores or masks by element of head dims 192/128: it takes up to 128",
        ),
        (
            problem(S_q=1 << 21),
            "S_q = 2097152, S_k = 2000 under a mask_mod: lists hold 32768 blocks",
        ),
    ],
)
def test_what_lists_do_not_take_is_refused_by_name(p: AttentionBwdProblem, reason: str) -> None:
    assert KERNEL.refuse(p, ROW) == reason

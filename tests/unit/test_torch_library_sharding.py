"""DTensors in the functions, on gloo ranks: results and gradients against those of the whole, where
results lie, and that nothing is sent where operands lie as a rule has them."""

from __future__ import annotations

import re
from unittest import mock

import pytest

pytest.importorskip("torch", reason="torch is not installed")
import sharded_calls  # noqa: E402
from gloo_ranks import Ranks  # noqa: E402
from kernelseam.errors import InvalidValue  # noqa: E402
from sharded_calls import Case  # noqa: E402

Q, K = (2, 4, 6, 8), (2, 2, 6, 8)
QKV, ONE = (Q, K, K), (2, 1, 6, 8)
BSHD = ((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
PAGES = ((2, 1, 4, 8), (6, 2, 2, 8), (6, 2, 2, 8), (2, 3), (2,))
PAGED = ("block_table", "kv_lengths")
CACHE = PAGES[1:3]
PACKED = ((6, 4, 8), (6, 2, 8), (6, 2, 8), (3,), (3,))
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
LONGEST = {"max_seqlen_q": 4, "max_seqlen_k": 4}
A, B = (2, 4, 6), (2, 6, 8)
QKV_PROJECTION = ((2, 6, 10), (32, 10), (32,))
HEADS = {"num_heads": 4, "num_kv_heads": 2}
NO_BIAS = {**HEADS, "bias": None}
OUT = ((2, 4, 6, 4), (10, 16))
CASES = [
    Case("attention", QKV, (0, 0, 0), (0,), options={"causal": True}),
    Case("attention", QKV, (1, 1, 1), (1, 1), options={"window": (2, 1), "return_lse": True}),
    Case("attention", QKV, (None, None, None), (None,)),
    Case("attention", (Q, ONE, ONE), (1, None, None), (1,)),  # one head of keys for all
    Case("attention", QKV, (2, 2, 2), (None,), moved=True),
    Case("attention", (Q, (2, 4, 6, 8), (2, 4, 6, 8)), (0, 0, 0), (0,), options={"softcap": 2.0}),
    Case("attention", BSHD, (2, 2, 2), (2,), options={"layout": "bshd"}),
    Case("attention", BSHD, (0, 0, 0), (0, 0), options={"layout": "bshd", "return_lse": True}),
    Case("attention", (*QKV, (1, 4, 6, 6)), (1, 1, 1, 1), (1,), ("bias",)),
    Case("attention", (*QKV, (1, 4, 6, 6)), (0, 0, 0, None), (0,), ("bias",)),
    Case("attention", (*QKV, (6, 6)), (1, 1, 1, None), (1,), ("bias",)),
    Case("attention", (*QKV, (2, 1, 1, 6)), (0, 0, 0, 0), (0,), ("mask",)),
    Case("attention", (*QKV, (4,)), (0, 0, 0, None), (0,), ("sinks",)),
    Case("attention", (*QKV, (4,), (4,)), (1, 1, 1, 0, 0), (1,), ("sinks", "alibi_slopes")),
    Case("attention", (*QKV, (2,)), (0, 0, 0, 0), (0,), ("kv_lengths",)),
    Case("attention", (*QKV, (2,)), (1, 1, 1, None), (1,), ("prefix_lengths",),
         {"causal": True}),
    Case("scaled_dot_product_attention", QKV, (1, 1, 1), (1,), options={"enable_gqa": True}),
    Case("attention_varlen", PACKED, (1, 1, 1, None, None), (1,), OFFSETS, LONGEST),
    Case("attention_varlen", PACKED, (1, 1, 1, None, None), (1, 0), OFFSETS,
         {**LONGEST, "return_lse": True}),
    Case("attention_paged", PAGES, (0, None, None, 0, 0), (0,), PAGED),
    Case("attention_paged", PAGES, (2, 2, 2, None, None), (2,), PAGED),
    Case("gather_paged", (*CACHE, (2, 3)), (2, 2, None), (2, 2), ("block_table",)),
    Case("gather_paged", (*CACHE, (2, 3)), (None, None, 0), (0, 0), ("block_table",),
         {"layout": "bhsd"}),
    Case("gather_paged", (*CACHE, (5,)), (2, 2, None), (1, 1), ("slot_mapping",)),
    Case("gather_paged", (*CACHE, (2, 4)), (None, None, 1), (1, 1), ("slot_mapping",)),
    Case("bmm", (A, B), (0, 0), (0,)),
    Case("bmm", (A, B), (1, None), (1,)),
    Case("bmm", (A, B), (None, 2), (2,)),
    Case("bmm", (A, B), (2, 1), ("sum",)),
    Case("bmm", ((2, 6, 4), (2, 8, 6)), (2, None), (1,),
         options={"a_transposed": True, "b_transposed": True}),
    Case("bmm", ((3, 2, 4, 6), (3, 2, 6, 8)), (1, 1), (1,)),
    Case("bmm", (A, B, (8,)), (0, 0, None), (0,), ("bias",)),
    Case("bmm", (A, B, (2, 8)), (None, 2, 1), (2,), ("bias",)),
    Case("bmm", (A, B, (2, 4, 8)), (1, None, 1), (1,), ("residual",)),
    Case("matmul2d", ((4, 6), (6, 8)), (0, None), (0,)),
    Case("matmul2d", ((4, 6), (6, 8)), (1, 0), ("sum",)),
    Case("grouped_mm", ((6, 4), (3, 4, 8), (3,)), (None, 2, None), (1,), ("offs",)),
    Case("grouped_mm", ((6, 4), (3, 4, 8), (3,)), (1, 1, None), ("sum",), ("offs",)),
    Case("grouped_mm", ((4, 6), (6, 8), (3,)), (0, None, None), (1,), ("offs",)),
    Case("grouped_mm", (A, B), (0, 0), (0,)),
    Case("grouped_mm_list", ((6, 4), (4, 6), (4, 8), (6, 2)), (0, 1, None, 0), (0, "sum")),
    Case("fused_qkv_projection", QKV_PROJECTION, (0, None, None), (0, 0, 0), options=HEADS),
    Case("fused_qkv_projection", QKV_PROJECTION[:2], (1, None), (2, 2, 2), options=NO_BIAS),
    Case("fused_qkv_projection", QKV_PROJECTION, (0, None, None), (0, 0, 0),
         options={**HEADS, "layout": "bshd"}),
    Case("fused_output_projection_residual", OUT, (0, None), (0,)),
    Case("fused_output_projection_residual", OUT, (1, 1), ("sum",)),
    Case("fused_output_projection_residual", ((2, 6, 16), (10, 16)), (2, 1), ("sum",)),
    Case("fused_output_projection_residual", OUT, (2, None), (1,)),
    Case("fused_output_projection_residual", (*OUT, (10,), (2, 6, 10)), (None, 0, 0, 2), (2,),
         ("bias", "residual")),
    Case("fused_output_projection_residual", (*OUT, (2, 6, 10)), (0, None, 0), (0,),
         ("residual",)),
    Case("merge_states", ((3, 2, 4, 5, 8), (3, 2, 4, 5)), (2, 2), (1, 1)),
    Case("merge_states", ((3, 2, 4, 5, 8), (3, 2, 4, 5)), (1, 1), (0, 0)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=sharded_calls.shown)
def test_shards_are_computed_where_they_lie(ranks: Ranks, case: Case) -> None:
    bound = 1e-6 if "sinks" in case.names else 1e-12  # whose gradient is of float32
    for found in ranks.run(sharded_calls.sharded, case, ranks=2):
        assert isinstance(found, dict), found
        assert max(found["errors"]) < bound, found
        assert all(found["placed"]), found
        assert bool(found["transfers"]) == case.moved, found


@pytest.mark.parametrize(
    "case",
    [
        Case("attention", ((3, 4, 6, 8), (3, 4, 6, 8), (3, 4, 6, 8)), (0, 0, 0), (0,)),
        Case(
            "attention", ((1, 6, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8)), (1, 1, 1), (None,), moved=True
        ),
    ],
    ids=["entries", "heads that share keys"],
)
def test_uneven_shards(ranks: Ranks, case: Case) -> None:
    """3 entries on 2 ranks are computed where they lie. 3 heads of keys, of which each is shared by
    2 of queries, are not: a rank's halves would not belong together."""
    for found in ranks.run(sharded_calls.sharded, case, ranks=2):
        assert isinstance(found, dict), found
        assert max(found["errors"]) < 1e-12 and all(found["placed"]), found
        assert bool(found["transfers"]) == case.moved, found


def test_a_mesh_of_entries_and_heads(ranks: Ranks) -> None:
    for found in ranks.run(sharded_calls.by_batch_and_heads, ranks=4):
        placements, transfers, error = found
        assert placements == ["S(0)", "S(1)"] and transfers == 0 and error < 1e-12


def test_options_are_part_of_what_torch_remembers(ranks: Ranks) -> None:
    for found in ranks.run(sharded_calls.by_options, ranks=2):
        assert found == [
            "torch.float16 [2, 2, 2, 8] S(0)",
            "torch.float32 [2, 2, 2, 8] S(0)",
            "torch.float32 [2, 2, 2] S(0)",
            "torch.float32 [2, 2, 2] S(0)",
            "torch.float32 [2, 4, 4] S(1)",
            "torch.float32 [2, 4, 4] P(sum)",
        ]


@pytest.mark.parametrize("function", ["plain", "differentiable"])
def test_a_tensor_beside_dtensors_is_refused(ranks: Ranks, function: str) -> None:
    for error in ranks.run(sharded_calls.beside, function, ranks=2):
        assert isinstance(error, InvalidValue), error
        assert re.match(
            r"kv_lengths = a tensor of this rank: must be a DTensor, as other operands are\. Pass ",
            str(error),
        )


@pytest.mark.slow("Dynamo and AOT take some seconds on each rank")
def test_compiled(ranks: Ranks) -> None:
    for placement, error in ranks.run(sharded_calls.compiled, ranks=2):
        assert placement == "S(1)" and error < 1e-6


def _wrongly(group: object, case: Case) -> object:
    """With a rule that shards heads of keys by rows."""
    from kernelseam.interop.torch_library import sharding

    right = sharding._dense
    with mock.patch.object(sharding, "_dense", lambda *given: (right(*given)[0], "BLHD")):
        return sharded_calls.sharded(group, case)


def test_a_wrong_rule_is_seen(ranks: Ranks) -> None:
    case = Case("attention", ((2, 4, 4, 8),) * 3, (1, 1, 1), (1,))
    for found in ranks.run(_wrongly, case, ranks=2):
        assert not isinstance(found, dict) or found["transfers"] or max(found["errors"]) > 1e-3


def test_every_operator_has_a_rule() -> None:
    import torch
    from kernelseam.interop.torch_library import handover, sharding

    assert handover  # which defines all
    names = {n.removeprefix("kernelseam::") for n in torch._C._dispatch_get_all_op_names()
             if n.startswith("kernelseam::")}  # fmt: skip
    pages = {"append_paged", "copy_pages", "fused_qkv_projection_paged"}
    # An expression reads the numbers of entries and heads, which a shard would count anew.
    of_functions = {n for n in names if n.endswith("_mods") or "epilogue" in n}
    # lists of DTensors are products one after the other
    assert names - {*sharding.RULES} == pages | of_functions | {"grouped_mm_list"}

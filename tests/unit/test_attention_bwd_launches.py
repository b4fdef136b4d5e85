"""What the gradients of an attention launch, in order or in any order: kernels, tiles,
workspace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kernelseam.contract import ArchRow, Device
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.kernels import KERNELS, BackwardTile
from kernelseam.kernels.attention.query_gradient import QUERY_GRADIENT, QueryGradientSpec

HALF = frozenset({DType.float16})
IN_ORDER = BackwardTile(HALF, 128, 8, 16, 64, 2, apart=True)
WIDE = replace(IN_ORDER, max_dim=256, step=32)
ANY_ORDER = BackwardTile(HALF, 128, 8, 32, 64, 2, column_warps=2, score_rows=32, query_rows=32)
PLAIN = replace(ANY_ORDER, warps=4, plain=True)
TILES = (IN_ORDER, WIDE, PLAIN, ANY_ORDER)
HOST, DEVICE = KERNELS["attention_bwd"], Device("fake", 0, "fake1")


def row(*tiles: BackwardTile, shared: int = 227) -> ArchRow:
    return ArchRow(
        "fake1", 32, shared * 1024, 255, "fake.h", (), HALF, {"attention_bwd": tiles or TILES}
    )


def spec(
    dim: int = 128,
    *,
    deterministic: bool = False,
    grads: tuple[bool, bool] = (False, False),
    **options: Any,
):  # type: ignore[no-untyped-def]
    forward = AttentionSpec(DType.float16, dim, dim, lse=True, **options)
    return AttentionBwdSpec(forward, *grads, deterministic=deterministic)


def problem(
    made: AttentionBwdSpec, batch: int = 2, S_q: int = 100, S_k: int = 300, total_q: int = 0
) -> AttentionBwdProblem:
    s, d = made.forward, made.forward.head_dim
    packed = s.q_view == "packed"
    q = (0, d, 6 * d) if packed else (6 * S_q * d, S_q * d, d)
    k = (0, d, 2 * d) if packed else (2 * S_k * d, S_k * d, d)
    bias = (0, 0, S_k, 1) if s.bias else (0, 0, 0, 0)
    forward = AttentionProblem(
        s, batch, 6, 2, S_q, S_k, q, k, k, q, scale=0.5, total_q=total_q, bias_strides=bias
    )
    return AttentionBwdProblem(made, forward, q, q, k, k, bias)


def launched(made: AttentionBwdSpec, *tiles: BackwardTile, **extents: int) -> tuple[list[str], Any]:
    p = problem(made, **extents)
    result = HOST.launches(p, HOST.tile(p, row(*tiles), DEVICE), DEVICE)
    return [x.kernel.entry for x in result.steps], result


def test_in_any_order_one_launch_of_keys_and_one_that_rounds() -> None:
    names, actual = launched(spec())
    assert names == ["row_delta", "attention_backward", "query_gradient"]
    delta, main, last = actual.steps
    assert (main.tile, last.tile) == (replace(PLAIN, role="keys"), PLAIN)
    assert main.kernel.grid(main.problem, main.tile, DEVICE) == -(-300 // 64) * 2 * 2, (
        "blocks own 64 keys of 2 KV heads"
    )
    assert last.kernel.grid(last.problem, last.tile, DEVICE) == 2 * 2 * 6, (
        "100 queries are two tiles"
    )
    # 2 entries × 2 tiles × 6 heads of 64 × 128 float32 sums lie after the row sums.
    lines, sums = 2 * 6 * 100 * 4, 4 * (2 * 2 * 6) * 64 * 128
    at = -(-lines // 256) * 256
    assert (delta.workspace, main.workspace, last.workspace) == (
        {"delta": 0, "zeros": at},
        {"delta": 0, "sums": at},
        {"sums": at},
    )
    assert delta.kernel.values(delta.problem, delta.tile, DEVICE)["zero_chunks"] == sums // 16
    assert actual.workspace_bytes == at + sums


def test_in_order_nothing_is_summed_in_the_workspace() -> None:
    names, actual = launched(spec(deterministic=True))
    assert names == ["row_delta", "attention_backward", "attention_backward"]
    assert [x.tile.role for x in actual.steps[1:]] == ["keys", "queries"]
    assert actual.workspace_bytes == -(-2 * 6 * 100 * 4 // 256) * 256
    delta = actual.steps[0]
    assert delta.kernel.values(delta.problem, delta.tile, DEVICE)[
        "zero_chunks"
    ] == 0 and delta.workspace == {"delta": 0}


@pytest.mark.parametrize(("deterministic", "most"), [(False, 3), (True, 3)])
def test_what_is_reduced_is_a_launch_more_each(deterministic: bool, most: int) -> None:
    options = {"bias": DType.float16, "sinks": True, "deterministic": deterministic}
    names, actual = launched(spec(grads=(True, True), **options))
    assert names[most:] == ["sum_axes", "sink_gradient"] and len(names) == most + 2
    main, reduction = actual.steps[1], actual.steps[most]
    plane, at = 4 * 2 * 6 * 100 * 300, main.workspace["dbias"]
    assert at == reduction.workspace[
        "x"
    ] == actual.workspace_bytes - plane and at >= main.workspace.get("sums", 0)
    assert main.tile.query_rows == (0 if deterministic else 32) and not main.tile.plain


def test_packed_sequences_begin_tiles_of_their_own() -> None:
    created = spec(q_view="packed", kv_view="packed")
    _, actual = launched(created, batch=5, total_q=333)
    # A sequence's first row and its number give its first tile, so no more than ⌊333 / 64⌋ + 5 are
    # there.
    zeroed = actual.steps[0].problem.zero_bytes
    assert zeroed == 4 * (333 // 64 + 5) * 6 * 64 * 128
    for lengths in ((333, 0, 0, 0, 0), (0, 65, 64, 1, 203), (64, 64, 64, 64, 77), (1, 1, 1, 1, 1)):
        taken, start = list[int](), 0
        for b, n in enumerate(lengths):
            taken += range(start // 64 + b, start // 64 + b + -(-n // 64))
            start += n
        assert len(set(taken)) == len(taken) and max(taken) < 333 // 64 + 5


@pytest.mark.parametrize(
    ("made", "tiles", "chosen"),
    [
        (spec(), TILES, (PLAIN, ANY_ORDER)),
        (spec(window=True), TILES, (ANY_ORDER,)),
        (spec(deterministic=True), TILES, (IN_ORDER,)),
        (spec(batch_invariant=True), TILES, (IN_ORDER,)),
        (spec(256), TILES, (WIDE,)),
        (spec(), (IN_ORDER,), (IN_ORDER,)),
        (spec(64), (replace(IN_ORDER, max_dim=64), *TILES), (replace(IN_ORDER, max_dim=64),)),
    ],
    ids=["plain", "options", "in-order", "batch-invariant", "wider", "no-row", "a-narrower-row"],
)
def test_which_rows_serve_a_spec(
    made: AttentionBwdSpec, tiles: tuple[BackwardTile, ...], chosen: tuple[BackwardTile, ...]
) -> None:
    assert HOST.tiles(made, row(*tiles)) == chosen


def test_a_row_that_does_not_fit_is_left_out() -> None:
    assert HOST.tiles(spec(), row(ANY_ORDER, IN_ORDER, shared=160)) == (IN_ORDER,)
    # K and V, two stages of Q and dout, LSEs and delta twice, p and ds.
    assert ANY_ORDER.shared_bytes(spec()) == 2 * (128 * 256 + 2 * 64 * 256 + 2 * 128 * 64) + 16 * 64


@pytest.mark.parametrize(
    ("change", "size"),
    [
        ({"resident": True}, 2 * (128 * 128 + 2 * 64 * 256 + 2 * 128 * 64) + 16 * 64),
        ({"one_layout": False}, 2 * (128 * (256 + 128) + 4 * 64 * 256 + 3 * 128 * 64) + 16 * 64),
        (
            {"resident": True, "one_layout": False},
            2 * (128 * 128 + 4 * 64 * 256 + 3 * 128 * 64) + 16 * 64,
        ),
        ({"query_rows": 0}, 2 * (128 * 256 + 2 * 64 * 256 + 2 * 128 * 64) + 16 * 64),
        ({"query_rows": 0, "score_rows": 0}, 2 * (128 * 256 + 2 * 64 * 256) + 16 * 64),
        (
            {"resident": True, "one_layout": False, "step": 16, "stages": 1, "query_rows": 16},
            2 * 128 * (128 + 256),
        ),
    ],
    ids=str,
)
def test_shared_memory(change: dict[str, Any], size: int) -> None:
    """With left factors in registers only K stays, as a right one; before, K and V lie where the
    ring comes."""
    assert replace(ANY_ORDER, **change).shared_bytes(spec()) == size


def test_head_dims_are_shared_by_the_warps_of_either_product() -> None:
    assert (
        ANY_ORDER.query_column_warps == 4
        and ANY_ORDER.width(80) == 128
        and IN_ORDER.width(80) == 80
    )
    _, actual = launched(spec(80))
    assert actual.steps[0].problem.zero_bytes == 4 * 24 * 64 * PLAIN.width(80)


def test_the_conversion_has_the_tiles_with_atomics_alone() -> None:
    assert QUERY_GRADIENT.tiles(QueryGradientSpec(DType.float16, 128), row()) == (PLAIN, ANY_ORDER)
    assert QUERY_GRADIENT.tiles(QueryGradientSpec(DType.float16, 256), row()) == ()
    assert (
        QUERY_GRADIENT.shared_bytes(QueryGradientSpec(DType.float16, 100), ANY_ORDER)
        == 64 * 128 * 2
    )

"""The kernel definition of Hopper's gradients: what it takes, what it is launched with. Nothing
here needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attention_problems import attention_problem
from compile_matrix.hopper_attention import COVERED_DIMS
from hopper import H200, ROW, gradients
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem
from kernelseam.dtypes import DType
from kernelseam_cuda import tensor_maps
from kernelseam_cuda.sm90.attention_bwd import HopperAttentionBwd
from kernelseam_cuda.sm90.attention_bwd_rows import QUERY_GRADIENT, ROW_VALUES, WIDTHS
from kernelseam_cuda.sm90.attention_bwd_tiles import ATTENTION_BWD

KERNEL = HopperAttentionBwd()


def problem(
    S_q: int = 4096,
    S_k: int = 4096,
    heads: int = 16,
    kv_heads: int = 16,
    batch: int = 4,
    deterministic: bool = True,
    sink_gradient: bool = False,
    **spec: object,
) -> AttentionBwdProblem:
    """Gradients as their operands."""
    p = attention_problem(S_q, S_k, heads, kv_heads, batch, **spec)
    return gradients(p, sink_gradient=sink_gradient, deterministic=deterministic)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": DType.float32}, "it takes bfloat16 and float16, not float32"),
        ({"dtype_out": DType.float32}, "dtype_out is not supported by this kernel"),
        ({"head_dim": 100, "value_dim": 80}, "head dims 100/80: it takes multiples of 8 up to 256"),
        ({"head_dim": 64, "value_dim": 264}, "head dims 64/264: it takes multiples of 8 up to 256"),
        (
            {"bias": DType.float16, "head_dim": 136, "value_dim": 128},
            "scores or masks by element of head dims 136/128: it takes up to 128",
        ),
        (
            {"q_view": "packed"},
            "queries packed with keys strided: it takes both strided or both packed",
        ),
        ({"vector": 8}, "rows at multiples of 8 bytes: TMA takes multiples of 16"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(
    changes: dict[str, object], reason: str
) -> None:
    assert KERNEL.refuse(problem(**changes), ROW) == reason


def test_problems_are_refused_by_their_numbers() -> None:
    p = problem()
    negative = replace(p, forward=replace(p.forward, scale=-1.0))
    assert KERNEL.refuse(negative, ROW) == "scale = -1.0: it takes more than 0"
    for nothing in ({"S_q": 0}, {"S_k": 0}, {"batch": 0}, {"heads": 0, "kv_heads": 0}):
        assert KERNEL.refuse(problem(**nothing), ROW) == "there is nothing to multiply"
    assert (
        KERNEL.refuse(problem(S_k=2**30), ROW) == "S_q + S_k = 1073745920: it takes less than 2**30"
    )
    far = replace(p, dq_strides=(1, 1, 2**31))
    reason = KERNEL.refuse(far, ROW)
    assert reason is not None and "stride_dq_row = 2147483648" in reason


@pytest.mark.parametrize("deterministic", [True, False], ids=["in-order", "any-order"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": True, "softcap": True},
        {"sinks": True, "lengths": True},
        {"q_view": "packed", "kv_view": "packed"},
    ],
    ids=["full", "causal", "window-softcap", "sinks-lengths", "packed"],
)
def test_every_head_dim_has_a_tile_whose_maps_the_hardware_takes(
    options: dict[str, object], deterministic: bool
) -> None:
    for dims in (*WIDTHS, *COVERED_DIMS):
        dim, value_dim = dims
        p = problem(head_dim=dim, value_dim=value_dim, deterministic=deterministic, **options)
        assert KERNEL.refuse(p, ROW) is None, dims
        tile = KERNEL.tile(p, ROW, H200)
        assert (tile.head_dim, tile.value_dim) == next(
            w for w in WIDTHS if dim <= w[0] and value_dim <= w[1]
        )
        assert tile.step == (128 if max(dims) <= 64 else 64), dims
        assert tile.shared_bytes <= ROW.shared_bytes_per_block, dims
        for m in KERNEL.main(tile).tensor_maps(p, tile, H200).values():
            assert tensor_maps.refuse(m, 16) is None, dims


def test_maps_walk_the_operands() -> None:
    p = problem(kv_heads=4, S_k=1000)
    maps = KERNEL.tensor_maps(p, KERNEL.tile(p, ROW, H200), H200)
    assert (maps["q_map"].operand, maps["q_map"].extents, maps["q_map"].box) == (
        "q",
        (128, 4096, 16, 4),
        (64, 64, 1, 1),
    )
    assert maps["dout_map"].operand == "dout"
    assert (maps["v_map"].extents, maps["v_map"].box) == ((128, 1000, 4, 4), (64, 128, 1, 1))
    assert (maps["dk_map"].operand, maps["dk_map"].box) == ("dk", (64, 16, 1, 1))
    assert maps["dk_map"].strides == (1, 512, 128, 512_000)
    packed = problem(q_view="packed", kv_view="packed", head_dim=64, value_dim=64)
    maps = KERNEL.tensor_maps(packed, KERNEL.tile(packed, ROW, H200), H200)
    assert (maps["q_map"].extents, maps["q_map"].box) == ((64, 16384, 16, 1), (64, 128, 1, 1))


def test_three_launches_share_a_workspace() -> None:
    """4·D bytes of sums a row of queries and head, 8 of values; in order a counter for each of
    two consumers that add to a block."""
    rows = 4 * 16 * 4096
    blocks = rows // 64
    for deterministic, turns in ((True, 8 * blocks), (False, 0)):
        p = problem(deterministic=deterministic)
        launches = KERNEL.launches(p, KERNEL.tile(p, ROW, H200), H200)
        assert [x.kernel.entry for x in launches.kernels] == [
            "attention_backward_rows_sm90",
            "attention_backward_sm90",
            "attention_backward_dq_sm90",
        ]
        assert launches.zeroed_bytes == 256
        first, main, last = (x.workspace for x in launches.kernels)
        assert first == {
            "lse_base2": 256,
            "delta": 256 + 4 * rows,
            "sums": 256 + 8 * rows,
            "semaphores": 256 + 8 * rows + 512 * rows,
        }
        assert main == {**first, "counter": 0} and last == {"sums": first["sums"]}
        assert launches.workspace_bytes == first["semaphores"] + turns


def test_sinks_have_a_gradient_of_the_same_row_values() -> None:
    """Packed rows lie otherwise in blocks: theirs are made again."""
    p = problem(sinks=True, sink_gradient=True, S_q=100)
    launches = KERNEL.launches(p, KERNEL.tile(p, ROW, H200), H200)
    sinks = launches.kernels[-1]
    assert sinks.kernel.entry == "sink_gradient" and len(launches.kernels) == 4
    assert sinks.problem.delta_strides == (16 * 128, 128)
    assert sinks.workspace == {"delta": launches.kernels[0].workspace["delta"]}
    packed = problem(sinks=True, sink_gradient=True, S_q=100, q_view="packed", kv_view="packed")
    launches = KERNEL.launches(packed, KERNEL.tile(packed, ROW, H200), H200)
    delta, sinks = launches.kernels[-2:]
    assert (delta.kernel.entry, sinks.problem.delta_strides) == ("row_delta", (0, 400))
    assert delta.workspace["delta"] == sinks.workspace["delta"]
    assert launches.workspace_bytes == delta.workspace["delta"] + 4 * 16 * 400


def test_wide_heads_take_clusters_whose_blocks_share_queries_and_sums() -> None:
    """Two blocks of 64 keys: a tile of 128; each of four consumers adds to a piece of a block of
    sums."""
    p = problem(head_dim=256, value_dim=256, heads=8, kv_heads=8, S_k=1000)
    tile = KERNEL.tile(p, ROW, H200)
    launches = KERNEL.launches(p, tile, H200)
    main = launches.kernels[1]
    assert main.kernel.entry == "attention_backward_wide_sm90"
    config = main.kernel.config(p, tile, ROW, H200)
    assert (config.grid, config.cluster, config.block) == ((132, 1, 1), (2, 1, 1), (384, 1, 1))
    assert config.shared_bytes == tile.shared_bytes
    values = main.kernel.values(p, tile, H200)
    assert (values["key_tiles"], values["total"]) == (8, 8 * 4 * 8)
    constants = main.kernel.constants(p.spec, tile, ROW)
    assert (constants["DQK"], constants["STEP"], constants["STAGES"], constants["O_STAGES"]) == (
        256,
        64,
        4,
        3,
    )
    maps = main.kernel.tensor_maps(p, tile, H200)
    assert (maps["k_map"].extents, maps["k_map"].box) == ((256, 1000, 8, 4), (64, 64, 1, 1))
    rows, turns = 4 * 8 * 4096, launches.kernels[0].workspace["semaphores"]
    assert turns == 256 + rows * (8 + 4 * 256)
    assert launches.workspace_bytes == turns + rows // 64 * 4 * 4


def test_the_last_columns_of_head_dim_96_are_half_a_panel() -> None:
    """In shared memory it is whole: TMA fills it with zeros, and does not store it."""
    p = problem(head_dim=96, value_dim=96)
    tile = KERNEL.tile(p, ROW, H200)
    main = KERNEL.main(tile)
    assert main is KERNEL
    assert tile.shared_bytes == KERNEL.tile(problem(), ROW, H200).shared_bytes
    maps = main.tensor_maps(p, tile, H200)
    assert (maps["q_map"].extents, maps["q_map"].box) == ((96, 4096, 16, 4), (64, 64, 1, 1))
    assert maps["dv_map"].extents == (96, 4096, 16, 4)
    rows = 4 * 16 * 4096
    launches = KERNEL.launches(p, tile, H200)
    assert launches.workspace_bytes == 256 + rows * (8 + 4 * 96) + rows // 64 * 8


@pytest.mark.parametrize(
    ("dims", "columns"),
    [
        ((8, 24), (16, 32)),
        ((40, 40), (48, 48)),
        ((64, 128), (80, 128)),
        ((128, 8), (128, 16)),
        ((72, 80), (80, 80)),
        ((120, 120), (128, 128)),
        ((128, 136), (144, 144)),
        ((160, 160), (160, 160)),
        ((192, 128), (192, 128)),
        ((200, 24), (256, 256)),
    ],
)
def test_columns_are_multiplied_in_whole_steps_and_each_consumer_has_a_piece(
    dims: tuple[int, int], columns: tuple[int, int]
) -> None:
    """Multiples of 16. Of more than one panel of queries and keys dq has two pieces, of wide heads
    three, whose last has columns at least; 256 are multiplied in halves. Its sums have as many."""
    p = problem(head_dim=dims[0], value_dim=dims[1])
    tile = KERNEL.tile(p, ROW, H200)
    constants = KERNEL.main(tile).constants(p.spec, tile, ROW)
    assert (constants["QK_COLUMNS"], constants["V_COLUMNS"]) == columns
    assert (constants["DQK"], constants["DV"]) == dims
    workspace = KERNEL.launches(p, tile, H200).kernels[0].workspace
    assert workspace["semaphores"] - workspace["sums"] == 4 * 16 * 4096 * columns[0] * 4
    capped = problem(head_dim=dims[0], value_dim=dims[1], softcap=True)
    whole = KERNEL.main(tile).constants(capped.spec, tile, ROW)
    assert whole["QK_COLUMNS"] == (192 if 144 <= columns[0] < 192 else columns[0])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "causal", "section"),
    [
        (3, 3, 128, False, 3),
        (8, 8, 128, False, 8),
        (10, 10, 128, False, 5),
        (33, 33, 128, False, 7),
        (64, 64, 128, False, 8),
        (64, 16, 128, False, 8),
        (64, 16, 128, True, 4),
        (9, 9, 256, False, 2),
    ],
)
def test_sections_are_of_one_width(
    heads: int, kv_heads: int, dim: int, causal: bool, section: int
) -> None:
    """A head has 4 MB, a section up to 32: ten heads are two of 5, not one of 8 and one of 2. Of
    groups of four, a section has 128 MB: four are 128 tiles, too few, but for a causal mask. A
    wide head has 8, a section 16."""
    p = problem(batch=1, heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=dim, causal=causal)
    tile = replace(KERNEL.tile(p, ROW, H200), staggered=0)
    v = KERNEL.main(tile).values(p, tile, H200)
    assert (v["section"], v["section_tiles"]) == (section, 32 * section)


def test_heads_of_192_have_values_of_128() -> None:
    """A piece of dq for three of a cluster's four consumers: three panels of sums."""
    p = problem(head_dim=192, value_dim=128, kv_heads=4)
    tile = replace(KERNEL.tile(p, ROW, H200), staggered=0)
    main = KERNEL.main(tile)
    assert main.entry == "attention_backward_wide_sm90"
    constants = main.constants(p.spec, tile, ROW)
    assert (constants["DQK"], constants["DV"]) == (192, 128)
    maps = main.tensor_maps(p, tile, H200)
    columns = {name: m.extents[0] for name, m in maps.items()}
    of_keys, of_values = ("q_map", "k_map", "dk_map"), ("dout_map", "v_map", "dv_map")
    assert columns == {**dict.fromkeys(of_keys, 192), **dict.fromkeys(of_values, 128)}
    rows, launches = 4 * 16 * 4096, KERNEL.launches(p, tile, H200)
    assert launches.kernels[0].workspace["semaphores"] == 256 + rows * (8 + 4 * 192)
    head = 4096 * (192 * 6 + 128 * 2) * 4
    assert main.values(p, tile, H200)["section"] == max((16 << 20) // head, 128 // 32)


def test_few_wide_tiles_are_one_cluster_each() -> None:
    p = problem(head_dim=256, value_dim=256, heads=3, kv_heads=3, batch=1, S_q=64, S_k=129)
    tile = KERNEL.tile(p, ROW, H200)
    assert KERNEL.main(tile).grid(p, tile, H200) == 2 * (2 * 3)


def test_blocks_of_packed_sequences_have_room() -> None:
    """⌊rows / step⌋ + sequences, for each head: sums.h says why."""
    p = problem(S_q=100, batch=3, q_view="packed", kv_view="packed", deterministic=False)
    tile = KERNEL.tile(p, ROW, H200)
    values = KERNEL.values(p, tile, H200)
    assert (values["query_blocks"], values["head_blocks"], values["num_heads"]) == (2, 7, 16)
    launches = KERNEL.launches(p, tile, H200)
    assert launches.workspace_bytes == 256 + 7 * 16 * 64 * (8 + 512)


@pytest.mark.parametrize(("batch", "S"), [(1, 64), (3, 700), (4, 4096), (64, 512)])
def test_tiles_and_blocks_of_a_launch(batch: int, S: int) -> None:
    p = problem(S_q=S, S_k=S, batch=batch, causal=True)
    tile = KERNEL.tile(p, ROW, H200)
    v = KERNEL.values(p, tile, H200)
    assert v["total"] == v["key_tiles"] * batch * 16 == -(-S // 128) * batch * 16
    assert v["section_tiles"] == v["section"] * v["key_tiles"]
    assert 1 <= v["section"] <= batch * 16
    assert KERNEL.grid(p, tile, H200) == min(v["total"], 132)
    assert ROW_VALUES.grid(p, tile, H200) == batch * 16 * -(-S // tile.step) * tile.step // 64
    assert QUERY_GRADIENT.grid(p, tile, H200) == batch * 16 * -(-S // 64)


def invariant_of(p: AttentionBwdProblem) -> AttentionBwdProblem:
    spec = replace(p.spec, forward=replace(p.spec.forward, batch_invariant=True))
    return replace(p, spec=spec, forward=replace(p.forward, spec=spec.forward))


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_sums_in_order_or_batch_invariant_take_turns(dim: int) -> None:
    any_order = problem(deterministic=False, head_dim=dim, value_dim=dim)
    for p, ways in (
        (problem(head_dim=dim, value_dim=dim), [True]),
        (invariant_of(any_order), [True]),
        (any_order, [False, True]),
    ):
        tiles = KERNEL.variants(p, ROW, H200).values()
        made = [KERNEL.main(t).constants(p.spec, t, ROW) for t in tiles]
        assert list(dict.fromkeys(c["IN_ORDER"] for c in made)) == ways
        assert not any(c["STAGGERED"] and p.spec.forward.batch_invariant for c in made)
        assert KERNEL.tile(p, ROW, H200).in_order is (ways[0] or dim == 64)


@pytest.mark.parametrize(
    ("dim", "S_q", "S_k", "causal", "in_order"),
    [
        (128, 4096, 4096, False, False),
        (128, 4096, 4096, True, False),
        (128, 4095, 4095, True, False),
        (128, 4000, 4000, True, True),
        (128, 2048, 2048, False, False),
        (128, 2048, 2047, False, True),
        (128, 1024, 1024, True, True),
        (128, 64, 4096, False, False),
        (64, 8192, 8191, False, True),
        (64, 8192, 8192, False, False),
        (256, 4096, 4096, True, True),
        (256, 4096, 4096, False, False),
    ],
)
def test_few_keys_are_summed_in_order_whether_asked_or_not(
    dim: int, S_q: int, S_k: int, causal: bool, in_order: bool
) -> None:
    """Of as many keys a query as a tile says turns cost more than setting sums to zero: 4095
    causal ones are 2048 on average."""
    p = problem(S_q=S_q, S_k=S_k, causal=causal, head_dim=dim, value_dim=dim, deterministic=False)
    assert KERNEL.tile(p, ROW, H200).in_order is in_order


@pytest.mark.parametrize(
    ("changes", "cycle"),
    [
        ({}, 8),
        ({"causal": True}, 8),
        ({"S_q": 2048, "S_k": 2048, "causal": True}, 8),
        ({"heads": 64, "causal": True}, 2),
    ],
)
def test_sections_that_walk_backwards(changes: dict[str, object], cycle: int) -> None:
    """The last of all; every other where heads share keys. None of a batch-invariant spec, whose
    order of sums may not depend on how many heads there are."""
    p = problem(**changes)  # type: ignore[arg-type]
    for q, expected in ((p, cycle), (invariant_of(p), 0)):
        tile = replace(KERNEL.tile(q, ROW, H200), staggered=0)
        assert KERNEL.values(q, tile, H200)["cycle"] == expected


@pytest.mark.parametrize(
    ("S", "dim", "causal", "section"),
    [
        (4096, 128, False, 8),
        (4096, 128, True, 8),
        (2048, 128, False, 16),
        (2048, 128, True, 8),
        (1024, 128, False, 16),
        (512, 64, False, 64),
    ],
)
def test_sections_of_few_keys_are_narrow(S: int, dim: int, causal: bool, section: int) -> None:
    """32 MB of queries, their result's gradients and sums; 16 where a query meets less than 1536
    keys on average; at least 128 tiles of 128 keys."""
    p = problem(S_q=S, S_k=S, batch=16, head_dim=dim, value_dim=dim, causal=causal)
    v = KERNEL.values(p, replace(KERNEL.tile(p, ROW, H200), staggered=0), H200)
    assert v["section"] == section and v["section_tiles"] >= 128


def test_each_launch_starts_while_the_one_before_it_ends() -> None:
    for dim in (128, 256):
        p = problem(head_dim=dim, value_dim=dim)
        launches = KERNEL.launches(p, KERNEL.tile(p, ROW, H200), H200)
        configs = [x.kernel.config(p, x.tile, ROW, H200) for x in launches.kernels]
        assert [c.programmatic for c in configs] == [True, True, True]


def test_variants_have_names_of_their_own() -> None:
    assert len({(t.head_dim, t.value_dim, t.name) for t in ATTENTION_BWD}) == len(ATTENTION_BWD)
    p = problem()
    plain, in_order = "128x64-3q-3dout-1kv", "128x64-3q-3dout-1kv-in-order"
    staggered = f"{in_order}-staggered"
    assert KERNEL.tile(p, ROW, H200).name == staggered
    assert list(KERNEL.variants(p, ROW, H200)) == [staggered, in_order]
    names = list(KERNEL.variants(problem(deterministic=False), ROW, H200))
    assert names == [plain, staggered, in_order]
    assert list(KERNEL.variants(problem(causal=True), ROW, H200)) == [in_order]

"""The kernel definition of Hopper's attention where scores or masks are computed by element."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from attention_problems import attention_problem
from hopper import H200, ROW
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.dtypes import DType
from kernelseam.expressions.scores import MaskMod, ScoreMod, score_expression
from kernelseam.expressions.text import text_of
from kernelseam.tuned.classes import representative
from kernelseam_cuda.sm90.attention import HopperAttention
from kernelseam_cuda.sm90.attention_blocks import VISIBLE_BLOCKS, element_rate
from kernelseam_cuda.sm90.tiles import SHARED_BYTES

HALF = HopperAttention()
BIAS = {"bias": DType.bfloat16}


def of(
    score: ScoreMod | None = None, mask: MaskMod | None = None, **fields: Any
) -> AttentionProblem:
    """Of user's functions that capture nothing."""
    plain = attention_problem(**fields)
    text = text_of(score_expression(score, mask).structure)
    return replace(plain, spec=replace(plain.spec, expression=text))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"prefix": True, "causal": True}, None),
        ({"prefix": True, "kv_view": "packed", "q_view": "packed"}, None),
        (BIAS, None),
        ({"mask": True, "causal": True, **BIAS}, None),
        ({"alibi": True, "head_dim": 104}, None),
        ({"head_dim": 64, "value_dim": 64, "mask": True, **BIAS}, None),
        ({"head_dim": 8, "value_dim": 96, "alibi": True}, None),
        ({"alibi": True, "lengths": True}, None),
        ({"q_view": "packed", "kv_view": "packed", "mask": True, **BIAS}, None),
        ({"kv_view": "paged", "alibi": True}, None),
        ({"head_dim": 256, "value_dim": 256, "mask": True}, None),
        (
            {"head_dim": 192, "value_dim": 128, **BIAS},
            "a bias of head dims 192/128: it takes up to 128",
        ),
        (
            {"head_dim": 264, "value_dim": 128, "alibi": True},
            "scores or masks by element of head dims 264/128: it takes up to 256",
        ),
        ({"kv_view": "paged", "mask": True}, None),
        ({"kv_view": "paged", "q_view": "packed", "mask": True, **BIAS}, None),
        (
            {"kv_view": "paged", "page_size": 12, **BIAS},
            (
                "pages of 12 keys: it takes multiples of 8, and others in half precision with "
                "head dims of 97 to 256, without scores by element"
            ),
        ),
    ],
)
def test_what_it_takes_by_element(changes: dict[str, object], reason: str | None) -> None:
    assert HALF.refuse(attention_problem(**changes), ROW) == reason


@pytest.mark.parametrize("masked", [False, True])
def test_where_a_mask_is_no_band_another_kernel_says_which_blocks_are_visited(masked: bool) -> None:
    mask = (lambda b, h, q, kv: q // 8 == kv // 8) if masked else None
    p = of(lambda s, b, h, q, kv: s - abs(q - kv), mask)
    tile = HALF.tile(p, ROW, H200)
    kernels = HALF.launches(p, tile, H200).kernels
    assert [x.kernel for x in kernels] == [VISIBLE_BLOCKS, HALF][not masked :]
    assert ("visited" in dict(HALF.signature(p.spec).parameters)) is masked
    assert ("words" in HALF.values(p, tile, H200)) is masked


@pytest.mark.parametrize(
    ("mods", "shares"),
    [
        ({"mask": lambda b, h, q, kv: kv < 4000 + q * b}, True),
        ({"mask": lambda b, h, q, kv: kv < 4000 + h}, False),
        ({"score": lambda s, b, h, q, kv: s - q, "mask": lambda b, h, q, kv: q < kv}, False),
    ],
    ids=["of no head", "of heads", "with scores"],
)
def test_a_mask_that_tells_no_heads_apart_keeps_the_tiles_for_few_queries(
    mods: dict[str, Any], shares: bool
) -> None:
    """As of a tree of drafts: heads share a tile's rows, so that their keys are read once."""
    drafts: dict[str, Any] = {"S_q": 8, "heads": 32, "kv_heads": 8, "batch": 64}
    p = of(**mods, **drafts, kv_view="paged", lengths=True)
    assert HALF.refuse(p, ROW) is None
    tile = HALF.tile(p, ROW, H200)
    plain = HALF.tile(attention_problem(**drafts, kv_view="paged", lengths=True), ROW, H200)
    assert tile.group_heads == (plain.group_heads if shares else 1)
    assert (replace(tile, follows=False) == plain) is shares
    visible, forward, *_ = HALF.launches(p, tile, H200).kernels
    assert (visible.kernel, forward.kernel) == (VISIBLE_BLOCKS, HALF)


def test_parts_in_clusters_count_no_blocks() -> None:
    """The blocks of a cluster have no counter, by which the last block would be known."""
    p = replace(of(None, lambda b, h, q, kv: q // 7 == kv // 7), S_q=300, S_k=2000)
    tile = next(t for t in HALF.few_queries if t.head_dim == 128)
    launches = HALF.launches(p, replace(tile, parts=3, in_cluster=True), H200)
    assert launches.zeroed_bytes == 0
    assert launches.kernels[0].kernel is VISIBLE_BLOCKS


def test_words_are_for_what_the_mask_tells_apart() -> None:
    """Four bytes a half word, of 32 blocks of 128 keys each, and a rank for every tile of 128
    queries. The block that ends last is known by the counter."""
    sizes = {}
    masks: dict[str, MaskMod] = {
        "shared": lambda b, h, q, kv: q >= kv,
        "heads": lambda b, h, q, kv: q - kv < h,
        "entries": lambda b, h, q, kv: q - kv < b,
        "both": lambda b, h, q, kv: q - kv < b + h,
    }
    for name, mask in masks.items():
        p = replace(of(None, mask), batch=3, num_heads=6, kv_heads=6, S_q=1000, S_k=5000)
        tile = HALF.tile(p, ROW, H200)
        launches = HALF.launches(p, tile, H200)
        visible, forward = launches.kernels
        assert visible.workspace["blocks"] == forward.workspace["blocks"]
        sizes[name] = launches.workspace_bytes - visible.workspace["blocks"]
        values = HALF.values(p, tile, H200)
        assert (values["blocks_batch"] > 0, values["blocks_head"] > 0) == (
            name in ("entries", "both"),
            name in ("heads", "both"),
        )
        assert visible.workspace["counter"] == forward.workspace["counter"] == 0
        groups = VISIBLE_BLOCKS.values(p, tile, H200)["groups"]
        assert groups == {"shared": 1, "heads": 6, "entries": 3, "both": 18}[name]
    one = 8 * (2 + 1) * 8  # tiles, words and rank, bytes
    assert sizes == {"shared": one, "heads": 6 * one, "entries": 3 * one, "both": 18 * one}


@pytest.mark.parametrize(
    ("strides", "apart"),
    [
        ((0, 0, 5000, 1), 1),
        ((5_000_000, 0, 5000, 1), 3),
        ((0, 5_000_000, 0, 1), 6),
        ((30_000_000, 5_000_000, 1, 1000), 18),
    ],
)
@pytest.mark.parametrize("bias", [None, DType.float32])
def test_a_mask_is_kept_as_bits_for_what_it_tells_apart(
    strides: tuple[int, int, int, int], apart: int, bias: DType | None
) -> None:
    """For every tile of 128 queries its words and rank, in whole 16 bytes, and 16 bytes a query and
    block of keys. One thread block for eight blocks of keys."""
    plain = attention_problem(mask=True, bias=bias)
    p = replace(plain, batch=3, num_heads=6, kv_heads=6, S_q=1000, S_k=5000, mask_strides=strides)
    tile = HALF.tile(p, ROW, H200)
    visible, forward = (launches := HALF.launches(p, tile, H200)).kernels
    blocks = -(-5000 // tile.bn)
    one = 16 * -(-(-(-blocks // 32) + 1) // 2) + blocks * 128 * 16
    at = visible.workspace["blocks"]
    assert at == forward.workspace["blocks"]
    assert launches.workspace_bytes - at == apart * 8 * one
    values = HALF.values(p, tile, H200)
    assert 8 * values["blocks_tile"] == one
    assert values["words"] == -(-blocks // 32)
    assert VISIBLE_BLOCKS.grid(p, tile, H200) == apart * 8 * 4 * values["words"]


def test_tiles_have_room_for_a_bias() -> None:
    for changes, keys in (({"alibi": True}, 128), (BIAS, 128), ({"bias": DType.float32}, 96)):
        p = attention_problem(**changes)
        tile = HALF.tile(p, ROW, H200)
        assert (tile.bn, tile.groups) == (keys, 2), changes
        assert all(t.shared_bytes <= SHARED_BYTES for t in HALF.tiles(p.spec, ROW))
        assert tile.parts == tile.group_heads == 1


def test_four_consumers_serve_alibi_and_biases_of_narrow_heads() -> None:
    """And nothing that takes more registers: there 104 are a thread's."""
    narrow: dict[str, Any] = {"head_dim": 64, "value_dim": 64}
    for fields, groups in (
        ({"alibi": True}, 4),
        ({"alibi": True, "causal": True}, 4),
        ({"alibi": True, "lengths": True, "kv_view": "paged"}, 4),
        (BIAS, 4),
        ({"bias": DType.float32}, 4),
        ({**BIAS, "causal": True}, 2),
        ({**BIAS, "alibi": True}, 2),
        ({**BIAS, "softcap": True}, 2),
        ({"alibi": True, "softcap": True}, 2),
        ({"mask": True}, 2),
        ({"alibi": True, "mask": True}, 2),
    ):
        p = attention_problem(**fields, **narrow)
        assert HALF.tile(p, ROW, H200).groups == groups, fields
        assert all(t.shared_bytes <= SHARED_BYTES for t in HALF.tiles(p.spec, ROW))
    by_function = of(lambda s, b, h, q, kv: s * 2, **narrow)
    assert HALF.tile(by_function, ROW, H200).groups == 2


def test_tiles_of_a_bias_are_for_nothing_else() -> None:
    for changes in ({}, {"alibi": True}):
        assert not any(t.has_bias for t in HALF.tiles(attention_problem(**changes).spec, ROW))
    plain = attention_problem(head_dim=64, value_dim=64)
    assert not any(t.by_element for t in HALF.tiles(plain.spec, ROW))
    listed = replace(plain.spec, mask=True)
    assert [(t.by_element, t.early) for t in HALF.tiles(listed, ROW)] == [(True, False)]
    assert all(t.has_bias for t in HALF.tiles(attention_problem(**BIAS).spec, ROW))


def test_what_is_by_element_costs_what_was_measured() -> None:
    plain = attention_problem(S_q=4096, S_k=4096)
    wide = attention_problem(S_q=4096, S_k=4096, **BIAS)
    wide = replace(wide, bias_strides=(0, 4096 * 4096, 4096, 1))
    assert element_rate(plain) == 1
    assert element_rate(wide) == 0.65
    assert element_rate(replace(wide, spec=replace(wide.spec, bias=DType.float32))) == 0.5
    for strides in ((0, 4096 * 4097, 4097, 1), (0, 4096 * 4096, 1, 4096)):
        assert element_rate(replace(wide, bias_strides=strides)) == 0.05
    alibi = attention_problem(S_q=4096, S_k=4096, alibi=True)
    masked = of(None, lambda b, h, q, kv: q // 8 == kv // 8)
    assert element_rate(alibi) == 0.84
    assert element_rate(masked) == element_rate(attention_problem(mask=True)) == 0.7
    assert element_rate(of(lambda s, b, h, q, kv: s * 2)) == 0.7
    both = replace(alibi, spec=replace(alibi.spec, mask=True), mask_strides=(0, 0, 4096, 1))
    assert element_rate(both) == 0.84 * 0.7
    everything = replace(wide, spec=replace(wide.spec, mask=True, alibi=True))
    assert element_rate(everything) == 0.45
    narrow = {"head_dim": 64, "value_dim": 64}
    assert element_rate(attention_problem(**narrow)) == 1
    assert element_rate(attention_problem(alibi=True, **narrow)) == 0.84


def test_dispatch_takes_a_bias_whose_rows_are_copied_by_16_bytes() -> None:
    """What decides is the class's representative, which has to tell such rows."""
    wide = attention_problem(S_q=4096, S_k=4096, **BIAS)
    for strides, rate in (
        ((0, 4096 * 4096, 4096, 1), 0.65),
        ((0, 0, 0, 1), 0.65),
        ((0, 4100 * 4096, 4100, 1), 0.05),
        ((0, 4096 * 4096, 1, 4096), 0.05),
    ):
        p = replace(wide, bias_strides=strides)
        assert element_rate(p) == element_rate(representative(p)) == rate, strides


def test_a_dear_function_is_in_the_code_once_for_a_part() -> None:
    from kernelseam.kernels.expression import expression_header

    cheap, dear = of(lambda s, b, h, q, kv: s * 2), of(lambda s, b, h, q, kv: s * 2 - abs(q - kv))
    assert "OPERATIONS = 1;" in expression_header(cheap.spec)
    assert "OPERATIONS = 5;" in expression_header(dear.spec)


def test_a_mask_that_repeats_is_kept_up_to_a_size() -> None:
    plain = replace(attention_problem(mask=True), S_q=65536, S_k=65536)
    assert HALF.refuse(replace(plain, mask_strides=(0, 0, 65536, 1)), ROW) is None
    refused = "a mask that repeats, kept as {} bytes: it takes up to 134217728"
    assert HALF.refuse(replace(plain, mask_strides=(0, 0, 0, 1)), ROW) == refused.format(2**29)
    # of entries of their own lengths each has bits of its own
    shared = {"batch": 256, "S_q": 8192, "S_k": 8192, "mask_strides": (0, 0, 8192, 1)}
    lengths = attention_problem(mask=True, lengths=True)
    for p, kept in ((plain, None), (lengths, refused.format(2**31))):
        assert HALF.refuse(replace(p, **shared), ROW) == kept
    each = {**shared, "mask_strides": (8192 * 8192, 0, 8192, 1)}
    assert HALF.refuse(replace(lengths, **each), ROW) is None


def test_a_bias_whose_rows_lie_beyond_places_of_32_bits_is_refused() -> None:
    wide = attention_problem(S_q=4096, S_k=4096, **BIAS)
    most = 2**32 // wide.num_heads
    assert HALF.refuse(replace(wide, bias_strides=(0, most - 4096, 4096, 1)), ROW) is None
    far = replace(wide, bias_strides=(0, most, 4096, 1))
    refused = "a bias' axis of 8589934592 bytes: it takes less than 2**33"
    assert HALF.refuse(far, ROW) == refused


@pytest.mark.parametrize("dim", [8, 64, 96, 104, 128, 160, 192, 256])
@pytest.mark.parametrize("bias", [None, DType.bfloat16, DType.float32])
def test_what_is_not_refused_has_a_tile(dim: int, bias: DType | None) -> None:
    """Whatever hides keys or adds to scores beside a bias, dense and over pages."""
    flags = ("causal", "window", "mask", "alibi", "prefix", "lengths", "softcap")
    taken = 0
    for chosen in itertools.product((False, True), repeat=len(flags)):
        named = dict(zip(flags, chosen, strict=True))
        if named["prefix"] and not (named["causal"] or named["window"]):
            continue
        for view in ("strided", "paged"):
            fields = {"head_dim": dim, "value_dim": dim, "bias": bias, "kv_view": view, **named}
            p = attention_problem(**fields)
            if HALF.refuse(p, ROW) is None:
                taken += 1
                assert HALF.tiles_of(p, ROW), fields
                assert HALF.tile(p, ROW, H200).fits
    assert taken >= 100 or (bias and dim > 128)

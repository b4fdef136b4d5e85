"""The options of an attention: what they make of the problem, and every refusal, word for word."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from attention_problems import latent_attention
from kernelseam import Attention, attention_varlen, plan
from kernelseam import attention as attend
from kernelseam.contract import Runtime
from kernelseam.descriptors import AttentionProblem, AttentionSpec
from kernelseam.descriptors.attention.options import ScoreNumbers, SpecOption
from kernelseam.descriptors.attention.problem import PLAIN
from kernelseam.descriptors.common.options import scalars_of
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.reference.attention_scores import SCORE_OPTIONS
from kernelseam_thirdvendor import AcmeArray
from refusals import Refused, refusals

Array = np.ndarray[Any, Any]
STRIDE = "Strides count elements, from 0 (broadcast) upward."
BASE: dict[str, Any] = {
    "batch": 2,
    "num_heads": 4,
    "S_q": 5,
    "S_k": 7,
    "head_dim": 8,
    "dtype": "float16",
}
PACKED: dict[str, Any] = {"cu_seqlens_q": 0, "total_q": 9, "cu_seqlens_k": 0, "total_k": 11}
PAGED: dict[str, Any] = {"block_table": 0, "kv_lengths": 0, "pages": 6, "page_size": 4}


def attention(**more: Any) -> Attention:
    return Attention(**{**BASE, **more})


def problem(**more: Any) -> AttentionProblem:
    return attention(**more).problem()


def i32(*values: Any) -> Array:
    return np.array(values, np.int32)


# ---------------------------------------------------------------- what is derived


def test_every_field_of_a_spec_is_an_option_or_every_implementations() -> None:
    assert {f.name for f in fields(AttentionSpec)} == {*SpecOption.__members__} | PLAIN
    for name in scalars_of(ScoreNumbers):  # the descriptor finds them there
        assert name in SpecOption.__members__ and hasattr(AttentionProblem, name), name


def test_a_window_is_a_band_and_causal_one_of_its_kinds() -> None:
    for more, spec, band in (
        ({}, (False, False), (None, None)),
        ({"causal": True}, (True, False), (None, 0)),
        ({"window": (None, None)}, (False, False), (None, None)),
        ({"window": (None, 0)}, (True, False), (None, 0)),
        ({"window": [3, 0]}, (False, True), (3, 0)),
        ({"window": (3, 2)}, (False, True), (3, 2)),
        ({"window": (3, 2), "causal": True}, (False, True), (3, 0)),
        ({"window": (None, 2)}, (False, True), (None, 2)),
        ({"window": (None, 2), "causal": True}, (True, False), (None, 0)),
        ({"window": (np.int64(0), None)}, (False, True), (0, None)),
    ):
        p = problem(**more)
        assert (p.spec.causal, p.spec.window) == spec and (p.left, p.right) == band
    assert problem(window=(None, 0)) == problem(causal=True)


def test_options_are_named_in_the_spec() -> None:
    zero = ("bias", "mask", "alibi_slopes", "sinks", "prefix_lengths", "kv_lengths")
    p = problem(
        **dict.fromkeys(zero, 0),
        softcap=30,
        window=(5, 5),
        dtype_out="float32",
        batch_invariant=True,
    )
    f16, f32 = DType.float16, DType.float32
    assert p.spec == AttentionSpec(
        f16,
        8,
        8,
        window=True,
        prefix=True,
        alibi=True,
        softcap=True,
        bias=f16,
        mask=True,
        sinks=True,
        lengths=True,
        dtype_out=f32,
        batch_invariant=True,
    )
    assert p.spec.options == SCORE_OPTIONS & ~SpecOption.causal | (
        SpecOption.lengths | SpecOption.dtype_out | SpecOption.batch_invariant
    )
    assert (p.softcap, p.spec.out) == (30.0, f32)
    rules = {r.name: r for r in p.operands}
    assert list(rules) == ["q", "k", "v", "out", *zero]
    assert rules["bias"].shape == rules["mask"].shape == (2, 4, 5, 7)
    assert p.bias_strides == p.mask_strides == (140, 35, 7, 1) and p.alibi_strides == (4, 1)
    kinds = [f16, DType.boolean, f32, f32, DType.int32, DType.int32]
    assert [rules[n].dtype for n in zero] == kinds
    assert not problem().spec.options and problem(dtype_out="float16").spec.dtype_out is None
    assert problem(bias=0, dtype_bias="float32").spec.bias is f32
    assert problem(bias=np.zeros((2, 4, 5, 7), np.float32)).spec.bias is f32
    assert str(p) == (
        "attention float16 alibi batch_invariant bias dtype_out lengths mask prefix sinks softcap "
        "window batch=2 heads=4 S_q=5 S_k=7 dim=8"
    )


def test_packed_rows() -> None:
    p = problem(**PACKED, kv_heads=2, value_dim=16, return_lse=True)
    assert (p.spec.q_view, p.spec.kv_view, p.total_q, p.total_k) == ("packed", "packed", 9, 11)
    # heads within rows, and no batch
    assert p.q_strides == (0, 8, 32) and p.k_strides == (0, 8, 16)
    assert p.v_strides == (0, 16, 32) and p.out_strides == (0, 16, 64) and p.lse_strides == (0, 9)
    rules = {r.name: r for r in p.operands}
    assert (rules["q"].shape, rules["v"].shape, rules["lse"].shape) == (
        (1, 4, 9, 8),
        (1, 2, 11, 16),
        (1, 4, 9),
    )
    assert rules["cu_seqlens_q"].shape == rules["cu_seqlens_k"].shape == (3,)
    assert problem(**PACKED, stride_q_head=72, stride_q_row=8).q_strides == (0, 72, 8)
    mixed = problem(cu_seqlens_q=0, total_q=9, kv_lengths=0)
    assert (mixed.spec.q_view, mixed.spec.kv_view, mixed.k_strides) == (
        "packed",
        "strided",
        (224, 56, 8),
    )
    assert "packed/packed" in str(p) and "packed/strided" in str(mixed)


def test_pages() -> None:
    p = problem(**PAGED, kv_heads=2)
    assert (p.spec.kv_view, p.pages, p.page_size, p.table_width, p.table_stride) == (
        "paged",
        6,
        4,
        2,
        2,
    )
    assert p.k_strides == p.v_strides == (64, 8, 16)  # page, head within rows, row
    rules = {r.name: r for r in p.operands}
    assert rules["k"].shape == (6, 2, 4, 8) and rules["block_table"].shape == (2, 2)
    p = problem(
        **PAGED,
        table_width=9,
        stride_table_row=10,
        stride_k_batch=999,
        stride_k_head=32,
        stride_k_row=8,
    )
    assert (p.table_width, p.table_stride, p.k_strides) == (9, 10, (999, 32, 8))


@pytest.mark.parametrize("left", [None, 0, 1, 3, 30])
@pytest.mark.parametrize("right", [None, 0, 2, 30])
def test_visible_pairs_are_counted(left: int | None, right: int | None) -> None:
    for s_q in (1, 4, 9):
        for s_k in (0, 1, 4, 9):
            d = np.arange(s_k) - np.arange(s_q)[:, None] - (s_k - s_q)
            seen = (d >= -(99 if left is None else left)) & (d <= (99 if right is None else right))
            p = problem(S_q=s_q, S_k=s_k, window=(left, right))
            assert p.visible == seen.sum()
            assert p.operations == 2 * 2 * 4 * seen.sum() * 16


# ---------------------------------------------------------------- what a descriptor refuses

MESSAGES: list[tuple[dict[str, Any], str]] = [
    *refusals("attention_options", "options", globals()),
    *(
        (
            {name: np.zeros(shape, given)},
            (
                f"{name} = an array of {np.dtype(given)}: must be {wanted}. Convert the array"
                f"{', or plan for its dtype' * (wanted == 'float32')}."
            ),
        )
        for name, shape, given, wanted in (
            ("mask", (2, 4, 5, 7), np.float32, "bool"),
            ("alibi_slopes", (2, 4), np.float16, "float32"),
            ("sinks", (4,), np.float16, "float32"),
            ("prefix_lengths", (2,), np.float32, "int32"),
            ("kv_lengths", (2,), np.bool_, "int32"),
        )
    ),
    *(
        (
            {**PACKED, f"stride_{n}_batch": 8, "return_lse": True},
            f"stride_{n}_batch = 8: packed rows have no batch. Leave it out.",
        )
        for n in ("q", "k", "v", "out", "lse")
    ),
    *(
        (
            {**more, f"stride_{field}": -1},
            f"stride_{field} = -1: must be from 0 to 2**{bits} - 1. {STRIDE}",
        )
        for more, field, bits in (
            ({"bias": 0}, "bias_column", 62),
            ({"bias": 0, "dtype_bias": "float32"}, "bias_batch", 61),
            ({"mask": 0}, "mask_head", 63),
            ({"alibi_slopes": 0}, "alibi_head", 61),
            (PAGED, "table_row", 61),
            (PAGED, "k_batch", 62),
            (PACKED, "q_row", 62),
            ({}, "lse_head", 61),
            ({"dtype_out": "float32"}, "out_row", 61),
        )
    ),
    *(
        (
            {**more, name: array},
            (
                f"{name} = an array with strides {[s // array.itemsize for s in array.strides]}: "
                "must be row-major without "
                "gaps where no strides are given. Give the strides, or copy the array."
            ),
        )
        for more, name, array in (
            ({}, "bias", np.zeros((2, 4, 7, 5), np.float16).swapaxes(2, 3)),
            ({}, "mask", np.zeros((2, 4, 5, 8), bool)[..., :7]),
            ({}, "alibi_slopes", np.zeros((2, 8), np.float32)[:, ::2]),
            ({}, "sinks", np.zeros(8, np.float32)[::2]),
            ({}, "prefix_lengths", i32(1, 2, 3)[::2]),
            ({}, "kv_lengths", i32(1, 2, 3)[::2]),
            (PACKED, "cu_seqlens_q", i32(1, 2, 3, 4, 5)[::2]),
            (PACKED, "cu_seqlens_k", i32(1, 2, 3, 4, 5)[::2]),
            (PAGED, "block_table", np.zeros((2, 3), np.int32)[:, :2]),
            (PACKED, "q", np.zeros((9, 12, 8), np.float16)[:, :4]),
            (PAGED, "v", np.zeros((6, 4, 4, 9), "f2")[..., :8]),
        )
    ),
]


@pytest.mark.parametrize(("more", "message"), MESSAGES)
def test_refused(more: dict[str, Any], message: str, refused: Refused) -> None:
    refused(message, lambda: attention(**more))


# ---------------------------------------------------------------- what lengths, offsets and tables
# may hold


def memory(p: Any) -> dict[str, Array]:
    """Arrays for the operands of a problem, with room to align them."""
    return {r.name: np.zeros(r.span + 16, r.dtype.numpy) for r in p.operands if r.dtype is not None}


def aligned(x: Array) -> int:
    return -(-x.ctypes.data // 16) * 16


def bound(**more: Any) -> None:
    """Bind a call over these arrays; on the host that is enough for their contents to be looked
    at."""
    given = {n: x for n, x in more.items() if isinstance(x, np.ndarray)}
    p = plan(attention(**{**more, **dict.fromkeys(given, 0)}), backend="numpy")
    arrays = memory(p.problem)
    p.bind(**{n: aligned(x) for n, x in arrays.items() if n not in given}, **given)


TABLE = "Entries that kv_lengths reaches name pages."
OFFSETS: list[tuple[dict[str, Any], str]] = refusals("attention_options", "contents", globals())
LENGTHS: list[tuple[dict[str, Any], str]] = [
    (
        {"kv_lengths": i32(7, 8)},
        "kv_lengths[1] = 8: must be from 0 to S_k = 7. Raise S_k, or correct it.",
    ),
    (
        {"kv_lengths": i32(-1, 7)},
        "kv_lengths[0] = -1: must be from 0 to S_k = 7. Raise S_k, or correct it.",
    ),
    (
        {**PAGED, "kv_lengths": i32(5, 4), "block_table": i32([0, 6], [1, 99])},
        f"block_table[0, 1] = 6: must be a page, from 0 to 5. {TABLE}",
    ),
    (
        {**PAGED, "kv_lengths": i32(4, 1), "block_table": i32([0, 99], [-1, 99])},
        f"block_table[1, 0] = -1: must be a page, from 0 to 5. {TABLE}",
    ),
]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        *(
            ({**PACKED, "cu_seqlens_q": i32(0, 4, 9), "cu_seqlens_k": i32(0, 4, 11), **more}, m)
            for more, m in OFFSETS
        ),
        *LENGTHS,
    ],
)
def test_contents_on_the_host_are_refused_by_bind(
    more: dict[str, Any], message: str, refused: Refused
) -> None:
    refused(message, lambda: bound(**more))


@pytest.mark.parametrize(
    "more",
    [
        # empty sequences, and rows of no one
        {**PACKED, "cu_seqlens_q": i32(0, 0, 5), "cu_seqlens_k": i32(4, 4, 11)},
        {"kv_lengths": i32(0, 7)},
        # what no key is on is not looked at
        {**PAGED, "kv_lengths": i32(0, 4), "block_table": i32([-1, 99], [5, -1])},
        {"prefix_lengths": i32(-5, 2**31 - 1)},  # all of them mean something
        {"batch": 0, **PACKED, "cu_seqlens_q": i32(7), "cu_seqlens_k": i32(7)},
    ],
)
def test_contents_that_stay_within(more: dict[str, Any]) -> None:
    bound(**more)


def test_a_table_is_read_as_the_plan_walks_it(refused: Refused) -> None:
    """Its rows further apart, in memory of any shape."""
    table = i32(0, 1, -9, -9, 2, 3, -9, -9)
    more = {**PAGED, "kv_lengths": i32(7, 7), "stride_table_row": 4}
    bound(**{**more, "block_table": table})
    bound(**{**more, "block_table": table.reshape(2, 4)})
    table[5] = 42
    refused(
        f"block_table[1, 1] = 42: must be a page, from 0 to 5. {TABLE}",
        lambda: bound(**{**more, "block_table": table}),
    )


def test_lengths_that_are_not_bound_are_missing(refused: Refused) -> None:
    """They are never read from address 0, which announced them."""
    p = plan(attention(**PAGED), backend="numpy")
    arrays = memory(p.problem)
    for name in ("kv_lengths", "block_table"):
        places = {n: aligned(x) for n, x in arrays.items() if n != name}
        remedy = f"Give {name} in the descriptor or to bind."
        message = f"{name} = null: must be the address of memory on the device. {remedy}"
        refused(message, lambda places=places: p.bind(**places))  # type: ignore[misc]


def test_contents_on_a_device_are_read_with_check(acme: Runtime, refused: Refused) -> None:
    """Nothing is copied by ``resolve``; ``check_device`` reads arrays and addresses alike."""
    lengths = AcmeArray(i32(7, 8))
    d = attention(kv_lengths=lengths)
    device = d.device
    assert device is not None and device.backend == "acme"
    for given in (lengths, lengths.host.ctypes.data):
        actual = d.resolve({"kv_lengths": given}, acme, device)
        refused(
            "kv_lengths[1] = 8: must be from 0 to S_k = 7. Raise S_k, or correct it.",
            lambda actual=actual: d.check_device(actual, acme, device),
        )  # type: ignore[misc]
    lengths.host[1] = 7
    d.check_device(d.resolve({"kv_lengths": lengths}, acme, device), acme, device)


def test_values_that_are_columns_of_the_keys() -> None:
    p = latent_attention().problem()
    assert p.spec.latent and not p.spec.options, "whoever reads v twice is right, too"
    assert str(p.spec) == "attention bfloat16 latent dim=576/512"
    assert str(p).startswith("attention bfloat16 latent batch=2 heads=16/1 S_q=1")
    apart = latent_attention(latent=False).problem()
    assert not apart.spec.latent
    # its rows have 512 elements of 576; of one head the stride does not count
    assert apart.bytes_moved - p.bytes_moved == 2 * 64 * 512 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"head_dim": 64, "value_dim": 128, "stride_v_row": 128, "stride_v_batch": 8192},
            "v is the first columns of k, and value_dim = 128 of head_dim = 64",
        ),
        (
            {"stride_v_row": 512},
            r"its strides are \(36864, .*, 512\), those of k \(36864, .*, 576\)",
        ),
        ({"latent": 1}, "latent = 1: must be True or False"),
    ],
)
def test_values_that_are_no_columns_of_the_keys(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        latent_attention(**changes)


def test_latent_values_lie_where_the_keys_do() -> None:
    q, k = np.ones((1, 2, 1, 8), np.float16), np.ones((1, 1, 5, 8), np.float16)
    out = attend(q, k, k[..., :4], latent=True)
    assert np.array_equal(out, np.ones((1, 2, 1, 4), np.float16))
    ends = np.array([0, 1], np.int32), np.array([0, 5], np.int32)
    rows = (x[0].transpose(1, 0, 2) for x in (q, k, k[..., :4]))
    packed = attention_varlen(*rows, *ends, 1, 5, latent=True)
    assert np.array_equal(packed, np.ones((1, 2, 4), np.float16))
    other = np.ones((1, 1, 5, 8), np.float16)
    with pytest.raises(InvalidValue, match="v = 0x.*: must be the address of k, of which it is a"):
        attend(q, k, other[..., :4], latent=True)

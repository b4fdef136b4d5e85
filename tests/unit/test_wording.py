"""A refusal in the words of who called: operands, options and extents by the caller's names, values
shortened."""

from __future__ import annotations

import kernelseam as ks
import numpy as np
import pytest
from kernelseam.descriptors.common.wording import Wording
from kernelseam.errors import InvalidValue, format_value
from public_calls import (
    B,
    D,
    G,
    H,
    S,
    attention_lists,
    f32,
    forward,
    i32,
    merge,
    output_bwd,
    paged,
    qkv,
)
from refusals import Refused


def test_operands_that_a_descriptor_calls_otherwise(refused: Refused) -> None:
    x = paged()
    refused(
        "k_pages = an array of float16: must be float32 as q is. Convert the array, or correct "
        "the dtype.",
        lambda: ks.attention_paged(**{**x, "k_pages": x["k_pages"].astype("f2")}),
    )
    refused(
        "v_pages.dtype = int64: must be one of float16, bfloat16, float32, float64, or where 8 "
        "bits are taken float8_e4m3fn or float8_e4m3fnuz. Convert the array.",
        lambda: ks.attention_paged(**{**x, "v_pages": x["v_pages"].astype("i8")}),
    )
    refused(
        "block_table = table_width 1: must have room for S_k = 7 keys in pages of 4: 2. Make the "
        "table wider, or S_k smaller.",
        lambda: ks.attention_paged(**{**x, "block_table": x["block_table"][:, :1]}),
    )
    refused(
        "q = num_heads 3: must be a multiple of kv_heads = 2. Make num_heads a multiple of "
        "kv_heads.",
        lambda: ks.attention(f32(B, 3, S, D), f32(B, G, S, D), f32(B, G, S, D)),
    )
    refused(
        "scores = row stride 0: the 5 entries of this axis of scores share elements (extents [2, "
        "4, 5, 5], strides [0, 0, 0, 1]). An output needs memory of its own for every element: "
        "make the row stride of scores larger.",
        lambda: ks.BatchedGemmStrided.for_scores(
            f32(B, H, S, D), f32(B, G, S, D), np.broadcast_to(np.zeros(S, np.float32), (B, H, S, S))
        ),
    )


def test_results_that_an_option_names(refused: Refused) -> None:
    q, remedy = f32(B, H, S, D), "Name another, or leave it out"
    refused(
        f"out_dtype = float64: must be float32. {remedy}.",
        lambda: ks.attention(q, q, q, out_dtype="float64"),
    )
    refused(
        "bias_dtype = float64: must be no wider than float32, in which products of float32 are "
        f"summed. {remedy}.",
        lambda: ks.fused_output_projection_residual_bwd(
            **{**output_bwd(), "bias_dtype": "float64"}
        ),
    )
    refused(
        "out_dtype = list: must be one of float16, bfloat16, float32, float64. Convert the array "
        "or name one of these.",
        lambda: ks.merge_states(**merge(), out_dtype=[q]),
    )
    refused(
        "out_dtype = float64: out is an array of float32. Give one of the two.",
        lambda: ks.merge_states(**merge(), out_dtype="float64"),
    )


@pytest.mark.parametrize("name", ["backend", "implementation"])
def test_what_is_no_name(name: str, refused: Refused) -> None:
    a = f32(2, 2)
    for value, reported in (
        ({}, "{}"),
        (["numpy"], "['numpy']"),
        (a, "ndarray"),
        (1, "1"),
        (b"numpy", "b'numpy'"),
    ):
        message = (
            f"{name} = {reported}: must be a name. Name one of those that `kernelseam doctor` "
            "lists."
        )
        refused(message, lambda value=value: ks.matmul2d(a, a, **{name: value}))
        refused(
            message,
            lambda value=value: ks.plan(
                ks.BatchedGemmStrided(M=2, N=2, K=2, A=a, B=a), **{name: value}
            ),
        )


def test_values_are_short() -> None:
    with pytest.raises(InvalidValue) as caught:
        ks.matmul2d(f32(2, 2), f32(2, 2), backend="x" * 10_000)
    assert len(str(caught.value)) < 500 and caught.value.value == "x" * 10_000
    assert str(caught.value).startswith(
        f"backend = {'x' * 160}… (10000 characters): must be one of "
    )
    for value, text in (
        (10**5000, "int"),
        (f32(3), "ndarray"),
        (list(range(999)), "list"),
        ((f32(2),), "tuple"),
        ("", "''"),
        ("a\nb", r"'a\nb'"),
        ((1, None), "(1, None)"),
        (np.float32(2), "2.0"),
        (object(), "object"),
    ):
        assert format_value(value) == text


def test_no_layout(refused: Refused) -> None:
    q = f32(B, H, S, D)
    message = "layout = None: must be one of bhsd, bshd. Name the order of the axes."
    refused(message, lambda: ks.attention(q, q, q, layout=None))  # type: ignore[arg-type]
    refused(message, lambda: ks.attention_paged(**{**paged(), "layout": None}))
    refused(message, lambda: ks.fused_qkv_projection(**{**qkv(), "layout": None}))
    refused(
        "kv_layout = None: must be one of nhd, hnd. Name the order of the axes.",
        lambda: ks.attention_paged(**{**paged(), "kv_layout": None}),
    )


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (-1, "-1: must be from 0 to 2**64 - 1"),
        (2**70, "an integer of 71 bits: must be from 0 to 2**64 - 1"),
    ],
)
def test_every_address_is_looked_at(bad: int, rule: str, refused: Refused) -> None:
    for name in ("dbias", "dsinks"):
        refused(
            f"{name} = {rule}. Pass the memory's address.",
            lambda name=name: ks.AttentionBwd(forward=forward(), **{name: bad}),
        )
    for name in ("lses", "lse"):
        refused(
            f"{name} = {rule}. Pass the memory's address.",
            lambda name=name: ks.MergeStates(
                parts=2, batch=B, num_heads=H, rows=S, value_dim=D, dtype="float32", **{name: bad}
            ),
        )


def test_strides_of_lists(refused: Refused) -> None:
    refused(
        "stride_q_row = ndarray: must be an integer. Pass an int.",
        lambda: ks.AttentionPointers(**attention_lists(), stride_q_row=i32(8)),
    )
    refused(
        "stride_a_row = 8.0: must be an integer. Pass an int.",
        lambda: ks.BatchedGemmPointers(M=2, N=2, K=2, A_ptrs=[f32(2, 2)], stride_a_row=8.0),
    )  # type: ignore[arg-type]


def test_an_array_that_its_runtime_cannot_read() -> None:
    """As a fake tensor beside one that is none: torch shows no memory of it."""
    torch = pytest.importorskip("torch")
    fake = pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode()
    x = torch.zeros(2, 2)
    ks.matmul2d(x, x)  # the runtime that knows tensors is remembered
    with pytest.raises(
        InvalidValue, match=r"^a\.data_ptr = None: has no memory \(a fake tensor, or one of torch"
    ):
        ks.matmul2d(fake.from_tensor(x), x)


def test_a_stream_that_breaks_its_protocol(refused: Refused) -> None:
    class Stream:
        def __cuda_stream__(self) -> object:
            return 7

    for stream, reported in ((Stream(), "Stream"), (2**64, str(2**64))):
        refused(
            f"stream = {reported}: must be an int, an object with __cuda_stream__, or None. Pass "
            "the stream's integer handle.",
            lambda stream=stream: ks.matmul2d(f32(2, 2), f32(2, 2), stream=stream),
        )


def test_words_are_replaced_whole() -> None:
    error = InvalidValue(
        "stride_k_row", 3, "k and v as S_k and stride_v_head say", "Mend k, not q_k"
    )
    reported = Wording({"k": "k_pages", "v": "v_pages"}).reworded(error)
    assert str(reported) == (
        "k_pages = row stride 3: k_pages and v_pages as S_k and the head stride of v_pages say. "
        "Mend k_pages, not q_k."
    )
    assert Wording({"A": "dc"}).reworded(InvalidValue("A_ptrs[3]", "null", "A", "B")).field == "dc"
    lists = Wording({"A_ptrs[1]": "b[4]", "A_ptrs": "b[0]"}, {"K[1]": "A_ptrs[1]"})
    rule = InvalidValue("stride_a_row[1]", 2, "A_ptrs[1] and A_ptrs", "enlarge stride_a_row[1]")
    assert (
        str(lists.reworded(rule))
        == "b[4] = row stride 2: b[4] and b[0]. enlarge the row stride of b[4]."
    )
    assert str(lists.reworded(InvalidValue("K[1]", 9, "x", ""))).startswith("b[4] = K[1] 9: ")
    read_off = Wording({"k": "k_pages"}, {"page_size": "k"}).reworded(
        InvalidValue("page_size", 0, "", "")
    )
    assert (read_off.field, read_off.value) == ("k_pages", "page_size 0")

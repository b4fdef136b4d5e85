"""What stands in lengths, offsets, tables, positions and lists is refused by its entry, and changes
after ``bind`` are seen at the next launch on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from kernelseam.errors import InvalidValue
from public_calls import D, G, H, attention_lists, f32, heads, i32, paged, qkv_fields
from refusals import Refused, cases


def lists(**more: Any) -> dict[str, Any]:
    return {**attention_lists(), **more}


def short() -> dict[str, Any]:
    """Keys of the second entry in arrays of four rows, of six that there may be."""
    x = attention_lists()
    return {
        **x,
        "k_ptrs": x["k_ptrs"][:3] + heads(1, 4, D),
        "v_ptrs": x["v_ptrs"][:2] + heads(2, 5, D),
    }


@pytest.mark.parametrize("check", [False, True])
def test_a_length_beyond_the_rows_of_its_arrays(check: bool, refused: Refused) -> None:
    x = short()
    x["kv_lengths"][1] = 5
    message = (
        "kv_lengths[1] = 5: the array of k_ptrs[3] has 4 rows. Give an array with more, or "
        "correct it."
    )
    refused(message, lambda: ks.plan(ks.AttentionPointers(**x), backend="numpy").bind(check=check))
    x["kv_lengths"][1] = 4
    call = ks.plan(ks.AttentionPointers(**x), backend="numpy").bind(check=check)
    call()
    x["kv_lengths"][1] = 5
    refused(message, call)
    x["kv_lengths"][:] = 6, 4
    call()


def test_a_length_beyond_the_rows_of_arrays_given_to_bind(refused: Refused) -> None:
    x = lists(kv_lengths=i32(6, 6))
    planned = ks.plan(ks.AttentionPointers(**x), backend="numpy")
    refused(
        "kv_lengths[0] = 6: the array of v_ptrs[1] has 2 rows. Give an array with more, or "
        "correct it.",
        lambda: planned.bind(v_ptrs=[x["v_ptrs"][0], f32(2, D), *x["v_ptrs"][2:]]),
    )
    refused(
        "kv_lengths[1] = 6: the array of k_ptrs[2] has 0 rows. Give an array with more, or "
        "correct it.",
        lambda: planned.bind().rebind(k_ptrs=[*x["k_ptrs"][:2], f32(0, D), x["k_ptrs"][3]]),
    )
    # behind an address there is what its owner says
    planned.bind(k_ptrs=[k.ctypes.data for k in x["k_ptrs"]])()


@pytest.mark.parametrize("name", ["q_ptrs", "k_ptrs", "out_ptrs"])
def test_a_list_that_the_host_holds_is_read_at_each_launch(name: str, refused: Refused) -> None:
    """A tensor of addresses in host memory is a list on the device, which here is the host."""
    torch = pytest.importorskip("torch")
    x = lists()
    entries = torch.tensor([m.ctypes.data for m in x[name]])
    call = ks.plan(ks.AttentionPointers(**{**x, name: entries}), backend="numpy").bind()
    call()
    kept, entries[1] = entries[1].clone(), 0
    message = (
        f"{name}[1] = null: must be the address of a matrix. Leave the entry out, or give "
        "it memory."
    )
    refused(message, call)
    refused(message, call.rebind)
    entries[1] = kept
    call()


def test_a_list_of_a_product_that_the_host_holds_is_read_at_each_launch(refused: Refused) -> None:
    torch = pytest.importorskip("torch")
    a, b, c = heads(4, 3, 5), heads(4, 5, 2), heads(4, 3, 2)
    entries = torch.tensor([m.ctypes.data for m in c])
    call = ks.plan(
        ks.BatchedGemmPointers(M=3, N=2, K=5, batch=4, A_ptrs=a, B_ptrs=b, C_ptrs=entries)
    ).bind()
    call()
    np.testing.assert_allclose(c[2], a[2] @ b[2], rtol=1e-6)
    entries[2] = entries[0]
    refused(
        f"C_ptrs[2] = {hex(entries[0])}: equals C_ptrs[0]. Give every output memory of its own.",
        call,
    )


def packed() -> tuple[dict[str, Any], ks.Call]:
    x: dict[str, Any] = {"cu_seqlens_q": i32(0, 3, 7), "cu_seqlens_k": i32(0, 5, 9)}
    d = ks.Attention.from_arrays(
        f32(7, H, D),
        f32(9, G, D),
        f32(9, G, D),
        f32(7, H, D),
        f32(H, 7),
        **x,
        max_seqlen_q=4,
        max_seqlen_k=5,
        bias=f32(4, 5),
    )
    return x, ks.plan(d).bind()


def in_pages() -> tuple[dict[str, Any], ks.Call]:
    x = paged()
    d = ks.Attention.from_arrays(
        x["q"],
        x["k_pages"],
        x["v_pages"],
        x["out"],
        layout="bshd",
        block_table=x["block_table"],
        kv_lengths=x["kv_lengths"],
        max_seqlen_k=7,
    )
    return x, ks.plan(d).bind()


def projected() -> tuple[dict[str, Any], ks.Call]:
    x = qkv_fields()
    return x, ks.plan(ks.QkvProjection(**x)).bind()


def dense() -> tuple[dict[str, Any], ks.Call]:
    x = {"kv_lengths": i32(6, 4)}
    d = ks.Attention.from_arrays(
        f32(2, H, 5, D), f32(2, G, 6, D), f32(2, G, 6, D), f32(2, H, 5, D), **x
    )
    return x, ks.plan(d).bind()


def gradients() -> tuple[dict[str, Any], ks.Call]:
    x = {"kv_lengths": i32(6, 4)}
    q, k = (2, H, 5, D), (2, G, 6, D)
    forward = ks.Attention.from_arrays(f32(*q), f32(*k), f32(*k), f32(*q), f32(2, H, 5), **x)
    d = ks.AttentionBwd(forward=forward, dout=f32(*q), dq=f32(*q), dk=f32(*k), dv=f32(*k))
    return x, ks.plan(d).bind()


CHANGES: list[
    tuple[Callable[[], tuple[dict[str, Any], ks.Call]], str, tuple[int, ...], int, str]
] = cases("contents", "changes", globals())


@pytest.mark.parametrize(
    ("bound", "name", "index", "value", "rule"),
    CHANGES,
    ids=[f"{c[0].__name__}-{c[1]}-{c[3]}" for c in CHANGES],
)
def test_what_changes_after_bind_is_seen_at_the_next_launch(
    bound: Callable[[], tuple[dict[str, Any], ks.Call]],
    name: str,
    index: tuple[int, ...],
    value: int,
    rule: str,
    refused: Refused,
) -> None:
    x, call = bound()
    call()
    kept, x[name][index] = x[name][index], value
    refused(f"{name}[{', '.join(map(str, index))}] = {value}: {rule}", call)
    x[name][index] = kept
    call()


def test_bad_lengths_are_refused_where_there_are_no_queries() -> None:
    nothing, x = f32(2, 0, H, D), paged()
    for name, bad, field in (
        ("kv_lengths", i32(99, 0), "kv_lengths[0]"),
        ("kv_lengths", i32(0, -4), "kv_lengths[1]"),
        ("block_table", np.array([[0, 9], [0, 0]], np.int32), "block_table[0, 1]"),
    ):
        given = {**x, "q": nothing, "out": None, "mask": None, name: bad}
        with pytest.raises(InvalidValue) as caught:
            ks.attention_paged(**given)
        assert caught.value.field == field
    with pytest.raises(InvalidValue) as caught:
        ks.attention_varlen(
            f32(0, H, D), f32(9, G, D), f32(9, G, D), i32(0, 0, 0), i32(0, 9, 5), 0, 9
        )
    assert caught.value.field == "cu_seqlens_k[2]"
    with pytest.raises(InvalidValue) as caught:
        ks.attention(f32(2, H, 0, D), f32(2, G, 6, D), f32(2, G, 6, D), kv_lengths=i32(6, 7))
    assert caught.value.field == "kv_lengths[1]"


def test_a_length_that_an_array_has_no_place_for_is_not_read() -> None:
    """With no queries, too, there is one length an entry."""
    d = {
        "batch": 2,
        "num_heads": H,
        "kv_heads": G,
        "S_q": 0,
        "S_k": 6,
        "head_dim": D,
        "dtype": "float32",
    }
    with pytest.raises(
        InvalidValue, match=r"^kv_lengths = an array that spans 1 elements: the extents and strides"
    ):
        ks.Attention(**d, kv_lengths=i32(6))

"""attention_varlen, attention_paged and merge_states on host arrays, against the formula; options
that are refused, and contents that go bad after a call was bound."""

from __future__ import annotations

from typing import Any

import kernelseam
import numpy as np
import pytest
from attention_formula import attention, close
from kernelseam import Attention, AttentionBwd, plan
from refusals import Refused

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(5)
H, H_KV, D, D_V, PAGE = 4, 2, 12, 7, 5
QUERIES, KEYS = (3, 0, 7, 1), (11, 4, 0, 9)
MOST_Q, MOST_K, WIDTH = max(QUERIES), max(KEYS), 3


def i32(*values: Any) -> Array:
    return np.array(values, np.int32)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def offsets(lengths: tuple[int, ...]) -> Array:
    return np.cumsum([0, *lengths], dtype=np.int32)


def options() -> dict[str, Any]:
    """Every one that changes what is seen or scored. A bias is NaN behind the keys of its
    sequence."""
    bias, mask = normal(len(KEYS), 1, MOST_Q, MOST_K), RNG.random((H, 1, MOST_K)) < 0.7
    for b, n in enumerate(KEYS):
        bias[b, :, :, n:] = np.nan
    return {
        "causal": True,
        "window": (4, None),
        "softcap": 3.0,
        "scale": 0.4,
        "bias": bias,
        "mask": mask,
        "alibi_slopes": RNG.random(H).astype(np.float32),
        "sinks": normal(H),
        "prefix_lengths": i32(2, 0, 3, 4),
    }


def expected(
    q: list[Array], k: list[Array], v: list[Array], given: dict[str, Any]
) -> tuple[list[Array], list[Array]]:
    """Results [H, S, D_V] and LSEs [H, S] of each entry, from [S, H, D] and so on."""
    bias = np.broadcast_to(given["bias"], (len(k), H, MOST_Q, MOST_K))
    mask = np.broadcast_to(given["mask"], bias.shape)
    results = [
        attention(
            *(x[b].swapaxes(0, 1) for x in (q, k, v)),
            **{
                **given,
                "bias": bias[b, :, : len(q[b]), : len(k[b])],
                "mask": mask[b, :, : len(q[b]), : len(k[b])],
                "prefix_lengths": given["prefix_lengths"][b],
            },
        )
        for b in range(len(k))
    ]
    return [out for out, _ in results], [lse for _, lse in results]


def into_pages(*operands: list[Array]) -> tuple[Array, ...]:
    """The pages of each operand, in any order, NaN where no row is, and at last their table, −1
    where no page is."""
    places = RNG.permutation(len(KEYS) * WIDTH + 2)
    table = np.full((len(KEYS), WIDTH), -1, np.int32)
    pages = [
        np.full((len(places), PAGE, *rows[0].shape[1:]), np.nan, np.float32) for rows in operands
    ]
    for b, length in enumerate(KEYS):
        for n, j in enumerate(range(0, length, PAGE)):
            table[b, n] = places[b * WIDTH + n]
            for own, rows in zip(pages, operands, strict=True):
                own[table[b, n], : length - j] = rows[b][j : j + PAGE]
    return *pages, table


def test_packed_sequences_take_every_option() -> None:
    q, k, v = (
        [normal(n, h, d) for n in lengths]
        for lengths, h, d in ((QUERIES, H, D), (KEYS, H_KV, D), (KEYS, H_KV, D_V))
    )
    given = options()
    out, lse = kernelseam.attention_varlen(
        *(np.concatenate(x) for x in (q, k, v)),
        offsets(QUERIES),
        offsets(KEYS),
        MOST_Q,
        MOST_K,
        return_lse=True,
        **given,
    )
    reference, want_lse = expected(q, k, v, given)
    close(out, np.concatenate([x.swapaxes(0, 1) for x in reference]), 4)
    close(lse, np.concatenate(want_lse, axis=1), 4)


@pytest.mark.parametrize("packed", [False, True], ids=["queries-dense", "queries-packed"])
@pytest.mark.parametrize("kv_layout", ["nhd", "hnd"])
def test_pages_take_every_option(packed: bool, kv_layout: str) -> None:
    k, v = ([normal(n, H_KV, d) for n in KEYS] for d in (D, D_V))
    q = [normal(n if packed else MOST_Q, H, D) for n in QUERIES]
    (k_pages, v_pages, table), given = into_pages(k, v), options()
    if kv_layout == "hnd":
        k_pages, v_pages = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k_pages, v_pages))
    of_q: dict[str, Any] = (
        {"cu_seqlens_q": offsets(QUERIES), "max_seqlen_q": MOST_Q} if packed else {}
    )
    out, lse = kernelseam.attention_paged(
        np.concatenate(q) if packed else np.stack(q),
        k_pages,
        v_pages,
        table,
        i32(*KEYS),
        kv_layout=kv_layout,
        max_seqlen_k=MOST_K,
        return_lse=True,
        **of_q,
        **given,
    )
    reference, want_lse = expected(q, k, v, given)
    if packed:
        close(out, np.concatenate([x.swapaxes(0, 1) for x in reference]), 4)
        close(lse, np.concatenate(want_lse, axis=1), 4)
    else:
        close(out, np.stack(reference).swapaxes(1, 2), 4)
        close(lse, np.stack(want_lse), 4)


def test_parts_of_the_keys_are_merged() -> None:
    """The keys of every entry in three parts, one of which it may not reach; the layout of the
    result is the parts'."""
    q, k, v = normal(2, H, 5, D), normal(2, H_KV, 30, D), normal(2, H_KV, 30, D_V)
    parts = [
        kernelseam.attention(
            q, k[:, :, j : j + 10], v[:, :, j : j + 10], kv_lengths=i32(n, 10), return_lse=True
        )
        for j, n in ((0, 10), (10, 3), (20, 0))
    ]
    assert np.isneginf(parts[2][1][0]).all()
    outs = np.full((3, *parts[0][0].shape[:3], D_V + 1), np.nan, np.float32)[..., :D_V]
    for n, (out, _) in enumerate(parts):
        outs[n] = out
    outs[2, 0] = np.nan  # of no key: not read
    out, lse = kernelseam.merge_states(outs, np.stack([x for _, x in parts]))
    whole, whole_lse = kernelseam.attention(q, k, v, kv_lengths=i32(13, 30), return_lse=True)
    np.testing.assert_allclose(out, whole, atol=2e-6)
    np.testing.assert_allclose(lse, whole_lse, atol=2e-6)
    into = np.empty((2, H, 5, D_V), np.float16)
    assert kernelseam.merge_states(outs, np.stack([x for _, x in parts]), out=into)[0] is into
    np.testing.assert_array_equal(into, out.astype(np.float16))
    none, none_lse = kernelseam.merge_states(outs[:0], np.zeros((0, 2, H, 5), np.float32))
    assert not none.any() and np.isneginf(none_lse).all()


def test_merging_refuses(refused: Refused) -> None:
    outs, lses = normal(3, 2, H, 5, D), normal(3, 2, H, 5)
    refused(
        "outs = an array of shape [3, 2, 5, 12]: must have 5 axes, [N, B, H, S, D_v]. Add or "
        "remove axes with reshape.",
        lambda: kernelseam.merge_states(outs[:, :, 0], lses[:, :, 0]),
    )
    refused(
        "lses = an array of shape [2, 2, 4, 5]: must be [N=3, B=2, H=4, S=5]. Check the order of "
        "the axes of all arrays.",
        lambda: kernelseam.merge_states(outs, lses[:2]),
    )


def test_refusals(refused: Refused) -> None:
    q, k, v = normal(7, H, D), normal(9, H_KV, D), normal(9, H_KV, D)
    cu = {"cu_seqlens_q": i32(0, 3, 7), "cu_seqlens_k": i32(0, 4, 9)}

    def packed(**more: Any) -> object:
        given = {"q": q, "k": k, "v": v, "max_seqlen_q": 4, "max_seqlen_k": 5, **cu}
        return kernelseam.attention_varlen(**{**given, **more})

    pages = {"k_pages": normal(6, PAGE, H_KV, D), "v_pages": normal(6, PAGE, H_KV, D)}
    table = {"block_table": i32([0, 1], [2, 3]), "kv_lengths": i32(10, 4)}

    def paged(**more: Any) -> object:
        return kernelseam.attention_paged(**{"q": normal(2, 1, H, D), **pages, **table, **more})

    packed()
    paged()
    without = "must be given. Give it, or call attention, which needs none."
    for name in cu:
        refused(f"{name} = None: {without}", lambda name=name: packed(**{name: None}))  # type: ignore[misc]
    for name in table:
        refused(f"{name} = None: {without}", lambda name=name: paged(**{name: None}))  # type: ignore[misc]
    refused(
        "max_seqlen_k = 5.0: must be an integer. Pass an int.", lambda: packed(max_seqlen_k=5.0)
    )
    refused(
        "cu_seqlens_q = an array of shape [0]: must be [B+1]. One offset, 0, says that B is 0.",
        lambda: packed(cu_seqlens_q=i32(), cu_seqlens_k=i32()),
    )
    refused(
        "max_seqlen_q = 3: is about packed queries. Give cu_seqlens_q too, or leave it out.",
        lambda: paged(max_seqlen_q=3),
    )
    refused(
        "alibi_slopes = an array of shape [2]: must repeat to [2, 4]. Its axes are batch, head, "
        "from the right; extent 1 repeats.",
        lambda: packed(alibi_slopes=normal(2)),
    )
    refused(
        "kv_lengths[0] = 11: must be from 0 to S_k = 10. Raise S_k (max_seqlen_k; the table may "
        "be too narrow), or correct it.",
        lambda: paged(kv_lengths=i32(11, 4)),
    )


@pytest.mark.parametrize(
    ("bad", "good", "message"),
    [
        (
            {"window": (2.0, 0)},
            {"window": (2, 0)},
            "window[0] = 2.0: must be an integer. Pass an int.",
        ),
        (
            {"softcap": True},
            {"softcap": 1.0},
            "softcap = True: must be a real number. Pass a float.",
        ),
        (
            {"batch_invariant": 1},
            {"batch_invariant": True},
            "batch_invariant = 1: must be True or False. Pass a bool.",
        ),
        (
            {"window": np.array([2, 0])},
            {"window": [2, 0]},
            "window = ndarray: must be (left, right). For example (127, 0).",
        ),
    ],
    ids=["window", "softcap", "batch_invariant", "array"],
)
def test_what_is_refused_does_not_depend_on_earlier_calls(
    bad: dict[str, Any], good: dict[str, Any], message: str, refused: Refused
) -> None:
    """A remembered plan's options equal what is refused; a dict takes the one for the other."""
    q, k = normal(1, H, 3, D), normal(1, H_KV, 6, D)
    kernelseam.attention(q, k, k, **good)
    refused(message, lambda: kernelseam.attention(q, k, k, **bad))


def test_lengths_and_orders_that_no_operand_has_are_refused(refused: Refused) -> None:
    q, k = normal(1, H, 3, D), normal(1, H_KV, 6, D)
    out, lse = kernelseam.attention(q, k, k, return_lse=True)
    refused(
        "max_seqlen_q = 3: is about packed queries. Give cu_seqlens_q too, or leave it out.",
        lambda: kernelseam.attention_bwd(out, q, k, k, out, lse, max_seqlen_q=3),
    )
    refused(
        "max_seqlen_k = 6: is about packed or paged keys. Give cu_seqlens_k or block_table too, "
        "or leave it out.",
        lambda: Attention.from_arrays(q, k, k, out, max_seqlen_k=6),
    )
    refused(
        "kv_layout = hnd: is about paged keys. Give block_table too, or leave it out.",
        lambda: Attention.from_arrays(q, k, k, out, kv_layout="hnd"),
    )
    refused(
        "layout = ['bhsd']: must be one of bhsd, bshd. Name the order of the axes.",
        lambda: kernelseam.attention_bwd(out, q, k, k, out, lse, layout=["bhsd"]),
    )


def test_an_order_of_dense_queries_is_refused_of_packed_ones(refused: Refused) -> None:
    q, pages, table = normal(2, H, D), normal(3, PAGE, H_KV, D), i32([0], [1])
    packed: dict[str, Any] = {"cu_seqlens_q": i32(0, 1, 2), "max_seqlen_q": 1}
    given = (q, pages, pages, table, i32(1, 1))
    refused(
        "layout = bhsd: is of dense queries, and cu_seqlens_q packs them, [T, H, D]. Leave it out.",
        lambda: kernelseam.attention_paged(*given, **packed, layout="bhsd"),
    )
    assert kernelseam.attention_paged(*given, **packed, layout="bshd").shape == q.shape


def test_a_pool_without_pages_serves_entries_without_keys(refused: Refused) -> None:
    q, pages, table = normal(2, 1, H, D), normal(0, PAGE, H_KV, D), i32([0, 9], [-1, 3])
    out, lse = kernelseam.attention_paged(q, pages, pages, table, i32(0, 0), return_lse=True)
    assert out.shape == (2, 1, H, D) and not out.any() and np.isneginf(lse).all()
    refused(
        "block_table[1, 0] = -1: names a page, of which there are none. Entries that kv_lengths "
        "reaches name pages.",
        lambda: kernelseam.attention_paged(q, pages, pages, table, i32(0, 1)),
    )


CONTENTS = [
    ("block_table", (0, 1), 99, "block_table[0, 1] = 99: must be a page, from 0 to 5."),
    ("block_table", (1, 0), -5, "block_table[1, 0] = -5: must be a page, from 0 to 5."),
    ("kv_lengths", (1,), 11, "kv_lengths[1] = 11: must be from 0 to S_k = 10."),
]


@pytest.mark.parametrize(("name", "at", "value", "message"), CONTENTS)
def test_contents_are_checked_before_every_launch(
    name: str, at: tuple[int, ...], value: int, message: str
) -> None:
    """With check=True, whatever changed since it was bound: nothing is read beyond the pages, −5
    not taken from the end."""
    given = {
        "q": normal(2, 3, H, D),
        "k": normal(6, PAGE, H_KV, D),
        "v": normal(6, PAGE, H_KV, D),
        "out": np.zeros((2, 3, H, D), np.float32),
        "block_table": i32([0, 1], [2, 3]),
        "kv_lengths": i32(10, 4),
    }
    call = plan(Attention.from_arrays(**given, layout="bshd")).bind(check=True)
    call()
    before = given["out"].copy()
    assert before.any()
    given[name][at] = value
    with kernelseam.trace() as launches, pytest.raises(kernelseam.errors.InvalidValue) as caught:
        call()
    assert str(caught.value).startswith(message) and launches == []
    np.testing.assert_array_equal(given["out"], before)


def test_offsets_of_gradients_are_checked_before_every_launch() -> None:
    q, k, cu = normal(7, H, D), normal(7, H, D), i32(0, 3, 7)
    out, lse = kernelseam.attention_varlen(q, k, k, cu, cu, 4, 4, return_lse=True)
    forward = Attention.from_arrays(
        q, k, k, out, lse, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4
    )
    dq, dk, dv = (np.zeros_like(q) for _ in range(3))
    call = plan(AttentionBwd(forward=forward, dout=normal(7, H, D), dq=dq, dk=dk, dv=dv)).bind(
        check=True
    )
    call()
    assert dq.any() and dk.any() and dv.any()
    cu[1] = 8
    with pytest.raises(
        kernelseam.errors.InvalidValue, match=r"^cu_seqlens_q\[2\] = 7: must not be below its pred"
    ):
        call()

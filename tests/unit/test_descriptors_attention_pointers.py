"""AttentionPointers: host and device lists, options beside them, the strided way, and what is
refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from address_lists import SPACED, Array, aligned, at, matrices, on_device
from attention_formula import attention as formula
from attention_formula import close
from kernelseam import AttentionPointers, Plan, plan, trace
from kernelseam_thirdvendor import AcmeArray
from refusals import Refused

B, H, G, S_Q, S_K, D, D_V = 2, 4, 2, 5, 9, 8, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 3.0, "scale": 0.7},
    "bias": {"bias": np.random.default_rng(5).standard_normal((B, H, S_Q, S_K), "f4")},
    "mask": {"mask": np.random.default_rng(6).random((B, H, S_Q, S_K)) < 0.6},
    "alibi": {"alibi_slopes": np.array([[0.5, 0.2, 0.1, 0.0]] * B, "f4")},
    "sinks": {"sinks": np.array([0.0, 1.0, -2.0, 3.0], "f4")},
    "prefix": {"causal": True, "prefix_lengths": np.array([3, 7], "i4")},
    "lengths": {"kv_lengths": np.array([9, 4], "i4")},
}


def lists(dtype: str = "f4") -> dict[str, list[Array]]:
    shapes = {
        "q": (B * H, S_Q, D),
        "k": (B * G, S_K, D),
        "v": (B * G, S_K, D_V),
        "out": (B * H, S_Q, D_V),
    }
    return {
        f"{n}_ptrs": matrices(*shape, dtype, seed) for seed, (n, shape) in enumerate(shapes.items())
    }


def attention(**more: Any) -> AttentionPointers:
    base: dict[str, Any] = {
        "batch": B,
        "num_heads": H,
        "kv_heads": G,
        "S_q": S_Q,
        "S_k": S_K,
        "head_dim": D,
        "value_dim": D_V,
        "dtype": "float32",
    }
    return AttentionPointers(**{**base, **more})


def right(x: dict[str, list[Array]], lse: Array | None = None, **options: Any) -> None:
    """Every entry of out, and the LSE, are the formula's."""
    of_entries = {"bias", "mask", "alibi_slopes", "prefix_lengths"}
    for b in range(B):
        n = int(options["kv_lengths"][b]) if "kv_lengths" in options else S_K
        own = {k: y[b] if k in of_entries else y for k, y in options.items() if k != "kv_lengths"}
        q, out = (np.stack(x[f"{name}_ptrs"][b * H : b * H + H]) for name in ("q", "out"))
        keys, values = (np.stack(x[f"{name}_ptrs"][b * G : b * G + G])[:, :n] for name in "kv")
        expected, want_lse = formula(q, keys, values, **own)
        close(out, expected, 4)
        if lse is not None:
            close(lse[b], want_lse, 4)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_as_in_attention(name: str) -> None:
    x, options = lists(), OPTIONS[name]
    lse = np.full((B, H, S_Q), np.nan, "f4")
    p = plan(attention(**x, lse=lse, **options), backend="numpy")
    spec = p.problem.spec
    assert (spec.q_view, spec.kv_view, spec.vector, p.note) == ("pointers", "pointers", 16, "")
    with trace() as launches:
        p.bind(check=True)()
    assert len(launches) == 1
    right(x, lse, **options)


def test_everything_from_the_arrays() -> None:
    x = lists("f2")
    x["k_ptrs"] = [np.zeros((S_K, 12), "f2")[:, :D] for _ in range(B * G)]
    x["out_ptrs"] = matrices(B * H, S_Q, D_V, "f4")
    s = attention(**x, dtype=None).problem()
    assert (str(s.spec.dtype), str(s.spec.out), s.spec.vector) == ("float16", "float32", 2)
    assert (s.q_strides, s.k_strides, s.v_strides, s.out_strides) == (
        (0, 0, 8),
        (0, 0, 12),
        (0, 0, 4),
        (0, 0, 4),
    )
    assert (
        s.bytes_moved
        == attention(dtype="float16", dtype_out="float32", stride_k_row=12).problem().bytes_moved
    )


def test_keys_of_a_length_of_their_own() -> None:
    """With kv_lengths an allocation need not have S_k rows."""
    x = lists()
    lengths = np.array([3, 7], "i4")
    for name, width in (("k_ptrs", D), ("v_ptrs", D_V)):
        x[name] = [
            np.random.default_rng(i).standard_normal((lengths[i // G], width), "f4")
            for i in range(B * G)
        ]
    plan(attention(**x, kv_lengths=lengths), backend="numpy").bind(check=True)()
    right(x, kv_lengths=lengths)


# ---------------------------------------------------------------- the strided way


def even() -> dict[str, list[Array]]:
    rng = np.random.default_rng(4)
    shapes = {
        "q": (B * H, S_Q, D),
        "k": (B * G, S_K, D),
        "v": (B * G, S_K, D_V),
        "out": (B * H, S_Q, D_V),
    }
    return {f"{n}_ptrs": list(rng.standard_normal(shape, "f4")) for n, shape in shapes.items()}


def spaced(x: dict[str, list[Array]], **more: Any) -> Plan:
    p = plan(attention(**x, **more), backend="numpy")
    assert p.note == SPACED
    return p


@pytest.mark.parametrize("name", [n for n in OPTIONS if n != "lengths"])
def test_evenly_spaced_lists_take_the_strided_way(name: str) -> None:
    x, options = even(), OPTIONS[name]
    lse = np.full((B, H, S_Q), np.nan, "f4")
    p = spaced(x, lse=lse, **options)
    s = p.problem
    assert (s.spec.q_view, s.spec.kv_view, s.batch, s.num_heads, s.kv_heads) == (
        "strided",
        "strided",
        B,
        H,
        G,
    )
    assert (s.q_strides, s.k_strides) == ((H * S_Q * D, S_Q * D, D), (G * S_K * D, S_K * D, D))
    call = p.bind(check=True)
    call()
    right(x, lse, **options)
    other, again = even(), np.empty_like(lse)
    call.rebind(out_ptrs=other["out_ptrs"], lse=again)()
    assert np.array_equal(np.stack(other["out_ptrs"]), np.stack(x["out_ptrs"])) and np.array_equal(
        again, lse
    )


def test_one_key_head_for_all() -> None:
    x = even()
    x["k_ptrs"], x["v_ptrs"] = [x["k_ptrs"][0]] * (B * G), [x["v_ptrs"][0]] * (B * G)
    p = spaced(x)
    assert (p.problem.k_strides, p.problem.v_strides) == ((0, 0, D), (0, 0, D_V))
    p.bind()()
    right(x)


def test_what_is_not_evenly_spaced() -> None:
    x = even()
    assert plan(attention(**{**x, "k_ptrs": x["k_ptrs"][::-1]}), backend="numpy").note == ""
    assert (
        plan(attention(**{n: m for n, m in x.items() if n != "v_ptrs"}), backend="numpy").note == ""
    )
    assert plan(attention(**x, kv_lengths=np.array([9, 4], "i4")), backend="numpy").note == ""
    empty = attention(**dict.fromkeys(x, []), batch=0)
    assert plan(empty, backend="numpy").note == ""
    plan(empty, backend="numpy").bind()()


def test_rebinding_the_strided_way_refuses(refused: Refused) -> None:
    x = even()
    p = spaced(x)
    refused(
        "q_ptrs = a list spaced otherwise: the plan walks entries 40 elements apart, as the lists "
        "it was made with. Plan again with this list.",
        lambda: p.bind(q_ptrs=x["q_ptrs"][::-1]),
    )


# ---------------------------------------------------------------- lists on the device


def test_device_lists(acme: Any, refused: Refused) -> None:
    """Acme computes no attention; its lists are described, staged and checked."""
    x = lists()
    d = attention(**{n: on_device(m) for n, m in x.items()})
    # nobody has read the addresses
    assert str(d.device) == "acme:0 (acme1)" and d.problem().spec.vector == 4
    assert d.simplified() == (d, "")
    actual = d.resolve(d.operands(), acme, d.device)
    assert actual.pointers == {n: at(v.host) for n, v in d.operands().items()}
    d.check_device(actual, acme, d.device)
    assert attention(**d.operands(), alignment=16).problem().spec.vector == 16
    d.operands()["out_ptrs"].host[2] = 0
    refused(
        "out_ptrs[2] = null: must be the address of a matrix. Leave the entry out, or give it "
        "memory.",
        lambda: d.check_device(actual, acme, d.device),
    )
    of_the_host = attention(**{n: [AcmeArray(m) for m in entries] for n, entries in x.items()})
    assert of_the_host.problem().spec.vector == 16
    refused(
        "v_ptrs = a list on the device: the plan relies on 16-byte alignment, found from a host "
        "list. Plan with this list, or with alignment=16 to promise it.",
        lambda: of_the_host.read({"v_ptrs": on_device(x["v_ptrs"])}, of_the_host.device),
    )


# ---------------------------------------------------------------- what is refused


def test_entries(refused: Refused) -> None:
    """Beside what test_descriptors_pointers.py has of every such list."""
    x = lists()

    def replaced(name: str, i: int, value: object) -> dict[str, Any]:
        return {name: [*x[name][:i], value, *x[name][i + 1 :]]}

    cases: list[tuple[str, dict[str, Any]]] = [
        (
            (
                "v_ptrs = 8 entries: must have batch·kv_heads = 4. Give one entry a matrix, "
                "batch-major."
            ),
            {"v_ptrs": x["v_ptrs"] * 2},
        ),
        (
            "dtype_out = float16: must be float32. Leave it out for q's dtype.",
            {"out_ptrs": matrices(B * H, S_Q, D_V, "f2")},
        ),
        (
            (
                "k_ptrs[1] = an array of shape [10, 8]: must be [at most 9, 8]. One matrix an "
                "entry, as it lies in memory."
            ),
            {
                **replaced("k_ptrs", 1, np.zeros((10, D), "f4")),
                "kv_lengths": np.array([1, 2], "i4"),
            },
        ),
    ]
    for message, more in cases:
        refused(message, lambda more=more: attention(**{**x, **more}))


def test_operands_bound_besides_the_lists(refused: Refused, acme: Any) -> None:
    x = lists()
    memory = aligned(B * H * S_Q + 64)
    lse = memory[: B * H * S_Q].reshape(B, H, S_Q)
    inside = [*x["out_ptrs"][:6], memory[30:50].reshape(S_Q, D_V), x["out_ptrs"][7]]
    p = plan(attention(**x, lse=lse), backend="numpy")
    refused(
        f"out_ptrs[6] = {hex(at(inside[6]))}: overlaps lse. Give the output memory of its own.",
        lambda: plan(attention(**{**x, "out_ptrs": inside}, lse=lse), backend="numpy").bind(),
    )
    refused(
        "kv_lengths[1] = 10: must be from 0 to S_k = 9. Raise S_k, or correct it.",
        lambda: plan(attention(**x, kv_lengths=np.array([1, 10], "i4")), backend="numpy").bind(),
    )
    refused(
        "k_ptrs = missing: must be the address of memory on the device. Give k_ptrs in the "
        "descriptor or to bind.",
        lambda: plan(attention(**{**x, "k_ptrs": None}), backend="numpy").bind(),
    )
    refused(
        "lse = on numpy:0 (cpu): the lists are on acme:0 (acme1). Move all to one device.",
        lambda: attention(
            **{n: [AcmeArray(m) for m in entries] for n, entries in x.items()}, lse=lse
        ),
    )
    p.bind(lse=lse + 0)


def test_nothing_to_read_needs_no_lists() -> None:
    """No queries, or no keys: what is not read may be missing, or null."""
    x = lists()
    plan(attention(S_q=0, batch=3), backend="numpy").bind()()
    lse = np.full((B, H, S_Q), np.nan, "f4")
    none = {n: [0] * (B * G) for n in ("k_ptrs", "v_ptrs")}
    plan(attention(**{**x, **none}, S_k=0, lse=lse), backend="numpy").bind(check=True)()
    assert not any(m.any() for m in x["out_ptrs"]) and np.isneginf(lse).all()

"""AttentionPointers: host and device lists, options beside them, the strided way, and what is
refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernelseam
import numpy as np
import numpy.typing as npt
import pytest
from attention_formula import close, formula
from kernelseam import AttentionPointers, Plan, plan, trace
from kernelseam_thirdvendor import AcmeArray

Refused = Callable[[str, Callable[[], object]], None]
Array = npt.NDArray[Any]
SPACED = "addresses are evenly spaced: the strided way is taken"
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


def matrices(count: int, rows: int, columns: int, dtype: str = "f4", seed: int = 0) -> list[Array]:
    """Matrices at unevenly spaced multiples of 16 bytes."""
    rng = np.random.default_rng(seed)
    unit = 16 // np.dtype(dtype).itemsize
    step = -(-rows * columns // unit) * unit
    pool = aligned(step * count + unit * count * count, dtype)
    results, at = [], 0
    for i in range(count):
        results.append(pool[at : at + rows * columns].reshape(rows, columns))
        results[-1][...] = rng.standard_normal((rows, columns))
        at += step + unit * (i % 3)
    return results


def aligned(count: int, dtype: str = "f4") -> Array:
    size = np.dtype(dtype).itemsize
    raw = np.zeros(count * size + 16, np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : start + count * size].view(dtype)


def at(x: Array) -> int:
    return x.ctypes.data


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
    for b in range(B):
        for h in range(H):
            g = b * G + h // (H // G)
            n = int(options["kv_lengths"][b]) if "kv_lengths" in options else S_K
            expected, want_lse = formula(
                x["q_ptrs"][b * H + h],
                x["k_ptrs"][g][:n],
                x["v_ptrs"][g][:n],
                scale=options.get("scale", D**-0.5),
                causal=options.get("causal", False),
                window=options.get("window"),
                softcap=options.get("softcap"),
                prefix=int(options["prefix_lengths"][b]) if "prefix_lengths" in options else 0,
                slope=float(options["alibi_slopes"][b, h]) if "alibi_slopes" in options else 0.0,
                bias=options["bias"][b, h] if "bias" in options else None,
                mask=options["mask"][b, h] if "mask" in options else None,
                sink=float(options["sinks"][h]) if "sinks" in options else -np.inf,
            )
            close(x["out_ptrs"][b * H + h], expected, 4)
            if lse is not None:
                close(lse[b, h], want_lse, 4)


@pytest.mark.parametrize("kind", ["arrays", "tuple", "addresses", "numpy", "mixed"])
def test_host_lists(kind: str) -> None:
    x = lists()
    turn: dict[str, Callable[[list[Array]], object]] = {
        "arrays": list,
        "tuple": tuple,
        "addresses": lambda x: [at(m) for m in x],
        "numpy": lambda x: np.array([at(m) for m in x]),
        "mixed": lambda x: [at(x[0]), *x[1:]],
    }
    p = plan(attention(**{n: turn[kind](m) for n, m in x.items()}), backend="numpy")
    assert (p.problem.spec.q_view, p.problem.spec.kv_view, p.note) == ("pointers", "pointers", "")
    assert p.problem.spec.vector == 16
    assert (
        str(p.problem)
        == "attention float32 pointers/pointers batch=2 heads=4/2 S_q=5 S_k=9 dim=8/4"
    )
    with trace() as launches:
        p.bind(check=True)()
    assert len(launches) == 1
    right(x)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_as_in_attention(name: str) -> None:
    x, options = lists(), OPTIONS[name]
    lse = np.full((B, H, S_Q), np.nan, "f4")
    p = plan(attention(**x, lse=lse, **options), backend="numpy")
    p.bind(check=True)()
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


def test_one_matrix() -> None:
    x = {n: m[:1] for n, m in even().items()}
    p = plan(attention(**x, batch=1, num_heads=1, kv_heads=1), backend="numpy")
    assert p.note == SPACED
    p.bind()()
    expected = formula(x["q_ptrs"][0], x["k_ptrs"][0], x["v_ptrs"][0], scale=D**-0.5)[0]
    close(x["out_ptrs"][0], expected, 4)


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
    refused(
        "q = given: is no operand of this plan. Its operands are q_ptrs, k_ptrs, v_ptrs, out_ptrs.",
        lambda: p.bind(q=x["q_ptrs"][0]),
    )
    base = aligned(4096)
    refused(
        "out_ptrs = 8 matrices, 7 elements apart: they share elements. Give every output memory "
        "of its own.",
        # Neighbours are apart, but entry 3 begins in row 1 of entry 0.
        lambda: plan(
            attention(
                **{**x, "out_ptrs": [at(base) + 28 * i for i in range(8)]}, stride_out_row=20
            ),
            backend="numpy",
        ),
    )


# ---------------------------------------------------------------- lists on the device


def on_device(x: list[Array], kind: str = "i8") -> AcmeArray:
    return AcmeArray(np.array([at(m) for m in x]).astype(kind))


@pytest.mark.parametrize("kind", ["i8", "u8"])
def test_device_lists(acme: Any, kind: str) -> None:
    """Acme computes no attention; its lists are described, staged and checked."""
    x = lists()
    d = attention(**{n: on_device(m, kind) for n, m in x.items()})
    # nobody has read the addresses
    assert str(d.device) == "acme:0 (acme1)" and d.problem().spec.vector == 4
    assert d.simplified() == (d, "")
    actual = d.resolve(d.operands(), acme, d.device)
    assert actual.pointers == {n: at(v.host) for n, v in d.operands().items()}
    d.check_device(actual, acme, d.device)
    assert attention(**d.operands(), alignment=16).problem().spec.vector == 16


def test_device_lists_under_check(acme: Any, refused: Refused) -> None:
    x = lists()
    entries = {n: np.array([at(m) for m in given]) for n, given in x.items()}
    d = attention(**{n: AcmeArray(e) for n, e in entries.items()}, alignment=16)

    def check() -> None:
        d.check_device(d.resolve(d.operands(), acme, d.device), acme, d.device)

    check()
    kept = entries["out_ptrs"][2]
    entries["out_ptrs"][2] = 0
    refused(
        "out_ptrs[2] = null: must be the address of a matrix. Leave the entry out, or give it "
        "memory.",
        check,
    )
    entries["out_ptrs"][2] = entries["out_ptrs"][5]
    refused(
        f"out_ptrs[5] = {hex(entries['out_ptrs'][5])}: equals out_ptrs[2]. Give every output "
        "memory of its own.",
        check,
    )
    entries["out_ptrs"][2] = kept + 4
    refused(
        f"out_ptrs[2] = {hex(kept + 4)}: must be a multiple of 16 bytes. Align the matrix, or "
        "plan with alignment=4.",
        check,
    )


def test_a_device_list_in_place_of_a_host_list(acme: Any, refused: Refused) -> None:
    x = lists()
    d = attention(**{n: [AcmeArray(m) for m in entries] for n, entries in x.items()})
    assert d.problem().spec.vector == 16
    refused(
        "v_ptrs = a list on the device: the plan relies on 16-byte alignment, found from a host "
        "list. Plan with this list, or with alignment=16 to promise it.",
        lambda: d.read({"v_ptrs": on_device(x["v_ptrs"])}, d.device),
    )


# ---------------------------------------------------------------- what is refused


def test_entries(refused: Refused) -> None:
    x = lists()

    def replaced(name: str, i: int, value: object) -> dict[str, Any]:
        return {name: [*x[name][:i], value, *x[name][i + 1 :]]}

    cases: list[tuple[str, dict[str, Any]]] = [
        (
            (
                "q_ptrs = 7 entries: must have batch·num_heads = 8. Give one entry a matrix, "
                "batch-major."
            ),
            {"q_ptrs": x["q_ptrs"][:7]},
        ),
        (
            (
                "v_ptrs = 8 entries: must have batch·kv_heads = 4. Give one entry a matrix, "
                "batch-major."
            ),
            {"v_ptrs": x["v_ptrs"] * 2},
        ),
        (
            (
                "k_ptrs[2] = null: must be the address of a matrix. Leave the entry out, or give "
                "it memory."
            ),
            replaced("k_ptrs", 2, 0),
        ),
        (
            (
                f"v_ptrs[1] = {hex(at(x['v_ptrs'][1]) + 2)}: must be a multiple of 4 bytes. Align "
                "the matrix."
            ),
            replaced("v_ptrs", 1, at(x["v_ptrs"][1]) + 2),
        ),
        (
            (
                f"out_ptrs[4] = {hex(at(x['out_ptrs'][1]))}: equals out_ptrs[1]. Give every output "
                "memory of its own."
            ),
            replaced("out_ptrs", 4, x["out_ptrs"][1]),
        ),
        (
            (
                f"out_ptrs[3] = {hex(at(x['q_ptrs'][5]))}: is also q_ptrs[5]. Give the output "
                "memory of its own."
            ),
            replaced("out_ptrs", 3, at(x["q_ptrs"][5])),
        ),
        (
            (
                f"out_ptrs[3] = {hex(at(x['k_ptrs'][1]) + 64)}: overlaps the matrix of k_ptrs[1]. "
                "Give the output memory of its own."
            ),
            replaced("out_ptrs", 3, at(x["k_ptrs"][1]) + 64),
        ),
        (
            (
                "k_ptrs[3] = an array of float64: must be float32 as all of a call are. Convert "
                "it, or call once a dtype."
            ),
            replaced("k_ptrs", 3, np.zeros((S_K, D))),
        ),
        (
            (
                "v_ptrs = an array of float16: must be float32 as q_ptrs is. Convert the array, or "
                "correct the dtype."
            ),
            {"v_ptrs": matrices(B * G, S_K, D_V, "f2"), "dtype": None},
        ),
        (
            "dtype_out = float16: must be float32. Leave it out for q's dtype.",
            {"out_ptrs": matrices(B * H, S_Q, D_V, "f2")},
        ),
        (
            (
                "q_ptrs[3] = row stride 16: must be 8 as all of a call are. Copy it, or call once "
                "a row stride."
            ),
            replaced("q_ptrs", 3, np.zeros((S_Q, 16), "f4")[:, :D]),
        ),
        (
            (
                "k_ptrs[1] = an array of shape [9, 4]: must be [9, 8]. One matrix an entry, as it "
                "lies in memory."
            ),
            replaced("k_ptrs", 1, x["v_ptrs"][1]),
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
        (
            "out_ptrs[5] = a read-only array: is written to. Give a writable array.",
            replaced("out_ptrs", 5, frozen(x["out_ptrs"][5])),
        ),
        (
            (
                "stride_out_row = 3: the 5 entries of this axis of out_ptrs share elements "
                "(extents [5, 4], strides [3, 1]). An output needs memory of its own for every "
                "element: make stride_out_row larger."
            ),
            {"out_ptrs": None, "stride_out_row": 3},
        ),
        (
            "alignment = 12: must be a power of two. Give 16, or the element size.",
            {"alignment": 12},
        ),
        (
            (
                "num_heads = 3: must be a multiple of kv_heads = 2. Make num_heads a multiple of "
                "kv_heads."
            ),
            {"num_heads": 3, "q_ptrs": x["q_ptrs"][:6], "out_ptrs": x["out_ptrs"][:6]},
        ),
        ("softcap = -1.0: must be greater than 0. Leave it out for no cap.", {"softcap": -1.0}),
        (
            (
                "dtype = None: must be named where the entries of the lists are no arrays. For "
                "example dtype='float16'."
            ),
            {**dict.fromkeys(x), "dtype": None},
        ),
        ("S_q = -1: must be from 0 to 2**31 - 1. Give a count in that range.", {"S_q": -1}),
    ]
    for message, more in cases:
        refused(message, lambda more=more: attention(**{**x, **more}))


def frozen(x: Array) -> Array:
    view = x.view()
    view.flags.writeable = False
    return view


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


def test_it_is_exported() -> None:
    assert kernelseam.AttentionPointers is AttentionPointers

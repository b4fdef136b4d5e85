"""BatchedGemmPointers: host and device lists, the strided way, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from address_lists import SPACED, Array, aligned, at, frozen, matrices, on_device
from kernelseam import BatchedGemmPointers, Plan, plan, trace
from kernelseam_thirdvendor import AcmeArray
from refusals import Refused


def gemm(**more: Any) -> BatchedGemmPointers:
    base: dict[str, Any] = {"M": 5, "N": 3, "K": 4, "batch": 2, "num_heads": 3, "dtype": "float32"}
    return BatchedGemmPointers(**{**base, **more})


def lists() -> tuple[list[Array], list[Array], list[Array]]:
    return matrices(6, 5, 4, seed=1), matrices(6, 4, 3, seed=2), matrices(6, 5, 3, seed=3)


def error(a: list[Array], b: list[Array], c: list[Array]) -> float:
    return float(max(abs(z - x.astype("f8") @ y).max() for x, y, z in zip(a, b, c, strict=True)))


@pytest.mark.parametrize("kind", ["arrays", "tuple", "addresses", "numpy", "mixed"])
def test_host_lists(kind: str) -> None:
    a, b, c = lists()
    turn: dict[str, Callable[[list[Array]], object]] = {
        "arrays": list,
        "tuple": tuple,
        "addresses": lambda x: [at(m) for m in x],
        "numpy": lambda x: np.array([at(m) for m in x]),
        "mixed": lambda x: [at(x[0]), *x[1:]],
    }
    d = gemm(A_ptrs=turn[kind](a), B_ptrs=turn[kind](b), C_ptrs=turn[kind](c))
    p = plan(d, backend="numpy")
    assert p.problem.spec.view == "pointers" and p.note == ""
    assert (p.problem.spec.vector_a, p.problem.spec.vector_b, p.problem.spec.vector_c) == (16, 4, 4)
    with trace() as launches:
        p.bind(check=True)()
    assert len(launches) == 1
    assert error(a, b, c) < 1e-5


def test_everything_from_the_arrays() -> None:
    a = [np.zeros((5, 9), np.float16)[:, :4] for _ in range(6)]
    c = [np.zeros((5, 3), np.float32) for _ in range(6)]
    p = gemm(A_ptrs=a, C_ptrs=c, dtype=None).problem()
    assert (str(p.spec.dtype), str(p.spec.dtype_c), str(p.spec.dtype_acc)) == (
        "float16",
        "float32",
        "float32",
    )
    assert (p.a_strides, p.b_strides, p.c_strides) == ((0, 0, 9), (0, 0, 3), (0, 0, 3))
    assert gemm(a_transposed=True, b_transposed=True).problem().a_strides == (0, 0, 5)


def test_lists_stay_alive(acme: Any) -> None:
    a, b, c = lists()
    wrapped = [[AcmeArray(m.copy()) for m in x] for x in (a, b, c)]
    first = weakref.ref(wrapped[0][0])
    call = plan(gemm(A_ptrs=wrapped[0], B_ptrs=wrapped[1], C_ptrs=wrapped[2])).bind()
    results = wrapped[2]
    del wrapped
    gc.collect()
    call()
    assert first() is not None
    assert error(a, b, [x.host for x in results]) < 1e-5


# ---------------------------------------------------------------- the strided way


def even() -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(4)
    return (
        rng.standard_normal((6, 5, 4), "f4"),
        rng.standard_normal((6, 4, 3), "f4"),
        np.full((6, 5, 3), np.nan, "f4"),
    )


def spaced_plan(a: Array, b: Array, c: Array, **more: Any) -> Plan:
    p = plan(gemm(A_ptrs=list(a), B_ptrs=list(b), C_ptrs=list(c), **more), backend="numpy")
    assert p.note == SPACED
    return p


def test_evenly_spaced_lists_take_the_strided_way() -> None:
    a, b, c = even()
    p = spaced_plan(a, b, c)
    s = p.problem
    assert (s.spec.view, s.batch, s.num_heads) == ("strided", 2, 3)
    assert (s.a_strides, s.b_strides, s.c_strides) == ((60, 20, 4), (36, 12, 3), (45, 15, 3))
    call = p.bind(check=True)
    call()
    assert error(list(a), list(b), list(c)) < 1e-5
    other = np.empty_like(c)
    call.rebind(C_ptrs=list(other), B_ptrs=list(b * 2))()
    assert np.array_equal(other, 2 * c)


def test_one_a_for_all() -> None:
    a, b, c = even()
    p = plan(gemm(A_ptrs=[a[0]] * 6, B_ptrs=list(b), C_ptrs=list(c)))
    assert (p.note, p.problem.a_strides) == (SPACED, (0, 0, 4))
    p.bind()()
    assert error([a[0]] * 6, list(b), list(c)) < 1e-5


def test_one_matrix() -> None:
    a, b, c = even()
    p = plan(gemm(A_ptrs=[a[0]], B_ptrs=[b[0]], C_ptrs=[c[0]], batch=1, num_heads=1))
    assert p.note == SPACED
    p.bind(A_ptrs=[a[3]])()
    assert error([a[3]], [b[0]], [c[0]]) < 1e-5


def test_transposes_and_rows_with_gaps() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((6, 4, 8), "f4")[:, :, :5], rng.standard_normal((6, 3, 4), "f4")
    c = np.zeros((6, 5, 3), "f4")
    d = gemm(
        A_ptrs=list(a),
        B_ptrs=list(b),
        C_ptrs=list(c),
        a_transposed=True,
        b_transposed=True,
        alpha=2.0,
        beta=1.0,
    )
    p = plan(d)
    assert p.problem.a_strides == (96, 32, 8)
    p.bind()()
    assert abs(c - 2 * a.swapaxes(1, 2) @ b.swapaxes(1, 2)).max() < 1e-5


def test_what_is_not_evenly_spaced() -> None:
    a, b, c = even()
    backwards = gemm(A_ptrs=list(a)[::-1], B_ptrs=list(b), C_ptrs=list(c))
    assert plan(backwards).note == ""
    unknown = gemm(A_ptrs=list(a), B_ptrs=list(b))
    assert plan(unknown).note == ""
    fractions = gemm(
        A_ptrs=[at(a) + 2 * i for i in range(6)], B_ptrs=list(b), C_ptrs=list(c), alpha=0.0
    )
    assert plan(fractions).note == SPACED  # A is never read
    empty = gemm(A_ptrs=[], B_ptrs=[], C_ptrs=[], batch=0, num_heads=0)
    assert plan(empty).note == ""
    plan(empty).bind()()


def test_rebinding_the_strided_way_refuses(refused: Refused, acme: Any) -> None:
    a, b, c = even()
    p = spaced_plan(a, b, c)
    refused(
        "A_ptrs = a list spaced otherwise: the plan walks entries 20 elements apart, as the lists "
        "it was made with. Plan again with this list.",
        lambda: p.bind(A_ptrs=list(a)[::-1]),
    )
    refused(
        f"C_ptrs[0] = {hex(at(a) + 84)}: overlaps the matrix of A_ptrs[1]. Give the output "
        "memory of its own.",
        lambda: p.bind(C_ptrs=[at(a) + 84 + 60 * i for i in range(6)]),
    )
    refused(
        "A = given: is no operand of this plan. Its operands are A_ptrs, B_ptrs, C_ptrs.",
        lambda: p.bind(A=a),
    )
    device = [AcmeArray(x) for x in (a, b, c)]
    on_device = plan(
        gemm(
            **{
                f"{n}_ptrs": [AcmeArray(m) for m in x.host]
                for n, x in zip("ABC", device, strict=True)
            }
        )
    )
    assert on_device.note == SPACED
    refused(
        "B_ptrs = a list on the device: the plan walks entries 12 elements apart, as the lists it "
        "was made with. Plan again with this list.",
        lambda: on_device.bind(B_ptrs=AcmeArray(np.array([at(m) for m in b]))),
    )


# ---------------------------------------------------------------- lists on the device


@pytest.mark.parametrize("kind", ["i8", "u8"])
def test_device_lists(acme: Any, kind: str) -> None:
    a, b, c = lists()
    d = gemm(**{f"{n}_ptrs": on_device(x, kind) for n, x in zip("ABC", (a, b, c), strict=True)})
    assert str(d.device) == "acme:0 (acme1)"
    p = plan(d)
    assert (p.implementation, p.problem.spec.view, p.note) == ("acme-gemm", "pointers", "")
    assert p.problem.spec.vector_a == 4  # nobody has read the addresses
    p.bind(check=True)()
    assert error(a, b, c) < 1e-5


def test_alignment_is_a_promise_that_check_verifies(acme: Any, refused: Refused) -> None:
    a, b, c = lists()
    base = aligned(24)
    a[4] = base[1:21].reshape(5, 4)  # 4 bytes past a multiple of 16
    given = {f"{n}_ptrs": on_device(x) for n, x in zip("ABC", (a, b, c), strict=True)}
    p = plan(gemm(**given, alignment=16))
    assert p.problem.spec.vector_a == 16
    p.bind()
    refused(
        f"A_ptrs[4] = {hex(at(a[4]))}: must be a multiple of 16 bytes. Align the matrix, or plan "
        "with alignment=4.",
        lambda: p.bind(check=True),
    )
    assert gemm(A_ptrs=a).problem().spec.vector_a == 4
    refused(
        f"A_ptrs[4] = {hex(at(a[4]))}: must be a multiple of 16 bytes. Align the matrix, or plan "
        "with alignment=4.",
        lambda: gemm(A_ptrs=a, alignment=16),
    )


@pytest.mark.parametrize(
    ("first", "alignment", "whole"),
    [(0, None, True), (16, None, False), (0, 16, True), (None, 128, True), (None, 16, False)],
)
def test_a_problem_knows_whether_lists_begin_lines(
    first: int | None, alignment: int | None, whole: bool
) -> None:
    """By the addresses of host lists, else by the promise; plans are cached by it, and serve
    both."""
    addresses = [4096, 65536, 3 << 16]
    lists = {
        f"{n}_ptrs": 0 if first is None else [x + i * (1 << 20) + first for x in addresses]
        for i, n in enumerate("ABC", 1)
    }
    problem = BatchedGemmPointers(
        M=64, N=64, K=64, batch=3, dtype="float16", alignment=alignment, **lists
    ).problem()
    assert problem.whole_lines is whole and problem.spec.vector_c == 16


def test_device_lists_under_check(acme: Any, refused: Refused) -> None:
    a, b, c = lists()
    given = {f"{n}_ptrs": on_device(x) for n, x in zip("ABC", (a, b, c), strict=True)}
    p = plan(gemm(**given))
    entries = np.array([at(m) for m in c])
    entries[2] = 0
    bad = AcmeArray(entries.copy())
    p.bind(C_ptrs=bad)  # what the host does not read, it cannot refuse
    refused(
        "C_ptrs[2] = null: must be the address of a matrix. Leave the entry out, or give it "
        "memory.",
        lambda: p.bind(C_ptrs=bad, check=True),
    )
    entries[2] = entries[5]
    bad = AcmeArray(entries.copy())
    refused(
        f"C_ptrs[5] = {hex(entries[5])}: equals C_ptrs[2]. Give every output memory of its own.",
        lambda: p.bind(C_ptrs=bad, check=True),
    )
    entries[2] += 2
    bad = AcmeArray(entries.copy())
    refused(
        f"C_ptrs[2] = {hex(entries[2])}: must be a multiple of 4 bytes. Align the matrix.",
        lambda: p.bind(C_ptrs=bad, check=True),
    )


def test_host_and_device_lists_mix(acme: Any) -> None:
    a, b, c = lists()
    p = plan(gemm(A_ptrs=on_device(a), B_ptrs=[at(m) for m in b], C_ptrs=on_device(c)))
    p.bind(check=True)()
    assert error(a, b, c) < 1e-5


def test_a_device_list_in_place_of_a_host_list(acme: Any, refused: Refused) -> None:
    a, b, c = lists()
    wrapped = {
        f"{n}_ptrs": [AcmeArray(m) for m in x] for n, x in zip("ABC", (a, b, c), strict=True)
    }
    p = plan(gemm(**wrapped))
    assert p.problem.spec.vector_a == 16
    refused(
        "A_ptrs = a list on the device: the plan relies on 16-byte alignment, found from a host "
        "list. Plan with this list, or with alignment=16 to promise it.",
        lambda: p.bind(A_ptrs=on_device(a)),
    )
    p.bind(B_ptrs=on_device(b))()  # rows of 3 float32 rely on nothing
    assert error(a, b, c) < 1e-5


# ---------------------------------------------------------------- what is refused


def replaced(x: list[Array], i: int, value: object) -> list[object]:
    return [*x[:i], value, *x[i + 1 :]]


def test_lengths(refused: Refused) -> None:
    a, b, c = lists()
    refused(
        "B_ptrs = 5 entries: must have batch·num_heads = 6. Give one entry a matrix, batch-major.",
        lambda: gemm(A_ptrs=a, B_ptrs=b[:5], C_ptrs=c),
    )
    p = plan(gemm(A_ptrs=a, B_ptrs=b, C_ptrs=c))
    refused(
        "C_ptrs = 7 entries: must have batch·num_heads = 6. Give one entry a matrix, batch-major.",
        lambda: p.bind(C_ptrs=[*c, c[0]]),
    )


def test_entries(refused: Refused) -> None:
    a, b, c = lists()
    cases: list[tuple[str, dict[str, Any]]] = [
        (
            (
                "A_ptrs[2] = null: must be the address of a matrix. Leave the entry out, or give "
                "it memory."
            ),
            {"A_ptrs": replaced(a, 2, 0)},
        ),
        (
            f"B_ptrs[1] = {hex(at(b[1]) + 2)}: must be a multiple of 4 bytes. Align the matrix.",
            {"B_ptrs": replaced(b, 1, at(b[1]) + 2)},
        ),
        (
            f"C_ptrs[4] = {hex(at(c[1]))}: equals C_ptrs[1]. Give every output memory of its own.",
            {"C_ptrs": replaced(c, 4, c[1])},
        ),
        (
            (
                f"C_ptrs[4] = {hex(at(c[1]) + 16)}: overlaps the matrix of C_ptrs[1]. Give every "
                "output memory of its own."
            ),
            {"C_ptrs": replaced(c, 4, at(c[1]) + 16)},
        ),
        (
            f"C_ptrs[3] = {hex(at(a[5]))}: is also A_ptrs[5]. Give the output memory of its own.",
            {"C_ptrs": replaced(c, 3, at(a[5]))},
        ),
        (
            (
                f"C_ptrs[3] = {hex(at(a[5]) + 64)}: overlaps the matrix of A_ptrs[5]. Give the "
                "output memory of its own."
            ),
            {"C_ptrs": replaced(c, 3, at(a[5]) + 64)},
        ),
        (
            (
                f"C_ptrs[2] = {hex(at(b[0]) - 48)}: overlaps the matrix of B_ptrs[0]. Give the "
                "output memory of its own."
            ),
            {"C_ptrs": replaced(c, 2, at(b[0]) - 48)},
        ),
        (
            (
                "C_ptrs[0] = 0xfffffffffffffff0: a walk over 60 bytes leaves the 64-bit addresses. "
                "Pass the memory's address."
            ),
            {"C_ptrs": replaced(c, 0, 2**64 - 16)},
        ),
        (
            "A_ptrs[0] = -8: must be from 0 to 2**64 - 1. Pass the memory's address.",
            {"A_ptrs": replaced(a, 0, -8)},
        ),
        (
            (
                "A_ptrs[3] = an array of float64: must be float32 as all of a call are. Convert "
                "it, or call once a dtype."
            ),
            {"A_ptrs": replaced(a, 3, np.zeros((5, 4)))},
        ),
        (
            (
                "B_ptrs = an array of float16: must be float32 as A_ptrs is. Convert the array, or "
                "correct the dtype."
            ),
            {"B_ptrs": matrices(6, 4, 3, "f2"), "dtype": None},
        ),
        (
            (
                "A_ptrs[3] = row stride 8: must be 4 as all of a call are. Copy it, or call once a "
                "row stride."
            ),
            {"A_ptrs": replaced(a, 3, np.zeros((5, 8), np.float32)[:, :4])},
        ),
        (
            (
                "A_ptrs[0] = row stride 4: must be 8 as all of a call are. Copy it, or call once a "
                "row stride."
            ),
            {"stride_a_row": 8},
        ),
        (
            (
                "A_ptrs[1] = an array of shape [4, 5]: must be [5, 4]. One matrix an entry, as it "
                "lies in memory."
            ),
            {"A_ptrs": replaced(a, 1, a[1].T)},
        ),
        (
            (
                "A_ptrs[1] = strides [1, 5]: the last axis must be contiguous (stride 1). "
                "Copy the array into a contiguous one."
            ),
            {"A_ptrs": replaced(a, 1, np.zeros((4, 5), np.float32).T)},
        ),
        (
            "C_ptrs[5] = a read-only array: is written to. Give a writable array.",
            {"C_ptrs": replaced(c, 5, frozen(c[5]))},
        ),
        (
            (
                "stride_c_row = 2: the 5 entries of this axis of C_ptrs share elements "
                "(extents [5, 3], strides [2, 1]). "
                "An output needs memory of its own for every element: make stride_c_row larger."
            ),
            {"C_ptrs": None, "stride_c_row": 2},
        ),
        (
            "alignment = 12: must be a power of two. Give 16, or the element size.",
            {"alignment": 12},
        ),
        ("alignment = 2: must be from 4 to 4096. Give 16, or the element size.", {"alignment": 2}),
    ]
    for message, more in cases:
        refused(message, lambda more=more: gemm(**{"A_ptrs": a, "B_ptrs": b, "C_ptrs": c, **more}))


def test_outputs_next_to_inputs_in_the_same_rows(refused: Refused) -> None:
    whole = [np.zeros((5, 8), np.float32) for _ in range(6)]
    for x in whole:
        x[:, :4] = np.arange(20).reshape(5, 4)
    a, b, c = [x[:, :4] for x in whole], lists()[1], [x[:, 4:7] for x in whole]
    plan(gemm(A_ptrs=a, B_ptrs=b, C_ptrs=c)).bind()()
    assert error(a, b, c) < 1e-4
    refused(
        f"C_ptrs[1] = {hex(at(whole[1]) + 12)}: overlaps the matrix of A_ptrs[1]. Give the "
        "output memory of its own.",
        lambda: gemm(A_ptrs=a, B_ptrs=b, C_ptrs=replaced(c, 1, whole[1][:, 3:6])),
    )


def test_what_is_no_list(refused: Refused, acme: Any) -> None:
    message = (
        "A_ptrs = {}: must be a list or tuple of arrays or addresses, or an array of 64-bit "
        "integers. Pass list(…), or a one-dimensional array of int64 or uint64."
    )
    refused(message.format("ndarray"), lambda: gemm(A_ptrs=np.zeros((6, 5, 4), np.float32)))
    refused(message.format("ndarray"), lambda: gemm(A_ptrs=np.zeros((2, 3), np.int64)))
    refused(message.format("4096"), lambda: gemm(A_ptrs=4096))
    refused(message.format("AcmeArray"), lambda: gemm(A_ptrs=AcmeArray(np.zeros(6, np.int32))))
    refused(
        "A_ptrs = an array of shape [2, 3] with strides [3, 1]: a list of addresses has one "
        "contiguous axis. Flatten it, batch-major.",
        lambda: gemm(A_ptrs=AcmeArray(np.zeros((2, 3), np.int64))),
    )
    refused(
        "A_ptrs = an array of shape [6] with strides [2]: a list of addresses has one contiguous "
        "axis. Flatten it, batch-major.",
        lambda: gemm(A_ptrs=AcmeArray(np.zeros(12, np.int64)[::2])),
    )


def test_devices(acme: Any, refused: Refused) -> None:
    a, b, c = lists()
    wrapped = [AcmeArray(m) for m in a]
    refused(
        "A_ptrs[1] = an array on acme:1 (acme1): A_ptrs[0] is on acme:0 (acme1). Move all arrays "
        "to one device.",
        lambda: gemm(A_ptrs=replaced(wrapped, 1, AcmeArray(a[1], 1))),  # type: ignore[arg-type]
    )
    refused(
        "C_ptrs = on numpy:0 (cpu): the others are on acme:0 (acme1). Move all to one device.",
        lambda: gemm(A_ptrs=wrapped, C_ptrs=c),
    )
    p = plan(gemm(), device="acme:1")
    refused(
        "A_ptrs = on acme:0 (acme1): the others are on acme:1 (acme1). Move all to one device.",
        lambda: p.bind(A_ptrs=wrapped),
    )


def test_spaced_outputs_that_meet_three_entries_on(refused: Refused) -> None:
    """Neighbours are apart, but entry 3 begins in row 1 of entry 0."""
    base = aligned(4096)
    entries = [at(base) + 4 * 7 * i for i in range(6)]
    a, b, _ = even()
    d = gemm(A_ptrs=list(a), B_ptrs=list(b), C_ptrs=entries, stride_c_row=20)
    refused(
        "C_ptrs = 6 matrices, 7 elements apart: they share elements. Give every output memory of "
        "its own.",
        lambda: plan(d, backend="numpy"),
    )


def test_missing_lists(refused: Refused) -> None:
    a, b, c = lists()
    p = plan(gemm(A_ptrs=a, B_ptrs=b))
    refused(
        "C_ptrs = missing: must be the address of memory on the device. Give C_ptrs in the "
        "descriptor or to bind.",
        p.bind,
    )
    p.bind(C_ptrs=c)()
    assert error(a, b, c) < 1e-5


def test_beta_alone_reads_no_inputs() -> None:
    c = matrices(6, 5, 3)
    before = [m.copy() for m in c]
    plan(gemm(C_ptrs=c, alpha=0.0, beta=2.0)).bind(check=True)()
    assert all(np.array_equal(x, 2 * y) for x, y in zip(c, before, strict=True))

"""Memory that a call writes and something else of it needs: over all launches of a gradient
function, in every gradient descriptor, and under a workspace of the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelseam import (
    BatchedGemmPointers,
    BatchedGemmStrided,
    bmm_bwd,
    matmul2d,
    matmul2d_bwd,
    plan,
    trace,
)
from kernelseam.descriptors import (
    Attention,
    AttentionBwd,
    AttentionPointers,
    OutputProjectionBwd,
    QkvProjectionBwd,
)
from kernelseam.errors import InvalidValue
from kernelseam_thirdvendor import AcmeArray
from refusals import Refused

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(40)
REMEDY = "Give the output memory of its own."


def integers(*shape: int) -> Array:
    return RNG.integers(-3, 4, shape).astype(np.float32)


def square() -> tuple[Array, Array, Array]:
    return integers(4, 4), integers(4, 4), integers(4, 4)


# ---------------------------------------------------------------- launches of one call


def test_a_gradient_in_what_the_next_launch_reads(refused: Refused) -> None:
    dc, a, b = square()
    before = a.copy()
    refused(
        f"da = {hex(a.ctypes.data)}: overlaps a, which is still to be read. {REMEDY}",
        lambda: matmul2d_bwd(dc, a, b, da=a),
    )
    refused(
        f"da = {hex(a.ctypes.data)}: overlaps a, which is still to be read. {REMEDY}",
        lambda: bmm_bwd(*(x[None] for x in (dc, a, b)), da=a[None], beta=1, db=integers(1, 4, 4)),
    )
    memory = integers(6, 4)
    with pytest.raises(
        InvalidValue, match="^da = 0x[0-9a-f]+: overlaps a, which is still to be read"
    ):
        matmul2d_bwd(dc, memory[:4], b, da=memory[2:])  # in part
    np.testing.assert_array_equal(a, before)


def test_two_gradients_in_one_place(refused: Refused) -> None:
    dc, a, b = square()
    x = integers(6, 4)
    refused(
        f"da = {hex(x.ctypes.data)}: overlaps db. {REMEDY}",
        lambda: matmul2d_bwd(dc, a, b, da=x[:4], db=x[:4]),
    )
    refused(
        f"da = {hex(x.ctypes.data)}: overlaps db. {REMEDY}",
        lambda: matmul2d_bwd(dc, a, b, da=x[:4], db=x[2:]),
    )
    both = integers(4, 8)  # rows in turns share nothing
    matmul2d_bwd(dc, a, b, da=both[:, :4], db=both[:, 4:])
    np.testing.assert_array_equal(both, np.hstack([dc @ b.T, a.T @ dc]))


def test_what_was_read_before_may_be_written() -> None:
    """b is the first launch's: db may take its place. An input that no launch reads may be any
    output's."""
    dc, a, b = square()
    expected = dc @ b.T, a.T @ dc
    actual = matmul2d_bwd(dc, a, b, db=b)
    assert actual.db is b
    for x, w in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x, w)
    dc, a, b = square()
    expected = dc @ b.T, a.T @ dc
    np.testing.assert_array_equal(matmul2d_bwd(dc, a, b, da=a, b_gradient=False).da, expected[0])
    np.testing.assert_array_equal(a, expected[0])
    dc, a, b = square()
    expected = dc @ b.T, a.T @ dc
    np.testing.assert_array_equal(matmul2d_bwd(dc, a, b, db=b, a_gradient=False).db, expected[1])
    x = integers(4, 4)
    expected = a @ b + x
    np.testing.assert_array_equal(
        matmul2d(a, b, residual=x, out=x), expected
    )  # in place on purpose


def test_nothing_is_launched_where_a_later_launch_is_refused(refused: Refused) -> None:
    dc, a, b = square()
    da = np.full((4, 4), 77, np.float32)
    with trace() as launches:
        refused(
            f"db = {hex(dc.ctypes.data)}: overlaps dc. {REMEDY}",
            lambda: matmul2d_bwd(dc, a, b, da=da, db=dc),
        )
        refused(
            f"db = {hex(a.ctypes.data)}: overlaps a. {REMEDY}",
            lambda: matmul2d_bwd(dc, a, b, da=da, db=a),
        )
    assert launches == [] and (da == 77).all()


def test_products_by_lists_of_addresses() -> None:
    """Launches that are made for one call alone are held against the others too, and nothing comes
    before."""
    memory, b, row = integers(2, 9, 10, 10), integers(2, 3, 7, 4), integers(7)
    dc = memory[:, :6, :5, :4]
    a, da = np.broadcast_to(row, (2, 6, 5, 7)), row.reshape(1, 1, 1, 7)
    before, expected = row.copy(), np.einsum("bhmn,bhkn->k", dc, np.repeat(b, 2, axis=1))
    with trace() as launches:
        with pytest.raises(
            InvalidValue, match="^da = 0x[0-9a-f]+: overlaps a, which is still to be read"
        ):
            bmm_bwd(dc, a, b, da=da)
        with pytest.raises(InvalidValue, match="^db = 0x[0-9a-f]+: overlaps dc"):
            bmm_bwd(dc, a, b, db=memory.reshape(-1)[: b.size].reshape(b.shape))
    assert launches == []
    np.testing.assert_array_equal(row, before)
    with trace() as launches:
        actual = bmm_bwd(dc, a, b)
    assert len(launches) == 2
    np.testing.assert_array_equal(actual.da.reshape(7), expected)


def test_addresses_that_were_launched_before(acme: Any) -> None:
    """Each launch was bound to these addresses already, but never both."""
    dc, a, b, x, y = (AcmeArray(integers(4, 4)) for _ in range(5))
    for _ in range(2):
        matmul2d_bwd(dc, a, b, da=x, db=y)
        matmul2d_bwd(dc, a, b, da=y, db=x)
        np.testing.assert_array_equal(y.host, dc.host @ b.host.T)
        np.testing.assert_array_equal(x.host, a.host.T @ dc.host)
        for z in (x, y):
            with pytest.raises(InvalidValue, match="^da = 0x[0-9a-f]+: overlaps db"):
                matmul2d_bwd(dc, a, b, da=z, db=z)


# ---------------------------------------------------------------- gradient descriptors


def _attention() -> AttentionBwd:
    forward = Attention(
        batch=2,
        num_heads=2,
        S_q=4,
        S_k=4,
        head_dim=4,
        dtype="float32",
        return_lse=True,
        bias=0,
        sinks=0,
        stride_bias_batch=0,
    )
    return AttentionBwd(forward=forward, dbias=0, dsinks=0)


DESCRIPTORS: dict[str, Callable[[], Any]] = {
    "attention": _attention,
    "qkv": lambda: QkvProjectionBwd(
        batch=2,
        S=4,
        hidden=8,
        num_heads=2,
        kv_heads=1,
        head_dim=4,
        dtype="float32",
        d_input=0,
        d_weight=0,
        d_bias=0,
    ),
    "output": lambda: OutputProjectionBwd(
        batch=2,
        S=4,
        hidden=8,
        num_heads=2,
        head_dim=4,
        dtype="float32",
        d_attn_out=0,
        d_weight=0,
        d_bias=0,
    ),
}


@pytest.mark.parametrize("name", DESCRIPTORS)
def test_every_gradient_against_everything_else(name: str) -> None:
    """In its first element, in its last, and not at all."""
    planned = plan(DESCRIPTORS[name](), backend="numpy")
    rules = {r.name: r for r in planned.problem.operands}
    # so that what begins within one ends before the next
    room = 2 * max(r.span for r in rules.values()) + 4
    memory = np.ones((room + 4) * len(rules) + 4, np.float32)
    start = memory.ctypes.data + -memory.ctypes.data % 16
    at = {n: start + (4 * room + -4 * room % 16) * i for i, n in enumerate(rules)}
    call = planned.bind(**at)
    written = [n for n, r in rules.items() if r.written]
    assert len(written) >= 3
    for out in written:
        for other, rule in rules.items():
            if other == out:
                continue
            last = at[other] + 4 * (rule.span - 1)
            for address in (at[other], last - last % 16):
                with pytest.raises(
                    InvalidValue, match=r"^\w+ = 0x[0-9a-f]+: overlaps \w+\. Give the output"
                ) as caught:
                    call.rebind(**{out: address})
                assert {caught.value.field, caught.value.rule.split()[-1]} == {out, other}


# ---------------------------------------------------------------- workspaces of the caller's


def test_a_workspace_that_is_an_operand(refused: Refused) -> None:
    """On NumPy a half-precision product computes in its workspace."""
    a, b, c = (np.ones((64, 64), np.float16) for _ in range(3))
    planned = plan(BatchedGemmStrided(A=a, B=b, C=c, M=64, N=64, K=64))
    need = planned.workspace_bytes
    assert need > 4 * 64 * 64
    whole = np.zeros(2 * need, np.uint8)
    start = -whole.ctypes.data % 16
    space, rest = whole[start : start + need].view(np.float16), whole[start + need :]
    planned.bind(workspace=space.ctypes.data)()
    assert (c == 64).all()
    first, inside = (space[n : n + 4096].reshape(64, 64) for n in (0, need // 2 - 4096))
    behind = rest[:8192].view(np.float16).reshape(64, 64)
    for name, wide in (("A", a), ("B", b), ("C", c)):
        for there in (first, inside):
            message = (
                f"workspace = {hex(space.ctypes.data)}: overlaps {name}. Give it memory of its own."
            )
            refused(
                message, lambda n=name, x=there: planned.bind(workspace=space.ctypes.data, **{n: x})
            )
            refused(
                message,
                lambda n=name, x=there: planned.bind(workspace=space.view(np.float32), **{n: x}),
            )
        behind[...] = wide
        # of which only the first bytes are used
        larger = whole[start : start + need + 16].view(np.float16)
        planned.bind(workspace=larger, **{name: behind})()


def test_a_workspace_over_a_list_and_its_matrices(refused: Refused) -> None:
    space = np.zeros(200_000, np.float16)
    start = -space.ctypes.data % 16 // 2
    space = space[start:]
    matrices = {n: [np.ones((8, 8), np.float16) for _ in range(3)] for n in "ABC"}
    for of in "ABC":
        matrices[of] = [matrices[of][1], matrices[of][0], matrices[of][2]]  # not evenly spaced
    lists = {f"{n}_ptrs": x for n, x in matrices.items()}
    gemm = plan(BatchedGemmPointers(M=8, N=8, K=8, num_heads=3, **lists))
    gemm.bind(workspace=space)()
    assert (matrices["C"][2] == 8).all()
    for n in "ABC":
        moved = [*matrices[n][:2], space[64:128].reshape(8, 8)]
        refused(
            f"workspace = {hex(space.ctypes.data)}: overlaps the matrix of {n}_ptrs[2]. Give it "
            "memory of its own.",
            lambda n=n, x=moved: gemm.bind(workspace=space, **{f"{n}_ptrs": x}),
        )
    heads = plan(
        AttentionPointers(
            batch=1,
            num_heads=3,
            S_q=8,
            S_k=8,
            head_dim=8,
            dtype="float16",
            q_ptrs=matrices["A"],
            k_ptrs=matrices["B"],
            v_ptrs=matrices["A"],
            out_ptrs=matrices["C"],
        )
    )
    heads.bind(workspace=space)()
    moved = [space[:64].reshape(8, 8), *matrices["B"][:2]]
    refused(
        f"workspace = {hex(space.ctypes.data)}: overlaps the matrix of k_ptrs[0]. Give it memory "
        "of its own.",
        lambda: heads.bind(workspace=space, k_ptrs=moved),
    )


def test_a_list_on_the_device_is_read_with_check(acme: Any) -> None:
    space = AcmeArray(np.zeros(16 + 4, np.float32))
    space.host = space.host[-space.host.ctypes.data % 16 // 4 :][:16]
    matrices = [np.ones((2, 2), np.float32) for _ in range(3)]
    inside = space.host[4:8].reshape(2, 2)
    words = {
        n: AcmeArray(np.array([x.ctypes.data for x in actual], np.uint64))
        for n, actual in (
            ("A", matrices[:2]),
            ("B", [matrices[0], inside]),
            ("C", [matrices[2], np.ones((2, 2), "f4")]),
        )
    }
    planned = plan(
        BatchedGemmPointers(
            M=2,
            N=2,
            K=2,
            num_heads=2,
            dtype="float32",
            **{f"{n}_ptrs": x for n, x in words.items()},
        )
    )
    planned.bind(workspace=space)
    with pytest.raises(
        InvalidValue,
        match=r"^workspace = 0x[0-9a-f]+: overlaps the matrix of B_ptrs\[1\]\. Give it",
    ):
        planned.bind(workspace=space, check=True)


def test_a_list_that_is_the_workspace(acme: Any) -> None:
    space = AcmeArray(np.zeros(16 + 4, np.float32))
    space.host = space.host[-space.host.ctypes.data % 16 // 4 :][:16]
    words = AcmeArray(space.host[4:8].view(np.uint64))
    words.host[...] = np.ones((2, 2), np.float32).ctypes.data
    planned = plan(BatchedGemmPointers(M=2, N=2, K=2, num_heads=2, dtype="float32", A_ptrs=words))
    with pytest.raises(InvalidValue, match="^workspace = 0x[0-9a-f]+: overlaps A_ptrs"):
        planned.bind(
            workspace=space,
            B_ptrs=AcmeArray(words.host.copy()),
            C_ptrs=AcmeArray(words.host.copy()),
        )


# ---------------------------------------------------------------- anywhere in one memory


@st.composite
def anywhere(draw: st.DrawFn) -> dict[str, tuple[int, int]]:
    """Where dc [3, 2], a [3, 4], b [4, 2], da and db begin in one memory, and their row strides."""
    return {
        n: (draw(st.integers(0, 300)), draw(st.integers(columns, 6)))
        for n, (_, columns) in SHAPES.items()
    }


SHAPES = {"dc": (3, 2), "a": (3, 4), "b": (4, 2), "da": (3, 4), "db": (4, 2)}
APART = ({"da", "dc"}, {"da", "a"}, {"da", "b"}, {"da", "db"}, {"db", "dc"}, {"db", "a"})
"""What must not share an element: all but db and b, which was read by then, and what is read
alone."""


@settings(max_examples=200)
@given(anywhere(), st.sampled_from([0, 1]))
def test_operands_anywhere_in_one_memory(places: dict[str, tuple[int, int]], beta: int) -> None:
    """What is computed is right; what is refused shares elements, and nothing of it was touched."""
    memory = integers(330)
    views, elements = {}, {}
    for name, (start, row) in places.items():
        index = start + np.arange(SHAPES[name][0])[:, None] * row + np.arange(SHAPES[name][1])
        views[name] = np.lib.stride_tricks.as_strided(memory[start:], SHAPES[name], (4 * row, 4))
        elements[name] = set(index.reshape(-1).tolist())
    dc, a, b, da, db = (views[n].copy() for n in SHAPES)
    before = memory.copy()
    shared = [pair for pair in APART if len(set.intersection(*(elements[n] for n in pair)))]
    if shared:
        with pytest.raises(
            InvalidValue,
            match=r"^d[ab] = 0x[0-9a-f]+: overlaps \w+(, which is still to be read)?\. ",
        ):
            matmul2d_bwd(**views, beta=beta)
        np.testing.assert_array_equal(memory, before)
        return
    matmul2d_bwd(**views, beta=beta)
    np.testing.assert_array_equal(views["da"], dc @ b.T + beta * da)
    np.testing.assert_array_equal(views["db"], a.T @ dc + beta * db)

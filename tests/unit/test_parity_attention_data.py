"""Where packed and paged operands of a case lie, what is around them, and what their integer
operands say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernelseam.descriptors import Attention
from kernelseam.oracle import formulas
from kernelseam.parity.cases.attention import attention_cases
from kernelseam.parity.cases.attention_guards import guards
from kernelseam.parity.matrix import named
from kernelseam.plugins import plugins
from kernelseam.samples.attention_case import AttentionCase, case
from kernelseam.samples.common import TOKENS
from kernelseam.samples.data import attention as attention_data
from kernelseam.samples.data.attention import INVALID_PAGES, UNUSED_PAGES
from kernelseam.samples.data.memory import GUARD
from kernelseam.samples.operations import operands
from kernelseam.samples.operations.operands import describe

PACKED = case(
    "f16-40/32",
    q_sequences=(3, 0, 5),
    k_sequences=(7, 2, 0),
    S_q=5,
    S_k=7,
    batch=3,
    margin=2,
    q=TOKENS,
    k=TOKENS,
    v=TOKENS,
    out=TOKENS,
    lse_gap=1,
)
PAGED = case("f16-64", page_size=4, kv_lengths=(9, 0, 4), S_q=2, S_k=9, batch=3, k=TOKENS, v=TOKENS)


def _written(made: AttentionCase) -> tuple[Any, dict[str, np.ndarray], np.ndarray]:
    layout, values = operands.layout(made), operands.values(made)
    buffers = layout.buffers()
    layout.write(buffers, values)
    return layout, values, buffers["all"]


def _block(layout: Any, memory: np.ndarray, name: str, shape: tuple[int, ...]) -> np.ndarray:
    p = layout.placements[name]
    start, size = layout.blocks()[p.block][1], int(np.prod(shape)) * p.dtype.itemsize
    return memory[start : start + size].view(p.dtype.numpy).reshape(shape)


@pytest.mark.parametrize(
    "made", [PACKED, PAGED, case("f16-64", kv_lengths=(5, 0), S_k=6, k=TOKENS)]
)
def test_what_is_written_is_read_back_and_the_rest_is_nan(made: AttentionCase) -> None:
    layout, values, memory = _written(made)
    for name, lengths in (("q", made.q_sequences), ("k", made.keys), ("v", made.keys)):
        read = layout.read({"all": memory}, name)
        assert read.shape == values[name].shape
        for b in range(made.batch):
            n = read.shape[2] if lengths is None else lengths[b]
            np.testing.assert_array_equal(read[b, :, :n], values[name][b, :, :n])
            assert (read[b, :, n:] == 0).all()
        placement = layout.placements[name]
        start = layout.blocks()[placement.block][1]
        room = memory[start : start + placement.bytes].view(placement.dtype.numpy)
        assert np.isfinite(room.astype(np.float32)).sum() == sum(
            read[b, :, : read.shape[2] if lengths is None else lengths[b]].size
            for b in range(made.batch)
        )


def test_packed_rows_follow_each_other_between_margins() -> None:
    layout, values, memory = _written(PACKED)
    assert values["cu_seqlens_q"].tolist() == [2, 5, 5, 10]
    assert values["cu_seqlens_k"].tolist() == [2, 9, 11, 11]
    rows = _block(layout, memory, "q", (12, 2, 40)).astype(np.float32)
    assert np.isnan(rows[:2]).all() and np.isnan(rows[10:]).all()
    np.testing.assert_array_equal(rows[2:5], values["q"][0, :, :3].swapaxes(0, 1))
    np.testing.assert_array_equal(rows[5:10], values["q"][2].swapaxes(0, 1))
    lse = layout.placements["lse"]
    assert (
        lse.strides == (0, 13, 1)
        and [p.start for p in lse.row_spans] == [2, 5, 5]
        and lse.min_elements == 26
    )


def test_pages_are_shuffled_and_the_table_names_none_beyond_the_lengths() -> None:
    layout, values, memory = _written(PAGED)
    table, size = values["block_table"], PAGED.page_size
    used = [(b, i) for b, n in enumerate((9, 0, 4)) for i in range(-(-n // size))]
    named_pages = [int(table[at]) for at in used]
    assert len(set(named_pages)) == len(used) == 4 and set(named_pages) <= set(
        range(attention_data.pages(PAGED))
    )
    assert named_pages != sorted(named_pages), "in order, a table that is not read would not show"
    assert attention_data.pages(PAGED) == 4 + UNUSED_PAGES
    beyond = [int(table[b, i]) for b, i in np.ndindex(*table.shape) if (b, i) not in used]
    assert set(beyond) == set(INVALID_PAGES) and table.shape == (3, 5)
    k = _block(layout, memory, "k", (7, size, 2, 64)).astype(np.float32)
    for b, i in used:
        page = k[table[b, i]]
        rows = values["k"][b, :, i * size : (i + 1) * size].swapaxes(0, 1)[
            : PAGED.kv_lengths[b] - i * size
        ]  # type: ignore[index]
        np.testing.assert_array_equal(page[: len(rows)], rows)
        assert np.isnan(page[len(rows) :]).all()
    for page in set(range(7)) - set(named_pages):
        assert np.isnan(k[page]).all()


def test_planes_have_their_operand_layout() -> None:
    parity_case = named("attention-f16-64-bias-odd-transposed")
    assert isinstance(parity_case, AttentionCase)
    placements = operands.layout(parity_case).placements
    batch, head, row, column = placements["bias"].strides
    assert (row, column, head, batch) == (1, 65, 129 * 65 + 1, 2 * (129 * 65 + 1) + 3)
    flat = operands.layout(named("attention-f16-64-bias-by-query")).placements["bias"].strides
    assert flat[0] == flat[3] == 0 and flat[2] == 1 and flat[1] >= 65


def test_a_bias_beyond_the_lengths_is_nan() -> None:
    created = replace(PACKED, bias=PACKED.dtype, mask="random")
    bias = operands.values(created)["bias"].astype(np.float32)
    for b, (n_q, n_k) in enumerate(zip((3, 0, 5), (7, 2, 0), strict=True)):
        assert np.isfinite(bias[b, :, :n_q, :n_k]).all()
        assert np.isnan(bias[b, :, n_q:]).all() and np.isnan(bias[b, :, :, n_k:]).all()


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("name", ["out", "lse"])
def test_stray_writes_beyond_a_sequence_show(name: str, separate: bool) -> None:
    layout = operands.layout(PACKED, separate)
    before = layout.buffers()
    layout.write(before, operands.values(PACKED))
    buffer, start = layout.blocks()[name]
    placement = layout.placements[name]
    for row, stray in ((1, True), (2, False), (9, False), (10, True)):
        after = {n: b.copy() for n, b in before.items()}
        after[buffer][start + row * placement.strides[2] * placement.dtype.itemsize] ^= 0x55
        assert bool(layout.stray(before, after, ("out", "lse"))) == stray
    assert separate or start >= GUARD


def test_the_descriptor_says_what_the_case_does() -> None:
    parity_case = named("attention-f16-64-causal-pages-16-sequences")
    assert isinstance(parity_case, AttentionCase)
    layout = operands.layout(parity_case)
    at = {
        n: 2**20 + layout.blocks()[p.block][1] + p.offset * p.dtype.itemsize
        for n, p in layout.placements.items()
    }
    runtime = plugins().backend("numpy").runtime
    actual = describe(parity_case, layout, at, runtime, runtime.devices()[0])
    assert isinstance(actual, Attention)
    p = actual.problem()
    assert (p.spec.q_view, p.spec.kv_view, p.spec.lengths, p.spec.causal) == (
        "packed",
        "paged",
        True,
        True,
    )
    assert (p.total_q, p.S_q, p.S_k, p.page_size, p.pages, p.table_width) == (
        78,
        40,
        129,
        16,
        3 + 5 + 9 + 3,
        11,
    )
    assert (
        p.table_stride == 14 and p.k_strides == (16 * 2 * 64, 64, 2 * 64) and p.lse_strides[1] == 78
    )
    assert (
        {r.name for r in p.operands}
        == {"q", "k", "v", "out", "lse", "kv_lengths", "cu_seqlens_q", "block_table"}
        == set(actual.operands())
    )


def test_gradients_have_memory_of_their_own() -> None:
    lengths, bias, whole = (
        operands.layout(named(f"attention-bwd-f16-64-{n}")).placements
        for n in ("lengths", "bias-by-key", "packed")
    )
    assert lengths["k"].row_spans is not None, "keys behind an entry's length are no memory to read"
    assert lengths["dk"].row_spans is None and lengths["dk"].shape == (4, 2, 129, 64), (
        "their gradients are zeros"
    )
    assert bias["bias"].shape == (2, 2, 40, 70) and bias["bias"].strides == (0, 0, 0, 1)
    assert bias["dbias"].shape == (1, 1, 1, 70) and bias["dbias"].dtype is bias["bias"].dtype
    assert {whole[n].block for n in ("dq", "dk", "dv")} == {"dqkv"}
    row = (4 + 2 * 2) * 64
    assert [(whole[n].offset, whole[n].strides[2]) for n in ("dq", "dk", "dv")] == [
        (0, row),
        (256, row),
        (384, row),
    ]


def test_a_backward_case_gives_the_result_of_an_exact_forward() -> None:
    parity_case = named("attention-bwd-f16-64-causal-33x129")
    x = operands.values(parity_case)
    expected = formulas.attention(x["q"], x["k"], x["v"], True, 0.125)
    np.testing.assert_array_equal(x["out"], expected.out.astype(np.float16))
    np.testing.assert_array_equal(x["lse"], expected.lse.astype(np.float32))
    assert x["dout"].shape == x["out"].shape and operands.outputs(parity_case) == ("dq", "dk", "dv")


def test_lists_name_scattered_heads() -> None:
    parity_case = named("attention-f16-64-causal-pointers-gqa")
    placements = operands.layout(parity_case).placements
    for name, heads in (("q", 8), ("k", 2), ("v", 2), ("out", 8)):
        starts = placements[name].starts
        assert (
            starts is not None and len(set(starts)) == 2 * heads and list(starts) != sorted(starts)
        )
    assert placements["lse"].starts is None


def test_cases_of_scores_that_rise_share_others_kernels() -> None:
    """They ask for numbers and for no kernels of their own, and their blocks are many."""

    def spec(c: AttentionCase) -> tuple[object, ...]:
        return c.dtype, c.head_dim, c.value_dim, c.causal, c.lse

    mine = {c.name for c in guards()}
    others = {spec(c) for c in attention_cases() if c.name.removesuffix("-ramp") not in mine}
    for c in guards():
        assert spec(c) in others and 300 <= c.S_k <= 700, c.name

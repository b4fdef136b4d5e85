"""Where operands lie, and that stray reads and writes show."""

from __future__ import annotations

import numpy as np
import pytest
from kernelseam.dtypes import DType
from kernelseam.samples.data.memory import (
    GUARD,
    Layout,
    Placement,
    never_written,
    placement,
    scattered,
)
from kernelseam.samples.operand_layout import OperandLayout

F16, F32 = DType.float16, DType.float32


@pytest.mark.parametrize(
    ("operand_layout", "itemsize", "strides"),
    [
        (OperandLayout(), 2, (3 * 5 * 8, 5 * 8, 8)),
        (OperandLayout(aligned=False), 2, (3 * 5 * 7, 5 * 7, 7)),
        (OperandLayout(), 8, (3 * 5 * 8, 5 * 8, 8)),
        (OperandLayout(order="brh"), 2, (5 * 3 * 8, 8, 3 * 8)),
        (OperandLayout(gaps=(16, 8, 4)), 4, ((3 * (5 * 12 + 8)) + 16, 5 * 12 + 8, 12)),
        (OperandLayout(broadcast="b"), 2, (0, 5 * 8, 8)),
        (OperandLayout(broadcast="bhr"), 2, (0, 0, 0)),
        (OperandLayout(broadcast="r"), 2, (3 * 8, 8, 0)),
    ],
)
def test_strides(
    operand_layout: OperandLayout, itemsize: int, strides: tuple[int, int, int]
) -> None:
    assert operand_layout.strides((2, 3, 5, 7), itemsize) == strides


def _layout(separate: bool = False) -> tuple[Layout, dict[str, np.ndarray]]:
    shape = (2, 3, 4, 5)
    placements = {
        "A": placement("A", OperandLayout(order="brh", gaps=(0, 0, 8), offset=3), shape, F16),
        "B": scattered("B", OperandLayout(), shape, F16, 0),
        "C": placement("C", OperandLayout(), shape, F32),
    }
    rng = np.random.default_rng(0)
    return Layout(placements, separate), {
        n: rng.standard_normal(shape).astype(np.float16) for n in "AB"
    }


@pytest.mark.parametrize("separate", [False, True])
def test_what_is_written_is_read_back_and_the_rest_is_canaries(separate: bool) -> None:
    layout, values = _layout(separate)
    buffers = layout.buffers()
    layout.write(buffers, values)
    for name, value in values.items():
        np.testing.assert_array_equal(layout.read(buffers, name), value)
    assert never_written(layout.read(buffers, "C")).all()
    assert np.isnan(layout.read(buffers, "C")).all()
    assert sorted(buffers) == (["A", "B", "C"] if separate else ["all"])
    data = sum(b.size for b in buffers.values()) - sum(
        int((b == 0xFF).sum()) for b in buffers.values()
    )
    assert 0 < data <= 2 * 240
    if separate:  # the allocation ends with the last element
        assert buffers["C"].size == ((2 * 3 * 4 - 1) * 8 + 5) * 4


def test_rows_start_where_aligned_says() -> None:
    layout, _ = _layout()
    for name, (_, start) in layout.blocks().items():
        assert start % 16 == 0 and start >= GUARD
        p = layout.placements[name]
        assert (start + p.offset * p.dtype.itemsize) % 16 == (6 if name == "A" else 0)


def test_scattered_matrices_do_not_touch() -> None:
    p = scattered("B", OperandLayout(), (3, 4, 5, 6), F16, 7)
    assert p.starts is not None and len(p.starts) == 12
    ordered = np.sort(p.starts)
    assert ordered.tolist() != list(p.starts)
    assert (np.diff(ordered) >= 4 * 8 + 6).all() and len(set(np.diff(ordered).tolist())) > 1
    assert all(s % 8 == 0 for s in p.starts)


@pytest.mark.parametrize(
    ("byte", "caught"),
    [("inside", False), ("before", True), ("behind", True), ("gap", True), ("input", True)],
)
def test_stray_writes_show(byte: str, caught: bool) -> None:
    layout, values = _layout()
    before = layout.buffers()
    layout.write(before, values)
    start = layout.blocks()["C"][1]
    span = ((2 * 3 * 4 - 1) * 8 + 5) * 4
    at = {
        "inside": start,
        "before": start - 1,
        "behind": start + span,
        "gap": start + 5 * 4,
        "input": layout.blocks()["A"][1] + 6,
    }[byte]
    after = {n: b.copy() for n, b in before.items()}
    after["all"][at] ^= 0x55
    message = layout.stray(before, after, ("C",))
    assert bool(message) == caught
    if caught:
        near = "A" if byte == "input" else "C"
        first = at - layout.blocks()[near][1]
        assert (
            message
            == f"1 bytes outside the output changed, the first {first} bytes from the start of "
            f"{near}"
        )


def test_shared_blocks_and_empty_operands() -> None:
    packed = {
        n: Placement("qkv", F16, (1, 1, 2, 4), (24, 4, 12, 1), i * 4) for i, n in enumerate("qkv")
    }
    layout = Layout({**packed, "none": placement("none", OperandLayout(), (0, 1, 2, 4), F16)})
    buffers = layout.buffers()
    values = {n: np.full((1, 1, 2, 4), i, np.float16) for i, n in enumerate("qkv")}
    layout.write(buffers, {**values, "none": np.empty((0, 1, 2, 4), np.float16)})
    start = layout.blocks()["qkv"][1]
    row = buffers["all"][start : start + 48].view(np.float16)
    assert row.tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4 + [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    assert layout.read(buffers, "none").shape == (0, 1, 2, 4)


def test_a_nan_of_another_pattern_was_written() -> None:
    x = np.array([np.nan, -np.nan, 1.0], np.float32)
    assert not never_written(x).any()
    assert never_written(np.full(3, 0xFFFF, np.uint16).view(np.float16)).all()

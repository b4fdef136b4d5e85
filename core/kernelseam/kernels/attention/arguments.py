"""Host side of the structures of scores.h and sequences.h that attention kernels take as
arguments."""

from __future__ import annotations

from collections.abc import Iterable

from kernelseam.kernels.elements import divider_parameter
from kernelseam.kernels.signature import Structure

STRIDES = ("batch", "head", "row")


def matrices(name: str) -> Structure:
    """Matrices: an operand's address, and its strides."""
    batch, head, row = (f"{name}_{axis}" for axis in STRIDES)
    return Structure(
        ((name, "pointer"), (batch, "i64"), (head, "i64"), (row, "i32")), ("base", *STRIDES)
    )


def walk_values(
    names: Iterable[str], walks: Iterable[tuple[int, int, int]]
) -> dict[str, int | float]:
    """The strides of ``matrices`` of these names, each walk (batch, head, row)."""
    return {
        f"{name}_{axis}": stride
        for name, walk in zip(names, walks, strict=True)
        for axis, stride in zip(STRIDES, walk, strict=True)
    }


def row_values(name: str) -> Structure:
    """RowValues, and the slopes of ALiBi: an address, and the strides of entries and heads."""
    batch, head = (f"{name}_{axis}" for axis in STRIDES[:2])
    return Structure(((name, "pointer"), (batch, "i64"), (head, "i64")), ("base", *STRIDES[:2]))


def planes(name: str) -> Structure:
    """Planes: a bias's or a mask's address, and its strides."""
    axes = (*STRIDES, "column")
    strides = tuple((f"{name}_{axis}", "i64") for axis in axes)
    return Structure(((name, "pointer"), *strides), ("base", *axes))


SEQUENCES = Structure(
    (
        ("lengths", "pointer"),
        ("q_offsets", "pointer"),
        ("k_offsets", "pointer"),
        ("S_q", "i32"),
        ("S_k", "i32"),
    )
)
PAGES = Structure(
    (("table", "pointer"), ("table_row", "i64"), ("page", divider_parameter("page_size"))),
    ("table", "table_row", "size"),
)
SEQUENCE_POINTERS = ("lengths", "q_offsets", "k_offsets")

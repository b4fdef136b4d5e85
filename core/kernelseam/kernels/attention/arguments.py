"""Host side of the structures of scores.h and sequences.h that attention kernels take as
arguments."""

from __future__ import annotations

from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.kernels.elements import divider_parameter, divider_values
from kernelseam.kernels.signature import Structure

STRIDES = ("batch", "head", "row")
VIEWS = {"strided": 0, "packed": 1, "paged": 2, "pointers": 3}
"""As sequences.h counts them."""
MATRICES = ("q", "k", "v", "out")
OPERANDS = {
    "slopes": "alibi_slopes",
    "prefixes": "prefix_lengths",
    "lengths": "kv_lengths",
    "q_offsets": "cu_seqlens_q",
    "k_offsets": "cu_seqlens_k",
    "table": "block_table",
}
"""Pointer parameter → operand, where they differ."""


def matrices(name: str) -> Structure:
    """Matrices: an operand's address, and its strides."""
    batch, head, row = (f"{name}_{axis}" for axis in STRIDES)
    return Structure(
        ((name, "pointer"), (batch, "i64"), (head, "i64"), (row, "i32")), ("base", *STRIDES)
    )


def walk_values(problem: object, *names: str) -> dict[str, int | float]:
    """The strides of ``matrices`` and ``row_values`` of these names, a problem's operands."""
    return {
        f"{name}_{axis}": stride
        for name in names
        for axis, stride in zip(STRIDES, getattr(problem, f"{name}_strides"), strict=False)
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


def forward_values(p: AttentionProblem) -> dict[str, int | float]:
    """The strides of q, k, v, the result and the LSE; how many queries and keys."""
    return {**walk_values(p, *MATRICES, "lse"), "S_q": p.S_q, "S_k": p.S_k}


def page_values(p: AttentionProblem) -> dict[str, int]:
    """Those of PAGES."""
    return {"table_row": p.table_stride, **divider_values("page_size", max(p.page_size, 1))}

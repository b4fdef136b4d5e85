"""Checks of an attention's integer operands: lengths, offsets and block tables must stay within
memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kernelseam.contract import Device, Runtime
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.descriptors.common.contents import (
    Ints,
    check_rising,
    read_integers,
    refuse,
    refuse_any,
)
from kernelseam.descriptors.common.protocol import Resolved


def check(
    problem: AttentionProblem,
    resolved: Resolved,
    runtime: Runtime,
    device: Device,
    rows: Mapping[str, Ints] | None = None,
) -> None:
    """Raise InvalidValue, naming the entry, where one points beyond its operand. Copies them to the
    host; operands that are not bound are refused elsewhere. ``rows``: list of addresses → rows of
    each entry's matrix."""
    p = problem
    checked = ("cu_seqlens_q", "cu_seqlens_k", "kv_lengths", "block_table")
    read = read_integers(p.operands, checked, resolved, runtime, device)
    if "cu_seqlens_q" in read:
        _offsets("q", read["cu_seqlens_q"], p.S_q, p.total_q)
    if "cu_seqlens_k" in read:
        _offsets("k", read["cu_seqlens_k"], p.S_k, p.total_k)
    if "kv_lengths" in read:
        x = read["kv_lengths"]
        remedy = (
            "Raise S_k (max_seqlen_k; the table may be too narrow)"
            if p.spec.kv_view == "paged"
            else "Raise S_k"
        )
        refuse_any(
            "kv_lengths",
            x,
            (x < 0) | (x > p.S_k),
            f"must be from 0 to S_k = {p.S_k}",
            f"{remedy}, or correct it",
        )
        for name, there in (rows or {}).items():
            _listed(name, there, x)
    if "block_table" in read and "kv_lengths" in read:
        _table(read["block_table"], read["kv_lengths"], p.page_size, p.pages)


def _offsets(letter: str, x: Ints, most: int, total: int) -> None:
    name = f"cu_seqlens_{letter}"
    check_rising(name, x)
    steps = np.diff(x)
    if (steps > most).any():
        i = int((steps > most).argmax()) + 1
        refuse(
            name,
            (i,),
            int(x[i]),
            f"gives entry {i - 1} of the batch {steps[i - 1]} rows, more than S_{letter} = {most}",
            f"Raise S_{letter} (max_seqlen_{letter}) to the longest sequence",
        )
    if x[-1] > total:
        refuse(
            name,
            (len(x) - 1,),
            int(x[-1]),
            f"must not exceed total_{letter} = {total}",
            "Correct the last offset",
        )


def _listed(name: str, rows: Ints, lengths: Ints) -> None:
    """Lengths within the rows that the matrices of a list have, batch-major."""
    heads = len(rows) // max(len(lengths), 1)
    short = rows < np.repeat(lengths, heads)
    if short.any():
        i = int(short.argmax())
        refuse(
            "kv_lengths",
            (i // heads,),
            int(lengths[i // heads]),
            f"the array of {name}[{i}] has {rows[i]} rows",
            "Give an array with more, or correct it",
        )


def _table(table: Ints, lengths: Ints, page_size: int, pages: int) -> None:
    """The entries that hold keys; entries after them are not read."""
    used = np.arange(table.shape[1]) * page_size < lengths[:, None]
    refuse_any(
        "block_table",
        table,
        used & ((table < 0) | (table >= pages)),
        f"must be a page, from 0 to {pages - 1}"
        if pages
        else "names a page, of which there are none",
        "Entries that kv_lengths reaches name pages",
    )

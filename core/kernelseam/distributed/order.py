"""How rows lie on ranks: one run of neighbours each, or two, by which causal work is even."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kernelseam.errors import InvalidValue

Tensor = Any
ORDERS = ("contiguous", "balanced")


class Run(NamedTuple):
    """Rows of the whole that lie side by side on a rank."""

    start: int
    rows: int

    @property
    def stop(self) -> int:
        return self.start + self.rows


def runs(index: int, size: int, rows: int, balanced: bool) -> tuple[Run, ...]:
    """The runs of one rank of ``size`` in the order of its rows, of ``rows`` rows in all: balanced
    are chunks index and 2·size − 1 − index of 2·size."""
    if not balanced:
        each = rows // size
        return (Run(index * each, each),)
    chunk = rows // (2 * size)
    first, second = (Run(at * chunk, chunk) for at in (index, 2 * size - 1 - index))
    return (Run(first.start, 2 * chunk),) if first.stop == second.start else (first, second)


def joined(parts: Sequence[Tensor], dim: int, balanced: bool) -> Tensor:
    """The rows of neighbouring ranks' shards, in the order of the whole."""
    if len(parts) == 1:
        return parts[0]
    if not balanced:
        return torch.cat(list(parts), dim)
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)], dim)


def parted(x: Tensor, size: int, dim: int, balanced: bool) -> list[Tensor]:
    """The inverse of ``joined``: the rows of each of ``size`` shards."""
    if size == 1:
        return [x]
    if not balanced:
        return list(x.chunk(size, dim))
    chunks = x.chunk(2 * size, dim)
    return [torch.cat([chunks[i], chunks[2 * size - 1 - i]], dim) for i in range(size)]


def check_divisible(field: str, rows: int, size: int, balanced: bool) -> None:
    """Refuse a number of rows that the ranks do not divide."""
    parts = 2 * size if balanced else size
    if rows % parts:
        rule = f"must be a multiple of {parts}"
        why = f"{'two chunks' if balanced else 'one'} for each of {size} ranks"
        raise InvalidValue(field, rows, f"{rule}, {why}", f"Pad to {-(-rows // parts) * parts}")

"""What a rank's queries have seen of different keys, and how it is joined: each call writes its
result beside the others', and one launch joins them all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from kernelseam.distributed.plan import Part
from kernelseam.ops import merge

Tensor = Any
_SLOTS = 4
"""Results of a row that are kept for one join. Of more, two at a time are joined: less memory."""
_SEGMENTS = 4
"""Launches of a join, at most."""


def wider(dtype: Any) -> Any:
    """The dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_of(x: Tensor, begin: int, rows: int) -> Tensor:
    """Of [B, H, S, …]; x itself where they are all, as a view costs the host about a launch."""
    return x if rows == x.shape[2] else x.narrow(2, begin, rows)


class Partials:
    """Results [B, H, S_q, D_v] and LSEs [B, H, S_q] of the calls so far."""

    def __init__(
        self,
        shape: Sequence[int],
        like: Tensor,
        dtype: Any,
        parts: Sequence[Part],
        backend: str | None = None,
    ) -> None:
        """``shape``: the result's; ``like``: of its device. ``dtype``: in which calls write their
        results. ``parts``: all calls that there will be, which tell how much is kept at once."""
        self._shape, self._like = tuple(shape), like
        self._backend = backend
        self._wide = wider(like.dtype)
        self._used: list[list[tuple[int, int]]] = []
        """Of each slot: rows that have a result there."""
        depth = max(1, deepest((p.query, p.m) for p in parts))
        self._kept = depth if depth <= _SLOTS else 2
        self._outs = like.new_empty((self._kept, *shape), dtype=dtype)
        self._lses = like.new_empty((self._kept, *shape[:-1]), dtype=self._wide)
        self._joined: tuple[Tensor, Tensor] | None = None

    def room(self, part: Part) -> tuple[Tensor, Tensor]:
        """Where a call writes the result and the LSE of its rows."""
        begin, end = part.query, part.query + part.m
        slot = next((i for i, used in enumerate(self._used) if _free(used, begin, end)), None)
        if slot is None and len(self._used) == self._kept:
            self._joined = self._all(self._wide)
            self._used = []
        if slot is None:
            slot = len(self._used)
            self._used.append([])
        if part.m:
            self._used[slot].append((begin, end))
        out, lse = (rows_of(x[slot], begin, part.m) for x in (self._outs, self._lses))
        if part.offsets is not None and (part.offsets[0], part.offsets[-1]) != (0, part.m):
            out.zero_()  # a call leaves rows of no document as they are
        return out, lse

    def result(self, dtype: Any) -> tuple[Tensor, Tensor]:
        """(result, LSE) over all keys, the result of this dtype; 0 and −inf of rows that no call
        had."""
        out, lse = self._all(dtype if self._joined is None else self._wide)
        return out.to(dtype), lse

    def _all(self, dtype: Any) -> tuple[Tensor, Tensor]:
        """What is kept, with what was joined before."""
        made = self._merged(dtype)
        return made if self._joined is None else _two(self._joined, made)

    def _merged(self, dtype: Any) -> tuple[Tensor, Tensor]:
        """Of the kept ones. Rows that only the first slot has are copied."""
        rows, outs, lses = self._shape[2], self._outs, self._lses
        if self._used == [[(0, rows)]]:
            return outs[0].to(dtype), lses[0]
        for used, lse in zip(self._used or [[]], lses, strict=False):
            for begin, end in _gaps(used, rows):
                lse[:, :, begin:end] = -torch.inf
        slots = _slots(self._used, rows)
        name = str(dtype).removeprefix("torch.")
        if len(slots) == 1:
            ((_, _, n),) = slots
            return merge.merge_states(outs[:n], lses[:n], out_dtype=name, backend=self._backend)
        out, lse = self._like.new_empty(self._shape, dtype=dtype), lses[0].clone()
        for begin, end, n in slots:
            x, s = outs[:n, :, :, begin:end], lses[:n, :, :, begin:end]
            if n == 1 and any(a <= begin and end <= b for a, b in self._used[0]):
                out[:, :, begin:end] = x[0]
                continue
            _, sums = merge.merge_states(x, s, out=out[:, :, begin:end], backend=self._backend)
            lse[:, :, begin:end] = sums
        return out, lse


def deepest(spans: Iterable[tuple[int, int]]) -> int:
    """In how many of them, (begin, rows) each, a row is, at most."""
    turns = sorted(x for begin, rows in spans for x in ((begin, 1), (begin + rows, -1)))
    return max(accumulate(turn for _, turn in turns), default=0)


def _free(used: Sequence[tuple[int, int]], begin: int, end: int) -> bool:
    return begin == end or all(end <= a or b <= begin for a, b in used)


def _gaps(used: Sequence[tuple[int, int]], rows: int) -> Iterator[tuple[int, int]]:
    """Rows that have nothing."""
    at = 0
    for begin, end in sorted(used):
        if at < begin:
            yield at, begin
        at = max(at, end)
    if at < rows:
        yield at, rows


def _slots(used: Sequence[Sequence[tuple[int, int]]], rows: int) -> list[tuple[int, int, int]]:
    """Rows (begin, end) and of how many slots they have results, all in one where there are many
    such spans."""
    ends = sorted({0, rows, *(x for slot in used for span in slot for x in span)})
    result: list[tuple[int, int, int]] = []
    for begin, end in pairwise(ends):
        n = max((i + 1 for i, x in enumerate(used) if not _free(x, begin, end)), default=1)
        if result and result[-1][2] == n:
            begin = result.pop()[0]
        result.append((begin, end, n))
    return result if len(result) <= _SEGMENTS else [(0, rows, len(used))]


def _two(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The share of b is e^b / (e^a + e^b). One that saw no key has none, whatever the other is;
    NaN stays NaN."""
    share = torch.sigmoid(b[1] - a[1]).masked_fill_(b[1] == -torch.inf, 0)
    return a[0].lerp_(b[0], share.unsqueeze(-1)), torch.logaddexp(a[1], b[1])

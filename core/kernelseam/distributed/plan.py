"""Which attention calls compute a rank's queries over a rank's keys: the whole sequence's mask
expressed as windows, causal masks and lengths of calls on pieces.

Query i of the whole lies at p = i + S_k − S_q, key j at distance d = j − p. A piece of m queries
from p = A and n keys from j = b is a call whose own diagonal ends in its last query and last key,
at d = o = (b + n) − (A + m): its window is (left + o, right − o). A call takes no negative window.
Where right < o, no query sees the last o − right keys, and without them o is right; where left <
−o, the last −left − o queries see no key, and without them o is −left. So every band has a call, or
none where nothing is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from kernelseam.distributed.order import Run, runs
from kernelseam.frozen import dataclass

Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class Mask:
    """The mask of the whole sequence, and what depends on distances in it."""

    rows_q: int
    rows_k: int
    left: int | None = None
    right: int | None = None
    """The band −left ≤ d ≤ right; None: no bound."""
    alibi: bool = False
    prefix: bool = False
    """Each batch entry's first keys are visible whatever the band (prefix LM)."""
    lengths: bool = False
    """Each batch entry has a length, and there is no band."""
    documents: tuple[int, ...] | None = None
    """Offsets of packed sequences, the same for queries and keys."""
    mods: bool = False
    """Scores or masks depend on positions, so that a call's rows must be contiguous in the whole,
    and of one document or of whole documents."""


@dataclass(frozen=True)
class Part:
    """One call, over contiguous rows of the local queries and of the keys at hand."""

    query: int
    m: int
    key: int
    n: int
    first_query: int
    """The position p of the first query in the whole."""
    first_key: int
    window: Window = (None, None)
    prefix: bool = False
    """Keys below the entry's prefix length are visible too."""
    lengths: bool = False
    """Only keys below the entry's length are visible."""
    slopes: str = ""
    """"diagonal": d is the call's own; "before" or "after": all keys lie on that side."""
    offsets: tuple[int, ...] | None = None
    """Offsets of packed sequences among the part's rows, the same for queries and keys."""
    document: int | None = None
    """The packed sequence of the part, where there are ``Mask.mods``; with offsets, the first
    one."""


@lru_cache(maxsize=4096)
def parts(mask: Mask, queries: tuple[Run, ...], keys: tuple[Run, ...]) -> tuple[Part, ...]:
    """The calls that cover every visible pair of ``queries`` and ``keys`` once; () where there is
    none. The runs' rows lie one run after the other."""
    whole = _one_diagonal(mask, queries, keys)
    if whole is not None:
        return (whole,)
    shift = mask.rows_k - mask.rows_q
    result: list[Part] = []
    at = 0
    for q in queries:
        beside = 0
        for k in keys:
            piece = Part(at, q.rows, beside, k.rows, q.start + shift, k.start)
            result += _of_piece(mask, piece)
            beside += k.rows
        at += q.rows
    return tuple(result if mask.mods else _fused(result))


def opening_and_closing(all_parts: tuple[Part, ...]) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """The calls in two portions, so that a transfer overlaps with each. A single call that is a
    rectangle or a causal triangle is cut at half of its queries; any other is in the second
    portion."""
    if len(all_parts) != 1:
        return all_parts[: len(all_parts) // 2], all_parts[len(all_parts) // 2 :]
    (part,) = all_parts
    half = part.m // 2
    triangle = replace(part, window=(None, None)) if part.window == (None, 0) else None
    if half and _plain(part):
        first = replace(part, m=half)
    elif half and triangle is not None and _plain(triangle) and part.m == part.n:
        first = replace(part, m=half, n=half)
    else:
        return (), all_parts
    rest = replace(
        part, query=part.query + half, m=part.m - half, first_query=part.first_query + half
    )
    return (first,), (rest,)


@lru_cache(maxsize=256)
def reach(mask: Mask, size: int, balanced: bool) -> tuple[int, ...]:
    """For each rank's keys, how many steps round the ring they travel, to the last rank that sees
    any of them."""
    of_q, of_k = (
        [runs(i, size, rows, balanced) for i in range(size)] for rows in (mask.rows_q, mask.rows_k)
    )
    return tuple(
        max((t for t in range(size) if _sees(mask, of_q[(s + t) % size], of_k[s])), default=0)
        for s in range(size)
    )


def seen(part: Part) -> int:
    """The number of visible query-key pairs of a part, by its band alone."""
    if part.offsets is not None:
        return sum(
            seen(replace(part, m=b - a, n=b - a, offsets=None))
            for a, b in zip(part.offsets, part.offsets[1:], strict=False)
        )
    left, right = part.window
    if left is None and right is None:
        return part.m * part.n
    total, step = 0.0, max(1, part.m // 256)
    for i in range(0, part.m, step):  # so many rows by the middle one: near enough
        rows = min(step, part.m - i)
        corner = i + (rows - 1) / 2 + part.n - part.m
        high = part.n if right is None else min(part.n, corner + right + 1)
        low = 0 if left is None else max(0, corner - left)
        total += max(0, high - low) * rows
    return round(total)


def _sees(mask: Mask, queries: Sequence[Run], keys: Sequence[Run]) -> bool:
    """Whether any pair is visible."""
    if mask.prefix or mask.lengths:
        return True
    if mask.documents is not None:
        return bool(parts(mask, tuple(queries), tuple(keys)))
    shift = mask.rows_k - mask.rows_q
    return any(
        q.rows > 0
        and k.rows > 0
        and (mask.right is None or k.start - (q.stop - 1 + shift) <= mask.right)
        and (mask.left is None or k.stop - 1 - (q.start + shift) >= -mask.left)
        for q in queries
        for k in keys
    )


def _one_diagonal(mask: Mask, queries: Sequence[Run], keys: Sequence[Run]) -> Part | None:
    """The part of equal runs of queries and keys under a causal mask alone: only their order
    matters, not the gaps between the runs."""
    causal = (mask.left, mask.right) == (None, 0) and mask.rows_q == mask.rows_k
    if not causal or mask.alibi or mask.prefix or mask.documents is not None or queries != keys:
        return None
    if mask.mods and len(queries) > 1:
        return None
    rows = sum(q.rows for q in queries)
    return Part(0, rows, 0, rows, queries[0].start, keys[0].start, (None, 0)) if rows else None


def _of_piece(mask: Mask, piece: Part) -> Iterator[Part]:
    if mask.documents is not None:
        yield from _of_documents(mask, piece)
    elif mask.lengths:
        if piece.m and piece.n:
            yield replace(piece, lengths=True)
    elif mask.alibi:
        for cell in _cells(piece):
            yield from _banded(mask, replace(cell, slopes=_side(cell)))
    else:
        yield from _banded(mask, piece)


def _cut(piece: Part, q: tuple[int, int], k: tuple[int, int]) -> Part:
    """The rows q[0] … q[1] and k[0] … k[1] of a piece, by positions in the whole."""
    return replace(
        piece,
        query=piece.query + q[0] - piece.first_query,
        m=q[1] - q[0],
        key=piece.key + k[0] - piece.first_key,
        n=k[1] - k[0],
        first_query=q[0],
        first_key=k[0],
    )


def _cells(piece: Part) -> Iterator[Part]:
    """A piece cut into cells in which queries and keys have the same positions, or all keys lie
    before, or after, all queries."""
    a, b = piece.first_query, piece.first_query + piece.m
    c, d = piece.first_key, piece.first_key + piece.n
    low, high = max(a, c), min(b, d)
    if low >= high:
        yield piece
        return
    queries, keys = ([(x, low), (low, high), (high, y)] for x, y in ((a, b), (c, d)))
    for q in queries:
        for k in keys:
            if q[0] < q[1] and k[0] < k[1]:
                yield _cut(piece, q, k)


def _side(cell: Part) -> str:
    if cell.first_key >= cell.first_query + cell.m:
        return "after"
    return "before" if cell.first_key + cell.n <= cell.first_query else "diagonal"


def _banded(mask: Mask, piece: Part) -> Iterator[Part]:
    """A piece without rows that see nothing or are not seen; with a prefix these become parts of
    their own."""
    left, right = mask.left, mask.right
    a, m, b, n = piece.first_query, piece.m, piece.first_key, piece.n
    offset = (b + n) - (a + m)
    keys, queries = n, m
    if right is not None and offset > right:
        keys = max(0, n - (offset - right))
    elif left is not None and offset < -left:
        queries = max(0, m + offset + left)
    first, begin = a, b
    if mask.prefix:
        if keys < n and m:
            yield replace(_cut(piece, (a, a + m), (b + keys, b + n)), lengths=True)
        if queries < m and n:
            yield replace(_cut(piece, (a + queries, a + m), (b, b + n)), lengths=True)
    else:
        if right is not None:  # queries before any key's
            first = min(max(a, b - right), a + queries)
        if left is not None:
            begin = min(max(b, first - left), b + keys)
    last, end = a + queries, b + keys
    if first >= last or begin >= end:
        return
    kept = _cut(piece, (first, last), (begin, end))
    offset = end - last
    window = (
        None if left is None or left + offset >= kept.n - 1 else left + offset,
        None if right is None or right - offset >= kept.m - 1 else right - offset,
    )
    yield replace(kept, window=window, prefix=mask.prefix)


def _of_documents(mask: Mask, piece: Part) -> Iterator[Part]:
    """The parts of packed sequences: those within the same rows together, and one that continues
    from some rows into others as a rectangle."""
    assert mask.documents is not None
    for cell in _cells(piece):
        side = _side(cell)
        a, b = cell.first_query, cell.first_query + cell.m
        c, d = cell.first_key, cell.first_key + cell.n
        if side == "diagonal":
            yield from _beside_themselves(mask, cell)
            continue
        last = (d if side == "before" else b) - 1  # the earlier side's last row
        slopes = side if mask.alibi else ""
        for i, (start, stop) in enumerate(zip(mask.documents, mask.documents[1:], strict=False)):
            if start <= last < stop and stop > max(a, c):
                kept = _cut(cell, (max(a, start), min(b, stop)), (max(c, start), min(d, stop)))
                yield from _banded(mask, replace(kept, slopes=slopes, document=i))


def _beside_themselves(mask: Mask, cell: Part) -> Iterator[Part]:
    """The parts of packed sequences in a cell whose queries and keys have the same positions."""
    assert mask.documents is not None
    a, b = cell.first_query, cell.first_query + cell.m
    slopes = "diagonal" if mask.alibi else ""
    inside = [min(max(x, a), b) for x in mask.documents]
    together = list[int]()
    for i, rows in enumerate(zip(inside, inside[1:], strict=False)):
        if rows[0] == rows[1]:
            continue
        if rows == (a, b) or (mask.mods and rows != mask.documents[i : i + 2]):
            kept = _cut(cell, rows, rows)
            yield from _banded(mask, replace(kept, slopes=slopes, document=i))
        else:
            together.append(i)
    if together:
        first, last = together[0], together[-1]
        yield replace(
            cell,
            window=(mask.left, mask.right),
            slopes=slopes,
            offsets=tuple(x - a for x in inside[first : last + 2]),
            document=first,
        )


def _fused(all_parts: list[Part]) -> list[Part]:
    """The parts, with adjacent ones joined where all queries see all keys."""
    for along in ("n", "m"):
        kept: list[Part] = []
        for part in all_parts:
            before = kept[-1] if kept else None
            if before is not None and _plain(before) and _plain(part):
                if along == "n" and (
                    (before.query, before.m, before.key + before.n)
                    == (part.query, part.m, part.key)
                ):
                    kept[-1] = replace(before, n=before.n + part.n)
                    continue
                if along == "m" and (
                    (before.key, before.n, before.query + before.m)
                    == (part.key, part.n, part.query)
                ):
                    kept[-1] = replace(before, m=before.m + part.m)
                    continue
            kept.append(part)
        all_parts = kept
    return all_parts


def _plain(part: Part) -> bool:
    return (
        part.window == (None, None)
        and not (part.prefix or part.lengths or part.slopes)
        and part.offsets is None
    )

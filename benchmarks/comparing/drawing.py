"""Random problems: extents drawn log-uniformly, ragged ones among them.

``drawn``: of a few specs of each kind (``python -m benchmarks choices``). ``drawn_rows``: of any
spec of the suites' kinds, each a row beside its peers (``python -m benchmarks run drawn``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.comparing.attention import AttentionRow
from benchmarks.comparing.backward import BackwardRow
from benchmarks.comparing.decoding import DecodeRow
from benchmarks.comparing.epilogues import EpilogueRow
from benchmarks.comparing.gemm import GemmRow
from benchmarks.comparing.grouped import FORMS, GroupedRow
from benchmarks.comparing.paging import PagedRow
from benchmarks.comparing.rows import NamedRow

MOST_BYTES, MOST_OPERATIONS = 1 << 30, {"float32": 1e11, "": 1e12}
"""Of a problem; operations by dtype, "" for all others."""
LEAST = 0.95
"""Of the best peer's speed, what a row of any spec is to have."""

Row = AttentionRow | BackwardRow | DecodeRow | EpilogueRow | GemmRow | GroupedRow | PagedRow
Rng = np.random.Generator
Draw = Callable[[Rng], Row]


def log_uniform(rng: Rng, low: int, high: int) -> int:
    """From low to high, both included."""
    return int(min(np.exp(rng.uniform(np.log(low), np.log(high + 1))), high))


def ragged(rng: Rng, low: int, high: int) -> int:
    """The same; two of three are multiples of 64 where they are larger."""
    n = log_uniform(rng, low, high)
    return n if n < 64 or rng.random() < 1 / 3 else n // 64 * 64


def _heads(rng: Rng, group: int) -> tuple[int, int]:
    """Heads, and KV heads (0: as many)."""
    kv_heads = int(rng.choice((1, 2, 4, 8, 16)))
    return kv_heads * group, 0 if group == 1 else kv_heads


def _dense(rng: Rng, D: int, causal: bool, group: int, short: bool) -> Row:
    """As many queries as keys, or where ``short`` a few at the end of many."""
    heads, kv_heads = _heads(rng, group)
    batch, keys = log_uniform(rng, 1, 64), ragged(rng, 16, 16384)
    S = ragged(rng, 2, min(keys, 512)) if short else keys
    return AttentionRow(
        "dense", batch, heads, S, D, causal, kv_heads, keys=keys if short and keys != S else 0
    )


def _small(rng: Rng, D: int, group: int) -> Row:
    """That hardly fills a device."""
    heads, kv_heads = (16, 0) if group == 1 else (8 * group, 8)
    return AttentionRow(
        "small", log_uniform(rng, 1, 8), heads, ragged(rng, 16, 1024), D, True, kv_heads
    )


def _few(rng: Rng, D: int, group: int) -> Row:
    """Few queries at the end of many keys."""
    heads, kv_heads = (16, 0) if group == 1 else (8 * group, 8)
    batch, S, keys = log_uniform(rng, 1, 8), ragged(rng, 9, 512), ragged(rng, 1024, 32768)
    return AttentionRow("few", batch, heads, S, D, True, kv_heads, keys=keys)


def _packed(rng: Rng, D: int, causal: bool, group: int = 1) -> Row:
    heads, kv_heads = _heads(rng, group)
    longest = log_uniform(rng, 16, 8192)
    rows = tuple(log_uniform(rng, 1, longest) for _ in range(log_uniform(rng, 2, 256)))
    return AttentionRow("packed", len(rows), heads, max(rows), D, causal, kv_heads, packed=rows)


def _decode(rng: Rng, D: int, group: int) -> Row:
    heads, kv_heads = _heads(rng, group)
    batch, keys, mixed = log_uniform(rng, 1, 128), log_uniform(rng, 16, 65536), rng.random() < 0.5
    return DecodeRow(batch, keys, heads, kv_heads or heads, D, 16, mixed=bool(mixed))


def _paged(rng: Rng, D: int, group: int) -> Row:
    """Prefills, chunks of sequences or few queries, one of three beside sequences with one
    query."""
    kv_heads = int(rng.choice((1, 2, 4, 8)))
    keys, most = log_uniform(rng, 16, 16384), int(rng.choice((8, 8192)))
    parts = [(log_uniform(rng, 1, 64), log_uniform(rng, 1, min(keys, most)), keys)]
    if rng.random() < 1 / 3:
        parts.append((log_uniform(rng, 1, 128), 1, log_uniform(rng, 16, 16384)))
    return PagedRow(tuple(parts), kv_heads * group, kv_heads, D, 16, suite="paged")


def _backward(rng: Rng, D: int, causal: bool, group: int) -> Row:
    heads, kv_heads = _heads(rng, group)
    return BackwardRow(
        log_uniform(rng, 1, 32), heads, ragged(rng, 16, 8192), D, causal, kv_heads=kv_heads
    )


def _gemm(rng: Rng, dtype: str, b_transposed: bool, many: bool) -> Row:
    high = 2048 if many else 16384
    M, N, K = (ragged(rng, 1, high), *(8 * ragged(rng, 1, high // 8) for _ in range(2)))
    return GemmRow("gemm", log_uniform(rng, 2, 4096) if many else 1, M, N, K, dtype, b_transposed)


def _epilogue(rng: Rng, **options: Any) -> Row:
    """A linear layer with an epilogue."""
    columns, hidden = (64 * log_uniform(rng, 4, 256) for _ in range(2))
    return EpilogueRow("epilogue", log_uniform(rng, 1, 16384), columns, hidden, **options)


def _grouped(rng: Rng, form: str) -> Row:
    """Experts' layers."""
    hidden, width = (64 * log_uniform(rng, 4, 128) for _ in range(2))
    sizes = str(rng.choice(("equal", "skewed", "drawn")))
    experts, tokens = log_uniform(rng, 2, 64), log_uniform(rng, 64, 16384)
    return GroupedRow("grouped", experts, tokens, hidden, width, sizes, form)


KINDS: dict[str, tuple[Draw, ...]] = {
    "attention": (
        *(
            partial(_dense, D=D, causal=causal, group=group, short=short)
            for D, group in ((64, 1), (128, 4), (256, 1))
            for causal, short in ((False, False), (True, False), (True, True))
        ),
        *(partial(_packed, D=D, causal=causal) for D, causal in ((64, True), (128, False))),
    ),
    "small": tuple(partial(_small, D=D, group=group) for D in (64, 128) for group in (1, 4)),
    "few": tuple(partial(_few, D=D, group=group) for D, group in ((128, 4), (64, 1))),
    "decode": tuple(partial(_decode, D=D, group=group) for D, group in ((128, 4), (64, 8))),
    "paged": tuple(partial(_paged, D=D, group=group) for D, group in ((128, 4), (64, 8))),
    "wide": tuple(partial(draw, D=256, group=4) for draw in (_few, _decode, _paged)),
    "backward": tuple(
        partial(_backward, D=D, causal=causal, group=group)
        for D, causal, group in ((64, False, 1), (128, True, 4), (128, False, 1))
    ),
    "gemm": tuple(
        partial(_gemm, dtype=dtype, b_transposed=transposed, many=many)
        for dtype, transposed in (("bfloat16", True), ("float16", False), ("float32", False))
        for many in (False, True)
    ),
    "epilogue": (
        partial(_epilogue, epilogue="gelu", bias=True),
        partial(_epilogue, epilogue="swiglu", interleaved=True),
        partial(_epilogue, epilogue="silu", sums="row_squares"),
    ),
    "grouped": tuple(partial(_grouped, form=form) for form in FORMS),
}
"""What is drawn of each kind; the extents of a spec's problems differ."""


def _any(draw: Callable[..., Row], **options: Sequence[Any]) -> tuple[Draw]:
    """With one of each option's values."""

    def drawing(rng: Rng) -> Row:
        return draw(rng, **{name: _one(rng, values) for name, values in options.items()})

    return (drawing,)


def _one(rng: Rng, values: Sequence[Any]) -> Any:
    """NumPy's own choice would be of its types."""
    return values[int(rng.integers(len(values)))]


def _optional(rng: Rng, D: int, group: int, option: dict[str, Any]) -> Row:
    """With a window, a cap or sinks."""
    row = _dense(rng, D, True, group, short=False)
    assert isinstance(row, AttentionRow)
    return replace(row, **option)


def _varied(draw: Callable[..., Row], field: str, values: Sequence[Any]) -> Callable[..., Row]:
    """Another value of a field that the draw leaves at its default."""

    def drawing(rng: Rng, **options: Any) -> Row:
        return replace(draw(rng, **options), **{field: _one(rng, values)})

    return drawing


_WIDE, _GROUPS = (64, 128, 128, 256), (1, 1, 2, 4, 4, 5, 8)
_DIMS = (*_WIDE, 64, 128, 96, 80, 72, 160, 192, 40)
_HALVES, _EITHER = ("bfloat16", "float16"), (False, True)
_OPTIONS = (
    *({"window": (n, 0)} for n in (127, 511, 1023)),
    {"softcap": 30.0},
    {"sinks": True},
)
ANY_SPEC: dict[str, tuple[Draw, ...]] = {
    "dense": _any(
        _varied(_dense, "dtype", _HALVES), D=_DIMS, causal=_EITHER, group=_GROUPS, short=(False,)
    ),
    "few": _any(_dense, D=_WIDE, causal=(True,), group=_GROUPS, short=(True,)),
    "packed": _any(_packed, D=(*_WIDE, 96), causal=_EITHER, group=_GROUPS),
    "options": _any(_optional, D=_WIDE, group=_GROUPS, option=_OPTIONS),
    "decode": _any(_varied(_decode, "page", (16, 16, 32, 64)), D=_WIDE, group=_GROUPS),
    "paged": _any(_varied(_paged, "page", (16, 16, 32, 64, 128)), D=_WIDE, group=_GROUPS),
    "backward": _any(_backward, D=_DIMS, causal=_EITHER, group=_GROUPS),
    "gemm": _any(_gemm, dtype=_HALVES, b_transposed=_EITHER, many=_EITHER),
    "epilogue": KINDS["epilogue"],
    "grouped": KINDS["grouped"],
}
"""What is drawn of each kind as rows beside peers."""


def drawn(kinds: Iterable[str], count: int, seed: int) -> list[Row]:
    """``count`` problems, as many of each kind; the same of a seed in every run."""
    draws = [KINDS[name] for name in _known(kinds, KINDS)]
    return [_drawn(draws, i, seed) for i in range(count)]


def drawn_rows(kinds: Iterable[str] = (), count: int = 80, seed: int = 0) -> list[NamedRow]:
    """The same of any spec, as rows whose names say how to draw them again: SEED.NUMBER, the number
    among those of all kinds."""
    wanted, names, draws = _known(kinds, ANY_SPEC), list(ANY_SPEC), list(ANY_SPEC.values())
    numbers = (i for i in itertools.count() if names[i % len(names)] in wanted)
    return [
        NamedRow(f"{seed}.{i}", replace(_drawn(draws, i, seed), least=LEAST), "drawn")
        for i in itertools.islice(numbers, count)
    ]


def _known(kinds: Iterable[str], of: Mapping[str, Any]) -> list[str]:
    names = list(kinds) or list(of)
    if unknown := [n for n in names if n not in of]:
        raise SystemExit(f"no kind of problem is {', '.join(unknown)}: choose of {', '.join(of)}")
    return names


def _drawn(kinds: Sequence[Sequence[Draw]], i: int, seed: int) -> Row:
    """Kinds in turns, and a kind's draws."""
    number, kind = divmod(i, len(kinds))
    rng, draws = np.random.default_rng((seed, i)), kinds[kind]
    while True:
        row = draws[number % len(draws)](rng)
        most = MOST_OPERATIONS.get(row.dtype, MOST_OPERATIONS[""])
        if row.operations <= most and row.bytes <= MOST_BYTES:
            return row

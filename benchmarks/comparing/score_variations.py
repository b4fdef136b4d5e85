"""What rows of ``attention-scores`` are of: options of ours, and the same as functions that users
write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.comparing.rows import Make

DOCUMENTS = (4096, 3000, 2048, 2000, 1536, 1024, 1000, 777, 512, 291, 100)
"""Rows of the documents, 16384 in all."""
EQUAL = 10
"""Documents of one length."""
Arrays = Mapping[str, Any]
Mod = Callable[..., Any]


class Extents(NamedTuple):
    """Of a row: entries, heads, and queries as keys."""

    batch: int
    heads: int
    S: int


class Mods(NamedTuple):
    """As FlexAttention takes them."""

    score: Mod | None = None
    mask: Mod | None = None


@dataclass(frozen=True)
class Variation:
    """``arrays(row, make, given)``: what options point to and functions capture, ``make`` drawing
    it and ``given`` taking NumPy's. ``mods(arrays, library)``: the functions, by torch or NumPy.
    ``options(arrays)``: the options of ours that say the same. ``written``: ours is given the
    functions. ``least``: of the best peer's time over ours."""

    mods: Callable[[Arrays, ModuleType], Mods]
    arrays: Callable[[Extents, Make, Callable[[Any], Any]], dict[str, Any]] = lambda *_: {}
    options: Callable[[Arrays], dict[str, Any]] | None = None
    written: bool = False
    causal: bool = False
    least: float = 1.5
    by_entry: bool = False
    by_head: bool = False
    """Whether the mask tells entries, heads apart."""


def _at(plane: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    """The element of a plane that repeats along axes of extent 1."""
    batch, heads, rows, _ = plane.shape
    return plane[b if batch > 1 else 0, h if heads > 1 else 0, q if rows > 1 else 0, kv]


def _causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def _slopes(row: Extents, make: Make, given: Callable[[Any], Any]) -> dict[str, Any]:
    return {"slopes": given((2.0 ** (-8 * np.arange(1, row.heads + 1) / row.heads)).astype("f4"))}


def _plane(name: str, dtype: str, *axes: str) -> Any:
    """A matrix for each of these axes."""

    def arrays(row: Extents, make: Make, given: Callable[[Any], Any]) -> dict[str, Any]:
        shape = (row.batch if "b" in axes else 1, row.heads if "h" in axes else 1, row.S, row.S)
        return {name: make(shape, dtype)}

    return arrays


def _mask(kind: str) -> Any:
    """[B, 1, S, S], or of kind "keys" [B, 1, 1, S]: "random" hides a third, "triangle" what a
    causal mask does, "documents" other documents, "keys" the last quarter."""

    def arrays(row: Extents, make: Make, given: Callable[[Any], Any]) -> dict[str, Any]:
        one = {"keys": 1}.get(kind, row.S)
        if isinstance(make((1,), "float32"), torch.Tensor):
            return {"mask": _masks(kind, row, given)}
        return {"mask": make((row.batch, 1, one, row.S), "bool")}

    return arrays


def _masks(kind: str, row: Extents, given: Callable[[Any], Any]) -> Any:
    places = given(np.arange(row.S))
    if kind == "keys":
        return (places < row.S * 3 // 4).expand(row.batch, 1, 1, row.S).contiguous()
    if kind == "random":
        return torch.rand(row.batch, 1, row.S, row.S, device=places.device) > 1 / 3
    own = places // (row.S // EQUAL + 1)
    seen = own[:, None] == own if kind == "documents" else places[:, None] >= places
    return seen.expand(row.batch, 1, row.S, row.S).contiguous()


def _by_mask(x: Arrays, library: ModuleType) -> Mods:
    mask = x["mask"]
    return Mods(mask=lambda b, h, q, kv: _at(mask, b, h, q, kv))


def _by_bias(x: Arrays, library: ModuleType) -> Mods:
    bias = x["bias"]
    return Mods(lambda s, b, h, q, kv: s + _at(bias, b, h, q, kv))


def _alibi(x: Arrays, library: ModuleType) -> Mods:
    slopes = x["slopes"]
    return Mods(lambda s, b, h, q, kv: s - slopes[h] * abs(q - kv))


def _prefix(x: Arrays, library: ModuleType) -> Mods:
    n = x["prefix"]
    return Mods(mask=lambda b, h, q, kv: (q >= kv) | (kv < n[b]))


def _documents(row: Extents, make: Make, given: Callable[[Any], Any]) -> dict[str, Any]:
    starts = np.cumsum((0, *DOCUMENTS))
    own = np.repeat(np.arange(len(DOCUMENTS)), DOCUMENTS)
    return {"own": given(own.astype(np.int32)), "starts": given(starts.astype(np.int32))}


def _of_documents(x: Arrays, library: ModuleType) -> Mods:
    own = x["own"]
    return Mods(mask=lambda b, h, q, kv: (q >= kv) & (own[q] == own[kv]))


def _equal_documents(x: Arrays, library: ModuleType) -> Mods:
    size = 16384 // EQUAL + 1
    return Mods(mask=lambda b, h, q, kv: q // size == kv // size)


def _capped(x: Arrays, library: ModuleType) -> Mods:
    return Mods(lambda s, b, h, q, kv: 30.0 * library.tanh(s / 30.0))


def _another_cap(x: Arrays, library: ModuleType) -> Mods:
    return Mods(lambda s, b, h, q, kv: s / library.sqrt(1 + (s / 30.0) * (s / 30.0)))


def _heat(x: Arrays, library: ModuleType) -> Mods:
    slopes = x["slopes"]
    return Mods(lambda s, b, h, q, kv: s * (0.5 + slopes[h]))


def _distances(x: Arrays, library: ModuleType) -> Mods:
    table = x["table"]
    return Mods(lambda s, b, h, q, kv: s + table[h, q - kv], _causal)


def _neighbourhood(x: Arrays, library: ModuleType) -> Mods:
    return Mods(
        mask=lambda b, h, q, kv: (abs(q // 64 - kv // 64) <= 6) & (abs(q % 64 - kv % 64) <= 6)
    )


def _with_causal(mods: Callable[[Arrays, ModuleType], Mods]) -> Any:
    return lambda x, library: mods(x, library)._replace(mask=_causal)


BIASES = {"bias": lambda x: {"bias": x["bias"]}, "mask": lambda x: {"mask": x["mask"]}}
_ALIBI_CAUSAL = Variation(
    _with_causal(_alibi),
    _slopes,
    lambda x: {"alibi_slopes": x["slopes"], "causal": True},
    causal=True,
)
_PREFIX = Variation(
    _prefix,
    lambda row, make, given: {"prefix": given(np.full(row.batch, 500, np.int32))},
    lambda x: {"prefix_lengths": x["prefix"], "causal": True},
    causal=True,
    by_entry=True,
)
VARIATIONS: dict[str, Variation] = {
    "bias [1, H, S, S]": Variation(
        _by_bias, _plane("bias", "bfloat16", "h"), BIASES["bias"], least=1.6
    ),
    "bias [B, 1, S, S]": Variation(
        _by_bias, _plane("bias", "bfloat16", "b"), BIASES["bias"], least=1.6
    ),
    "bias [1, H, S, S] causal": Variation(
        _with_causal(_by_bias),
        _plane("bias", "bfloat16", "h"),
        lambda x: {"bias": x["bias"], "causal": True},
        causal=True,
        least=1.6,
    ),
    **{
        f"mask {kind}": Variation(_by_mask, _mask(kind), BIASES["mask"], least=1.6, by_entry=True)
        for kind in ("random", "triangle", "documents", "keys")
    },
    "alibi": Variation(_alibi, _slopes, lambda x: {"alibi_slopes": x["slopes"]}),
    "alibi causal": _ALIBI_CAUSAL,
    "prefix": _PREFIX,
    "causal, written": Variation(
        lambda x, library: Mods(mask=_causal),
        options=lambda x: {"causal": True},
        written=True,
        causal=True,
    ),
    "window, written": Variation(
        lambda x, library: Mods(mask=lambda b, h, q, kv: (q >= kv) & (q - kv <= 1023)),
        options=lambda x: {"window": (1023, 0)},
        written=True,
    ),
    "softcap, written": Variation(_capped, options=lambda x: {"softcap": 30.0}, written=True),
    "alibi causal, written": replace(_ALIBI_CAUSAL, written=True),
    "prefix, written": replace(_PREFIX, written=True),
    "documents": Variation(_of_documents, _documents, written=True, causal=True),
    "equal documents": Variation(_equal_documents, written=True),
    "sink and window": Variation(
        lambda x, library: Mods(mask=lambda b, h, q, kv: (q >= kv) & ((q - kv < 1024) | (kv < 4))),
        written=True,
        causal=True,
    ),
    "dilated": Variation(
        lambda x, library: Mods(mask=lambda b, h, q, kv: (q >= kv) & ((q - kv) % 4 == 0)),
        written=True,
        causal=True,
    ),
    "neighbourhood": Variation(_neighbourhood, written=True),
    "another cap": Variation(_another_cap, written=True),
    "temperature by head": Variation(_heat, _slopes, written=True),
    "bias by distance causal": Variation(
        _distances,
        lambda row, make, given: {
            "table": given(
                np.random.default_rng(1).standard_normal((row.heads, row.S)).astype("f4")
            )
        },
        written=True,
        causal=True,
    ),
}
"""By what a row is called."""

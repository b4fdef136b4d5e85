"""Random parity cases: kinds, each of which is one spec, and problems of a kind, their extents and strides drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernelseam.dtypes import DType
from kernelseam.parity.cases import AttentionCase, BackwardCase, Case, MergeCase
from kernelseam.parity.memory import Walk

F16, BF16, F32 = DType.float16, DType.bfloat16, DType.float32
Random = np.random.Generator
VIEWS = (
    ("strided", "strided"), ("packed", "packed"), ("strided", "paged"), ("packed", "paged"), ("strided", "lengths"),
    ("pointers", "pointers"), ("packed", "lengths"), ("strided", "packed"),
)
OPTIONS = ("window", "prefix", "softcap", "alibi", "bias", "bias-f32", "mask", "sinks")
DIMS = ((64, 64), (128, 128), (40, 40), (80, 64), (192, 128), (256, 256), (64, 64), (96, 96))
LONGEST = 300
MOST_HEADS = 8
"""Of all entries of a batch together."""


@dataclass(frozen=True)
class Kind:
    """What shapes a binary."""

    operation: str
    dtype: DType
    head_dim: int
    value_dim: int
    causal: bool = False
    options: frozenset[str] = frozenset()
    views: tuple[str, str] = ("strided", "strided")
    """Of queries and keys; "lengths": strided, with kv_lengths."""
    aligned: bool = True
    lse: bool = True
    to_f32: bool = False
    any_order: bool = False
    """Gradients that may be added up in any order."""

    @property
    def features(self) -> Iterator[str]:
        """Names of what it has."""
        yield self.operation
        yield str(self.dtype)
        yield f"head dims {self.head_dim}/{self.value_dim}"
        yield "/".join(dict.fromkeys(self.views))
        yield from sorted(self.options)
        flags = {
            "causal": self.causal, "unaligned": not self.aligned, "to float32": self.to_f32,
            "any order": self.any_order,
        }
        yield from (name for name, there in flags.items() if there)


def kinds(rng: Random, count: int) -> list[Kind]:
    """So many different ones: of ten, six forward, three backward and one merge; views in turn."""
    found: dict[Kind, None] = {}
    turn = 0
    while len(found) < count:
        operation = ("attention", "attention_bwd", "attention", "attention", "attention_bwd", "attention",
                     "attention_bwd", "attention", "attention", "merge_states")[turn % 10]
        found[_kind(rng, operation, turn // 2)] = None
        turn += 1
    return list(found)


def _kind(rng: Random, operation: str, turn: int) -> Kind:
    dtype = _one(rng, (F16, F16, BF16, F32))
    head_dim, value_dim = _one(rng, DIMS)
    if operation == "merge_states":
        return Kind(operation, _one(rng, (F32, F32, F16, BF16)), value_dim, value_dim, to_f32=bool(rng.integers(2)))
    backward = operation == "attention_bwd"
    views = VIEWS[turn % len(VIEWS)]
    if backward and ("paged" in views or "pointers" in views):
        views = ("strided", "strided")
    options = {x for x in OPTIONS if rng.random() < 0.3}
    if dtype is F32 or {"bias", "bias-f32"} <= options:
        options -= {"bias-f32"}
    return Kind(
        operation, dtype, head_dim, value_dim, bool(rng.integers(2)) and "window" not in options, frozenset(options),
        views, rng.random() < 0.75, backward or rng.random() < 0.7, not backward and rng.random() < 0.2,
        backward and turn % 3 == 2,
    )


def draw(kind: Kind, name: str, rng: Random) -> Case:
    """A problem of the kind; its name seeds its data."""
    if kind.operation == "merge_states":
        return _merge(kind, name, rng)
    forward = _attention(kind, name, rng)
    if kind.operation == "attention":
        return forward
    bias, sinks = forward.bias is not None, bool(forward.sinks)
    dout, dq, dk, dv = (_walk(kind, rng, kind.views[i]) for i in (0, 0, 1, 1))
    return BackwardCase(
        name, forward, dout, dq, dk, dv, bias_gradient=bias, sink_gradient=sinks, deterministic=not kind.any_order,
        dbias=Walk(gaps=_gaps(rng), aligned=False, offset=int(rng.integers(3))),
    )


def _attention(kind: Kind, name: str, rng: Random) -> AttentionCase:
    heads, kv_heads = _one(rng, ((1, 1), (2, 2), (4, 2), (4, 1), (6, 3), (8, 1), (5, 5), (8, 4)))
    batch = int(rng.integers(1, MOST_HEADS // heads + 1))
    S_q, S_k = _extent(rng), _extent(rng)
    if rng.random() < 0.1:  # long enough to be split
        S_q, S_k, batch = int(rng.integers(1, 8)), int(rng.integers(300, 2000)), 1
    if kind.operation == "attention_bwd":
        S_q, S_k = min(S_q, 200), min(S_k, 300)
    fields: dict[str, Any] = {"lse_gap": int(rng.integers(4)), "margin": int(rng.integers(4))}
    q, kv = kind.views
    if q == "packed":
        fields["q_sequences"] = _lengths(rng, batch, S_q)
    if kv == "packed":
        fields["k_sequences"] = _lengths(rng, batch, S_k)
    if kv in ("lengths", "paged"):
        fields["kv_lengths"] = _lengths(rng, batch, S_k)
    if kv == "paged":
        fields["page_size"] = int(_one(rng, (1, 3, 16, 48, 64, 128)))
    if q == "pointers":
        fields |= {"view": _one(rng, ("host", "device")), "scattered": True}
    fields |= {x: v for o in sorted(kind.options) for x, v in _OPTIONS[o](kind, rng, batch, heads, S_k)}
    for operand in ("q", "k", "v", "out"):
        view = kv if operand in "kv" else q
        fields[operand] = _walk(kind, rng, view, repeats=view == "strided" and operand in "kv")
    return AttentionCase(
        name, kind.dtype, kind.head_dim, kind.value_dim, S_q, S_k, batch, heads, kv_heads, kind.causal, kind.lse,
        scale=_one(rng, (None, None, None, float(rng.normal(0, 0.2)))),
        dtype_out=F32 if kind.to_f32 and kind.dtype is not F32 else None,
        data=_one(rng, ("normal",) * 8 + ("extreme", "climbing")), ramp=bool(rng.random() < 0.3), **fields,
    )


Fields = Iterator[tuple[str, Any]]


def _window(kind: Kind, rng: Random, batch: int, heads: int, S_k: int) -> Fields:
    left, right = (None if rng.random() < 0.2 else int(rng.integers(0, _one(rng, (2, 20, 100)))) for _ in "lr")
    # A band without bounds, or only that of a causal mask, would be another spec.
    yield "window", (7, right) if left is None and right in (None, 0) else (left, right)


def _prefix(kind: Kind, rng: Random, batch: int, heads: int, S_k: int) -> Fields:
    yield "prefix", tuple(int(x) for x in rng.integers(-2, S_k + 5, batch))


def _softcap(kind: Kind, rng: Random, batch: int, heads: int, S_k: int) -> Fields:
    yield "softcap", float(2 ** rng.uniform(-1, 7))


def _alibi(kind: Kind, rng: Random, batch: int, heads: int, S_k: int) -> Fields:
    yield "alibi", tuple(float(x) for x in rng.normal(0, 0.1, heads))
    yield "alibi_batch", bool(rng.integers(2))


def _bias(dtype: DType | None) -> Callable[..., Fields]:
    def given(kind: Kind, rng: Random, batch: int, heads: int, S_k: int) -> Fields:
        yield "bias", dtype or kind.dtype
        yield "bias_walk", _plane(rng)
        yield "bias_data", _one(rng, ("normal", "normal", "holes", "voids", "low"))

    return given


def _mask(kind: Kind, rng: Random, batch: int, heads: int, S_k: int) -> Fields:
    yield "mask", _one(rng, ("random", "random", "keys", "rows"))
    yield "mask_walk", _plane(rng)


def _sinks(kind: Kind, rng: Random, batch: int, heads: int, S_k: int) -> Fields:
    yield "sinks", tuple(-np.inf if rng.random() < 0.1 else float(x) for x in rng.normal(0, 3, heads))


_OPTIONS: dict[str, Callable[..., Fields]] = {
    "window": _window, "prefix": _prefix, "softcap": _softcap, "alibi": _alibi, "bias": _bias(None),
    "bias-f32": _bias(F32), "mask": _mask, "sinks": _sinks,
}


def _merge(kind: Kind, name: str, rng: Random) -> MergeCase:
    outs, out = (_walk(kind, rng) for _ in range(2))
    parts, batch, heads, rows = (int(rng.integers(1, most)) for most in (20, 4, 5, 70))
    dtype_out = F32 if kind.to_f32 else F16 if kind.dtype is F32 else kind.dtype
    return MergeCase(
        name, kind.dtype, dtype_out, parts, batch, heads, rows, kind.value_dim, outs=outs, out=out,
        part_gap=int(rng.integers(3)) * 8,
        data=_one(rng, ("normal", "normal", "apart", "absent", "nothing")),
    )


def _walk(kind: Kind, rng: Random, view: str = "strided", repeats: bool = False) -> Walk:
    orders = {"packed": ("brh", "brh", "bhr"), "paged": ("brh", "bhr", "hbr"), "pointers": ("bhr",)}
    order = _one(rng, orders.get(view, ("bhr", "brh", "rbh", "hbr")))
    if not kind.aligned:
        return Walk(order, _gaps(rng), aligned=False, offset=1)
    broadcast = _one(rng, ("",) * 6 + ("b", "h", "bh")) if repeats else ""
    return Walk(order, _gaps(rng), offset=int(rng.integers(3)) * 16 // kind.dtype.itemsize, broadcast=broadcast)


def _plane(rng: Random) -> Walk:
    """Of a bias or a mask: any axis may be the innermost, or repeat."""
    order = "".join(rng.permutation(list("bhrc"))) if rng.random() < 0.3 else "bhr"
    repeats = "".join(x for x in "bhrc" if rng.random() < 0.25)
    return Walk(order, _gaps(rng), aligned=False, offset=int(rng.integers(4)), broadcast=repeats)


def _gaps(rng: Random) -> tuple[int, int, int]:
    a, b, c = (int(x) if rng.random() < 0.5 else 0 for x in rng.integers(0, 40, 3))
    return a, b, c


def _lengths(rng: Random, batch: int, most: int) -> tuple[int, ...]:
    """One of them the longest; some may be 0."""
    found = [0 if rng.random() < 0.1 else int(n) for n in rng.integers(0, most + 1, batch)]
    found[int(rng.integers(batch))] = most
    return tuple(found)


def _extent(rng: Random) -> int:
    most = int(_one(rng, (2, 8, 40, 130, LONGEST)))
    return int(rng.integers(1, most + 1))


def _one(rng: Random, of: Any) -> Any:
    return of[int(rng.integers(len(of)))]

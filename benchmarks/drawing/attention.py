"""Random attentions, their gradients and merges: masks × layouts × dtypes × ragged sizes ×
strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from kernelseam.dtypes import DType
from kernelseam.samples.attention_bwd_case import BackwardCase
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.case import Case
from kernelseam.samples.common import InjectedValue
from kernelseam.samples.merge_case import MergeCase
from kernelseam.samples.operand_layout import OperandLayout

from benchmarks.drawing.common import BF16, F16, F32, Random, gaps, one

VIEWS = (
    ("strided", "strided"),
    ("packed", "packed"),
    ("strided", "paged"),
    ("packed", "paged"),
    ("strided", "lengths"),
    ("pointers", "pointers"),
    ("packed", "lengths"),
    ("strided", "packed"),
)
OPTIONS = ("window", "prefix", "softcap", "alibi", "bias", "bias-f32", "mask", "sinks")
DIMS = (
    *((64, 64), (128, 128), (40, 40), (80, 64), (192, 128), (256, 256), (64, 64), (96, 96)),
    *((72, 72), (112, 160), (224, 200)),
)
ODD_DIMS = ((33, 7), (5, 19), (1, 1), (71, 111))
WIDE_DIMS = (576, 512)
"""Of results alone, in 16 bits."""
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
    batch_invariant: bool = False
    stored: str = ""
    """What is of 8 bits: "keys" and values, or "queries", too."""
    scales: str = ""
    query_blocks: bool = False
    """Blocks of queries have scales, whatever those of keys are of."""
    latent: bool = False

    @property
    def can_be_packed(self) -> bool:
        """Whether q, k and v can be slices of one array, whose rows are aligned as the kind's."""
        whole = self.head_dim * self.dtype.itemsize % 16 == 0
        alike = self.head_dim == self.value_dim and self.views == ("strided", "strided")
        return alike and whole == self.aligned and not (self.stored or self.latent)

    @property
    def features(self) -> Iterator[str]:
        """Names of what all its problems have."""
        yield self.operation
        yield str(self.dtype)
        yield f"head dims {self.head_dim}/{self.value_dim}"
        yield "/".join(dict.fromkeys(self.views))
        yield from sorted(self.options)
        flags = {
            "causal": self.causal,
            "unaligned": not self.aligned,
            "to float32": self.to_f32,
            "any order": self.any_order,
            "batch invariant": self.batch_invariant,
            f"{self.stored} of 8 bits": bool(self.stored),
            f"scales of {self.scales}": bool(self.scales),
            "scales of blocks of queries": self.query_blocks,
            "latent": self.latent,
        }
        yield from (name for name, there in flags.items() if there)

    def draw(self, name: str, rng: Random) -> Case:
        """A problem of the kind; its name seeds its data."""
        if self.operation == "merge_states":
            return _merge(self, name, rng)
        forward = _attention(self, name, rng)
        return forward if self.operation == "attention" else _gradients(self, forward, rng)

    def about(self, case: Case) -> Iterator[str]:
        """Names of what one of its problems has beside that."""
        forward = case.forward if isinstance(case, BackwardCase) else case
        if isinstance(forward, AttentionCase):
            flags = {
                "grouped heads": forward.kv_heads < forward.num_heads,
                "ramp": forward.ramp,
                "few queries": forward.S_q <= 8,
                "more than 300 keys": forward.S_k > 300,
                "scores that are not normal": forward.data != "normal" or bool(forward.steps),
                "packed q, k and v": forward.packed,
                "a NaN or an infinity": bool(forward.injected),
                "repeated operands": bool(forward.k.broadcast or forward.v.broadcast),
            }
            yield from (name for name, there in flags.items() if there)


def kinds(rng: Random, count: int) -> list[Kind]:
    """So many different ones: of ten, six forward, three backward and one merge; views in turn, and
    of seven two with odd head dims and one with wide ones."""
    distinct: dict[Kind, None] = {}
    turn = 0
    while len(distinct) < count:
        operation = (
            "attention",
            "attention_bwd",
            "attention",
            "attention",
            "attention_bwd",
            "attention",
            "attention_bwd",
            "attention",
            "attention",
            "merge_states",
        )[turn % 10]
        distinct[_kind(rng, operation, turn // 2)] = None
        turn += 1
    return list(distinct)


def _kind(rng: Random, operation: str, turn: int) -> Kind:
    dtype = one(rng, (F16, F16, BF16, F32))
    head_dim, value_dim = one(rng, ODD_DIMS if turn % 7 in (1, 4) else DIMS)
    if turn % 7 == 6 and operation != "attention_bwd":
        dtype, (head_dim, value_dim) = one(rng, (F16, BF16)), WIDE_DIMS
    if operation == "merge_states":
        return Kind(
            operation,
            one(rng, (F32, F32, F16, BF16)),
            value_dim,
            value_dim,
            lse=rng.random() < 0.8,
            to_f32=bool(rng.integers(2)),
        )
    backward = operation == "attention_bwd"
    views = VIEWS[turn % len(VIEWS)]
    if backward and ("paged" in views or "pointers" in views):
        views = ("strided", "strided")
    options = {x for x in OPTIONS if rng.random() < 0.3}
    if dtype is F32 or {"bias", "bias-f32"} <= options:
        options -= {"bias-f32"}
    stored = one(rng, ("", "", "keys", "queries"))
    if backward or dtype is F32 or "pointers" in views:
        stored = ""
    likely = 0.6 if (head_dim, value_dim) == WIDE_DIMS else 0.1
    latent = rng.random() < likely and value_dim <= head_dim
    latent = latent and not (backward or stored or "pointers" in views)
    scales = one(rng, ("", "tensor", "heads", "entries", "blocks")) if stored else ""
    return Kind(
        operation,
        dtype,
        head_dim,
        value_dim,
        bool(rng.integers(2)) and "window" not in options,
        frozenset(options),
        views,
        rng.random() < 0.75,
        backward or rng.random() < 0.7,
        not backward and rng.random() < 0.2,
        backward and turn % 3 == 2,
        rng.random() < 0.2,
        stored,
        scales,
        stored == "queries" and bool(scales) and rng.random() < 0.4,
        latent,
    )


def _gradients(kind: Kind, forward: AttentionCase, rng: Random) -> BackwardCase:
    bias, sinks = forward.bias is not None, bool(forward.sinks)
    dout, dq, dk, dv = (_operand_layout(kind, rng, kind.views[i]) for i in (0, 0, 1, 1))
    return BackwardCase(
        forward.name,
        forward,
        dout,
        dq,
        dk,
        dv,
        bias_gradient=bias,
        sink_gradient=sinks,
        deterministic=not kind.any_order,
        packed=forward.packed and bool(rng.integers(2)),
        dbias=OperandLayout(gaps=gaps(rng), aligned=False, offset=int(rng.integers(3))),
    )


def _attention(kind: Kind, name: str, rng: Random) -> AttentionCase:
    heads, kv_heads = one(rng, ((1, 1), (2, 2), (4, 2), (4, 1), (6, 3), (8, 1), (5, 5), (8, 4)))
    batch = int(rng.integers(1, MOST_HEADS // heads + 1))
    S_q, S_k = _extent(rng), _extent(rng)
    if rng.random() < 0.1:  # long enough to be split
        S_q, S_k, batch = int(rng.integers(1, 8)), int(rng.integers(300, 2000)), 1
    if kind.operation == "attention_bwd":
        S_q, S_k = min(S_q, 200), min(S_k, 300)
    if (kind.head_dim, kind.value_dim) == WIDE_DIMS:
        S_q = min(S_q, 16)
    fields: dict[str, Any] = {"lse_gap": int(rng.integers(4)), "margin": int(rng.integers(4))}
    q, kv = kind.views
    if q == "packed":
        fields["q_sequences"] = _lengths(rng, batch, S_q)
    if kv == "packed":
        fields["k_sequences"] = _lengths(rng, batch, S_k)
    if kv in ("lengths", "paged"):
        fields["kv_lengths"] = _lengths(rng, batch, S_k)
    if kv == "paged":
        fields["page_size"] = int(one(rng, (1, 3, 16, 48, 64, 128)))
    if kind.scales == "blocks":
        block = int(one(rng, (1, 5, 16, 64, 128)))
        fields["scale_block"] = min(block, fields.get("page_size", block))
    if kind.query_blocks:
        fields["q_scale_block"] = int(one(rng, (1, 7, 16, 64, 128)))
    if kind.can_be_packed and rng.random() < 0.15:
        fields["packed"], S_k = True, S_q
    if q == "pointers":
        fields |= {"view": one(rng, ("host", "device")), "scattered": True}
    fields |= {
        x: v for o in sorted(kind.options) for x, v in _OPTIONS[o](kind, rng, batch, heads, S_k)
    }
    for operand in ("q", "k", "v", "out"):
        view = kv if operand in "kv" else q
        repeats = view == "strided" and operand in "kv" and not (kind.scales or "packed" in fields)
        size = _dtypes(kind).get(operand, kind.dtype).itemsize
        fields[operand] = _operand_layout(kind, rng, view, repeats, size)
    case = AttentionCase(
        name,
        kind.dtype,
        kind.head_dim,
        kind.value_dim,
        S_q,
        S_k,
        batch,
        heads,
        kv_heads,
        causal=kind.causal,
        lse=kind.lse,
        scale=one(rng, (None, None, None, float(rng.normal(0, 0.2)))),
        dtype_out=F32 if kind.to_f32 and kind.dtype is not F32 else None,
        batch_invariant=kind.batch_invariant,
        latent=kind.latent,
        data=one(
            rng, ("normal",) * 8 + ("extreme", "climbing" if kind.head_dim > 1 else "extreme")
        ),
        ramp=bool(rng.random() < 0.3),
        dtype_q=_dtypes(kind).get("q"),
        dtype_kv=_dtypes(kind).get("k"),
        scales=kind.scales,
        **fields,
    )
    case = _stepped(case, rng)
    return case if kind.operation == "attention_bwd" else _injected(_scored(case, rng), rng)


def _stepped(case: AttentionCase, rng: Random) -> AttentionCase:
    """The same, some times with scores that rise or fall by steps: what a softmax without a running
    maximum has to guard against."""
    if case.data != "normal" or case.head_dim == 1 or rng.random() < 0.75:
        return case
    firsts = sorted(int(x) for x in rng.integers(0, case.S_k, 3))
    steps = tuple((first, float(rng.normal(0, 60))) for first in firsts)
    return replace(case, steps=steps, steps_every=int(one(rng, (1, 1, 2, 3))))


def _scored(case: AttentionCase, rng: Random) -> AttentionCase:
    """The same, some times with scores that are all low, or −∞, or the steps alone."""
    if case.data != "normal" or case.head_dim == 1 or case.latent or rng.random() < 0.85:
        return case
    if case.steps:
        return replace(case, data="faint", ramp=False)
    infinite = not case.dtype_kv and case.scale is None
    return replace(case, data=one(rng, ("falling", *("holes", "voids") * infinite)))


def _injected(case: AttentionCase, rng: Random) -> AttentionCase:
    """The same, one time of ten with a NaN or an infinity in a row of q or k, or a NaN in one of v:
    what becomes of an infinity there depends on which weights are too small for float32. Nor is
    there one where all of a row's scores may be −∞, without being hidden."""
    name = one(rng, "qkv")
    layout = {"q": case.q, "k": case.k, "v": case.v}[name]
    infinite = case.data in ("holes", "voids") or case.bias_data != "normal"
    if rng.random() >= 0.1 or case.latent or layout.broadcast or (name == "v" and infinite):
        return case
    stored = (case.dtype_q if name == "q" else case.dtype_kv) is not None
    value = np.nan if stored or name == "v" else one(rng, (np.nan, np.inf, -np.inf))
    lengths = case.q_sequences if name == "q" else case.keys
    b = int(rng.integers(case.batch))
    rows = (case.S_q if name == "q" else case.S_k) if lengths is None else lengths[b]
    heads = case.num_heads if name == "q" else case.kv_heads
    columns = case.value_dim if name == "v" else case.head_dim
    if rows == 0:
        return case
    at = (b, *(int(rng.integers(n)) for n in (heads, rows, columns)))
    return replace(case, injected=(InjectedValue(name, value, at),))


def _dtypes(kind: Kind) -> dict[str, DType]:
    """The operands of 8 bits."""
    operands = {"keys": "kv", "queries": "qkv"}.get(kind.stored, "")
    return dict.fromkeys(operands, DType.float8_e4m3fn)


Fields = Iterator[tuple[str, Any]]


def _window(kind: Kind, rng: Random, batch: int, heads: int, S_k: int) -> Fields:
    left, right = (
        None if rng.random() < 0.2 else int(rng.integers(0, one(rng, (2, 20, 100)))) for _ in "lr"
    )
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
        yield "bias_layout", _plane(rng)
        # of a row without keys but of the least bias, the LSE is of the sums' rounding alone
        least = ("lowest",) * (not kind.lse)
        yield "bias_data", one(rng, ("normal", "normal", "holes", "voids", "low", *least))

    return given


def _mask(kind: Kind, rng: Random, batch: int, heads: int, S_k: int) -> Fields:
    yield "mask", one(rng, ("random",) * 4 + ("keys", "keys", "rows", "rows", "all"))
    yield "mask_layout", _plane(rng)


def _sinks(kind: Kind, rng: Random, batch: int, heads: int, S_k: int) -> Fields:
    yield (
        "sinks",
        tuple(-np.inf if rng.random() < 0.1 else float(x) for x in rng.normal(0, 3, heads)),
    )


_OPTIONS: dict[str, Callable[..., Fields]] = {
    "window": _window,
    "prefix": _prefix,
    "softcap": _softcap,
    "alibi": _alibi,
    "bias": _bias(None),
    "bias-f32": _bias(F32),
    "mask": _mask,
    "sinks": _sinks,
}


def _merge(kind: Kind, name: str, rng: Random) -> MergeCase:
    outs, out = (_operand_layout(kind, rng) for _ in range(2))
    parts, batch, heads, rows = (int(rng.integers(1, most)) for most in (20, 4, 5, 70))
    wrong = ("nan", "inf") * (rows > 3)  # those of the fourth row
    dtype_out = F32 if kind.to_f32 else F16 if kind.dtype is F32 else kind.dtype
    return MergeCase(
        name,
        kind.dtype,
        dtype_out,
        parts,
        batch,
        heads,
        rows,
        kind.value_dim,
        outs=outs,
        out=out,
        part_gap=int(rng.integers(3)) * 8,
        lse=kind.lse,
        data=one(rng, ("normal", "normal", "apart", "absent", "nothing", *wrong)),
    )


def _operand_layout(
    kind: Kind, rng: Random, view: str = "strided", repeats: bool = False, size: int | None = None
) -> OperandLayout:
    """``size``: of an element, where it is not of the kind's dtype."""
    orders = {"packed": ("brh", "brh", "bhr"), "paged": ("brh", "bhr", "hbr"), "pointers": ("bhr",)}
    order = one(rng, orders.get(view, ("bhr", "brh", "rbh", "hbr")))
    if not kind.aligned:
        return OperandLayout(order, gaps(rng), aligned=False, offset=1)
    broadcast = one(rng, ("",) * 6 + ("b", "h", "bh")) if repeats else ""
    return OperandLayout(
        order,
        gaps(rng),
        offset=int(rng.integers(3)) * 16 // (size or kind.dtype.itemsize),
        broadcast=broadcast,
    )


def _plane(rng: Random) -> OperandLayout:
    """Of a bias or a mask: any axis may be the innermost, or repeat."""
    order = "".join(rng.permutation(list("bhrc"))) if rng.random() < 0.3 else "bhr"
    repeats = "".join(x for x in "bhrc" if rng.random() < 0.25)
    return OperandLayout(
        order, gaps(rng), aligned=False, offset=int(rng.integers(4)), broadcast=repeats
    )


def _lengths(rng: Random, batch: int, most: int) -> tuple[int, ...]:
    """One of them the longest; some may be 0."""
    lengths = [0 if rng.random() < 0.1 else int(n) for n in rng.integers(0, most + 1, batch)]
    lengths[int(rng.integers(batch))] = most
    return tuple(lengths)


def _extent(rng: Random) -> int:
    most = int(one(rng, (2, 8, 40, 130, LONGEST)))
    return int(rng.integers(1, most + 1))

"""Attention forward beside FlashAttention-3, cuDNN and FlashAttention-2, on the same memory: [B, S,
H, D].

Ours and FlashAttention-3 write the LSE too. Options that torch's peers lack are held beside
FlashAttention-3 where its build has them, else beside ours without the option.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import kernelseam as ks
import numpy as np
import torch
import torch.nn.functional as functional
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.oracle import formulas
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.comparing.results import WITHOUT, Record
from benchmarks.comparing.rows import Judged, Make, Part, Prepared, Session, compared, host, judged

TORCH_PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}
ADVERSARIAL = ("sink", "falling", "rising", "jump")
JUDGED_ROWS, JUDGED_ELEMENTS = 16, 1 << 25
"""Queries of each of two heads that are held against float64, and at most so many elements of keys
and values for them (but four queries in any case)."""


@cache
def flash_attention_3() -> ModuleType | str:
    """The build that is there, or why there is none."""
    try:
        import flash_attn_interface
    except Exception as e:  # a library that does not load raises what it likes
        return f"flash_attn_interface cannot be imported: {type(e).__name__}: {e}"[:200]
    if not hasattr(flash_attn_interface, "fa3_fwd"):
        return "flash_attn_interface has no fa3_fwd"
    interface: ModuleType = flash_attn_interface
    return interface


@dataclass(frozen=True)
class AttentionRow:
    """``keys``: of each entry, where they are not as many as queries (the causal mask is then
    aligned to the last of both). ``lengths``: keys that each entry has. ``packed``: rows of each
    sequence, one after the other, of queries and keys. ``scores``: "" for N(0, 1), else one of
    ADVERSARIAL."""

    suite: str
    batch: int
    heads: int
    S: int
    D: int
    causal: bool = False
    kv_heads: int = 0
    D_v: int = 0
    dtype: str = "bfloat16"
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: bool = False
    lengths: tuple[int, ...] = ()
    packed: tuple[int, ...] = ()
    scores: str = ""
    least: float = 1.0
    keys: int = 0

    @property
    def S_k(self) -> int:
        """Keys of each entry."""
        return self.keys or self.S

    @property
    def few(self) -> bool:
        """Whether queries are few, so that a device is not filled without parts of the keys."""
        return self.S <= 1024 and self.batch * self.heads * self.S <= 1 << 17

    @property
    def of_keys(self) -> int:
        """KV heads."""
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """Of v's rows."""
        return self.D_v or self.D

    @property
    def name(self) -> str:
        heads = f"H{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads else "")
        dims = f"D{self.D}" + (f"/{self.D_v}" if self.D_v else "")
        extents = f"S{self.S}" + f" × {self.keys}" * bool(self.keys)
        parts = [f"B{self.batch} {heads} {extents} {dims}"]
        parts += ["f16"] * (self.dtype == "float16") + ["causal"] * self.causal
        if self.window is not None:
            parts.append(f"window {self.window[0]},{self.window[1]}")
        if self.softcap is not None:
            parts.append(f"softcap {self.softcap:g}")
        parts += (
            ["sinks"] * self.sinks
            + ["lengths"] * bool(self.lengths)
            + ["varlen"] * bool(self.packed)
        )
        parts += [self.scores] * bool(self.scores)
        return " ".join(parts)

    @property
    def plain(self) -> AttentionRow:
        """Without its options."""
        return replace(self, window=None, softcap=None, sinks=False, lengths=(), packed=())

    @property
    def without(self) -> AttentionRow | None:
        """What ours is held beside too: the same arrays without the options."""
        return None if self.packed or self.plain == self else self.plain

    def pairs(self) -> float:
        """Queries times visible keys, a causal mask half, of all entries."""
        if self.packed:
            each = [(n, n) for n in self.packed]
        else:
            each = [(self.S, n) for n in self.lengths or (self.S_k,) * self.batch]
        return sum(visible_pairs(q, k, self.causal, self.window) for q, k in each)

    @property
    def operations(self) -> float:
        return 2.0 * self.heads * (self.D + self.width) * self.pairs()

    @property
    def bytes(self) -> float:
        """Of q, k, v and the result, once each."""
        rows = sum(self.packed) or self.batch * self.S
        keys = sum(self.packed) or sum(self.lengths) or self.batch * self.S_k
        columns = rows * self.heads * (self.D + self.width) + keys * self.of_keys * (
            self.D + self.width
        )
        return 2.0 * columns

    def shapes(self) -> dict[str, tuple[int, ...]]:
        lead = (sum(self.packed),) if self.packed else (self.batch, self.S)
        keys = lead if self.packed else (self.batch, self.S_k)
        return {
            "q": (*lead, self.heads, self.D),
            "k": (*keys, self.of_keys, self.D),
            "v": (*keys, self.of_keys, self.width),
            "out": (*lead, self.heads, self.width),
            "lse": (self.heads, *lead) if self.packed else (self.batch, self.heads, self.S),
        }

    def descriptor(self, arrays: Mapping[str, Any], out: Any, lse: Any) -> Descriptor:
        """Over arrays by operand."""
        options: dict[str, Any] = {
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
        }
        options |= {
            n: arrays[n]
            for n in ("sinks", "kv_lengths", "cu_seqlens_q", "cu_seqlens_k")
            if n in arrays
        }
        if self.packed:
            options |= {"max_seqlen_q": max(self.packed), "max_seqlen_k": max(self.packed)}
        else:
            options["layout"] = "bshd"
        return ks.Attention.from_arrays(arrays["q"], arrays["k"], arrays["v"], out, lse, **options)

    def arrays(self, make: Make, offsets: Any) -> dict[str, Any]:
        """Operands but for the results; ``offsets(numbers)``: int32."""
        shapes = self.shapes()
        operands = {n: make(shapes[n], self.dtype) for n in "qkv"}
        if self.sinks:
            operands["sinks"] = make((self.heads,), "float32")
        if self.lengths:
            operands["kv_lengths"] = offsets(self.lengths)
        if self.packed:
            starts = (0, *itertools.accumulate(self.packed))
            operands |= {"cu_seqlens_q": offsets(starts), "cu_seqlens_k": offsets(starts)}
        return operands

    def planned(self, session: Session) -> Iterable[Descriptor]:
        for row in filter(None, (self, self.without)):
            arrays = row.arrays(session.phantom, lambda n: session.phantom((len(n),), "int32"))
            shapes = row.shapes()
            yield row.descriptor(
                arrays,
                session.phantom(shapes["out"], row.dtype),
                session.phantom(shapes["lse"], "float32"),
            )

    def measure(self, session: Session) -> Record:
        record = Record(self.suite, self.name, self.operations, self.bytes, self.least)
        return compared(record, self.prepare(session), session)

    def prepare(self, session: Session) -> Prepared:
        arrays = self.arrays(
            session.random, lambda n: torch.tensor(n, dtype=torch.int32, device=session.device)
        )
        hardened(self.scores, arrays["q"], arrays["k"])
        shapes = self.shapes()
        prepared = session.prepared(self.dtype, lambda: Judge(self, arrays))

        def results() -> tuple[torch.Tensor, torch.Tensor]:
            return session.poisoned(shapes["out"], self.dtype), session.poisoned(
                shapes["lse"], "float32"
            )

        prepared.ours(
            session,
            lambda outputs: self.descriptor(arrays, *outputs),
            results,
            lambda outputs: outputs[0],
        )
        if self.without is not None:
            prepared.add(
                session,
                lambda outputs: self.plain.descriptor({n: arrays[n] for n in "qkv"}, *outputs),
                results,
                lambda outputs: outputs[0],
                "ours without",
                WITHOUT,
            )
            prepared.contestants[-1].result = None  # it computes something else
        self._flash_attention_3(prepared, arrays, session)
        if not self.scores:  # those are held to FlashAttention-3 alone
            self._torch_peers(prepared, arrays)
        return prepared

    def _flash_attention_3(
        self, prepared: Prepared, arrays: Mapping[str, Any], session: Session
    ) -> None:
        module = flash_attention_3()
        if isinstance(module, str) or self.sinks:
            prepared.refused["FA3"] = module if isinstance(module, str) else "it has no sinks"
            return
        out = session.poisoned(self.shapes()["out"], self.dtype)
        options: dict[str, Any] = {"causal": self.causal, "out": out}
        if self.few:  # it splits keys by a heuristic of its own
            options["num_splits"] = 0
        if self.window is not None:
            options["window"] = tuple(-1 if x is None else x for x in self.window)
        if self.softcap is not None:
            options["softcap"] = self.softcap
        if self.lengths:
            options["seqused_k"] = arrays["kv_lengths"]
        if self.packed:
            options |= {n: arrays[n] for n in ("cu_seqlens_q", "cu_seqlens_k")}
            options |= {"max_seqlen_q": max(self.packed), "max_seqlen_k": max(self.packed)}
        forward, q, k, v = module.fa3_fwd, arrays["q"], arrays["k"], arrays["v"]
        prepared.peer("FA3", lambda: forward(q, k, v, **options), lambda x: x[0])

    def _torch_peers(self, prepared: Prepared, arrays: Mapping[str, Any]) -> None:
        if self.plain != self:
            prepared.refused |= dict.fromkeys(TORCH_PEERS, "torch's SDPA has no such option")
            return
        if self.causal and self.keys:
            prepared.refused |= dict.fromkeys(
                TORCH_PEERS, "its causal mask is aligned to the first"
            )
            return
        q, k, v = (arrays[n].transpose(1, 2) for n in "qkv")
        grouped = {"enable_gqa": True} if self.of_keys != self.heads else {}

        def run() -> torch.Tensor:
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=self.causal, **grouped
            )

        for name, backend in TORCH_PEERS.items():

            def only(backend: Any = backend) -> AbstractContextManager[None]:
                selected: AbstractContextManager[None] = sdpa_kernel(backend)
                return selected

            prepared.peer(name, run, lambda x: x.transpose(1, 2), around=only)


def visible_pairs(
    q: int, k: int, causal: bool, window: tuple[int | None, int | None] | None
) -> float:
    """Queries times the keys that each sees; a causal mask over as many keys as queries counts half
    of them."""
    if window is None:
        if not causal:
            return float(q * k)
        return q * k / 2 if q == k else float(np.clip(np.arange(q) + k - q + 1, 0, k).sum())
    left, right = window
    middle = np.arange(q) + k - q
    last = np.minimum(middle + (k if right is None else right), k - 1)
    if causal:
        last = np.minimum(last, middle)
    first = np.maximum(middle - (k if left is None else left), 0)
    return float(np.maximum(last - first + 1, 0).sum())


def hardened(kind: str, q: torch.Tensor, k: torch.Tensor) -> None:
    """Scores that defeat a softmax with a fixed reference, by one column of q and k: a first key
    that outweighs the others; scores that fall or rise by 200 along the keys; a jump of 300 after
    two fifths of them."""
    if not kind:
        return
    d, keys = q.shape[-1], k.shape[1]
    along = torch.linspace(0, 1, keys, device=k.device)
    expected = {
        "sink": 40.0 * (along == 0),
        "falling": 200 * (1 - along),
        "rising": 200 * along,
        "jump": 300.0 * (along < 0.4),
    }[kind]
    q[..., 0] = 16.0
    k[..., 0] = (expected * math.sqrt(d) / 16).to(k.dtype)[None, :, None]


class Judge:
    """Some queries of the first head of the first entry and of the last head of the last, in
    float64."""

    def __init__(self, row: AttentionRow, arrays: Mapping[str, Any]) -> None:
        self._row, self._parts = row, []
        sinks = host(arrays["sinks"]) if row.sinks else None
        starts = (0, *itertools.accumulate(row.packed))
        for b, h in {(0, 0), ((len(row.packed) or row.batch) - 1, row.heads - 1)}:
            g = h * row.of_keys // row.heads
            rows: Any = (slice(starts[b], starts[b + 1]),) if row.packed else (b, slice(None))
            place = (*rows, h)
            q, k, v = arrays["q"][place], arrays["k"][(*rows, g)], arrays["v"][(*rows, g)]
            if row.lengths:
                k, v = k[: row.lengths[b]], v[: row.lengths[b]]
            host_arrays = [host(x)[None, None] for x in (q, k, v)]
            most = min(max(JUDGED_ELEMENTS // (len(k) * (row.D + row.width)), 4), JUDGED_ROWS)
            numbers = formulas.sample_rows(len(q), most)
            variant = formulas.Variant(
                window=row.window or (None, None),
                softcap=row.softcap,
                sinks=None if sinks is None else sinks[h : h + 1],
            )
            want = formulas.attention(
                host_arrays[0],
                host_arrays[1],
                host_arrays[2],
                row.causal,
                row.D**-0.5,
                numbers,
                variant,
            )
            self._parts.append(Part(place, len(k), want, numbers))

    def __call__(self, result: Any) -> Judged:
        return judged(result, self._parts, self._row.D, self._row.dtype)

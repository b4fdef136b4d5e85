"""Attention's forward with scores and masks beyond a product and a band: options of ours, and
functions as users write them, beside FlexAttention (compiled), cuDNN and torch's memory-efficient
attention, over [B, H, S, D].

Functions are given to ours as they are given to FlexAttention. Where an option of ours says the
same, it is a contestant of its own, as is the attention without the row's scores and masks; packed
rows are, where a mask is of documents. All write the log-sum-exp but torch's peers of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import kernelseam as ks
import numpy as np
import torch
import torch.nn.functional as functional
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.expressions.scores import score_expression
from kernelseam.oracle import formulas
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.comparing.results import WITHOUT, Record
from benchmarks.comparing.rows import Judged, Part, Prepared, Session, compared, host, judged
from benchmarks.comparing.score_variations import VARIATIONS, Arrays, Extents, Mod, Variation

SDPA = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
JUDGED_ROWS = 8


@dataclass(frozen=True)
class ScoreRow:
    variation: str
    batch: int = 4
    heads: int = 16
    S: int = 4096
    D: int = 128
    dtype: str = "bfloat16"
    suite: str = "attention-scores"

    @property
    def name(self) -> str:
        return f"B{self.batch} H{self.heads} S{self.S} D{self.D} {self.variation}"

    @property
    def of(self) -> Variation:
        return VARIATIONS[self.variation]

    @property
    def extents(self) -> Extents:
        return Extents(self.batch, self.heads, self.S)

    @property
    def operations(self) -> float:
        """Of all pairs, or of a causal mask's half."""
        pairs = self.S * self.S / (2 if self.of.causal else 1)
        return 4.0 * self.batch * self.heads * self.D * pairs

    @property
    def bytes(self) -> float:
        """Of q, k, v and the result, once each."""
        return 8.0 * self.batch * self.heads * self.S * self.D

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.S, self.D

    def descriptor(
        self, arrays: Arrays, options: Mapping[str, Any], out: Any, lse: Any
    ) -> Descriptor:
        return ks.Attention.from_arrays(arrays["q"], arrays["k"], arrays["v"], out, lse, **options)

    def packed(self, arrays: Arrays, lengths: Any, most: int, out: Any, lse: Any) -> Descriptor:
        """The documents of the one entry as sequences, over the same memory."""
        q, k, v, result = (x[0].transpose(0, 1) for x in (*(arrays[n] for n in "qkv"), out))
        packed: dict[str, Any] = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
        packed |= {"max_seqlen_q": most, "max_seqlen_k": most, "causal": self.of.causal}
        return ks.Attention.from_arrays(q, k, v, result, lse[0], **packed)

    def ours(self, arrays: Arrays) -> dict[str, dict[str, Any]]:
        """Options of ours by contestant, the row's own first."""
        v = self.of
        option = v.options(arrays) if v.options is not None else None
        result: dict[str, dict[str, Any]] = {}
        if v.written:
            result["ours"] = {"expression": score_expression(*v.mods(arrays, torch))}
        if option is not None:
            result["ours, the option" if v.written else "ours"] = option
        causal = {"causal": v.causal}
        if causal not in result.values():
            result["ours without"] = causal
        return result

    def planned(self, session: Session) -> Iterable[Descriptor]:
        """Functions capture what is there: those arrays are small."""

        def given(x: Any) -> torch.Tensor:
            return torch.as_tensor(x, device=session.device)

        make, shape = session.phantom, self.shape
        arrays = {n: make(shape, self.dtype) for n in "qkv"} | self.of.arrays(
            self.extents, make, given
        )
        out, lse = make(shape, self.dtype), make(shape[:3], "float32")
        for options in self.ours(arrays).values():
            yield self.descriptor(arrays, options, out, lse)

    def measure(self, session: Session) -> Record:
        least = self.of.least
        record = Record(self.suite, self.name, self.operations, self.bytes, least)
        return compared(record, self.prepare(session), session)

    def prepare(self, session: Session) -> Prepared:
        def given(x: Any) -> torch.Tensor:
            return torch.as_tensor(x, device=session.device)

        arrays = {n: session.random(self.shape, self.dtype) for n in "qkv"}
        arrays |= self.of.arrays(self.extents, session.random, given)
        prepared = session.prepared(self.dtype, lambda: Judge(self, arrays))
        prepared.keep = arrays

        def results() -> tuple[torch.Tensor, torch.Tensor]:
            out = session.poisoned(self.shape, self.dtype)
            return out, session.poisoned(self.shape[:3], "float32")

        for name, options in self.ours(arrays).items():

            def described(
                outputs: tuple[Any, Any], options: dict[str, Any] = options
            ) -> Descriptor:
                return self.descriptor(arrays, options, *outputs)

            if name == "ours":
                prepared.ours(session, described, results, lambda outputs: outputs[0])
                continue
            prepared.add(session, described, results, lambda outputs: outputs[0], name, WITHOUT)
            if name == "ours without":
                prepared.contestants[-1].result = None  # it computes something else
        if "starts" in arrays:
            most = int(arrays["starts"].diff().max())
            prepared.add(
                session,
                lambda outputs: self.packed(arrays, arrays["starts"], most, *outputs),
                results,
                lambda outputs: outputs[0],
                "ours, packed",
                WITHOUT,
            )
        if session.peers:
            self._flex(prepared, arrays, session)
            self._sdpa(prepared, arrays)
        return prepared

    def _flex(self, prepared: Prepared, arrays: Arrays, session: Session) -> None:
        q, k, v = (arrays[n] for n in "qkv")
        mods = self.of.mods(arrays, torch)
        try:
            from torch.nn.attention.flex_attention import create_block_mask

            mask = None
            if mods.mask is not None:
                axes = (
                    self.batch if self.of.by_entry else None,
                    self.heads if self.of.by_head else None,
                )
                mask = create_block_mask(mods.mask, *axes, self.S, self.S, device=session.device)
            flex = compiled_flex()
        except Exception as e:  # a torch without it, or without Triton
            prepared.refused["Flex"] = f"{type(e).__name__}: {e}".splitlines()[0][:200]
            return
        prepared.peer("Flex", lambda: flex(q, k, v, score_mod=mods.score, block_mask=mask))

    def _sdpa(self, prepared: Prepared, arrays: Arrays) -> None:
        plane = arrays.get("mask", arrays.get("bias"))
        if plane is None or self.of.causal:
            prepared.refused |= dict.fromkeys(SDPA, "it has no such mask")
            return
        q, k, v = (arrays[n] for n in "qkv")
        plane = plane.expand(*self.shape[:3], self.S)

        def run() -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=plane)

        for name, backend in SDPA.items():

            def only(backend: Any = backend) -> AbstractContextManager[None]:
                selected: AbstractContextManager[None] = sdpa_kernel(backend)
                return selected

            prepared.peer(name, run, around=only)


@cache
def compiled_flex() -> Callable[..., torch.Tensor]:
    """FlexAttention as its page says to use it."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.cache_size_limit = 256
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled


class Judge:
    """Some queries of the first head of the first entry and of the last head of the last, in
    float64."""

    def __init__(self, row: ScoreRow, arrays: Arrays) -> None:
        self._row, self._parts = row, []
        for b, h in {(0, 0), (row.batch - 1, row.heads - 1)}:
            q, k, v = (host(arrays[n][b, h])[None, None] for n in "qkv")
            numbers = formulas.sample_rows(row.S, JUDGED_ROWS)
            known = {n: _of_head(x, b, h) for n, x in arrays.items() if n not in ("q", "k", "v")}
            score, mask = (_placed(mod, b, h) for mod in row.of.mods(known, np))
            variant = formulas.Variant(score_mod=score, mask_mod=mask)
            want = formulas.attention(q, k, v, False, row.D**-0.5, numbers, variant)
            self._parts.append(Part((b, h), row.S, want, numbers))

    def __call__(self, result: Any) -> Judged:
        return judged(result, self._parts, self._row.D, self._row.dtype)


def _of_head(x: Any, b: int, h: int) -> Any:
    """An array as the judge's functions capture it: of a plane, the head's."""
    if x.dim() == 4:
        x = x[b % x.shape[0], h % x.shape[1]][None, None]
    array = host(x)
    return array if array.dtype.kind in "bi" else array.astype(np.float64)


def _placed(mod: Mod | None, b: int, h: int) -> Mod | None:
    """The function of the head that the judge looks at, which counts as the first."""
    if mod is None:
        return None
    return lambda *x: mod(*x[:-4], b, h, *x[-2:])


def score_rows() -> list[ScoreRow]:
    """One problem of each; documents in one long sequence; biases and masks of other head dims."""
    long = ScoreRow("", batch=1, S=16384)
    rows = [
        replace(long, variation=n) if "documents" in n and "mask" not in n else ScoreRow(n)
        for n in VARIATIONS
    ]
    return [
        *rows,
        *(ScoreRow(n, D=64) for n in ("bias [1, H, S, S]", "mask random", "alibi causal")),
    ]

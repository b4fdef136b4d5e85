"""Attention's gradients beside torch's FlashAttention-2 and cuDNN and beside FlashAttention-3, on
the same memory: [B, H, S, D].

Ours twice: in order, the same bits every time, and in any order, where an arch has a way with
atomics. Operations are
2.5 times the forward's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import kernelseam as ks
import torch
import torch.nn.functional as functional
from kernelseam.descriptors.common.protocol import Descriptor
from torch.nn.attention import sdpa_kernel

from benchmarks.comparing.attention import TORCH_PEERS, flash_attention_3, visible_pairs
from benchmarks.comparing.results import OURS, Record
from benchmarks.comparing.rows import PEERS_DIFFER, Judged, Prepared, Session, apart, compared

ANY_ORDER = "ours, any order"
GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class BackwardRow:
    """``kv_heads``: as many as heads, where it is 0."""

    batch: int
    heads: int
    S: int
    D: int
    causal: bool = False
    dtype: str = "bfloat16"
    kv_heads: int = 0
    suite: str = "backward"
    least: float = 1.0

    @property
    def name(self) -> str:
        grouped = f"/{self.kv_heads}" * bool(self.kv_heads)
        return f"B{self.batch} H{self.heads}{grouped} S{self.S} D{self.D}" + " causal" * self.causal

    @property
    def operations(self) -> float:
        return (
            10.0
            * self.batch
            * self.heads
            * self.D
            * visible_pairs(self.S, self.S, self.causal, None)
        )

    @property
    def bytes(self) -> float:
        """Of q, k, v, out, dout and the gradients, once each."""
        heads = self.heads + (self.kv_heads or self.heads)
        return 4 * 2.0 * self.batch * heads * self.S * self.D

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every operand."""
        kv_heads = self.kv_heads or self.heads
        heads = {
            **dict.fromkeys(("q", "out", "dout", "dq"), self.heads),
            **dict.fromkeys(("k", "v", "dk", "dv"), kv_heads),
        }
        return {name: (self.batch, n, self.S, self.D) for name, n in heads.items()}

    def parted(self, gradients: torch.Tensor) -> dict[str, torch.Tensor]:
        """dq, dk and dv of what has their elements one after the other."""
        shapes = [self.shapes[n] for n in GRADIENTS]
        each = gradients.split([math.prod(s) for s in shapes])
        return {n: x.view(s) for n, x, s in zip(GRADIENTS, each, shapes, strict=True)}

    @property
    def elements(self) -> int:
        """Of all gradients."""
        return sum(math.prod(self.shapes[n]) for n in GRADIENTS)

    def forward(self, arrays: Mapping[str, Any]) -> ks.Attention:
        return ks.Attention.from_arrays(
            *(arrays[n] for n in ("q", "k", "v", "out", "lse")), causal=self.causal
        )

    def descriptor(
        self, arrays: Mapping[str, Any], gradients: Mapping[str, Any], deterministic: bool
    ) -> Descriptor:
        return ks.AttentionBwd(
            forward=self.forward(arrays),
            dout=arrays["dout"],
            **gradients,
            deterministic=deterministic,
        )

    def planned(self, session: Session) -> Iterable[Descriptor]:
        arrays = {
            n: session.phantom(self.shapes[n], self.dtype) for n in ("q", "k", "v", "out", "dout")
        }
        arrays["lse"] = session.phantom(self.shapes["q"][:3], "float32")
        yield self.forward(arrays)
        for deterministic in (True, False):
            gradients = {n: session.phantom(self.shapes[n], self.dtype) for n in GRADIENTS}
            yield self.descriptor(arrays, gradients, deterministic)

    def measure(self, session: Session) -> Record:
        record = Record(self.suite, self.name, self.operations, self.bytes, self.least)
        return compared(record, self.prepare(session), session)

    def prepare(self, session: Session) -> Prepared:
        arrays: dict[str, Any] = {
            n: session.random(self.shapes[n], self.dtype) for n in ("q", "k", "v", "dout")
        }
        arrays["out"] = session.poisoned(self.shapes["out"], self.dtype)
        arrays["lse"] = session.poisoned(self.shapes["q"][:3], "float32")
        ks.plan(self.forward(arrays), device=session.target()).bind()()
        session.synchronize()
        prepared = session.prepared(self.dtype, lambda: Judge(self, arrays))

        def result() -> torch.Tensor:
            return session.poisoned((self.elements,), self.dtype)

        def way(deterministic: bool) -> Any:
            return lambda outputs: self.descriptor(arrays, self.parted(outputs), deterministic)

        prepared.ours(session, way(True), result)
        if not session.peers:
            return prepared
        prepared.add(
            session, way(False), result, lambda outputs: outputs, ANY_ORDER, OURS
        ).repeats = False
        self._torch_peers(prepared, arrays)
        self._flash_attention_3(prepared, arrays)
        return prepared

    def _torch_peers(self, prepared: Prepared, arrays: Mapping[str, Any]) -> None:
        for name, backend in TORCH_PEERS.items():
            q, k, v = inputs = tuple(arrays[n].detach().clone().requires_grad_() for n in "qkv")
            try:
                with sdpa_kernel(backend), torch.enable_grad():
                    out = functional.scaled_dot_product_attention(
                        q, k, v, is_causal=self.causal, enable_gqa=bool(self.kv_heads)
                    )
            except RuntimeError as e:  # no kernel
                prepared.refused[name] = str(e).strip().splitlines()[0][:200]
                continue

            def run(out: Any = out, inputs: Any = inputs) -> Any:
                return torch.autograd.grad(out, inputs, arrays["dout"], retain_graph=True)

            prepared.peer(name, run, _joined)

    def _flash_attention_3(self, prepared: Prepared, arrays: Mapping[str, Any]) -> None:
        module = flash_attention_3()
        if isinstance(module, str) or not hasattr(module, "fa3_bwd"):
            prepared.refused["FA3"] = (
                module if isinstance(module, str) else "flash_attn_interface has no fa3_bwd"
            )
            return
        dout, q, k, v, out = (arrays[n].transpose(1, 2) for n in ("dout", "q", "k", "v", "out"))
        gradients = torch.empty(self.elements, dtype=arrays["q"].dtype, device=q.device)
        dq, dk, dv = (x.transpose(1, 2) for x in self.parted(gradients).values())

        def run() -> torch.Tensor:
            module.fa3_bwd(
                dout, q, k, v, out, arrays["lse"], causal=self.causal, dq=dq, dk=dk, dv=dv
            )
            return gradients

        prepared.peer("FA3", run)


def _joined(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.flatten() for x in gradients])


class Judge:
    """The first KV head of the first entry and the last of the last, with their heads, in float64
    on the device: the largest error of the three gradients, ‖x − float64‖ / ‖float64‖, over what
    peers may differ."""

    def __init__(self, row: BackwardRow, arrays: Mapping[str, Any]) -> None:
        self._row = row
        self._parts: list[tuple[str, int, int, torch.Tensor]] = []
        kv_heads = row.kv_heads or row.heads
        group = row.heads // kv_heads
        for entry, kv_head in sorted({(0, 0), (row.batch - 1, kv_heads - 1)}):
            k, v = (arrays[n][entry, kv_head].double() for n in ("k", "v"))
            sums = torch.zeros_like(k), torch.zeros_like(v)
            for head in range(kv_head * group, (kv_head + 1) * group):
                q, dout = (arrays[n][entry, head].double() for n in ("q", "dout"))
                dq, *more = gradients(q, k, v, dout, row.causal)
                for total, x in zip(sums, more, strict=True):
                    total += x
                self._parts.append(("dq", entry, head, dq))
            for name, total in zip(("dk", "dv"), sums, strict=True):
                self._parts.append((name, entry, kv_head, total))

    def __call__(self, result: Any) -> Judged:
        parted = self._row.parted(result)
        each = {
            f"{name}[{entry}, {head}]": apart(parted[name][entry, head], reference)
            for name, entry, head, reference in self._parts
        }
        worst = max(each, key=lambda n: float("inf") if each[n] != each[n] else each[n])
        return Judged(each[worst], each[worst] / PEERS_DIFFER[self._row.dtype], f"{worst} is off")


def gradients(
    q: Any, k: Any, v: Any, dout: Any, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of one head, [S, D] each, by torch in the inputs' dtype."""
    inputs = [x[None, None].detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal)
    dq, dk, dv = (x[0, 0] for x in torch.autograd.grad(out, inputs, dout[None, None]))
    return dq, dk, dv


def backward_rows() -> list[BackwardRow]:
    long = [
        BackwardRow(4, heads, 4096, D, causal)
        for D, heads in ((128, 16), (64, 32), (256, 8), (96, 16))
        for causal in (False, True)
    ]
    short = [
        BackwardRow(batch, heads, S, D, causal, dtype)
        for batch, heads, S, D, dtype in (
            (16, 16, 1024, 128, "bfloat16"),
            (32, 12, 512, 64, "float16"),
        )
        for causal in (False, True)
    ]
    grouped = [BackwardRow(4, 32, 4096, 128, causal, kv_heads=8) for causal in (False, True)]
    return [*long, *short, *grouped]

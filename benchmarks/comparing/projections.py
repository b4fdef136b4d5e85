"""Projections beside torch's linear (cuBLASLt), forward and backward.

torch makes q, k and v by one linear and leaves them token-major in one array; ours splits them into
heads, and where the row says so turns them, for which torch takes operations of its own. A linear's
gradients are two products and a sum over rows; with the residual torch takes linear and an
addition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import kernelseam as ks
import numpy as np
import torch
import torch.nn.functional as functional
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.dtypes import DType
from kernelseam.oracle import check
from kernelseam.oracle import projections as oracle

from benchmarks.comparing.results import Record
from benchmarks.comparing.rows import Judged, Prepared, Session, compared, host, relative

JUDGED = 32
"""Tokens whose results are held against float64; of a weight's gradient, so many columns."""
TOKENS = (16384, 1024, 512, 256, 64)
TORCH = "torch linear"
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class ProjectionRow:
    """``kind``: one of KINDS."""

    kind: str
    tokens: int
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    D: int = 128
    dtype: str = "bfloat16"
    suite: str = "projections"
    least: float = 1.0

    @property
    def columns(self) -> int:
        """Of q, k and v, or of the attention's result."""
        return (self.heads + 2 * self.kv_heads * self.kind.startswith("qkv")) * self.D

    @property
    def name(self) -> str:
        ends = (self.hidden, self.columns)
        if self.kind.startswith("output"):
            ends = (self.columns, self.hidden)
        return f"{self.kind} {self.tokens}×{ends[0]}→{ends[1]}"

    @property
    def backward(self) -> bool:
        return self.kind.endswith("backward")

    @property
    def operations(self) -> float:
        return 2.0 * self.tokens * self.hidden * self.columns * (1 + self.backward)

    @property
    def bytes(self) -> float:
        """Of operands and results, once each."""
        inputs, results = self.shapes()
        return float(
            DType.of(self.dtype).itemsize
            * sum(math.prod(s) for s in (*inputs.values(), *results.values()))
        )

    def shapes(self) -> tuple[Shapes, Shapes]:
        """Of operands and of results."""
        x, rows = (1, self.tokens, self.hidden), self.tokens
        q, k = (1, self.heads, rows, self.D), (1, self.kv_heads, rows, self.D)
        if self.kind.startswith("qkv"):
            w, heads = (self.columns, self.hidden), {"q": q, "k": k, "v": k}
            if self.backward:
                return (
                    {**{f"d{n}": s for n, s in heads.items()}, "input": x, "weight": w},
                    {"d_input": x, "d_weight": w, "d_bias": w[:1]},
                )
            return {"input": x, "weight": w, "bias": w[:1]}, dict(heads)
        w = (self.hidden, self.columns)
        if self.backward:
            return (
                {"d_output": x, "attn_out": q, "weight": w},
                {"d_attn_out": q, "d_weight": w, "d_bias": w[:1]},
            )
        attn = (1, rows, self.heads, self.D) if self.kind == "output token-major" else q
        return {"attn_out": attn, "weight": w, "bias": w[:1], "residual": x}, {"out": x}

    def descriptor(self, arrays: Mapping[str, Any], results: Mapping[str, Any]) -> Descriptor:
        given, outputs = dict(arrays), dict(results)
        if self.kind == "qkv backward":
            dq, dk, dv = (given.pop(f"d{n}") for n in "qkv")
            return ks.QkvProjectionBwd.from_arrays(dq, dk, dv, **given, **outputs)
        if self.kind == "output backward":
            return ks.OutputProjectionBwd.from_arrays(given.pop("d_output"), **given, **outputs)
        if self.kind.startswith("qkv"):
            return ks.QkvProjection.from_arrays(
                given.pop("input"), given.pop("weight"), *(outputs[n] for n in "qkv"), **given
            )
        layout = "bshd" if self.kind == "output token-major" else "bhsd"
        return ks.OutputProjection.from_arrays(
            given.pop("attn_out"), given.pop("weight"), outputs["out"], layout=layout, **given
        )

    def planned(self, session: Session) -> Iterable[Descriptor]:
        inputs, results = (
            {n: session.phantom(s, self.dtype) for n, s in shapes.items()}
            for shapes in self.shapes()
        )
        if self.kind == "qkv turned":
            inputs |= {
                n: session.phantom((self.tokens, self.D // 2), "float32") for n in ("cos", "sin")
            }
        yield self.descriptor(inputs, results)

    def measure(self, session: Session) -> Record:
        record = Record(self.suite, self.name, self.operations, self.bytes, self.least)
        return compared(record, self.prepare(session), session)

    def prepare(self, session: Session) -> Prepared:
        shapes, outputs = self.shapes()
        arrays = {n: session.random(s, self.dtype) for n, s in shapes.items()}
        if self.kind == "qkv turned":
            angles = 6.28 * torch.rand(self.tokens, self.D // 2, device=session.device)
            arrays |= {"cos": angles.cos(), "sin": angles.sin()}
        prepared = session.prepared(self.dtype, lambda: Judge(self, arrays))
        size = sum(map(math.prod, outputs.values()))
        prepared.ours(
            session,
            lambda flat: self.descriptor(arrays, self.split(flat)),
            lambda: session.poisoned((size,), self.dtype),
        )
        run, flat = PEERS[self.kind](self, arrays)
        prepared.peer(TORCH, run, lambda x: torch.cat([t.reshape(-1) for t in flat(x)]))
        return prepared

    def split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """One memory as results by name."""
        shapes = self.shapes()[1]
        parts = flat.split([math.prod(s) for s in shapes.values()])
        return {n: part.view(s) for (n, s), part in zip(shapes.items(), parts, strict=True)}


Peer = tuple[Callable[[], Any], Callable[[Any], Iterable[torch.Tensor]]]
"""What is timed, and how what it returns becomes results in order."""


def _qkv(row: ProjectionRow, arrays: Mapping[str, Any]) -> Peer:
    x, w, b = (arrays[n] for n in ("input", "weight", "bias"))

    def split(y: torch.Tensor) -> Any:
        return (
            y.unflatten(2, (-1, row.D))
            .transpose(1, 2)
            .split([row.heads, row.kv_heads, row.kv_heads], 1)
        )

    return lambda: functional.linear(x, w, b), split


def _turned(row: ProjectionRow, arrays: Mapping[str, Any]) -> Peer:
    x, w, b, cos, sin = (arrays[n] for n in ("input", "weight", "bias", "cos", "sin"))
    turning = row.heads + row.kv_heads

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        heads = functional.linear(x, w, b).unflatten(2, (-1, row.D)).transpose(1, 2)
        low, high = heads[:, :turning].float().chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype), heads[
            :, turning:
        ]

    return run, lambda outputs: (*outputs[0].split([row.heads, row.kv_heads], 1), outputs[1])


def _output(row: ProjectionRow, arrays: Mapping[str, Any]) -> Peer:
    attn, w, b, residual = (arrays[n] for n in ("attn_out", "weight", "bias", "residual"))
    flat = (
        (attn if row.kind == "output token-major" else attn.transpose(1, 2)).flatten(2).contiguous()
    )
    return lambda: functional.linear(flat, w, b) + residual, lambda out: [out]


def _qkv_backward(row: ProjectionRow, arrays: Mapping[str, Any]) -> Peer:
    d = torch.cat([arrays[f"d{n}"] for n in "qkv"], 1).transpose(1, 2).flatten(2).contiguous()[0]
    x, w = arrays["input"][0], arrays["weight"]
    return lambda: (d @ w, d.T @ x, d.sum(0)), lambda outputs: outputs


def _output_backward(row: ProjectionRow, arrays: Mapping[str, Any]) -> Peer:
    attn = arrays["attn_out"].transpose(1, 2).flatten(2).contiguous()[0]
    d, w = arrays["d_output"][0], arrays["weight"]

    def split(gradients: tuple[torch.Tensor, ...]) -> Iterable[torch.Tensor]:
        return gradients[0].unflatten(1, (row.heads, row.D)).transpose(0, 1), *gradients[1:]

    return lambda: (d @ w, d.T @ attn, d.sum(0)), split


PEERS: dict[str, Callable[[ProjectionRow, Mapping[str, Any]], Peer]] = {
    "qkv": _qkv,
    "qkv turned": _turned,
    "output head-major": _output,
    "output token-major": _output,
    "qkv backward": _qkv_backward,
    "output backward": _output_backward,
}
KINDS = tuple(PEERS)


class Judge:
    """Some tokens of every result, some of a weight's gradient and all of a bias's, in float64."""

    def __init__(self, row: ProjectionRow, arrays: Mapping[str, Any]) -> None:
        self._row = row
        rng = np.random.default_rng(0)
        some = {0, row.tokens - 1, *rng.permutation(row.tokens)[:JUDGED].tolist()}
        self._tokens = torch.tensor(sorted(some))
        self._want = self._float64({n: host(self._cut(n, x)) for n, x in arrays.items()}, arrays)

    def _cut(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The tokens, where it has any."""
        if name in ("weight", "bias", "d_weight", "d_bias"):
            return x
        at = self._tokens.to(x.device)
        if name in ("cos", "sin"):
            return x[at]
        token_major = x.ndim == 3 or (name == "attn_out" and self._row.kind == "output token-major")
        return x[:, at] if token_major else x[:, :, at]

    def _float64(self, cut: Mapping[str, Any], arrays: Mapping[str, Any]) -> oracle.Results:
        row = self._row
        if row.kind == "qkv backward":
            gradients = oracle.qkv_projection_bwd(
                cut["dq"], cut["dk"], cut["dv"], None, cut["weight"][None, None]
            )
            # Sums over all tokens: one head of each, and a few columns of the input.
            dq, dk, dv = (host(arrays[f"d{n}"][:, :1]) for n in "qkv")
            x = host(arrays["input"][:, None, :, :JUDGED])
            return {
                "d_input": gradients["d_input"],
                **_sums(oracle.qkv_projection_bwd(dq, dk, dv, x, None)),
            }
        if row.kind == "output backward":
            gradients = oracle.output_projection_bwd(
                cut["d_output"][:, None], None, cut["weight"][None, None], row.heads
            )
            d = host(arrays["d_output"][:, None, :, :JUDGED])
            attn = host(arrays["attn_out"][:, :1])
            return {
                "d_attn_out": gradients["d_attn_out"],
                **_sums(oracle.output_projection_bwd(d, attn, None, 1)),
            }
        if row.kind.startswith("qkv"):
            rotary: dict[str, Any] = {}
            if row.kind == "qkv turned":
                rotary = {"cos": cut["cos"], "sin": cut["sin"], "style": "halves"}
                rotary["positions"] = np.arange(len(self._tokens))[None]
            return oracle.qkv_projection(
                cut["input"], cut["weight"], cut["bias"], row.heads, row.kv_heads, row.D, **rotary
            )
        attn = (
            cut["attn_out"].swapaxes(1, 2) if row.kind == "output token-major" else cut["attn_out"]
        )
        return oracle.output_projection(attn, cut["weight"], cut["bias"], cut["residual"][:, None])

    def _looked_at(self, result: torch.Tensor) -> dict[str, Any]:
        """What of the results was computed in float64, as the oracle has it."""
        row, sampled = self._row, {}
        for name, x in row.split(result).items():
            cut = self._cut(name, x)
            if name in ("d_weight", "d_bias"):
                rows: Any = slice(JUDGED)
                if row.kind == "qkv backward":  # the first head of q, of k and of v
                    starts = (0, row.heads * row.D, (row.heads + row.kv_heads) * row.D)
                    rows = torch.cat([torch.arange(s, s + row.D) for s in starts]).to(x.device)
                columns = JUDGED if row.kind == "qkv backward" else row.D
                cut = x[rows] if name == "d_bias" else x[rows][None, None, :, :columns]
            elif name in ("out", "d_input"):
                cut = cut[:, None]
            sampled[name] = host(cut)
        return sampled

    def __call__(self, result: Any) -> Judged:
        actual = self._looked_at(result)
        verdict = check.projection(self._want, DType.of(self._row.dtype), actual)
        flat = np.concatenate([x.astype(np.float64).reshape(-1) for x in actual.values()])
        want = np.concatenate([self._want[n][0].out.reshape(-1) for n in actual])
        return Judged(relative(flat, want), verdict.worst, verdict.message)


def _sums(results: oracle.Results) -> oracle.Results:
    return {n: results[n] for n in ("d_weight", "d_bias")}


def projection_rows() -> list[ProjectionRow]:
    return [ProjectionRow(kind, tokens) for tokens in TOKENS for kind in KINDS]

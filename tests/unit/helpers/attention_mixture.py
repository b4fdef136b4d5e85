"""Random mixtures of an attention's options and views."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from attention_formula import Array

F32 = np.dtype(np.float32)
KINDS = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), F32, np.dtype(np.float64)]
UNTOUCHED = 77.0


@dataclass
class Mixture:
    """A random problem: its operands in memory full of NaN, and what its formula makes of each
    head."""

    seed: int
    q_views: tuple[str, ...] = ("strided", "packed", "pointers")
    kv_views: tuple[str, ...] = ("strided", "packed", "paged", "pointers")
    fields: dict[str, Any] = field(default_factory=dict)
    pointers: dict[str, list[Array]] = field(default_factory=dict)
    """Rows of each matrix of an operand that is a list."""

    def __post_init__(self) -> None:
        self.rng = rng = np.random.default_rng(self.seed)
        self.q_view, self.kv_view = rng.choice(self.q_views), rng.choice(self.kv_views)
        self.kind = KINDS[rng.integers(4)]
        self.batch, self.kv_heads, self.group = (int(rng.integers(1, most)) for most in (4, 3, 4))
        self.heads = self.kv_heads * self.group
        self.D, self.D_v = int(rng.integers(1, 20)), int(rng.integers(1, 20))
        S_q, S_k = (int(x) for x in rng.choice([1, 3, 9, 17, 40, 60], 2))
        self.fields = {
            "batch": self.batch,
            "num_heads": self.heads,
            "kv_heads": self.kv_heads,
            "S_q": S_q,
            "S_k": S_k,
            "head_dim": self.D,
            "value_dim": self.D_v,
            "dtype": self.kind.name,
            "precision": ("tf32", "tf32x3", None)[self.seed % 3]
            if self.kind.name == "float32"
            else None,
            "scale": float(rng.choice([-0.4, 0.5])),
            "batch_invariant": self.maybe(),
        }
        self.S_q, self.S_k = [S_q] * self.batch, [S_k] * self.batch
        if self.q_view == "packed":
            self.S_q = self.ragged(S_q)
        if self.kv_view == "packed" or self.kv_view == "paged" or self.maybe():
            self.S_k = self.ragged(S_k)
        self.options()
        self.memory()

    def maybe(self, chance: float = 0.5) -> bool:
        return bool(self.rng.random() < chance)

    def ragged(self, most: int) -> list[int]:
        return [
            int(x)
            for x in self.rng.choice([0, most, *self.rng.integers(0, most + 1, 3)], self.batch)
        ]

    def normal(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape).astype(self.kind)

    def options(self) -> None:
        f, rng, S_k = self.fields, self.rng, self.fields["S_k"]
        f["causal"] = self.maybe(0.3)
        if self.maybe(0.4):
            f["window"] = tuple(
                None if self.maybe(0.2) else int(rng.integers(0, S_k + 4)) for _ in range(2)
            )
        if self.maybe(0.3):
            f["prefix_lengths"] = rng.integers(-2, S_k + 4, self.batch).astype(np.int32)
        if self.maybe(0.3):
            f["softcap"] = float(rng.choice([0.5, 3.0]))
        if self.maybe(0.3):
            f["sinks"] = rng.choice([-np.inf, -1, 0, 2], self.heads).astype(np.float32)
        if self.maybe(0.3):
            f["alibi_slopes"] = rng.choice([0, 0.03, 0.25], (self.batch, self.heads)).astype(
                np.float32
            )
        if self.maybe(0.4):
            f["mask"], strides = self.plane(lambda shape: rng.random(shape) < 0.7)
            f |= {f"stride_mask_{axis}": s for axis, s in strides.items()}
        if self.maybe(0.4):
            kind = F32 if self.maybe() else self.kind
            f["bias"], strides = self.plane(lambda shape: rng.standard_normal(shape).astype(kind))
            f |= {f"stride_bias_{axis}": s for axis, s in strides.items()}

    def plane(self, made: Callable[[tuple[int, ...]], Array]) -> tuple[Array, dict[str, int]]:
        """An array that repeats along some axes, transposed or with gaps, and its strides by
        axis."""
        whole = (self.batch, self.heads, self.fields["S_q"], self.fields["S_k"])
        shape = [1 if self.maybe(0.3) else n for n in whole]
        order = self.rng.permutation(4)
        x = made(tuple(shape[a] + 1 for a in order))[:-1, :-1, :-1, :-1].transpose(
            np.argsort(order)
        )
        strides = [0 if n == 1 else s // x.itemsize for n, s in zip(shape, x.strides, strict=True)]
        return x, dict(zip(("batch", "head", "row", "column"), strides, strict=True))

    def memory(self) -> None:
        f = self.fields
        self.q = [self.normal(self.heads, n, self.D) for n in self.S_q]
        self.k = [self.normal(self.kv_heads, n, self.D) for n in self.S_k]
        self.v = [self.normal(self.kv_heads, n, self.D_v) for n in self.S_k]
        for rows in (*self.q, *self.k, *self.v):  # some of them hidden from some queries
            if rows.size and self.maybe(0.2):
                rows[:, self.rng.integers(rows.shape[1])] = self.rng.choice(
                    [np.nan, np.inf, -np.inf]
                )
        if self.kv_view != "packed" and (self.kv_view == "paged" or set(self.S_k) != {f["S_k"]}):
            f["kv_lengths"] = np.array(self.S_k, np.int32)
        if self.kv_view == "paged":
            size = f["page_size"] = int(self.rng.choice([1, 4, 7, 64]))
            needed = [-(-n // size) for n in self.S_k]
            f["pages"], f["table_width"] = sum(needed) + 2, -(-f["S_k"] // size) + 1
            f["stride_table_row"] = f["table_width"] + 2
            table = self.rng.choice([-5, 2**30], (self.batch, f["table_width"] + 2)).astype(
                np.int32
            )
            free = iter(self.rng.permutation(f["pages"]))
            for row, n in zip(table, needed, strict=True):
                row[:n] = [next(free) for _ in range(n)]
            f["block_table"] = table
        for letter, view, lengths in (("q", self.q_view, self.S_q), ("k", self.kv_view, self.S_k)):
            if view == "packed":
                offsets = np.cumsum([int(self.rng.integers(3)), *lengths]).astype(np.int32)
                f[f"cu_seqlens_{letter}"], f[f"total_{letter}"] = offsets, int(offsets[-1]) + 2
        self.place("q", self.q_view, self.heads, self.D, self.kind, self.q)
        self.place("k", self.kv_view, self.kv_heads, self.D, self.kind, self.k)
        self.place("v", self.kv_view, self.kv_heads, self.D_v, self.kind, self.v)
        kind = F32 if self.maybe(0.3) else self.kind
        f["dtype_out"] = kind.name
        self.place("out", self.q_view, self.heads, self.D_v, kind, None)
        S_q = f["total_q"] if self.q_view == "packed" else f["S_q"]
        f["lse"] = np.full(
            (1 if self.q_view == "packed" else self.batch, self.heads, S_q),
            UNTOUCHED,
            np.promote_types(self.kind, F32),
        )

    def place(
        self, name: str, view: str, heads: int, width: int, kind: Any, entries: list[Array] | None
    ) -> None:
        """Lay rows out as the view has it, NaN (or what is to stay untouched) all around."""
        f = self.fields
        letter = "k" if name[-1] in "kv" else "q"
        empty, room = UNTOUCHED if entries is None else np.nan, width + int(self.rng.integers(3))
        rows = (
            f[f"total_{letter}"]
            if view == "packed"
            else f["page_size"]
            if view == "paged"
            else f[f"S_{letter}"]
        )
        outer = 1 if view == "packed" else f["pages"] if view == "paged" else self.batch
        if view == "pointers":
            self.pointers[name] = [np.full((rows, room), empty, kind) for _ in range(outer * heads)]
            whole = None
        elif self.maybe():
            whole = np.full((outer, heads, rows, room), empty, kind)
        else:
            whole = np.full((outer, rows, heads, room), empty, kind).swapaxes(1, 2)
        if whole is not None:
            f[name] = whole[..., :width]
            steps = [s // whole.itemsize for s in whole.strides]
            f |= {
                f"stride_{name}_{a}": s
                for a, s in zip(("batch", "head", "row"), steps, strict=False)
            }
            if view == "packed":
                del f[f"stride_{name}_batch"]
        for b in range(self.batch):
            for h in range(heads):
                for i, there in enumerate(self.rows(name, view, b, h)):
                    if entries is not None:
                        there[:width] = entries[b][h][i]

    def rows(self, name: str, view: str, b: int, h: int) -> list[Array]:
        """Where each row of one head lies."""
        f, of_keys = self.fields, name[-1] in "kv"
        n = (self.S_k if of_keys else self.S_q)[b]
        if view == "pointers":
            heads = self.kv_heads if of_keys else self.heads
            return list(self.pointers[name][b * heads + h][:n])
        if view == "packed":
            first = f[f"cu_seqlens_{'k' if of_keys else 'q'}"][b]
            return list(f[name][0, h, first : first + n])
        if view == "paged":
            return [
                f[name][f["block_table"][b, j // f["page_size"]], h, j % f["page_size"]]
                for j in range(n)
            ]
        return list(f[name][b, h, :n])

    def formula(self, b: int, h: int) -> dict[str, Any]:
        """The arguments of ``attention_formula.formula`` for one head."""
        f, g = self.fields, h // self.group

        def plane(name: str) -> Array | None:
            x = f.get(name)
            whole = (self.batch, self.heads, f["S_q"], f["S_k"])
            return None if x is None else np.broadcast_to(x, whole)[b, h]

        return {
            "q": self.q[b][h],
            "k": self.k[b][g],
            "v": self.v[b][g],
            "scale": f["scale"],
            "causal": f["causal"],
            "window": f.get("window"),
            "prefix": int(f["prefix_lengths"][b]) if "prefix_lengths" in f else 0,
            "softcap": f.get("softcap"),
            "slope": float(f["alibi_slopes"][b, h]) if "alibi_slopes" in f else 0.0,
            "bias": plane("bias"),
            "mask": plane("mask"),
            "sink": float(f["sinks"][h]) if "sinks" in f else -math.inf,
        }

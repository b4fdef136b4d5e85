"""The operands of an attention, in any view, as the rows of one entry and head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.contract import OperandRule, host_array
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.dtypes import DType
from kernelseam.reference.attention_scores import Scores

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Sequence:
    """An entry of the batch: its queries and keys, and the first row of each in packed memory."""

    S_q: int
    S_k: int
    q_first: int = 0
    k_first: int = 0


class Views:
    """Bound operands. Lengths, offsets, tables and addresses are read at each launch.

    ``rules``: with further operands than the problem's own, gradients with the layouts of q, k, v
    and out.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        pointers: Mapping[str, int],
        rules: Iterable[OperandRule] | None = None,
    ) -> None:
        self.problem = problem
        rules = problem.operands if rules is None else rules
        self.arrays = {r.name: _array(r, pointers.get(r.name, 0)) for r in rules}

    def sequence(self, b: int) -> Sequence:
        p, s = self.problem, self.problem.spec
        S_q, S_k, q_first, k_first = p.S_q, p.S_k, 0, 0
        if s.q_view == "packed":
            q_first, stop = (int(x) for x in self.arrays["cu_seqlens_q"][b : b + 2])
            S_q = stop - q_first
        if s.kv_view == "packed":
            k_first, stop = (int(x) for x in self.arrays["cu_seqlens_k"][b : b + 2])
            S_k = stop - k_first
        if s.lengths:
            S_k = min(max(int(self.arrays["kv_lengths"][b]), 0), S_k)
        return Sequence(S_q, S_k, q_first, k_first)

    def queries(self, name: str, b: int, h: int, own: Sequence) -> Array:
        """q [S_q, D] or out [S_q, D_v] of one query head, or an operand of that layout."""
        view, p = self.problem.spec.q_view, self.problem
        if view == "pointers":
            dtype, width, strides = {
                "q": (p.spec.dtype, p.spec.head_dim, p.q_strides),
                "out": (p.spec.out, p.spec.value_dim, p.out_strides),
            }[name]
            return self._by_address(name, b * p.num_heads + h, (own.S_q, width), strides[2], dtype)
        x: Array = self.arrays[name]
        return (
            x[0, h, own.q_first : own.q_first + own.S_q] if view == "packed" else x[b, h, : own.S_q]
        )

    def lse(self, b: int, h: int, own: Sequence) -> Array | None:
        """[S_q] of one query head."""
        if not self.problem.spec.lse:
            return None
        b = 0 if self.problem.spec.q_view == "packed" else b
        rows: Array = self.arrays["lse"][b, h, own.q_first : own.q_first + own.S_q]
        return rows

    def keys(self, name: str, b: int, g: int, own: Sequence) -> list[Array]:
        """k [S_k, D] or v [S_k, D_v] of one KV head, or an operand of that layout, as a list of
        consecutive pieces: one, or one per page."""
        view, p = self.problem.spec.kv_view, self.problem
        if view == "pointers":
            width, strides = (
                (p.spec.head_dim, p.k_strides) if name == "k" else (p.spec.value_dim, p.v_strides)
            )
            return [
                self._by_address(
                    name, b * p.kv_heads + g, (own.S_k, width), strides[2], p.spec.dtype
                )
            ]
        x = self.arrays[name]
        if view == "paged":
            starts = range(0, own.S_k, p.page_size)
            table = self.arrays["block_table"][b, : len(starts)]
            return [x[page, g, : own.S_k - j] for page, j in zip(table, starts, strict=True)]
        return [
            x[0, g, own.k_first : own.k_first + own.S_k] if view == "packed" else x[b, g, : own.S_k]
        ]

    def query_scales(self, b: int, h: int, own: Sequence) -> Array | None:
        """The scale of each query of one head, [S_q]; None without scales."""
        p, kind = self.problem, self.problem.spec.q_scales
        if kind is None:
            return None
        scales: Array = self.arrays["q_scales"]
        if kind == "heads":
            return np.full(own.S_q, scales[b, h // p.head_group, 0])
        outer = 0 if p.spec.q_view == "packed" else b
        rows: Array = scales[outer, h, (own.q_first + np.arange(own.S_q)) // p.q_scale_block]
        return rows

    def key_scales(self, name: str, b: int, g: int, own: Sequence) -> Array | None:
        """The scale of each key of one KV head, [S_k], or one for all, [1]; None without scales."""
        p, kind = self.problem, self.problem.spec.kv_scales
        if kind is None:
            return None
        outer, row = np.full(1, b), np.zeros(1, np.int64)
        if kind == "blocks":
            row = np.arange(own.S_k)
            if p.spec.kv_view == "paged":
                outer, row = self.arrays["block_table"][b][row // p.page_size], row % p.page_size
            elif p.spec.kv_view == "packed":
                outer, row = np.zeros(1, np.int64), own.k_first + row
        scales: Array = self.arrays[f"{name}_scales"][outer, g, row // max(p.scale_block, 1)]
        return scales

    def scores(self, b: int, h: int, own: Sequence) -> Scores:
        p, s = self.problem, self.problem.spec
        return Scores(
            own.S_q,
            own.S_k,
            p.scale,
            p.left if s.window else None,
            0 if s.causal else p.right if s.window else None,
            min(max(int(self.arrays["prefix_lengths"][b]), 0), own.S_k) if s.prefix else 0,
            p.softcap if s.softcap else 0.0,
            float(self.arrays["alibi_slopes"][b, h]) if s.alibi else 0.0,
            self.arrays["bias"][b, h] if s.bias else None,
            self.arrays["mask"][b, h] if s.mask else None,
            float(self.arrays["sinks"][h]) if s.sinks else -math.inf,
        )

    def _by_address(
        self, name: str, entry: int, shape: tuple[int, int], row: int, dtype: DType
    ) -> Array:
        return host_array(int(self.arrays[f"{name}_ptrs"][entry]), shape, (row, 1), dtype)


def _array(rule: OperandRule, pointer: int) -> Array:
    if rule.dtype is None:
        return host_array(pointer, rule.shape, rule.strides, DType.float64).view(np.uint64)
    return host_array(pointer, rule.shape, rule.strides, rule.dtype)

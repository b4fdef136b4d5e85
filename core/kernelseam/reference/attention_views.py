"""The operands of an attention, in any view, as the rows of a stack of heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.contract import OperandRule, host_array
from kernelseam.descriptors.attention.options import ScoreNumbers
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.descriptors.common.captured import captured
from kernelseam.descriptors.common.options import scalars_of
from kernelseam.dtypes import DType
from kernelseam.expressions.text import structure_of
from kernelseam.frozen import dataclass
from kernelseam.reference.attention_expression import Expression
from kernelseam.reference.attention_scores import Scores
from kernelseam.reference.implementation import operand_arrays

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Stack:
    """KV heads of one entry of the batch, or of several whose lengths are alike; and the first row
    of its queries and keys in packed memory."""

    batch: slice
    heads: slice
    S_q: int
    S_k: int
    q_first: int = 0
    k_first: int = 0


class Rows:
    """q or out of a stack, or an operand of that layout."""

    def __init__(self, parts: Sequence[Array]) -> None:
        """[batch, KV heads, heads of a group, S_q, width]: one part, or one for each head."""
        self._parts = parts

    def block(self, heads: slice, i: int, n: int) -> Iterator[tuple[slice, Array]]:
        """n rows from query i on of some heads of each group, as parts: the place among these
        heads, and its rows."""
        if len(self._parts) == 1:
            yield slice(None), self._parts[0][:, :, heads, i : i + n]
            return
        for at, part in enumerate(self._parts[heads]):
            yield slice(at, at + 1), part[..., i : i + n, :]


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
        self.arrays = operand_arrays(problem.operands if rules is None else rules, pointers)

    def stack(self, batch: slice, heads: slice) -> Stack:
        """Of these entries and KV heads; more than one entry only where lengths are alike."""
        p, s, b = self.problem, self.problem.spec, batch.start
        S_q, S_k, q_first, k_first = p.S_q, p.S_k, 0, 0
        if s.q_view == "packed":
            q_first, stop = (int(x) for x in self.arrays["cu_seqlens_q"][b : b + 2])
            S_q = stop - q_first
        if s.kv_view == "packed":
            k_first, stop = (int(x) for x in self.arrays["cu_seqlens_k"][b : b + 2])
            S_k = stop - k_first
        if s.lengths:
            S_k = min(max(int(self.arrays["kv_lengths"][b]), 0), S_k)
        return Stack(batch, heads, S_q, S_k, q_first, k_first)

    def queries(self, name: str, own: Stack) -> Rows:
        """q, of rows of D, or out, of D_v, or an operand of that layout."""
        view, p = self.problem.spec.q_view, self.problem
        if view == "pointers":
            dtype, width, strides = {
                "q": (p.spec.dtype, p.spec.head_dim, p.q_strides),
                "out": (p.spec.out, p.spec.value_dim, p.out_strides),
            }[name]
            first = own.batch.start * p.num_heads
            return Rows(
                [
                    self._by_address(name, first + h, (own.S_q, width), strides[2], dtype)[None]
                    for h in range(p.num_heads)[self._of_queries(own)]
                ]
            )
        return Rows([self._grouped(self._query_rows(name, own))])

    def lse(self, own: Stack) -> Array | None:
        """[batch, KV heads, group, S_q]"""
        return self._grouped(self._query_rows("lse", own)) if self.problem.spec.lse else None

    def keys(self, name: str, own: Stack) -> list[Array]:
        """k or v, or an operand of that layout, [batch, KV heads, rows, width], as a list of
        consecutive pieces: one, or one per page."""
        view, p = self.problem.spec.kv_view, self.problem
        if view == "pointers":
            width, strides = (
                (p.spec.head_dim, p.k_strides) if name == "k" else (p.spec.value_dim, p.v_strides)
            )
            entry = own.batch.start * p.kv_heads + own.heads.start
            return [self._by_address(name, entry, (own.S_k, width), strides[2], p.spec.dtype)]
        if p.spec.row_scale_block:
            return [self._scaled(name, x) for x in self._pieces("k", own)]
        return self._pieces(name, own)

    def _scaled(self, name: str, rows: Array) -> Array:
        """k or v from rows that have their scales: in float32, rounded to bfloat16."""
        s = self.problem.spec
        assert s.row_scale_block is not None
        v, scales = s.value_dim, s.value_dim // s.row_scale_block
        to = np.empty((*rows.shape[:-1], s.head_dim if name == "k" else v), s.dtype.numpy)
        behind = rows[..., v:].view(np.uint8)
        factors = np.repeat(behind[..., : 4 * scales].view(np.float32), s.row_scale_block, axis=-1)
        to[..., :v] = rows[..., :v].astype(np.float32) * factors
        if name == "k":
            to[..., v:] = behind[..., 4 * scales :].view(s.dtype.numpy)
        return to

    def _pieces(self, name: str, own: Stack) -> list[Array]:
        """The same as they lie in memory."""
        view, p = self.problem.spec.kv_view, self.problem
        x = self.arrays[name]
        if view == "paged":
            starts = range(0, own.S_k, p.page_size)
            table = self.arrays["block_table"][own.batch.start, : len(starts)]
            return [
                x[None, page, own.heads, : own.S_k - j]
                for page, j in zip(table, starts, strict=True)
            ]
        if view == "packed":
            return [x[:, own.heads, own.k_first : own.k_first + own.S_k]]
        return [x[own.batch, own.heads, : own.S_k]]

    def query_scales(self, own: Stack) -> Array | None:
        """The scale of each query, [batch, KV heads, group, S_q], or one of a group's, [batch, KV
        heads, 1, 1]; None without scales."""
        p, kind = self.problem, self.problem.spec.q_scales
        if kind is None:
            return None
        scales: Array = self.arrays["q_scales"]
        if kind == "heads":
            return scales[own.batch, own.heads, :1, None]
        outer = slice(0, 1) if p.spec.q_view == "packed" else own.batch
        blocks = (own.q_first + np.arange(own.S_q)) // p.q_scale_block
        return self._grouped(scales[outer, self._of_queries(own)][:, :, blocks])

    def key_scales(self, name: str, own: Stack) -> Array | None:
        """The scale of each key, [batch, KV heads, S_k], or one of all keys of a head, [batch, KV
        heads, 1]; None without scales."""
        p, kind = self.problem, self.problem.spec.kv_scales
        if kind is None:
            return None
        scales: Array = self.arrays[f"{name}_scales"]
        if kind == "heads":
            return scales[own.batch, own.heads, :1]
        row = np.arange(own.S_k)
        if p.spec.kv_view == "paged":
            page, row = (
                self.arrays["block_table"][own.batch.start][row // p.page_size],
                row % p.page_size,
            )
            return scales[page, own.heads, row // p.scale_block].T[None]
        if p.spec.kv_view == "packed":
            return scales[:, own.heads, (own.k_first + row) // p.scale_block]
        return scales[own.batch, own.heads][:, :, row // p.scale_block]

    def scores(self, own: Stack) -> Scores:
        p, s = self.problem, self.problem.spec
        heads = self._of_queries(own)

        def of_heads(name: str, used: object) -> Array | None:
            return self._grouped(self.arrays[name][own.batch, heads]) if used else None

        return Scores(
            own.S_q,
            own.S_k,
            p.scale,
            left=p.left if s.window else None,
            right=0 if s.causal else p.right if s.window else None,
            prefix=min(max(int(self.arrays[s.prefixes][own.batch.start]), 0), own.S_k)
            if s.prefix
            else 0,
            slopes=self._grouped(self._slopes()[own.batch, heads]) if s.alibi else None,
            bias=of_heads("bias", s.bias),
            mask=of_heads("mask", s.mask),
            sinks=self._grouped(self.arrays["sinks"][None, heads])[0] if s.sinks else None,
            **{n: getattr(p, n) for n in scalars_of(ScoreNumbers) if getattr(s, n)},
            expression=self._expression(own) if s.expression is not None else None,
        )

    def _slopes(self) -> Array:
        """[batch, heads], also where a captured array has them."""
        p, x = self.problem, self.arrays[self.problem.spec.slopes]
        walk = [s * x.itemsize for s in p.alibi_strides]
        return np.lib.stride_tricks.as_strided(x, (p.batch, p.num_heads), walk, writeable=False)

    def _expression(self, own: Stack) -> Expression:
        """The user's functions over the stack's heads."""
        p = self.problem
        assert p.spec.expression is not None
        structure = structure_of(p.spec.expression)
        arrays = tuple(self.arrays[captured(i)] for i in range(len(structure.arrays)))
        heads = np.arange(p.num_heads)[self._of_queries(own)]
        return Expression(
            structure,
            p.captured_numbers,
            arrays,
            np.arange(own.batch.start, own.batch.stop),
            heads.reshape(own.heads.stop - own.heads.start, -1),
            own.S_q,
            own.S_k,
        )

    def _of_queries(self, own: Stack) -> slice:
        """The query heads of a stack."""
        group = max(self.problem.head_group, 1)
        return slice(own.heads.start * group, own.heads.stop * group)

    def _query_rows(self, name: str, own: Stack) -> Array:
        """[batch, query heads, S_q, …]"""
        heads, rows = self._of_queries(own), slice(own.q_first, own.q_first + own.S_q)
        outer = slice(0, 1) if self.problem.spec.q_view == "packed" else own.batch
        x: Array = self.arrays[name][outer, heads, rows]
        return x

    def _grouped(self, x: Array) -> Array:
        """Query heads, axis 1, as KV heads and the heads of a group; a view."""
        group = max(self.problem.head_group, 1)
        return x.reshape(x.shape[0], x.shape[1] // group, group, *x.shape[2:])

    def _by_address(
        self, name: str, entry: int, shape: tuple[int, int], row: int, dtype: DType
    ) -> Array:
        address = int(self.arrays[f"{name}_ptrs"][entry])
        return host_array(address, (1, 1, *shape), (0, 0, row, 1), dtype)

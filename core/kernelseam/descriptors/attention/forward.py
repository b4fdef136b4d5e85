"""The attention forward: dense, packed and paged memory, masks and score options."""

from __future__ import annotations

from typing import Any

from kernelseam.contract import Device, Runtime
from kernelseam.descriptors.attention import contents
from kernelseam.descriptors.attention.arrays import fields_of
from kernelseam.descriptors.attention.forward_fields import OPTIONAL, ROWS, AttentionFields
from kernelseam.descriptors.attention.forward_problem import problem_of
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.descriptors.common.captured import bare, captured_operands
from kernelseam.descriptors.common.operands import (
    describe_all,
    left_out,
)
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.errors import InvalidValue
from kernelseam.expressions.scores import ScoreExpression
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass


@dataclass(frozen=True, eq=False, kw_only=True)
class Attention(AttentionFields):
    """out[b,h] = softmax(x[b,h])·v[b,g], where query head h has KV head g = h // (num_heads /
    kv_heads). The score of query i and a visible key j is

    x = softcap·tanh(scale·q_i·k_j / softcap) − slope_h·|d| + bias[b,h,i,j]

    and −inf where the key is not visible. d = j − i − (S_k − S_q) is the distance from the
    bottom-right diagonal, on which the last query meets the last key. Terms whose option is not
    given are left out; without ``softcap`` the first is scale·q_i·k_j. ``sinks`` [H], float32: each
    row's sum of e^x also has e^sink_h, as of a key of value 0.

    Masks. Query i sees key j iff mask[b,h,i,j] is True and (j < prefix_lengths[b], or d is in the
    band). ``causal``: d ≤ 0; ``window = (left, right)``: −left ≤ d ≤ right, None for no bound; with
    both, both. A query that sees no key has zeros as its result, and an lse of −inf (its sink,
    where there is one).

    Operands. q [batch, num_heads, S_q, head_dim], k [batch, kv_heads, S_k, head_dim], v [batch,
    kv_heads, S_k, value_dim], out [batch, num_heads, S_q, value_dim]; ``lse`` [batch, num_heads,
    S_q], float32 (float64 where q is): ln Σ_j e^x. ``bias`` (q's dtype or float32) and ``mask``
    (bool) are [batch, num_heads, S_q, S_k] with any strides, 0 to broadcast; ``alibi_slopes`` is
    float32 [batch, num_heads], ``prefix_lengths`` int32 [batch]. ``expression``
    (``kernelseam.expressions.scores.score_expression``) is a traced score_mod and mask_mod:
    score_mod(x, b, h, i, j) replaces x, and mask_mod(b, h, i, j) is a further mask; i and j count
    from 0 in each sequence.

    Sequences of different lengths:

    * ``kv_lengths`` int32 [batch]: sequence b has kv_lengths[b] keys, at most S_k; d counts with
      these.
    * ``cu_seqlens_q`` int32 [batch + 1]: q, out and lse are packed, rows cu_seqlens_q[b] to
      cu_seqlens_q[b+1] − 1 of sequence b, ``total_q`` rows in all; S_q is the longest sequence's.
      ``cu_seqlens_k`` likewise.
    * ``block_table`` int32 [batch, table_width] with ``kv_lengths``: k and v are [pages, page_size,
      kv_heads, dim] (the page's stride is the batch's), and key j of sequence b is row j %
      page_size of page block_table[b, j // page_size].

    Keys and values of 8 bits (float8_e4m3fn; float8_e4m3fnuz on gfx942), with q and out of 16:
    ``dtype_kv``, by default the arrays'. A stored number x of k stands for k_scale·x, one of v for
    v_scale·x. ``k_scales`` and ``v_scales``, both or neither (1), are float32 [batch, kv_heads];
    with ``scale_block`` that many keys share a scale: [batch, kv_heads, blocks], block n from key
    n·scale_block on; of pages [pages, kv_heads, blocks of a page]; of packed rows [kv_heads, blocks
    of total_k].

    Queries of 8 bits, beside k and v of the same dtype: ``dtype_q``, by default the array's.
    ``dtype`` is then that of out and bias, and what implementations may compute in: float16 or
    bfloat16, by default out's, else bfloat16. ``q_scales`` is [batch, kv_heads], a scale for each
    group of query heads; with ``q_scale_block`` that many queries of a head share one: [batch,
    num_heads, blocks], of packed rows [num_heads, blocks of total_q]. Scales are given for q, k and
    v, or for none. Probabilities may be rounded to 8 bits before they are multiplied by v.

    Operands are arrays, addresses (ints), or None until ``bind``. An optional operand (bias …
    block_table) that is left to ``bind`` is announced by address 0, an lse also by ``return_lse``.
    Strides count elements, for the axes (batch, head, row) whatever their order in memory; columns
    are contiguous, and so are the rows of lse. A stride left out packs the axis row-major around
    the others (packed and paged rows: heads within rows); an array must then have the operand's
    axes in that order, merged or not, and axes of extent 1 do not count. Stride 0 broadcasts an
    input.

    ``kv_heads`` defaults to num_heads, ``value_dim`` to head_dim, ``scale`` to 1/√head_dim,
    ``dtype`` (of q, k and v) to the arrays', ``dtype_out`` to dtype (float32 keeps partial results
    for ``merge_states``), ``dtype_bias`` to the array's, else to dtype. ``batch_invariant``: a
    row's bits do not depend on what else is in the batch. ``precision``: how float32 is multiplied,
    as in ``BatchedGemmStrided``. ``latent``: v is a view of k's first columns, at its address with
    its strides, as in multi-head latent attention; a kernel may then read the two once.
    ``row_scale_block``: rows of a latent k of float8_e4m3fn hold their scales: value_dim numbers, a
    float32 scale for each ``row_scale_block`` of them, and head_dim − value_dim numbers in
    bfloat16, as q. Strides count bytes, and a number x stands for scale·x in float32, rounded to
    bfloat16.

    Raises InvalidValue (field, value, rule, remedy) where no such problem exists.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.expression, ScoreExpression | None):
            raise InvalidValue(
                "expression",
                self.expression,
                "must be a score_mod and a mask_mod, traced",
                "Give kernelseam.expressions.scores.score_expression(score_mod, mask_mod)",
            )
        infos = describe_all(self.operands())
        problem = problem_of(self, infos)
        self._keep(problem, infos)

    def _axis_strides(self, name: str) -> list[int | None]:
        """Packed rows have no batch, and scales without blocks no block."""
        strides = self._given(name)
        queries = name in ("q", "out", "lse", "q_scales")
        keys = name in ("k", "v", "k_scales", "v_scales")
        per_block = self.q_scale_block if queries else self.scale_block
        if name.endswith("_scales") and per_block is None:
            return strides[:-1]
        packed_rows = (queries and self.cu_seqlens_q is not None) or (
            keys and self.cu_seqlens_k is not None
        )
        return strides[1:] if packed_rows else strides

    @cached_property
    def _packed_strides(self) -> dict[str, bool]:
        return left_out({n: self._axis_strides(n) for n in (*ROWS, "lse", *OPTIONAL)})

    def problem_by_functions(self) -> AttentionProblem:
        """The problem with all that a score_mod and a mask_mod say as an expression, for gradients
        by what the score_mod returned."""
        return problem_of(self, self._arrays, functions_as_options=False)

    def operands(self) -> dict[str, object]:
        """q, k, v, out, lse and the optional ones, as far as they are given."""
        given = {n: v for n in (*ROWS, "lse", *OPTIONAL) if (v := getattr(self, n)) is not None}
        return given | captured_operands(self.expression)

    def _found(self) -> dict[str, object]:
        s, expression = self._problem.spec, self.expression
        if expression is not None:
            expression = bare(expression, self._arrays, score_mod=None, mask_mod=None)
        kinds = {"dtype": s.dtype, "dtype_out": s.dtype_out, "dtype_bias": s.bias}
        return {**kinds, "dtype_q": s.dtype_q, "dtype_kv": s.dtype_kv, "expression": expression}

    def check_device(self, resolved: Resolved, runtime: Runtime, device: Device) -> None:
        """Hold lengths, offsets and the block table against the memory that they point into;
        synchronises."""
        contents.check(self._problem, resolved, runtime, device)

    @classmethod
    def from_arrays(
        cls,
        q: object,
        k: object,
        v: object,
        out: object,
        lse: object = None,
        *,
        layout: str = "bhsd",
        kv_layout: str = "nhd",
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        **options: Any,
    ) -> Attention:
        """The attention of arrays as they lie in memory: nothing is copied.

        ``layout`` "bhsd": q [B, H, S_q, D], k [B, H_kv, S_k, D], v [B, H_kv, S_k, D_v], out [B, H,
        S_q, D_v]; "bshd": the head after the row. Any strides with a contiguous last axis. ``lse``
        is [B, H, S_q] in both. With ``cu_seqlens_q``: q [T, H, D], out [T, H, D_v], lse [H, T], and
        ``max_seqlen_q`` in place of S_q; with ``cu_seqlens_k``: k [T_k, H_kv, D], v [T_k, H_kv,
        D_v] and ``max_seqlen_k``. With ``block_table`` [B, width]: k and v [pages, page_size, H_kv,
        D] ("nhd"), or with the head before the row ("hnd").

        ``k_scales`` and ``v_scales`` repeat to [B, H_kv]; with ``scale_block`` they have the axes
        of k and v but the last, blocks in the place of rows; so have ``q_scales`` those of q with
        ``q_scale_block``.

        ``options``: the descriptor's other fields. ``bias``, ``mask`` and ``alibi_slopes`` repeat
        along axes of extent 1 and along those that they lack from the left.
        """
        given = {
            "q": q,
            "k": k,
            "v": v,
            "out": out,
            "lse": lse,
            **{n: options.pop(n, None) for n in OPTIONAL},
        }
        arrays = {n: x for n, x in given.items() if x is not None or n in ROWS}
        return cls(
            **{
                **fields_of(
                    arrays,
                    layout,
                    kv_layout,
                    max_seqlen_q,
                    max_seqlen_k,
                    options.get("scale_block"),
                    options.get("q_scale_block"),
                    options.get("row_scale_block"),
                ),
                **options,
            }
        )

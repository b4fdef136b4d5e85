"""Attention on arrays: dense, variable-length (packed) and paged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack, overload

from kernelseam.descriptors.attention.options import PAGED, AttentionOptions, band
from kernelseam.descriptors.common.options import (
    by_name,
    operands_of,
    refuse_others,
    scalars_of,
    spelled_out,
    taken,
)
from kernelseam.descriptors.common.wording import Wording
from kernelseam.errors import InvalidValue
from kernelseam.expressions.block_mask import BlockMask
from kernelseam.expressions.scores import MaskMod, ScoreMod
from kernelseam.expressions.tree import check_drafts
from kernelseam.ops.attention_work import EXTENTS, attention_work
from kernelseam.ops.calling import operate
from kernelseam.ops.expressions import with_expression
from kernelseam.ops.signatures import Array, Dense, Packed, Paged

_LSE = "return_lse"
"""Is of overloads, each with a type of its own, and not of the types of options."""


class Frontend:
    """A public function's share of ``AttentionOptions``: which it takes, their defaults, and its
    names of operands."""

    def __init__(
        self,
        function: str,
        options: type,
        own: tuple[str, ...] = (),
        defaults: AttentionOptions | None = None,
        operands: Mapping[str, str] | None = None,
    ) -> None:
        """``options``: the types of its keywords. ``own``: scalars among its other parameters.
        ``operands``: its names of operands, where they are not the descriptor's."""
        names = {_LSE, *options.__annotations__, *own}
        self.function = function
        self.operands = [n for n in operands_of(AttentionOptions) if n in names]
        self.scalars = {n for n in scalars_of(AttentionOptions) if n in names}
        self.defaults = by_name(defaults or AttentionOptions())
        self.wording = Wording(operands or {}, EXTENTS)

    def call(
        self,
        arrays: dict[str, Array],
        options: dict[str, Any],
        functions: tuple[Any, Any, Any],
        out: Any,
        where: tuple[str | None, str | None, object],
        work: Callable[..., None] = attention_work,
    ) -> Array | tuple[Array, Array]:
        """``functions``: score_mod, mask_mod and block_mask. ``where``: backend, implementation and
        stream."""
        if not options.keys() <= self.scalars:
            arrays |= taken(self.operands, options)
            refuse_others(self.function, options, self.scalars)
        if out is not None:
            arrays["out"] = out
        if options.get("window") is not None:
            options["window"] = band("window", options["window"])
        values = tuple({**self.defaults, **options}.values())
        score_mod, mask_mod, block_mask = functions
        if not (score_mod is mask_mod is block_mask is None):
            check_drafts(mask_mod, arrays["q"], options.get("layout", self.defaults["layout"]))
            values = with_expression(values, arrays, *functions)
        results = operate(work, arrays, values, *where, self.wording)
        result: Array = results["out"] if out is None else out
        return (result, results["lse"]) if options.get(_LSE) else result


DENSE = Frontend("attention", Dense)
PACKED = Frontend("attention_varlen", Packed, ("max_seqlen_q", "max_seqlen_k"))
_PAGED = Frontend(
    "attention_paged", Paged, defaults=PAGED, operands={"k": "k_pages", "v": "v_pages"}
)


@overload
def attention(
    q: Array, k: Array, v: Array, *, return_lse: Literal[False] = False, **options: Unpack[Dense]
) -> Array: ...


@overload
def attention(
    q: Array, k: Array, v: Array, *, return_lse: Literal[True], **options: Unpack[Dense]
) -> tuple[Array, Array]: ...


@overload
def attention(
    q: Array, k: Array, v: Array, *, return_lse: bool, **options: Unpack[Dense]
) -> Array | tuple[Array, Array]: ...


@spelled_out(AttentionOptions(), _LSE, *Dense.__annotations__)
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | Any = None,
    out: Any = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
    **options: Any,
) -> Array | tuple[Array, Array]:
    """Scaled dot-product attention, softmax(scores)·v, of q [B, H, S_q, D], k [B, H_kv, S_k, D] and
    v [B, H_kv, S_k, D_v].

    Arrays are of float16, bfloat16, float32 or float64, all of one dtype (but for k and v of 8
    bits, below), from NumPy, torch or any library with DLPack, on one device. Strides are any with
    a contiguous last axis; nothing is copied. ``layout`` "bshd" has the head after the row, in the
    result too. H is a multiple of H_kv (GQA): query head h has KV head h // (H / H_kv).

    Masks: with d = j − i − (S_k − S_q), query i sees key j iff d ≤ 0 (``causal``), −left ≤ d ≤
    right (``window``) and mask[…, i, j] is True (``mask``); keys j < prefix_lengths[b] are seen
    whatever the first two say. Sequence b has kv_lengths[b] keys. Scores are
    softcap·tanh(scale·q·k/softcap) − slope·|d| + bias, as far as each is given
    (``descriptors.Attention`` has the whole formula). ``bias`` and ``mask`` broadcast to [B, H,
    S_q, S_k], ``alibi_slopes`` to [B, H]; ``sinks`` is [H]. A query that sees no key gives zeros
    (and −inf in the LSE).

    ``score_mod(score, b, h, q_idx, kv_idx)`` returns a new score, and ``mask_mod(b, h, q_idx,
    kv_idx)`` whether the key is visible, beside the masks above: ordinary Python, as torch's
    FlexAttention takes it (``expressions.scores.score_expression`` has what they may contain).
    Arrays that they capture must be on the arrays' device. ``block_mask``
    (``kernelseam.block_mask``, or torch's ``BlockMask``) is a mask_mod with its block sparsity:
    blocks that it leaves out are skipped.

    8 bits: k and v may be float8_e4m3fn (float8_e4m3fnuz on gfx942) beside q in float16 or
    bfloat16. A stored number stands for its product with ``k_scales`` or ``v_scales`` (1 where left
    out), float32, which broadcast to [B, H_kv]; with ``scale_block`` that many keys share a scale,
    and scales are [B, H_kv, ⌈S_k / scale_block⌉] (in ``layout``'s order). q may have the same
    dtype: ``q_scales``, given beside the other two, broadcast to [B, H_kv], one for each group of
    query heads, or with ``q_scale_block`` are [B, H, ⌈S_q / q_scale_block⌉]. The result is then
    bfloat16, unless ``out`` or ``out_dtype`` says otherwise, and probabilities may be rounded to 8
    bits.

    ``scale`` defaults to 1/√D. ``precision``: how float32 is multiplied, None or "ieee", "tf32" or
    "tf32x3", as in ``Attention``. ``out``: an array for the result, else a new one of q's library,
    of ``out_dtype`` (q's, or float32; with q of 8 bits float16, bfloat16 or float32).
    ``return_lse``: also return the log-sum-exp of the visible keys' scores, [B, H, S_q], float32
    (float64 where q is). ``batch_invariant``: a row's bits do not depend on what else is in the
    batch. ``latent``: v is a view of k's first columns (multi-head latent attention), which a
    kernel may read once. ``row_scale_block``: rows of such a k, float8_e4m3fn, are D_v numbers, a
    float32 scale for each ``row_scale_block`` of them, and bfloat16 (FlashMLA's 656 bytes: 512
    numbers, 4 scales, 64 in bfloat16); a number stands for its product with the scale, rounded to
    bfloat16, and v is k[..., :D_v].

    ``backend`` must be that of the arrays' device; ``implementation`` selects an implementation by
    name; ``stream`` is an int, an object with ``__cuda_stream__``, or None for the array library's
    current one. Results of a call on another stream must be kept until its work is done.

    Returns the result [B, H, S_q, D_v] (``out`` where it was given), or (result, lse). Raises
    InvalidValue for what does not fit together, Unsupported with each implementation's reason.
    """
    functions, where = (score_mod, mask_mod, block_mask), (backend, implementation, stream)
    return DENSE.call({"q": q, "k": k, "v": v}, options, functions, out, where)


@overload
def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Packed],
) -> Array: ...


@overload
def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    **options: Unpack[Packed],
) -> tuple[Array, Array]: ...


@overload
def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    **options: Unpack[Packed],
) -> Array | tuple[Array, Array]: ...


@spelled_out(AttentionOptions(), _LSE, *Packed.__annotations__)
def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | Any = None,
    out: Any = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
    **options: Any,
) -> Array | tuple[Array, Array]:
    """Attention over packed sequences of different lengths: q [T, H, D], k [T_k, H_kv, D], v [T_k,
    H_kv, D_v].

    Sequence b has rows cu_seqlens_q[b] … cu_seqlens_q[b+1] − 1 of q and likewise of k and v; the
    offsets are int32 [B + 1] on the arrays' device. ``max_seqlen_*``: at least the longest
    sequence. ``bias`` and ``mask`` broadcast to [B, H, max_seqlen_q, max_seqlen_k], of which
    each sequence has the first rows and columns. With ``scale_block`` scales are [T_k /
    scale_block, H_kv], with ``q_scale_block`` those of q [T / q_scale_block, H]. The rest is as in
    ``attention``.

    Returns the result [T, H, D_v], or (result, lse [H, T]). Rows that belong to no sequence are not
    written.
    """
    _require(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    arrays = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    functions, where = (score_mod, mask_mod, block_mask), (backend, implementation, stream)
    return PACKED.call(arrays, options, functions, out, where)


@overload
def attention_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_table: Array,
    kv_lengths: Array,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Paged],
) -> Array: ...


@overload
def attention_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_table: Array,
    kv_lengths: Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[Paged],
) -> tuple[Array, Array]: ...


@overload
def attention_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_table: Array,
    kv_lengths: Array,
    *,
    return_lse: bool,
    **options: Unpack[Paged],
) -> Array | tuple[Array, Array]: ...


@spelled_out(PAGED, _LSE, *Paged.__annotations__)
def attention_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_table: Array,
    kv_lengths: Array,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | Any = None,
    out: Any = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
    **options: Any,
) -> Array | tuple[Array, Array]:
    """Attention over keys in pages: k_pages [pages, page_size, H_kv, D], v_pages [pages, page_size,
    H_kv, D_v].

    Key j of entry b is row j % page_size of page block_table[b, j // page_size]; entry b has
    kv_lengths[b] keys. The table is int32 [B, width], kv_lengths int32 [B]. ``kv_layout`` "hnd":
    the head before the row of a page. q is [B, S_q, H, D] (``layout`` "bshd"; "bhsd": the head
    before the row), or with ``cu_seqlens_q`` and ``max_seqlen_q`` [T, H, D]. ``max_seqlen_k``: at
    least the longest of kv_lengths, by default what the table has room for. ``bias`` and ``mask``
    repeat to [B, H, S_q, max_seqlen_k], of which each entry has the first rows and columns. With
    ``scale_block``, from 1 to page_size, scales are [pages, page_size / scale_block, H_kv] (in
    ``kv_layout``'s order). ``prefix_groups``: up to so many groups of neighbouring entries whose
    rows of the block table begin with the same pages read the keys of these once, for the queries
    of all; the device finds them in the table. The rest is as in ``attention``; ``causal`` is True
    here: the last query is the entry's last token.
    """
    _require(block_table=block_table, kv_lengths=kv_lengths)
    arrays = {
        "q": q,
        "k": k_pages,
        "v": v_pages,
        "block_table": block_table,
        "kv_lengths": kv_lengths,
    }
    functions, where = (score_mod, mask_mod, block_mask), (backend, implementation, stream)
    return _PAGED.call(arrays, options, functions, out, where)


def _require(**arrays: Any) -> None:
    for name, x in arrays.items():
        if x is None:
            raise InvalidValue(
                name, None, "must be given", "Give it, or call attention, which needs none"
            )

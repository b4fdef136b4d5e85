"""The cases of the page about emulated AMD devices, and the purpose of each group.
`emulated_parity.py` runs them.

They are chosen to cover every path through the kernels and to finish in minutes: a distinct binary
costs seconds, a case that shares one almost nothing, and the sum of a bias's gradient over many
elements many seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelseam.dtypes import E4M3, DType

SHARED, UNFUSED, DECODE = "shared", "gemm-softmax-gemm", "decode"


@dataclass(frozen=True)
class Group:
    """Cases about one thing, of one operation and on one implementation."""

    about: str
    names: str
    """The names of its cases, separated by blanks."""
    implementation: str = SHARED

    stored: DType | None = None
    """The dtype of 8 bits of its cases' keys and values: archs that do not convert it pass over
    them."""

    @property
    def cases(self) -> tuple[str, ...]:
        return tuple(self.names.split())


_STORED = """attention-f16-64-% attention-bf16-128-%-ramp attention-bf16-128-%-1-query-gqa
attention-f16-40-causal-%-heads attention-f16-128-causal-%-heads-ramp
attention-f16-192v128-causal-%-heads attention-f16-256-causal-%-heads
attention-f16-250v40-%-odd attention-bf16-576v512-causal-%-mqa
attention-f16-64-%-negative-scale attention-f16-64-%-nan attention-f16-64-causal-%-hidden-nan
attention-f16-64-%-nan-scale attention-f16-64-%-blocks-ramp
attention-bf16-128-causal-%-blocks attention-f16-64-causal-%-keys attention-f16-64-%-blocks-softcap
attention-f16-64-causal-%-blocks-hidden-nan attention-f16-64-%-pages
attention-bf16-128-causal-%-pages-ramp attention-f16-128-%-pages-blocks
attention-bf16-64-%-pages-keys attention-f16-64-%-pages-uneven
attention-f16-64-causal-%-sequences attention-bf16-64-%-sequences-blocks
attention-f16-64-%-split attention-bf16-128-%-split-blocks"""

GROUPS = (
    Group(
        "transposes and dtypes, whole and ragged",
        """gemm-f16-nn gemm-f16-nt gemm-f16-tn gemm-f16-tt gemm-bf16-nn gemm-f32-nn gemm-f64-nn
        gemm-f16-nt-integers
        gemm-bf16-nn-ragged-65x129x7 gemm-f16-nt-ragged-17x65x257 gemm-f16-nt-to-f32""",
    ),
    Group(
        "lists of addresses, rows that allow no wide access, gaps, scalars",
        "gemm-f16-nt-pointers gemm-f16-nt-unaligned gemm-f16-nt-gaps gemm-f16-nn-alpha-beta",
    ),
    Group(
        "what is not a number, too large or too small",
        """gemm-f16-nt-nan-in-a gemm-f16-nt-inf-minus-inf gemm-bf16-nn-nan-in-b
        gemm-f16-nt-subnormal
        gemm-f16-nt-overflow""",
    ),
    Group(
        "bias and residual, ragged, in place, of other dtypes, beyond the largest number",
        """gemm-f16-nt-bias-residual-ragged gemm-f16-nt-bias-residual-alpha-beta
        gemm-f16-nt-bias-residual-in-place
        gemm-bf16-nn-bias-f32-residual gemm-f16-nt-bias-residual-to-f32
        gemm-f16-nt-bias-residual-overflow
        gemm-f32-nn-bias-residual-overflow""",
    ),
    Group(
        "sums over batches and heads",
        """gemm-f16-nt-sum-both gemm-f16-nt-sum-4-of-b-group-2 gemm-f16-tn-sum-batch
        gemm-f32-nn-sum-bias-residual
        gemm-f32-nn-pointers-sum-bias-residual""",
    ),
    Group(
        "small matrices, several of them a block",
        """gemm-f16-nt-310-of-13x11x9-bias-residual gemm-f16-nt-310-of-13x11x9-sum-beta
        gemm-f32-nn-310-of-13x11x9-sum-beta""",
    ),
    Group(
        "epilogues of users: gated, interleaved, of float32, ragged, with sums of their results",
        """gemm-f32-nn-epilogue-gelu gemm-f16-nt-epilogue-gated_options-ragged
        gemm-f16-nn-epilogue-interleaved_options gemm-bf16-tn-epilogue-to-f32
        gemm-f16-nt-epilogue-reductions""",
    ),
    Group(
        "groups of rows, of columns and of K; rows that are gathered and scattered; epilogues",
        """grouped-gemm-bf16-m-nn grouped-gemm-bf16-n-nn grouped-gemm-bf16-k-tn
        grouped-gemm-f32-m-nt grouped-gemm-bf16-m-nn-rows grouped-gemm-bf16-m-nn-one-each
        grouped-gemm-bf16-m-nn-epilogue-swiglu grouped-gemm-f16-m-nt-epilogue-interleaved""",
    ),
    Group(
        "lists of products",
        "grouped-lists-bf16-nn grouped-lists-f16-nt-device grouped-lists-bf16-nt-one-row-each",
    ),
    Group(
        "rows appended to pages, gathered and copied; norms, rotary embedding",
        """paged-cache-append-f16 paged-cache-append-bf16-norm-rotary paged-cache-gather-f16
        paged-cache-copy-bf16 paged-cache-append-f16-odd""",
    ),
    Group(
        "head dims and dtypes",
        """attention-f16-32 attention-f16-64-ramp attention-f16-80 attention-f16-128
        attention-f16-256
        attention-bf16-128-causal-ramp attention-f32-64 attention-f32-64-causal-ramp""",
    ),
    Group(
        "head dims that no chunk divides", "attention-f16-33v7 attention-f16-33v7-causal-sequences"
    ),
    Group("192/128", "attention-f16-192v128 attention-f16-192v128-causal-mqa"),
    Group(
        "wider than 256",
        "attention-f16-272v40-causal-mqa attention-bf16-576v512-causal-1-query-mqa",
    ),
    Group(
        "causal masks, extents, grouped heads, strides",
        """attention-f16-64-causal-130x130-ramp attention-f16-64-causal-7x129
        attention-f16-64-causal-masked-rows
        attention-f16-64-gqa-6-2 attention-f16-64-bshd-to-bhsd attention-f16-64-odd
        attention-f16-64-no-keys""",
    ),
    Group(
        "scores and values that are infinite or no numbers",
        """attention-f16-64-extreme attention-f16-64-minus-inf-holes attention-f16-64-nan-in-v
        attention-f16-64-causal-nan-in-hidden-v attention-bf16-128-causal-nan-in-hidden-k""",
    ),
    Group(
        "scores that rise, fall, jump to infinity or begin late; scales of 0 and below",
        """attention-f16-64-climbing attention-f16-64-falling attention-f16-64-from-nothing
        attention-f16-64-rises-again-and-again attention-bf16-128-causal-stays-then-rises
        attention-bf16-128-rises-inf-in-k attention-f16-64-minus-inf-all
        attention-f16-64-scale-negative attention-f16-64-causal-scale-0""",
    ),
    Group(
        "pages of 1, 16, 48 and 256 keys, one query",
        """attention-f16-64-pages-1 attention-f16-64-pages-16-ramp attention-f16-64-pages-48
        attention-f16-64-pages-256""",
    ),
    Group(
        "pages, several queries",
        """attention-f16-64-causal-pages-16 attention-f16-64-causal-pages-16-head-major
        attention-bf16-128-causal-pages-48-gqa attention-f32-64-causal-pages-16
        attention-f16-64-causal-pages-16-sequences attention-f16-64-causal-pages-48-window-sinks""",
    ),
    Group(
        "packed sequences, some of length 0",
        """attention-f16-64-causal-sequences attention-f16-64-causal-sequences-gqa
        attention-bf16-128-causal-sequences
        attention-f32-64-causal-sequences attention-f16-64-sequences-0""",
    ),
    Group("key lengths", "attention-f16-64-causal-lengths"),
    Group("sliding window", "attention-f16-64-window-16-0 attention-f16-64-window-33-12"),
    Group("prefix", "attention-f16-64-causal-prefix attention-f16-64-prefix-window"),
    Group("ALiBi", "attention-f16-64-causal-alibi-gqa"),
    Group("softcap", "attention-f16-64-softcap-5"),
    Group(
        "bias, with −inf and the most negative number in it",
        """attention-f16-64-bias-f32-holes attention-f16-64-causal-bias-f32-gqa
        attention-f16-64-bias-f32-lowest-ramp""",
    ),
    Group("boolean mask", "attention-f16-64-mask"),
    Group("sinks, grouped heads", "attention-f16-64-causal-sinks-gqa"),
    Group(
        "scores and masks of users, blocks of keys that are passed over",
        """attention-f32-64-mod-relative attention-bf16-128-mod-buckets-paged
        attention-bf16-128-mod-documents-packed attention-bf16-128-mod-documents-blocks
        attention-bf16-128-mod-prefix-blocks-decoding attention-bf16-128-mod-tree-blocks-paged""",
    ),
    Group(
        "everything at once",
        """attention-f16-64-everything attention-bf16-128-everything
        attention-f16-64-causal-sequences-everything
        attention-f16-64-causal-pointers-everything""",
    ),
    Group(
        "pointer lists",
        "attention-f16-64-causal-device-pointers attention-bf16-128-device-pointers",
    ),
    *(
        Group(
            f"keys and values of {stored}: scales of tensors, heads, keys and blocks, numbers that "
            "are none, pages, sequences, parts",
            _STORED.replace("%", stored.value.removeprefix("float8_")),
            stored=stored,
        )
        for stored in E4M3
    ),
    Group(
        "split keys, in two launches",
        """attention-f16-64-causal-split-window attention-f16-64-split-pages
        attention-f16-64-pointers-split
        attention-f16-64-split-to-f32""",
    ),
    Group(
        "one launch for all keys: rows of several heads, packed queries, values that are NaN",
        """attention-bf16-128-causal-pages-48-gqa attention-f16-64-pages-16-nan-in-v
        attention-f16-64-causal-pages-16-sequences attention-f16-64-split-pages""",
        DECODE,
    ),
    Group(
        "plain, everything at once, float32 with masked rows",
        "attention-f16-64 attention-f16-64-everything attention-f32-64-causal-masked-rows",
        UNFUSED,
    ),
    Group(
        "dense",
        """attention-bwd-f16-64-causal-33x129-ramp attention-bwd-f16-64-causal-130x130
        attention-bwd-f16-80v64
        attention-bwd-bf16-128-causal attention-bwd-f32-64""",
    ),
    Group(
        "head dims that no chunk divides",
        "attention-bwd-f16-33v7 attention-bwd-f16-33v7-causal-sequences",
    ),
    Group(
        "scores and masks of users, blocks that are passed over",
        "attention-bwd-f32-64-mod-buckets attention-bwd-bf16-64-mod-blocks",
    ),
    Group(
        "packed sequences, some of length 0",
        """attention-bwd-f16-64-causal-sequences attention-bwd-f16-64-causal-sequences-margin-gqa
        attention-bwd-bf16-128-causal-sequences""",
    ),
    Group("grouped heads", "attention-bwd-f16-64-gqa-6-2 attention-bwd-bf16-128-causal-gqa-4-2"),
    Group(
        "a bias and its gradient",
        """attention-bwd-f16-64-bias-by-key attention-bwd-f16-64-bias-f32-holes
        attention-bwd-f32-64-causal-bias-window""",
    ),
    Group(
        "sinks and their gradient",
        "attention-bwd-f16-64-sinks attention-bwd-f16-64-causal-lengths-bias-sinks",
    ),
    Group("softcap", "attention-bwd-f16-64-softcap-5"),
    Group("everything at once", "attention-bwd-f16-64-everything"),
    Group(
        "in any order, by atomics",
        """attention-bwd-f16-64-causal-any-order
        attention-bwd-bf16-128-causal-any-order-sequences-gqa
        attention-bwd-f32-128v40-any-order""",
    ),
    Group(
        "partial results of split keys",
        "merge-states-f32-f16 merge-states-bf16-bf16 merge-states-f32-f16-absent "
        "merge-states-f32-f16-apart",
    ),
    Group(
        "head-major and token-major, with rotary embedding of either kind",
        """qkv-projection-f16-rotary-halves qkv-projection-f16-rotary-halves-20-of-80
        qkv-projection-f16-rotary-pairs-from-17 qkv-projection-f16-bias""",
    ),
    Group(
        "k and v into pages",
        "qkv-projection-f16-pages-24-rotary qkv-projection-f16-pages-24-token-major",
    ),
    Group(
        "head-major and token-major, bias and residual, in place",
        """output-projection-f16-bias-residual output-projection-f16-token-major-in-place
        output-projection-f32-bias-residual""",
    ),
    Group(
        "gradients by input, weight and bias: side by side, apart, in different orders, of many "
        "small heads",
        """qkv-projection-bwd-f16-bias qkv-projection-bwd-f16-different-orders
        qkv-projection-bwd-f16-token-major-bias qkv-projection-bwd-f16-d-bias-alone
        qkv-projection-bwd-f16-heads-160-80-8 qkv-projection-bwd-f32-bias""",
    ),
    Group(
        "gradients by attention's result, weight and bias: head-major and token-major",
        """output-projection-bwd-f16-bias output-projection-bwd-f16-token-major-bias
        output-projection-bwd-f32-bias""",
    ),
)

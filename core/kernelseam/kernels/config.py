"""The constants of a binary: the members of ``struct Config``, which device sources read as
``Config::NAME``."""

from __future__ import annotations

from collections.abc import Mapping

from kernelseam.errors import PluginError

CONFIG = "generated/config.h"
"""The structure's file, as device sources include it."""


class ElementType(str):
    """A type's name in device sources."""

    __slots__ = ()


Constant = bool | int | float | ElementType
Constants = dict[str, Constant]
"""Members by name: a bool, int or float is a ``static constexpr`` one, an element type a
``typedef``."""


def members(of: object, *names: str) -> Constants:
    """Fields of a spec or a tile as members of the same names, in capitals."""
    return {n.upper(): getattr(of, n) for n in names}


def config_header(constants: Mapping[str, Constant], texts: Mapping[str, str]) -> str:
    """The file. A source that reads a member which is not given does not compile.

    ``texts``: what each member says. Raises PluginError where one has none, or another type.
    """
    members = [f"  {_declaration(n, v)}  // {_text(n, texts)}" for n, v in constants.items()]
    lines = ["#pragma once", '#include "platform.h"', "struct Config {", *members, "};", ""]
    return "\n".join(lines)


def _declaration(name: str, value: object) -> str:
    match value:
        case bool():
            return f"static constexpr bool {name} = {str(value).lower()};"
        case int():
            return f"static constexpr int {name} = {value};"
        case float():
            return f"static constexpr float {name} = {value}f;"
        case ElementType():
            return f"typedef {value} {name};"
    raise PluginError(
        f"constant {name} = {value!r} is a {type(value).__name__}: give a bool, int, float or "
        "ElementType"
    )


def _text(name: str, texts: Mapping[str, str]) -> str:
    if name in texts:
        return texts[name]
    raise PluginError(f"constant {name} has no text that says what it is: give one in texts")


TEXTS: Mapping[str, str] = {
    # products: operands and results
    "TC": "element type of C",
    "TY": "element type of y",
    "A_TRANSPOSED": "A lies as its transpose",
    "B_TRANSPOSED": "B lies as its transpose",
    "VECTOR_A": "bytes that rows of A are aligned to",
    "VECTOR_B": "bytes that rows of B are aligned to",
    "VECTOR_C": "bytes that rows of C are aligned to",
    "VECTOR_R": "bytes that rows of the residual are aligned to",
    "X_VECTOR": "bytes of a load along a vector x; 0: its elements are apart",
    "RESIDUAL": "element type of the residual; void: none",
    "ROW_SUMS": "element type of the sums of A's rows; void: none",
    "SCALES": "factors of 8 bits have scales",
    "SCALE_M": "rows that share a scale; 0: scales are a row's",
    "SCALE_N": "columns that share a scale; 0: scales are a column's",
    "SCALE_K": "values of k that share a scale; 0: all do",
    "GATHERED": "indices say which rows of A groups have",
    "SCATTERED": "indices say which rows of C groups' rows are written to",
    "FACTORS": "groups' rows are multiplied by factors",
    "EPILOGUE": "an epilogue (gemm/epilogue.h)",
    "PAIRS": "it is of pairs of columns: 0 none, HALVES or NEIGHBOURS",
    "PREACTIVATION": "what the epilogue is of is written too",
    "MAXIMUM": "a maximum; else a sum",
    "REDUCTIONS": "sums and maxima in the epilogue (gemm/reductions.h)",
    "VECTOR_P": "bytes that rows of that are aligned to",
    "SUMMED": "C sums the products of several batches or heads",
    "SEGMENTED": "A's heads lie in three places",
    "HEADS": "C's columns are heads of q, k and v (heads.h)",
    "ROTARY": "rotary embedding: 0 none, 1 half-split, 2 interleaved",
    "POSITIONS": "rows have positions in memory",
    "PAGED": "k and v go into pages",
    "K_LAST": "W's rows lie along k",
    # products: tiles
    "BM": "rows of a tile",
    "BK": "values of k of a slice",
    "WARPS_M": "warps along a tile's rows",
    "WARPS_N": "warps along a tile's columns",
    "TEAMS": "tiles that a block computes at once, each by a warp",
    "PERSISTENT": "each block takes every gridDim-th tile, else one",
    "VECTORS": "vectors x of a block",
    "LANES": "threads that share a row of W, or that have pieces of it",
    "AHEAD": "the next pieces of W are loaded while these are multiplied",
    # attention: scores.h, sequences.h, fp8.h
    "CAUSAL": "causal mask; false where there is a window",
    "WINDOW": "left and right bound the distance of visible keys",
    "PREFIX": "the first keys of a sequence are visible to all its queries",
    "MASK": "a bool mask",
    "ALIBI": "ALiBi slopes",
    "SOFTCAP": "scores are capped",
    "BIAS": "element type of the bias; void: none",
    "SINKS": "attention sinks",
    "CAPTURES": "a user's functions capture numbers or arrays",
    "Q_VIEW": "how queries lie: STRIDED, PACKED, PAGED or POINTERS",
    "KV_VIEW": "how keys and values lie, likewise",
    "OUT_VIEW": "how results lie, likewise",
    "LENGTHS": "the number of a sequence's keys is in device memory",
    "GROUPED": "attention: a block's rows are the query heads of one KV head, query after query; "
    "products: the axis that offsets divide, 0 none, ALONG_M, ALONG_N or ALONG_K; or BY_LIST",
    "Q": "element type of queries in memory",
    "KV": "element type of keys and values in memory",
    "Q_SCALES": "scales of queries: NO_SCALES, HEAD_SCALES or BLOCK_SCALES",
    "ROW_SCALES": "columns of a latent key that share a scale in its row; 0: none do",
    "KV_SCALES": "scales of keys and values, likewise",
    # attention: dims, dtypes, results
    "T": "element type that is multiplied",
    "OUT": "element type of the result",
    "DQK": "head dim of queries and keys",
    "DV": "head dim of values",
    "LSE": "the log-sum-exp of rows is written",
    "FACTOR": "factor of weights before they are rounded",
    "PACKED": "sequences' rows follow one another, those of sequence b from offsets[b] on",
    "POINTERS": "operands are lists of matrices; of merges, the result",
    "BIAS_GRADIENT": "the bias' gradient is written, or that by a score_mod's scores",
    # paged caches
    "PAGES": "element type of pages",
    "D": "head dim of queries and keys of a cache",
    "DIRECTION": "APPEND, GATHER or COPY",
    "SLOTS": "bytes of a slot's number; 0: places follow from a block table",
    "POSITION": "a token's position: OWN_NUMBER, GIVEN or LENGTHS",
    "ROTARY_DIM": "elements of a head that are rotated",
    "NORM": "element type of the weights of RMS norms; void: none",
    "CACHE_SCALES": "scales of pages of 8 bits: NO_SCALES, OF_HEADS or OF_TOKENS",
    "LARGEST": "the largest number of pages of 8 bits",
    "EXACT": "rows are copied as they are",
    "ROW_HEADS": "heads of a token that the lanes of a row have together",
    "WIDE": "rows are accessed by 16 bytes of the wider type",
    # tiles
    "PRECISION": "products of TF32 that one of float is multiplied by; 0: by float's own",
    "VECTOR": "bytes that rows are aligned to",
    "WARPS": "warps of a block",
    "ALONE": "whether a lane has an element of the sum to itself",
    "ELEMENTS": "of the sum, that a block makes",
    "COLUMN_WARPS": "warps that share rows, each with a part of the columns",
    "THREADS": "threads of a block",
    "ROWS": "rows of a warp; of latent attention, of a tile",
    "SCORE_ROWS": "rows of a warp of scores; 0: ROWS",
    "QUERY_ROWS": "rows of dq that a warp computes in a step; 0: dq is computed elsewhere",
    "BN": "keys, or columns, of a tile",
    "STEP": "rows that a step meets",
    "STAGES": "stages of the ring",
    "SHARED_STAGE": "K and V share a stage",
    "Q_RESIDENT": "queries stay in registers",
    "Q_RETURNED": "the ring takes the shared memory of resident queries",
    "RESIDENT": "what a block owns stays in registers as a left factor",
    "UNROLL": "unrolling of the loop over the head dim",
    "ROLE": "0: blocks that own keys and blocks that own queries; 1: the former; 2: the latter",
    "SECTIONS": "the longest blocks of a section of heads start first",
    "ITEM_COST": "keys that cost as much as beginning an item of the list",
    "MIN_BLOCKS": "blocks that are wanted on a compute unit",
    "SHARED_BYTES": "dynamic shared memory of a block",
}
"""What the shared kernels' constants say, by name."""

"""What the constants of Hopper's kernels say, by name; those beside the shared kernels'."""

from __future__ import annotations

from collections.abc import Mapping

from kernelseam.kernels.config import TEXTS

HOPPER: Mapping[str, str] = {
    **TEXTS,
    "GROUPS": "consumer warpgroups",
    "PRODUCER_REGISTERS": "registers of a producer's thread; 0: as launched",
    "CONSUMER_REGISTERS": "registers of a consumer's thread; 0: as launched",
    "COLUMN_REGISTERS": "of a thread of those that multiply columns alone",
    # attention forward
    "TO": "element type of the result",
    "Q_SCALES": "q, k and v have scales",
    "V_STAGES": "e4m3: stages of V as it lies in memory",
    "SUM_BLOCKS": "e4m3: blocks of keys that P·V sums before the sums move to sums.h; 0: never",
    "Q_STAGES": "stages of queries; 2: the next tile's arrive during this one",
    "OUT_STAGES": "panels of 16×64 of a warp's epilogue",
    "GROUP_HEADS": "query heads of a KV head that share a tile's rows",
    "IN_PARTS": "a tile's keys are cut into parts",
    "IN_CLUSTER": "parts are the blocks of a cluster, which merge their results",
    "VALUE_PARTS": "consumers that share rows, each with a part of the values' columns",
    "PING_PONG": "ping-pong scheduling of two consumers; in products each has tiles of its own",
    "EARLY": "the next tile's first Q·Kᵀ precedes a tile's last P·V",
    "AHEAD": "elements of S, of BN/2 a thread, whose exponentials precede the wait for P·V; the "
    "others follow it, beside the rounding of P",
    "RECOMPUTE_NAN_ROWS": "rows with NaN are recomputed; else values are filtered",
    "DYNAMIC": "tiles come from an atomic counter",
    "LATE": "the counter is asked when few blocks of a tile are left",
    "PAGE_ROWS": "rows of a page that a box of TMA loads",
    "K_TOGETHER": "a box loads rows of all panels of K",
    "V_TOGETHER": "a box loads rows of all panels of V",
    # products
    "RESIDUAL": "a residual is added",
    "JOINED": "heads that lie one after the other are one product: JOINED_A, JOINED_B, JOINED_K",
    "CLUSTER": "blocks of a cluster, which share B's columns, or A's rows",
    "A_ROWS": "rows of A that a slice has, all of a tile's or few",
    "GROUP_ROWS": "rows of clusters of a group of tiles, which is walked column by column",
    "SHARED_A": "a cluster's tiles are neighbours along N, and share A",
    "SPLIT": "blocks of a cluster that sum a part of K each",
    "TAIL_SLICES": "of a part of K into which a last wave's tile is cut, at least; 0: none is",
    "ADDS_UP": "parts of sums and maxima are added up by the launch itself (joined_parts.h)",
    "IN_TURNS": "e4m3: two consumers alternate in multiplying, each when the other adds up",
    "HALVES": "e4m3: products of a tile's second half of columns go on while the first is added",
    "BLOCKS": "blocks that share a multiprocessor",
    "BUFFERS": "epilogue buffers of a consumer, 64 rows of 128 bytes each",
    "STORE": "who stores C: ROWS or TMA (epilogue.h)",
    "C_FIRST": "C is stored with the L2 policy evict-first",
    "B_FIRST": "most of a large B is loaded with that policy",
    "PRODUCTS": "products of TF32 that stand for one of float32",
    "SWAP_AB": "the left factor is op(B)ᵀ",
    "LEFT_TRANSPOSED": "the left factor lies along its rows, not along k",
    "LOADERS": "warpgroups beside the consumers",
    # attention backward
    "QK_COLUMNS": "columns of q and k in tiles",
    "V_COLUMNS": "columns of v and dout in tiles",
    "O_STAGES": "stages of dout; both count parts of the columns in backward_wide.h",
    "KV_STAGES": "2: the next tile's K and V arrive during this one",
    "IN_ORDER": "dq is summed in a fixed order",
    "STAGGERED": "tiles begin at blocks of queries that lie apart (tiles.h)",
}

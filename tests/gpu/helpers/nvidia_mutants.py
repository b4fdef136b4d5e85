"""Bugs planted in NVIDIA's platform header, and the parity case that each is tried on first.

No processor but theirs shows them: benchmarks/platform_mutants.py runs them there. Every row is
bound to a few words of the header. Where that is changed so that the words are gone, the row has to
be changed too, such that it plants the same bug in what stands there now; never deleted because it
no longer fits.
"""

from __future__ import annotations

from mutant import Mutant

PLATFORM, COPY, ENGINE = "platform_nvidia.h", "copy.h", "engine.h"
WIDE, TF32 = "wide_engine.h", "tf32_engine.h"


def _mutant(
    name: str, find: str, plant: str, case: str, what: str, place: str = PLATFORM
) -> Mutant:
    return Mutant(name, place, find, plant, case, "", what)


MUTANTS = (
    # ---- a row's maximum and sum, over the four lanes that hold it
    _mutant(
        "row-maximum-without-neighbours",
        "v = maximum(v, shuffle_xor(v, 1));",
        "",
        "attention-f16-64",
        "two lanes of a row have another maximum than the other two",
        ENGINE,
    ),
    _mutant(
        "row-sum-without-neighbours",
        "a.x[r][h] += shuffle_xor(a.x[r][h], 1);",
        "",
        "attention-f16-64",
        "the weights of neighbouring lanes are left out of a row's sum",
        ENGINE,
    ),
    # ---- waits
    _mutant(
        "wait-off-by-one",
        '::"n"(PENDING) : "memory"',
        '::"n"(PENDING + 1) : "memory"',
        "gemm-f16-nt-large",
        "one group of copies too many is left in flight",
        COPY,
    ),
    _mutant(
        "groups-not-closed",
        'asm volatile("cp.async.commit_group;" ::: "memory");',
        "",
        "gemm-f16-nt-large",
        "copies belong to no group, so that no wait is for them",
        COPY,
    ),
    _mutant(
        "barrier-of-the-warp-alone",
        "void block_barrier() { __syncthreads(); }",
        "void block_barrier() { __syncwarp(); }",
        "gemm-f16-nt-large",
        "the block's barrier holds up the warp alone",
    ),
    # ---- lanes of fragments
    _mutant(
        "fragment-a-transposed",
        "inner + 8 * high, row0 + 16 * r, 8 * middle)",
        "inner + 8 * middle, row0 + 16 * r, 8 * high)",
        "gemm-f16-tn",
        "two quarters of a transposed A are exchanged",
        ENGINE,
    ),
    _mutant(
        "fragment-not-transposed",
        "m8n8.x4.trans.",
        "m8n8.x4.",
        "gemm-f16-nn",
        "8×8 blocks are not transposed when loaded",
        ENGINE,
    ),
    _mutant(
        "product-of-the-wrong-half",
        "[k], x[2], x[3",
        "[k], x[0], x[1",
        "gemm-f16-nt",
        "columns 8 to 15 of a product are columns 0 to 7 again",
        ENGINE,
    ),
    _mutant(
        "permutation-of-chunks-lost",
        "first ^ (column0",
        "first + (column0",
        "gemm-f16-nt",
        "columns of a tile are looked for where they would be without the permutation of chunks",
        ENGINE,
    ),
    _mutant(
        "accumulator-rows",
        "= f(Place::row(r, e / 2), Place::column(c) + e % 2 * Place::STEP, a.x[r][c][e])",
        "= f(Place::row(r, e % 2), Place::column(c) + e / 2 * Place::STEP, a.x[r][c][e])",
        "attention-f16-64-causal-65x65",
        "a mask hides other elements of a lane than those it is about",
        ENGINE,
    ),
    _mutant(
        "row-apply-lanes",
        "f(a.x[r][c][e], v.x[r][e / 2]);",
        "f(a.x[r][c][e], v.x[r][e % 2]);",
        "attention-f16-64",
        "elements are scaled by another row's factor",
        ENGINE,
    ),
    _mutant(
        "operand-neighbours",
        "], x[2 * (e % 2) + 1",
        " + 1], x[2 * (e % 2)",
        "attention-f16-64",
        "neighbouring keys have each other's weight",
        ENGINE,
    ),
    _mutant(
        "stored-rows",
        "r, h), column0",
        "r, 1 - h), column0",
        "gemm-f16-nt",
        "rows 8 apart are exchanged when they are written",
        ENGINE,
    ),
    _mutant(
        "atomics-lanes",
        "lane() * ADDED;",
        "lane();",
        "attention-bwd-f16-64-causal-any-order",
        "lanes add to each other's sums",
    ),
    # ---- float64 and TF32
    _mutant(
        "wide-rows",
        "16 * r + 2 * lane_group() + h",
        "16 * r + lane_group() + 8 * h",
        "gemm-f64-nn",
        "accumulators are taken for where the instruction has them",
        WIDE,
    ),
    _mutant(
        "double-second-k",
        '0]), "d"(b.x[1',
        '1]), "d"(b.x[0',
        "gemm-f64-nn",
        "every k of A meets its neighbour of B",
        WIDE,
    ),
    _mutant(
        "tf32-cut-to-half",
        "parts[0] = __float_as_uint(raised(x)); }",
        "parts[0] = __float_as_uint(raised(x)) & 0xffff0000u; }",
        "gemm-f32-nt-tf32-one-product",
        "operands have 7 bits behind the point",
        TF32,
    ),
    _mutant(
        "split-one-cross-term",
        "c3, a.x[0], b.x[1]);",
        "c3, a.x[1], b.x[1]);",
        "gemm-f32-nn-tf32x3",
        "the rest of B meets that of A, not A",
        TF32,
    ),
    _mutant(
        "split-infinities",
        "x + y == x + y ? x + y : x;",
        "x + y;",
        "gemm-f32-nn-tf32x3-inf-in-a",
        "an infinity makes NaN",
        TF32,
    ),
    # ---- copies
    _mutant(
        "copy-of-rows-beyond-the-end",
        '"r"(none ? 0 : 16) : "memory"',
        '"r"(16) : "memory"',
        "attention-f16-64-causal-65x65",
        "rows beyond the last are copied, not filled with zeros",
        COPY,
    ),
    _mutant(
        "copy-of-columns-beyond-the-end",
        "(EXACT || col0 + Tile::COLS <= col_end)",
        "true",
        "gemm-f16-nt-large",
        "a tile that reaches beyond the last column is copied whole",
        COPY,
    ),
    _mutant(
        "copy-of-elements-beyond-the-end",
        "row_in && e < left ? from[e] : zero_of<T>();",
        "row_in ? from[e] : zero_of<T>();",
        "gemm-f16-nt-unaligned",
        "elements beyond a row's end are copied",
        COPY,
    ),
    _mutant(
        "copy-places",
        "(to ^ Tile::Layout::mask(row) * 16)",
        "to",
        "attention-bf16-576v512-causal-mqa",
        "the permutation of chunks is taken for the same in rows that are not 8 apart",
        COPY,
    ),
    # ---- conversions
    _mutant(
        "halves-exchanged",
        "cvt.rn.f16x2.f32 %0, %1, %2;",
        "cvt.rn.f16x2.f32 %0, %2, %1;",
        "gemm-f16-nt",
        "neighbours are exchanged when they are rounded",
    ),
    _mutant(
        "bfloat16-cut-off",
        "cvt.rn.bf16x2.f32",
        "cvt.rz.bf16x2.f32",
        "gemm-bf16-nt-integers-rounded",
        "results are cut off, not rounded",
    ),
)

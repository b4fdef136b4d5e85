"""Bugs planted in NVIDIA's platform header, and the parity case that each is tried on first.

No processor but theirs shows them: benchmarks/platform_mutants.py runs them there. Every row is
bound to a few words of the header. Where that is changed so that the words are gone, the row has to
be changed too, such that it plants the same bug in what stands there now; never deleted because it
no longer fits.
"""

from __future__ import annotations

from mutant import Mutant

PLATFORM, COPY, ENGINE = "platform_nvidia.h", "copy.h", "engine.h"
WIDE = "wide_engine.h"


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
        "row-maximum-of-the-wrong-lanes",
        "out.x[r][h] = maximum(v, shuffle_xor(v, 2));",
        "out.x[r][h] = maximum(v, shuffle_xor(v, 1));",
        "attention-f16-64",
        "the halves of a row do not tell each other their maximum",
        ENGINE,
    ),
    _mutant(
        "row-maximum-of-another-row",
        "out.x[r][h] = maximum(v, shuffle_xor(v, 2));",
        "out.x[r][h] = maximum(v, shuffle_xor(v, 4));",
        "attention-f16-64-causal-65x65",
        "the maximum is taken over two rows' halves",
        ENGINE,
    ),
    _mutant(
        "row-maximum-of-half-the-columns",
        "maximum(v, maximum(a.x[r][c][2 * h], a.x[r][c][2 * h + 1]));",
        "maximum(v, a.x[r][c][2 * h]);",
        "attention-f16-64-extreme",
        "odd columns do not count for the maximum",
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
    _mutant(
        "row-sum-of-half-the-columns",
        "out.x[r][h] += a.x[r][c][2 * h] + a.x[r][c][2 * h + 1];",
        "out.x[r][h] += a.x[r][c][2 * h];",
        "attention-f16-64",
        "odd columns are left out of a row's sum",
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
        "wait-missing",
        'asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");',
        "",
        "gemm-f16-nt-large",
        "no copy is waited for",
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
        "fragment-a-columns",
        "tile.address(row0 + 16 * r, low, k0 + 16 * k, 8 * high)",
        "tile.address(row0 + 16 * r, low, k0 + 16 * k, 8 * middle)",
        "gemm-f16-nt",
        "lanes 8 to 15 ask for the second half of A's columns, which is lanes 16 to 31's",
        ENGINE,
    ),
    _mutant(
        "fragment-a-transposed",
        "inner + 8 * high, row0 + 16 * r, 8 * middle)",
        "inner + 8 * middle, row0 + 16 * r, 8 * high)",
        "gemm-f16-tn",
        "two quarters of a transposed A are exchanged",
        ENGINE,
    ),
    _mutant(
        "fragment-b-columns",
        "b.address(n0 + 16 * c, inner + 8 * high, k0 + 16 * k, 8 * middle)",
        "b.address(n0 + 16 * c, inner + 8 * middle, k0 + 16 * k, 8 * high)",
        "gemm-f16-nt",
        "two quarters of B are exchanged",
        ENGINE,
    ),
    _mutant(
        "fragment-b-transposed",
        "b.address(k0 + 16 * k, low, n0 + 16 * c, 8 * high)",
        "b.address(k0 + 16 * k, low, n0 + 16 * c, 0)",
        "gemm-f16-nn",
        "B's first eight columns are taken twice",
        ENGINE,
    ),
    _mutant(
        "fragment-not-transposed",
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
        "gemm-f16-nn",
        "8×8 blocks are not transposed when loaded",
        ENGINE,
    ),
    _mutant(
        "product-of-the-wrong-half",
        "Mma<T>::run(acc.x[r][2 * c + 1], a.x[r][k], x[2], x[3]);",
        "Mma<T>::run(acc.x[r][2 * c + 1], a.x[r][k], x[0], x[1]);",
        "gemm-f16-nt",
        "columns 8 to 15 of a product are columns 0 to 7 again",
        ENGINE,
    ),
    _mutant(
        "permutation-of-chunks-lost",
        "(first ^ (column0 & TURNED) * (int)sizeof(T))",
        "(first + (column0 & TURNED) * (int)sizeof(T))",
        "gemm-f16-nt",
        "columns of a tile are looked for where they would be without the permutation of chunks",
        ENGINE,
    ),
    _mutant(
        "accumulator-rows",
        "f(Place::row(r, e / 2), Place::column(c) + e % 2 * Place::STEP, a.x[r][c][e]);",
        "f(Place::row(r, e % 2), Place::column(c) + e / 2 * Place::STEP, a.x[r][c][e]);",
        "attention-f16-64-causal-65x65",
        "a mask hides other elements of a lane than those it is about",
        ENGINE,
    ),
    _mutant(
        "accumulator-pairs",
        "f(Place::row(r, h), Place::column(c), a.x[r][c][2 * h]",
        "f(Place::row(r, 1 - h), Place::column(c), a.x[r][c][2 * h]",
        "qkv-projection-f16-rotary-pairs",
        "pairs are turned by another row's angle",
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
        "row-map-rows",
        "a.x[r][h] = f(Place::row(r, h), a.x[r][h]);",
        "a.x[r][h] = f(Place::row(r, 0), a.x[r][h]);",
        "attention-bwd-f16-64-causal-sequences",
        "rows 8 to 15 take the values of rows 0 to 7",
        ENGINE,
    ),
    _mutant(
        "each-row-rows",
        "for (int h = 0; h < 2; h++) f(Place::row(r, h), a.x[r][h]);",
        "for (int h = 0; h < 2; h++) f(Place::row(r, h), a.x[r][1 - h]);",
        "attention-f16-64",
        "the LSEs of rows 8 apart are exchanged",
        ENGINE,
    ),
    _mutant(
        "operand-columns",
        "const float(&x)[4] = a.x[r][2 * k + e / 2];",
        "const float(&x)[4] = a.x[r][2 * k];",
        "attention-f16-64",
        "weights of keys 8 to 15 are those of keys 0 to 7",
        ENGINE,
    ),
    _mutant(
        "operand-neighbours",
        "Pack<T>::two(x[2 * (e % 2)], x[2 * (e % 2) + 1]);",
        "Pack<T>::two(x[2 * (e % 2) + 1], x[2 * (e % 2)]);",
        "attention-f16-64",
        "neighbouring keys have each other's weight",
        ENGINE,
    ),
    _mutant(
        "stored-rows",
        "out.at(row0 + Place::row(r, h), column0 + Place::column(c));",
        "out.at(row0 + Place::row(r, 1 - h), column0 + Place::column(c));",
        "gemm-f16-nt",
        "rows 8 apart are exchanged when they are written",
        ENGINE,
    ),
    _mutant(
        "atomics-lanes",
        "float* const place = to + i * WARP + lane() * ADDED;",
        "float* const place = to + i * WARP + lane();",
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
        '"d"(a.x[0][1]), "d"(a.x[1][1]), "d"(b.x[0]), "d"(b.x[1])',
        '"d"(a.x[0][1]), "d"(a.x[1][1]), "d"(b.x[1]), "d"(b.x[0])',
        "gemm-f64-nn",
        "every k of A meets its neighbour of B",
        WIDE,
    ),
    _mutant(
        "wide-layout-along-k",
        "(row & 2) * 2",
        "(row & 2) * 2 * (lane_group() % 2)",
        "gemm-f64-nt",
        "lanes do not agree on where chunks lie",
        WIDE,
    ),
    _mutant(
        "tf32-cut-to-half",
        "parts[0] = to_tf32(x);",
        "parts[0] = to_tf32(x) & 0xffff0000u;",
        "gemm-f32-nt-tf32-one-product",
        "operands have 7 bits behind the point",
        WIDE,
    ),
    _mutant(
        "tf32-second-k",
        '"r"(a[0][s + 1]), "r"(a[1][s + 1]), "r"(b[s]), "r"(b[s + 1])',
        '"r"(a[0][s + 1]), "r"(a[1][s + 1]), "r"(b[s + 1]), "r"(b[s])',
        "gemm-f32-nn-tf32",
        "every k of A meets its neighbour of B",
        WIDE,
    ),
    _mutant(
        "split-without-the-rest",
        "to_tf32(x - __uint_as_float(parts[0]))",
        "0u",
        "gemm-f32-nn-tf32x3",
        "what rounding leaves of a number is lost",
        WIDE,
    ),
    _mutant(
        "split-one-cross-term",
        "small[3], a.x[0], b.x[1]);",
        "small[3], a.x[1], b.x[1]);",
        "gemm-f32-nn-tf32x3",
        "the rest of B meets that of A, not A",
        WIDE,
    ),
    _mutant(
        "split-infinities",
        "(finite(small[i]) ? small[i] : 0.f)",
        "small[i]",
        "gemm-f32-nn-tf32x3-inf-in-a",
        "an infinity makes NaN",
        WIDE,
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
        "copy-of-whole-tiles",
        "VECTOR == 16 && row0 + Tile::ROWS <= row_end && (EXACT",
        "VECTOR == 16 && (EXACT",
        "attention-f16-64-causal-65x65",
        "a tile that reaches beyond the last row is copied whole",
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
        "copy-of-chunks-beyond-the-end",
        "if (VECTOR == 16 && (none || left >= V)) {",
        "if (VECTOR == 16) {",
        "gemm-f16-nt",
        "the last chunk of a row is copied whole, however few columns it has",
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
        "Mine::STEP % Tile::Layout::PERIOD == 0 ? to + i",
        "true ? to + i",
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

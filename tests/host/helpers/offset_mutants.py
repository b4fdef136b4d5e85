"""Offsets of 32 bits, planted in the shared kernels, and the case of large_offsets.py that each is
wrong in.

As in mutants.py, every row is bound to a few words of a source; ``case`` is a name of
large_offsets.CASES.
"""

from __future__ import annotations

from mutant import ATTENTION, BASE, FORWARD, GEMM, Mutant


def _mutant(name: str, place: str, find: str, plant: str, case: str) -> Mutant:
    return Mutant(f"far-{name}", place, find, plant, case, "", "an offset is cut off at 32 bits")


FAR_MUTANTS = (
    _mutant(
        "batch",
        ATTENTION,
        "batch * batch_stride",
        "(int)(batch * batch_stride)",
        "q-batches",
    ),
    _mutant("page", BASE, "table[n] * page_stride", "(int)(table[n] * page_stride)", "k-pages"),
    _mutant(
        "lse",
        FORWARD,
        "const i64 at = (i64)there.batch * lse.batch",
        "const int at = (i64)there.batch * lse.batch",
        "lse-batches",
    ),
    _mutant(
        "backward-entry",
        ATTENTION,
        "operand.base += batch * operand.batch",
        "operand.base += (int)(batch * operand.batch)",
        "bwd-dq-batches",
    ),
    _mutant(
        "written-page", GEMM, "entry * operand.batch", "(int)(entry * operand.batch)", "qkv-k-pages"
    ),
    _mutant(
        "merged-part", ATTENTION, "o + n * outs_part", "o + (int)(n * outs_part)", "merge-parts"
    ),
)
OFTEN = 3
"""So many of them, the first, are run whenever tests are."""

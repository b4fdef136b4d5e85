"""Operands of a grouped GEMM over lists: seeded values and their memory. The matrices of a list lie
in one block, each an operand "A[g]" of its own."""

from __future__ import annotations

import numpy as np

from kernelseam.oracle.formulas import Array
from kernelseam.samples.data.memory import Placement, drawn
from kernelseam.samples.grouped_pointers_case import GroupedPointersCase


def shapes(case: GroupedPointersCase) -> dict[str, tuple[int, int]]:
    """(rows, columns) of every matrix in memory."""
    of: dict[str, tuple[int, int]] = {}
    for g, (m, n, k) in enumerate(case.sizes):
        of[f"A[{g}]"] = (k, m) if case.a_transposed else (m, k)
        of[f"B[{g}]"] = (n, k) if case.b_transposed else (k, n)
        of[f"C[{g}]"] = (m, n)
    return of


def values(case: GroupedPointersCase, rng: np.random.Generator) -> dict[str, Array]:
    inputs: dict[str, Array] = {}
    for name, shape in shapes(case).items():
        if name[0] != "C" or case.beta:
            dtype = case.out_dtype if name[0] == "C" else case.dtype
            inputs[name] = drawn(rng, shape, dtype, case.data)
    return inputs


def placements(case: GroupedPointersCase) -> dict[str, Placement]:
    """Every matrix's placement: in a random order, with gaps between them and behind their rows."""
    result: dict[str, Placement] = {}
    rng, ends = np.random.default_rng(len(case.sizes)), dict.fromkeys("ABC", 0)
    of = shapes(case)
    for g in rng.permutation(len(case.sizes)).tolist():
        for block in "ABC":
            name, dtype = f"{block}[{g}]", case.out_dtype if block == "C" else case.dtype
            rows, columns = of[name]
            unit = max(16 // dtype.itemsize, 1) if case.aligned else 1
            row = -(-(columns + int(rng.integers(0, 3))) // unit) * unit
            start = ends[block] + unit * int(rng.integers(1, 4))
            ends[block] = -(-(start + max(rows, 1) * row) // unit) * unit
            result[name] = Placement(block, dtype, (rows, columns), (row, 1), start)
    return {name: result[name] for name in of}

"""A merge case's operands: seeded values and their memory."""

from __future__ import annotations

import numpy as np

from kernelseam.oracle.formulas import Array
from kernelseam.samples.data.memory import Placement, placement
from kernelseam.samples.merge_case import MergeCase


def values(case: MergeCase, rng: np.random.Generator) -> dict[str, Array]:
    """``outs`` [part, batch, head, row, column] and ``lses`` [part, batch, head, row]."""
    lead = (case.parts, case.batch, case.num_heads, case.rows)
    outs, lses = rng.standard_normal((*lead, case.value_dim)), 2 * rng.standard_normal(lead)
    if case.data == "apart":
        lses += rng.integers(-2, 3, lead) * 50
    elif case.data in ("absent", "nothing"):
        lses[rng.random(lead) < (0.5 if case.data == "absent" else 2)] = -np.inf
        outs[np.isneginf(lses)] = np.nan
    elif case.data in ("nan", "inf"):
        lses[-1, 0, 0, 3] = float(case.data)
    elif case.data != "normal":
        raise ValueError(case.data)
    return {
        "outs": outs.astype(case.dtype.numpy),
        "lses": lses.astype(case.dtype.accumulator.numpy),
    }


def placements(case: MergeCase) -> dict[str, Placement]:
    """Every operand's placement; parts follow each other."""
    lead = (case.batch, case.num_heads, case.rows)
    shape = (*lead, case.value_dim)
    strides = case.outs.strides(shape, case.dtype.itemsize)
    part = max(n * s for n, s in zip(lead, strides, strict=True)) + case.part_gap
    placements = {
        "outs": Placement(
            "outs", case.dtype, (case.parts, *shape), (part, *strides, 1), case.outs.offset
        ),
        "out": placement("out", case.out, shape, case.dtype_out),
    }
    head = case.rows + case.part_gap
    each, kind = (case.num_heads * head, head, 1), case.dtype.accumulator
    placements["lses"] = Placement("lses", kind, (case.parts, *lead), (case.batch * each[0], *each))
    if case.lse:
        placements["lse"] = Placement("lse", kind, lead, each)
    return placements

"""Keys in parts, for few queries: each part's result and log-sum-exp in the workspace, and their
merge."""

from __future__ import annotations

from typing import Any

from kernelseam.contract import Launch, Launches
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.frozen import changed
from kernelseam.kernels.attention.merge import MERGE, MERGE_TILE, MergeProblem, MergeSpec
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.elements import pad

FEWEST_KEYS = 256
"""Keys below which a part is not worth a block of its own."""
MOST_PARTS = 64


def in_parts(
    kernel: KernelDefinition, problem: AttentionProblem, tile: Any, parts: int, first: int = 0
) -> Launches:
    """A launch of ``kernel`` that leaves a result and an LSE for each part of the keys in the
    workspace, all float32, and the merge of those.

    They begin ``first`` bytes into the workspace. The kernel gets a problem whose ``out`` and
    ``lse`` are those of the first part; ``part_strides`` has the distance to the next.
    """
    spec = problem.spec
    rows = problem.total_q if spec.q_view == "packed" else problem.batch * problem.S_q
    entries = 1 if spec.q_view == "packed" else problem.batch
    each = rows // max(entries, 1)
    # [part, batch, head, row, column], and without the column for the LSE.
    heads, width = problem.num_heads, pad(spec.value_dim)
    strides = (heads * each * width, each * width, width)
    part = changed(
        problem,
        spec=spec.part,
        out_strides=strides,
        lse_strides=(0 if spec.q_view == "packed" else heads * each, each),
    )
    out_bytes = parts * heads * rows * width * 4
    merged = MergeProblem(
        MergeSpec(
            spec.part.out,
            spec.out,
            spec.value_dim,
            spec.lse,
            spec.vector,
            spec.q_view == "pointers",
            spec.q_view == "packed",
        ),
        parts,
        entries,
        heads,
        each,
        (rows * heads * width, *strides),
        (rows * heads, heads * each, each),
        problem.out_strides,
        problem.lse_strides,
        problem.batch,
    )
    outs, lses = first, first + out_bytes
    return Launches(
        (
            Launch(kernel, part, tile, {"out": outs, "lse": lses}),
            Launch(MERGE, merged, MERGE_TILE, {"outs": outs, "lses": lses}),
        ),
        lses + parts * heads * rows * 4,
    )


def part_strides(problem: AttentionProblem) -> tuple[int, int]:
    """Elements from one part's result and LSE to the next: all heads of all entries."""
    matrices = problem.num_heads * (1 if problem.spec.q_view == "packed" else problem.batch)
    return problem.out_strides[1] * matrices, problem.lse_strides[1] * matrices

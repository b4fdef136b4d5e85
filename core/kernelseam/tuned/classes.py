"""Problem classes: problems of one class share a tuned choice.

A class is the spec (dtypes, views, options, access width of rows), the extents that a model fixes
(head_dim, hidden), exactly, and the extents that vary by request (batch, sequence length), in steps
of √2: 609 to 861 are "about 724". Strides are not part of a class; whether an implementation
supports them is asked again for each problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from kernelseam.contract import Problem

Extents = tuple[dict[str, object], dict[str, int]]
"""Extents that must be equal, and extents that are bucketed."""


def about(n: int) -> int:
    """An extent's bucket: the nearest power of √2 on a logarithmic scale; 0 for 0."""
    return round(2 ** (round(2 * math.log2(n)) / 2)) if n > 0 else 0


def _gemm(p: Any) -> Extents:
    exact = {"N": p.N, "K": p.K, "group": p.b_head_group, "summed": p.summed}
    return exact | {"beta": p.beta != 0, "reads": p.reads_inputs}, {
        "M": p.M,
        "matrices": p.matrices,
    }


def _attention(p: Any) -> Extents:
    varied = {"batch": p.batch, "S_q": p.S_q, "S_k": p.S_k}
    window = {n: x for n, x in (("left", p.left), ("right", p.right)) if x is not None}
    return {"heads": p.num_heads, "kv_heads": p.kv_heads, "page": p.page_size}, varied | window


def _projection(p: Any) -> Extents:
    heads = getattr(p, "heads", p)  # the qkv projections describe their heads separately
    exact = {
        n: getattr(heads, n) for n in ("num_heads", "kv_heads", "head_dim") if hasattr(heads, n)
    }
    tokens = heads.tokens if hasattr(heads, "tokens") else p.S
    return {"hidden": p.hidden, **exact}, {"tokens": p.batch * tokens}


_EXTENTS: Mapping[str, Callable[[Any], Extents]] = {
    "gemm": _gemm,
    "attention": _attention,
    "attention_bwd": lambda p: _attention(p.forward),
    **dict.fromkeys(
        ("qkv_projection", "output_projection", "qkv_projection_bwd", "output_projection_bwd"),
        _projection,
    ),
}


def problem_class(problem: Problem) -> str:
    """The class as text. Each problem of an operation that is unknown here is its own class."""
    extents = _EXTENTS.get(problem.operation)
    if extents is None:
        return repr(problem)
    exact, varied = extents(problem)
    parts = [
        *(f"{n}={x}" for n, x in exact.items()),
        *(f"{n}~{about(x)}" for n, x in varied.items()),
    ]
    return f"{problem.spec!r} {' '.join(parts)}"


def batch_invariant(problem: Problem) -> bool:
    """Whether a row's bits must not depend on the rest of the batch. Such problems have no tuned
    choice, which could differ between batch sizes."""
    spec: Any = problem.spec
    return bool(getattr(getattr(spec, "forward", spec), "batch_invariant", False))

"""Which problems share a tuned choice.

A class is the spec, which holds dtypes, views, options and how wide rows may be accessed; the
extents that a model fixes, exactly; and those that its requests vary, in steps of half an octave:
609 to 861 are "about 724". The alignment that strides leave is in the spec. Strides themselves are
in no class: whether an implementation takes them is asked again at each problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from kernelseam.contract import Problem

Extents = tuple[dict[str, object], dict[str, int]]
"""Those that must be equal, and those that may be about equal."""


def about(n: int) -> int:
    """The middle of an extent's bucket: the power of √2 that is nearest on a logarithmic scale; 0
    of nothing."""
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
    heads = getattr(p, "heads", p)  # of q, k and v they have a description of their own
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
    """The class as text, equal where a tuned choice may be shared. Of an operation that is not
    known here every problem is a class of its own."""
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
    """Whether a row's bits must not depend on the rest of the batch. A choice by extents could be
    another for a larger batch: such problems have none that is tuned."""
    spec: Any = problem.spec
    return bool(getattr(getattr(spec, "forward", spec), "batch_invariant", False))

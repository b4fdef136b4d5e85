"""Of what a user's functions say, what options say as well: kernels have more ways for these."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.expressions.options import options_of
from kernelseam.expressions.text import structure_of, text_of


def by_options(p: AttentionProblem) -> AttentionProblem:
    """The problem with a mask_mod's band as ``causal`` or a window, and a score_mod that is a
    soft cap as ``softcap``; what options do not say stays an expression. A band beside a prefix
    stays, too: what it hides the prefix would show. So it is where a batch-invariant result would
    depend on lengths."""
    s = p.spec
    if s.expression is None:
        return p
    dense = s.q_view == s.kv_view == "strided" and not (s.lengths or s.batch_invariant)
    first = not (s.softcap or s.alibi or s.bias)
    structure = structure_of(s.expression)
    found = options_of(structure, p.captured_numbers, dense and p.S_q == p.S_k, first)
    if s.prefix or found.rest == structure:
        return p
    left, right = _nearer(p.left, found.left), _nearer(0 if s.causal else p.right, found.right)
    windowed = left is not None or (right is not None and right != 0)
    rest: dict[str, Any] = {"captured_numbers": (), "captured_extents": (), "captured_strides": ()}
    spec = replace(
        s,
        causal=right == 0 and not windowed,
        window=windowed,
        softcap=s.softcap or found.softcap is not None,
        expression=None if found.rest is None else text_of(found.rest),
    )
    return replace(
        p,
        spec=spec,
        left=left,
        right=right,
        softcap=p.softcap if found.softcap is None else found.softcap,
        **(rest if found.rest is None else {}),
    )


def _nearer(x: int | None, y: int | None) -> int | None:
    return y if x is None else x if y is None else min(x, y)

"""Of what a user's functions say, what options say as well: kernels have more ways for these."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.descriptors.common.captured import captured
from kernelseam.expressions.options import Source, options_of
from kernelseam.expressions.text import structure_of, text_of


def by_options(p: AttentionProblem) -> AttentionProblem:
    """The problem with a mask_mod's band as ``causal`` or a window, its prefix as
    ``prefix_lengths``, and a score_mod that is a soft cap or ALiBi as ``softcap`` and
    ``alibi_slopes``, in the captured arrays; what options do not say stays an expression. A band
    beside a prefix stays, too: what it hides the prefix would show. So it is where a
    batch-invariant result would depend on lengths."""
    s = p.spec
    if s.expression is None:
        return p
    dense = s.q_view == s.kv_view == "strided" and not (s.lengths or s.batch_invariant)
    first = not (s.softcap or s.alibi or s.bias)
    banded = s.causal or s.window
    structure = structure_of(s.expression)

    def has(source: Source, dtype: str) -> bool:
        known = {"b": p.batch, "h": p.num_heads, "": 1}
        extents, strides = p.captured_extents[source.array], p.captured_strides[source.array]
        there = all(n >= known[x] for x, n in zip(source.axes, extents, strict=True))
        return there and (dtype == "float32" or (not banded and strides == (1,)))

    found = options_of(
        structure,
        p.captured_numbers,
        dense and p.S_q == p.S_k,
        first,
        0 if s.causal else p.right,
        has,
    )
    if s.prefix or found.rest == structure:
        return p
    left, right = _nearer(p.left, found.left), _nearer(0 if s.causal else p.right, found.right)
    windowed = left is not None or (right is not None and right != 0)
    kinds: dict[str, Any] = {
        "causal": right == 0 and not windowed,
        "window": windowed,
        "softcap": s.softcap or found.softcap is not None,
        "expression": None if found.rest is None else text_of(found.rest),
    }
    values: dict[str, Any] = {"left": left, "right": right}
    if found.softcap is not None:
        values["softcap"] = found.softcap
    if found.slopes is not None:
        array, axes = found.slopes
        walk = dict(zip(axes, p.captured_strides[array], strict=True))
        kinds |= {"alibi": True, "slopes": captured(array)}
        values["alibi_strides"] = walk.get("b", 0), walk.get("h", 0)
    if found.prefix is not None:
        kinds |= {"prefix": True, "prefixes": captured(found.prefix.array)}
    if found.rest is None:
        values["captured_numbers"] = ()
    return replace(p, spec=replace(s, **kinds), **values)


def _nearer(x: int | None, y: int | None) -> int | None:
    return y if x is None else x if y is None else min(x, y)

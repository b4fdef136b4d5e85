"""The user's score_mod and mask_mod in a binary: the generated struct, and what kernels are handed
for it."""

from __future__ import annotations

from typing import Any

from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec, captured
from kernelseam.expressions.lowering import Structure as Expression
from kernelseam.expressions.lowering import device_struct
from kernelseam.expressions.nodes import Type
from kernelseam.expressions.text import structure_of
from kernelseam.kernels.signature import Member, Structure

EXPRESSION = "generated/expression.h"
"""The struct's file, as attention/scores.h includes it."""
_NONE = """#pragma once
struct Expression {
  static constexpr bool HAS_SCORE = false, HAS_MASK = false;
  struct Tile {};
  struct Row {};
  struct Column {};
  struct Rows {};
  KS_DEVICE Tile tile(int, int, int, int) const { return {}; }
  KS_DEVICE Row row(const Tile&, int) const { return {}; }
  KS_DEVICE Column column(const Tile&, int) const { return {}; }
  KS_DEVICE Rows rows(const Tile&, int, int) const { return {}; }
  KS_DEVICE float score(float x, const Tile&, const Row&, const Column&) const { return x; }
  KS_DEVICE float slope(float, const Tile&, const Row&, const Column&) const { return 1.f; }
  KS_DEVICE bool visible(const Tile&, const Row&, const Column&) const { return true; }
  KS_DEVICE bool any(const Tile&, const Rows&, int, int) const { return true; }
  KS_DEVICE bool every(const Tile&, const Rows&, int, int) const { return true; }
};
"""


def expression_header(spec: Any) -> str:
    """The file, for a spec of any operation; without an expression one that changes nothing."""
    text = getattr(getattr(spec, "forward", spec), "expression", None)
    if text is None:
        return _NONE
    return f'#pragma once\n#include "tile/element.h"\n{device_struct(structure_of(text))}'


def expression_structure(spec: AttentionSpec) -> Structure | None:
    """The struct as a kernel's argument; None without one, or where nothing is captured."""
    if spec.expression is None:
        return None
    expression = structure_of(spec.expression)
    members: list[Member] = [
        (f"number{i}", "f32" if type is Type.FLOAT else "i32")
        for i, type in enumerate(expression.numbers)
    ]
    members += [(f"array{i}", _array(i, rank)) for i, (_, rank) in enumerate(expression.arrays)]
    return Structure(tuple(members)) if members else None


def _array(index: int, rank: int) -> Structure:
    name, axes = captured(index), range(rank)
    strides = [(f"{name}_stride_{axis}", "i64") for axis in axes]
    extents = [(f"{name}_extent_{axis}", "i32") for axis in axes]
    fields = ("base", *(f"stride_{i}" for i in axes), *(f"extent_{i}" for i in axes))
    return Structure(((name, "pointer"), *strides, *extents), fields)


def expression_pointers(spec: AttentionSpec) -> tuple[str, ...]:
    """Pointer parameters, named as their operands."""
    return tuple(captured(i) for i in range(len(_arrays(spec))))


def expression_values(p: AttentionProblem) -> dict[str, int | float]:
    """What the functions captured, but addresses."""
    if p.spec.expression is None:
        return {}
    expression: Expression = structure_of(p.spec.expression)
    values: dict[str, int | float] = {f"number{i}": x for i, x in enumerate(p.captured_numbers)}
    for i in range(len(expression.arrays)):
        for field, given in (("stride", p.captured_strides[i]), ("extent", p.captured_extents[i])):
            values |= {f"{captured(i)}_{field}_{axis}": n for axis, n in enumerate(given)}
    return values


def _arrays(spec: AttentionSpec) -> tuple[tuple[str, int], ...]:
    return () if spec.expression is None else structure_of(spec.expression).arrays

"""Users' functions in a binary: the generated structs, and what kernels are handed for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kernelseam.descriptors.attention.problem import AttentionSpec
from kernelseam.descriptors.common.captured import captured
from kernelseam.expressions.epilogues import device_epilogue, epilogue_of
from kernelseam.expressions.lowering import device_struct
from kernelseam.expressions.nodes import Type
from kernelseam.expressions.text import structure_of
from kernelseam.kernels.signature import Member, Structure

EXPRESSION = "generated/expression.h"
"""The struct's file, as attention/scores.h includes it."""
_NONE = """#pragma once
struct Expression {
  static constexpr bool HAS_SCORE = false, HAS_MASK = false;
  static constexpr bool HAS_DIAGONAL = false, DIAGONAL_IS_BIT = false;
  static constexpr bool ROW_IS_LOADED = false, COLUMNS_MAY_BE_ALIKE = false;
  static constexpr int OPERATIONS = 0, OPERATIONS_BESIDE = 0;
  struct Tile {};
  struct Row {};
  struct Column {};
  struct Diagonal {};
  struct Rows {};
  struct Columns {};
  KS_DEVICE Tile tile(int, int, int, int) const { return {}; }
  KS_DEVICE Row row(const Tile&, int) const { return {}; }
  KS_DEVICE Column column(const Tile&, int) const { return {}; }
  KS_DEVICE Diagonal diagonal(const Tile&, int) const { return {}; }
  template<int LANES = 1> KS_DEVICE Rows rows(const Tile&, int, int) const { return {}; }
  template<int LANES = 1> KS_DEVICE Columns columns(const Tile&, int, int) const { return {}; }
  template<class... D> KS_DEVICE float score(float x, const D&...) const { return x; }
  KS_DEVICE float slope(float, const Tile&, const Row&, const Column&) const { return 1.f; }
  template<class... D> KS_DEVICE bool visible(const D&...) const { return true; }
  template<int LANES = 1, class... D> KS_DEVICE bool any(const D&...) const { return true; }
  template<int LANES = 1, class... D> KS_DEVICE bool every(const D&...) const { return true; }
};
"""


EPILOGUE = "generated/epilogue.h"
"""A GEMM's, as gemm/epilogue.h includes it."""
_NO_EPILOGUE = """#pragma once
struct Epilogue {
  struct Tile {};
  struct Row {};
  struct Column {};
  KS_DEVICE Tile tile(int) const { return {}; }
  KS_DEVICE Row row(const Tile&, int) const { return {}; }
  KS_DEVICE Column column(const Tile&, int) const { return {}; }
  KS_DEVICE float value(float x, const Tile&, const Row&, const Column&) const { return x; }
  KS_DEVICE float value(float x, float, const Tile&, const Row&, const Column&) const { return x; }
};
"""


def epilogue_header(spec: Any) -> str:
    """The file, for a spec of any operation; without an epilogue one that changes nothing."""
    text = getattr(getattr(spec, "product", spec), "epilogue", None)
    if text is None:
        return _NO_EPILOGUE
    return f'#pragma once\n#include "tile/element.h"\n{device_epilogue(epilogue_of(text))}'


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
    return captured_structure(expression.numbers, expression.arrays)


def captured_structure(
    numbers: Sequence[Type], arrays: Sequence[tuple[str, int]]
) -> Structure | None:
    """A generated struct as a kernel's argument; None where nothing is captured."""
    members: list[Member] = [
        (f"number{i}", "f32" if type is Type.FLOAT else "i32") for i, type in enumerate(numbers)
    ]
    members += [(f"array{i}", _array(i, rank)) for i, (_, rank) in enumerate(arrays)]
    return Structure(tuple(members)) if members else None


def _array(index: int, rank: int) -> Structure:
    name, axes = captured(index), range(rank)
    strides = [(f"{name}_stride_{axis}", "i64") for axis in axes]
    extents = [(f"{name}_extent_{axis}", "i32") for axis in axes]
    fields = ("base", *(f"stride_{i}" for i in axes), *(f"extent_{i}" for i in axes))
    return Structure(((name, "pointer"), *strides, *extents), fields)


def captured_values(p: Any) -> dict[str, int | float]:
    """What a problem's functions captured, but addresses."""
    values: dict[str, int | float] = {f"number{i}": x for i, x in enumerate(p.captured_numbers)}
    for i, axes in enumerate(zip(p.captured_strides, p.captured_extents, strict=True)):
        for field, given in zip(("stride", "extent"), axes, strict=True):
            values |= {f"{captured(i)}_{field}_{axis}": n for axis, n in enumerate(given)}
    return values

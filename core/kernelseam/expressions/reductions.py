"""Sums and maxima of a product's elements on their way out: what an epilogue writes beside the
result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kernelseam.expressions.lowering import function_text
from kernelseam.expressions.nodes import Node

SUM, MAXIMUM = "sum", "max"
"""``MAXIMUM`` is of absolute values: of none it is 0, and a NaN among them makes it NaN."""
NAMES = ("reduced", "rest")
"""Of a reduction's nodes in an epilogue's text, each followed by its number."""


class Reduction(NamedTuple):
    """One of them, at a point of the epilogue: what it is of, and what becomes of the element
    afterwards. Both nodes are of the coordinate "acc", the element at that point."""

    operation: str
    rows: int
    """Rows that share a number of the result; 0: all."""
    columns: int
    by_matrix: bool
    """Whether each matrix has numbers of its own; else they are of all matrices."""
    value: Node
    rest: Node

    def shape(self, results: int, rows: int, columns: int) -> tuple[int, ...]:
        """Of the array that it is written to, for so many matrices of so many rows and columns. One
        number of all is [1]."""
        sizes = [results] if self.by_matrix else []
        for n, size in ((rows, self.rows), (columns, self.columns)):
            if size:
                sizes.append(-(-n // size))
        return tuple(sizes) or (1,)

    @property
    def axes(self) -> str:
        """Of that array, for messages."""
        sizes = ["batch"] if self.by_matrix else []
        for n, size in (("M", self.rows), ("N", self.columns)):
            if size:
                sizes.append(n if size == 1 else f"⌈{n} / {size}⌉")
        return ", ".join(sizes) or "1"


def reduction(index: int) -> str:
    """The name of the operand that an epilogue's sum or maximum is written to."""
    return f"reduction_{index}"


def reduction_operands(expression: Any) -> dict[str, object]:
    """The arrays that an epilogue's sums and maxima are written to, by their operands' names; none
    of an expression that has none."""
    arrays = getattr(expression, "results", ())
    return {reduction(i): x for i, x in enumerate(arrays)}


def roots_of(reductions: Sequence[Reduction]) -> dict[str, Node]:
    """Their nodes, by the names that they have in a text."""
    return {
        f"{name}_{i}": node
        for i, r in enumerate(reductions)
        for name, node in zip(NAMES, (r.value, r.rest), strict=True)
    }


def reductions_text(reductions: Sequence[Reduction]) -> str:
    """What else there is to them."""
    return json.dumps([[r.operation, r.rows, r.columns, r.by_matrix] for r in reductions])


def names_in(text: str) -> tuple[str, ...]:
    """The names of the nodes of what ``reductions_text`` wrote. Raises ValueError."""
    return tuple(f"{name}_{i}" for i in range(len(json.loads(text))) for name in NAMES)


def reductions_of(text: str, roots: Mapping[str, Node]) -> tuple[Reduction, ...]:
    """What ``reductions_text`` wrote. Raises ValueError, KeyError."""
    result = []
    for i, (operation, rows, columns, by_matrix) in enumerate(json.loads(text)):
        if operation not in (SUM, MAXIMUM):
            raise ValueError(operation)
        nodes = (roots[f"{name}_{i}"] for name in NAMES)
        result.append(Reduction(operation, int(rows), int(columns), bool(by_matrix), *nodes))
    return tuple(result)


def device_reductions(reductions: Sequence[Reduction], names: Mapping[Node, str]) -> list[str]:
    """Members of the generated struct: for each reduction I its constants, and the functions

    float reduced<I>(acc, tile, row, column)    what it is of, for each element
    float rest<I>(acc, tile, row, column)       what becomes of the element afterwards
    """
    if not reductions:
        return []
    inputs = "float acc, const Tile& tile, const Row& row, const Column& column"
    lines = [f"  static constexpr int REDUCTIONS = {len(reductions)};"]
    for name, values in (
        ("MAXIMUM", [str(r.operation == MAXIMUM).lower() for r in reductions]),
        ("REDUCED_ROWS", [str(r.rows) for r in reductions]),
        ("REDUCED_COLUMNS", [str(r.columns) for r in reductions]),
    ):
        kind = "bool" if name == "MAXIMUM" else "int"
        lines.append(f"  static constexpr {kind} {name}[] = {{{', '.join(values)}}};")
    for name, root in roots_of(reductions).items():
        lines += function_text("float", name, inputs, root, names)
    for name in NAMES:
        lines += [
            f"  template<int I> KS_DEVICE float {name}({inputs}) const {{",
            *(
                f"    if constexpr (I == {i}) return {name}_{i}(acc, tile, row, column);"
                for i in range(len(reductions))
            ),
            "  }",
        ]
    return lines

"""Numbers and arrays that a user's functions captured, as parts of problems and their operands.

A problem has ``captured_numbers``, and ``captured_extents`` and ``captured_strides`` of the arrays,
the operands captured_0, captured_1, …
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kernelseam.contract import ArrayInfo, OperandRule
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.expressions.epilogues import EpilogueExpression
from kernelseam.expressions.nodes import Node
from kernelseam.expressions.reductions import reduction_operands

E = TypeVar("E", bound=Any)


def captured(index: int) -> str:
    """The name of the operand of an array that an expression's functions captured."""
    return f"captured_{index}"


def captured_operands(expression: Any) -> dict[str, object]:
    """The arrays that an expression captured, by their operands' names; none of None."""
    arrays = () if expression is None else expression.arrays
    return {captured(i): x for i, x in enumerate(arrays)}


def check_read(arrays: Iterable[Any]) -> None:
    """Raise InvalidValue where a function that is computed captured an array without elements."""
    for i, x in enumerate(arrays):
        if 0 in x.shape:
            raise InvalidValue(
                captured(i),
                f"an array of shape {list(x.shape)}",
                "must have elements, as a function reads it",
                "Leave the array out where it is empty",
            )


def _check_counted(
    loads: Iterable[Node], shapes: Sequence[tuple[int, ...]], counts: Mapping[str, int]
) -> None:
    """Raise InvalidValue where a coordinate itself is an index of an array that has neither as many
    elements, nor one for all."""
    for n in loads:
        shape = shapes[n.value[0]]
        for axis, (index, extent) in enumerate(zip(n.arguments, shape, strict=True)):
            count = counts.get(index.value, 0) if index.operation == "coordinate" else 0
            if 1 < extent < count:
                raise InvalidValue(
                    captured(n.value[0]),
                    f"an array of shape {list(shape)}",
                    f"is read at {index.value} along axis {axis}: must have {count} elements "
                    "there, or 1",
                    "Give one for each, or make the index an expression that stays within it",
                )


def epilogue_fields(
    epilogue: EpilogueExpression | None, infos: Mapping[str, ArrayInfo], counts: Mapping[str, int]
) -> dict[str, Any]:
    """``captured_fields`` of a product's epilogue. ``counts``: of rows m, columns n and the batch,
    how many there are."""
    live = all(counts.values())
    fields = captured_fields(epilogue, infos, live)
    if live and epilogue is not None:
        _check_counted(epilogue.structure.loads, fields["captured_extents"], counts)
    return fields


def captured_fields(expression: Any, infos: Mapping[str, ArrayInfo], live: bool) -> dict[str, Any]:
    """A problem's fields of what an expression captured; none of None. ``live``: something is
    computed, else the arrays may be empty, too."""
    if expression is None:
        return {}
    arrays = [infos[captured(i)] for i in range(len(expression.arrays))]
    if live:
        check_read(arrays)
    return {
        "captured_numbers": tuple(expression.numbers),
        "captured_extents": tuple(x.shape for x in arrays),
        "captured_strides": tuple(x.strides for x in arrays),
    }


def captured_rules(
    problem: Any, arrays: Sequence[tuple[str, int]], live: int
) -> Iterator[OperandRule]:
    """Of arrays (dtype, rank); ``live``: 1 where they are read, else 0."""
    for i, (dtype, _) in enumerate(arrays):
        yield OperandRule(
            captured(i),
            DType(dtype),
            tuple(n * live for n in problem.captured_extents[i]),
            problem.captured_strides[i],
            DType(dtype).itemsize,
        )


def bare(expression: E, infos: Mapping[str, ArrayInfo], **functions: None) -> E:
    """An expression over the addresses of its arrays, without its functions, which keep them."""
    places = {n: i.pointer for n, i in infos.items()}
    given: dict[str, Any] = {
        "arrays": tuple(places.get(captured(i), x) for i, x in enumerate(expression.arrays))
    }
    if results := reduction_operands(expression):
        given["results"] = tuple(places.get(n, x) for n, x in results.items())
    bared: E = replace(expression, **given, **functions)
    return bared

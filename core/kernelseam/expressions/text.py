"""An expression's structure as text, and back: what specs, traces' files and bundles carry.

One node after another, each used by its number: ``0 coordinate INT32 "q_idx"; 1 constant INT32 3;
2 lt BOOLEAN 0 1; score 0; visible 2; …``. Equal structures have equal texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache

from kernelseam.errors import InvalidValue
from kernelseam.expressions.blocks import Blocks
from kernelseam.expressions.lowering import ELEMENTS, Structure
from kernelseam.expressions.nodes import Node, Type, cast, make, order
from kernelseam.expressions.operations import OPERATIONS

_LEAVES = ("constant", "coordinate", "argument")


def text_of(structure: Structure) -> str:
    return _text_of(structure)


@lru_cache(512)
def _text_of(structure: Structure) -> str:
    roots = {"score": structure.score, "visible": structure.visible}
    text = written(roots, structure.numbers, structure.arrays)
    return text if structure.blocks is None else f"{text}{_BLOCKS}{json.dumps(structure.blocks)}"


_BLOCKS = "; blocks "


@lru_cache(512)
def structure_of(text: str) -> Structure:
    """The structure of a text. Raises InvalidValue for what is none."""
    own, _, given = text.partition(_BLOCKS)
    roots, numbers, arrays = read(own, ("score", "visible"))
    blocks = None
    if given:
        try:
            q_size, kv_size, decide = json.loads(given)
            blocks = Blocks(int(q_size), int(kv_size), bool(decide))
        except (TypeError, ValueError) as e:
            raise refused(text) from e
    return Structure(roots["score"], roots["visible"], numbers, arrays, blocks)


def refused(text: str) -> InvalidValue:
    """The error about a text of no expression."""
    return InvalidValue(
        "expression",
        text,
        "is no text of an expression",
        "Pass what a traced call of the function gave its operator",
    )


def written(
    roots: Mapping[str, Node], types: Sequence[Type], arrays: Sequence[tuple[str, int]]
) -> str:
    """Named nodes, the types of numbers, and dtypes and ranks of arrays as text."""
    nodes = order(roots.values())
    numbers = {n: i for i, n in enumerate(nodes)}
    statements = []
    for n, i in numbers.items():
        inner = [str(numbers[x]) for x in n.arguments]
        value = [json.dumps(n.value)] if n.value is not None else []
        statements.append(" ".join([str(i), n.operation, n.type.name, *inner, *value]))
    statements += [f"{name} {numbers[n]}" for name, n in roots.items()]
    statements += [f"number {t.name}" for t in types]
    statements += [f"array {dtype} {rank}" for dtype, rank in arrays]
    return "; ".join(statements)


def read(
    text: str, names: tuple[str, ...]
) -> tuple[dict[str, Node], tuple[Type, ...], tuple[tuple[str, int], ...]]:
    """What ``written`` wrote of nodes of these names, all of which must be there. Raises
    InvalidValue."""
    nodes: list[Node] = []
    roots: dict[str, Node] = {}
    numbers: list[Type] = []
    arrays: list[tuple[str, int]] = []
    try:
        for statement in text.split("; "):
            match statement.split(" "):
                case [name, i] if name in names:
                    roots[name] = nodes[int(i)]
                case ["number", type]:
                    numbers.append(Type[type])
                case ["array", dtype, rank] if dtype in ELEMENTS:
                    arrays.append((dtype, int(rank)))
                case [i, operation, type, *rest] if int(i) == len(nodes):
                    nodes.append(_node(operation, Type[type], rest, nodes))
                case _:
                    raise ValueError(statement)
        return {name: roots[name] for name in names}, tuple(numbers), tuple(arrays)
    except (KeyError, IndexError, TypeError, ValueError) as e:
        raise refused(text) from e


def _node(operation: str, type: Type, rest: list[str], nodes: list[Node]) -> Node:
    if operation in _LEAVES:
        return Node(operation, type, (), json.loads(" ".join(rest)))
    if operation == "load":
        first = next((i for i, x in enumerate(rest) if x.startswith("[")), len(rest))
        index, dtype, rank = json.loads(" ".join(rest[first:]))
        inner = tuple(nodes[int(i)] for i in rest[:first])
        return Node(operation, type, inner, (int(index), str(dtype), int(rank)))
    inner = tuple(nodes[int(i)] for i in rest)
    if operation == "cast":
        return cast(inner[0], type)
    if operation == "detach":
        return Node(operation, type, inner)
    if operation not in OPERATIONS:
        raise ValueError(operation)
    return make(operation, *inner)

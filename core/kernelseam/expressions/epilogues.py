"""What users write of a product's elements on their way out, as one expression: epilogues."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from kernelseam.expressions.captures import Record, dtype_name
from kernelseam.expressions.lowering import (
    Levels,
    function_text,
    kept_at,
    level_structs,
    members,
)
from kernelseam.expressions.nodes import Node, Type, coordinate, order
from kernelseam.expressions.scores import check_arrays
from kernelseam.expressions.text import read, written
from kernelseam.expressions.tracing import Kind, record_of, trace

EpilogueFunction = Callable[..., Any]
"""epilogue(acc, m, n, batch), or of pairs epilogue(gate, up, m, n, batch)"""

INDICES = tuple((name, Type.INT32) for name in ("m", "n", "batch"))
ACC = (("acc", Type.FLOAT),)
PAIR = (("gate", Type.FLOAT), ("up", Type.FLOAT))
_PLAIN = Kind("epilogue", "epilogue(acc, m, n, batch)", (*ACC, *INDICES), Type.FLOAT)
_PAIRS = Kind(
    "epilogue", "gated(epilogue), epilogue(gate, up, m, n, batch)", (*PAIR, *INDICES), Type.FLOAT
)
HALVES, INTERLEAVED = "halves", "interleaved"
_LEVELS = Levels(
    {"tile": ("batch",), "row": ("m",), "column": ("n",)},
    frozenset(name for name, _ in (*ACC, *PAIR)),
)


class EpilogueStructure(NamedTuple):
    """An epilogue as an expression: what a binary is made of. Hashable.

    ``pairs``: "" where it is of single elements; of pairs of columns, which make one: HALVES, n and
    n + N/2, or INTERLEAVED, 2n and 2n + 1. ``numbers`` are the types of captured numbers,
    ``arrays`` (dtype, rank) of captured arrays.
    """

    value: Node
    pairs: str
    numbers: tuple[Type, ...]
    arrays: tuple[tuple[str, int], ...]

    @property
    def key(self) -> str:
        """The same for equal structures, in every process."""
        return hashlib.blake2b(epilogue_text(self).encode(), digest_size=12).hexdigest()

    @property
    def sums(self) -> tuple[str, ...]:
        """The coordinates that are sums of products."""
        return tuple(name for name, _ in (PAIR if self.pairs else ACC))

    @property
    def operations(self) -> Counter[str]:
        """How many operations an element takes, by name."""
        nodes = (n for n in order([self.value]) if n.arguments and _LEVELS.of(n) == "element")
        return Counter(n.operation for n in nodes)

    def __str__(self) -> str:
        return f"epilogue={self.value}" + (f" of {self.pairs}" if self.pairs else "")


@dataclass(frozen=True, eq=False)
class EpilogueExpression:
    """An epilogue, traced: the structure that binaries are made of, and what it captured.
    ``function`` is the user's own."""

    structure: EpilogueStructure
    numbers: tuple[int | float, ...]
    arrays: tuple[Any, ...]
    function: EpilogueFunction | None = None

    def __str__(self) -> str:
        return str(self.structure)


def traced_epilogue(function: EpilogueFunction, pairs: str = "") -> EpilogueExpression:
    """Trace a function.

    ``function(acc, m, n, batch)`` is an element of the result, of float32: ``acc`` is what the
    product's other options make of it, m and n count its row and column from 0, batch the matrix
    among all results. Of pairs it is ``function(gate, up, m, n, batch)``, and n counts columns of
    the result, which has half as many. It is ordinary Python over operators, comparisons,
    ``where``, functions of NumPy and torch, and arrays that it captures, by element. Raises
    InvalidValue, with the line, for what cannot be traced.
    """
    traced = trace(_PAIRS if pairs else _PLAIN, function)
    check_arrays("epilogue", traced)
    types = dict.fromkeys(range(len(traced.numbers)), Type.INT32)
    types |= {n.value: n.type for n in order([traced.root]) if n.operation == "argument"}
    arrays = tuple((dtype_name(x), len(x.shape)) for x in traced.arrays)
    structure = EpilogueStructure(traced.root, pairs, tuple(types.values()), arrays)
    return EpilogueExpression(structure, traced.numbers, traced.arrays, function)


def record(function: EpilogueFunction, pairs: str = "") -> Record:
    """What the trace of a function, which was traced, depends on beside its code."""
    return record_of(_PAIRS if pairs else _PLAIN, function)


@lru_cache(512)
def epilogue_text(structure: EpilogueStructure) -> str:
    """A structure as text (``expressions.text``)."""
    name = f"epilogue_{structure.pairs}" if structure.pairs else "epilogue"
    return written({name: structure.value}, structure.numbers, structure.arrays)


@lru_cache(512)
def epilogue_of(text: str) -> EpilogueStructure:
    """The structure of a text. Raises InvalidValue for what is none."""
    pairs = next((p for p in (HALVES, INTERLEAVED) if f"; epilogue_{p} " in text), "")
    name = f"epilogue_{pairs}" if pairs else "epilogue"
    roots, numbers, arrays = read(text, (name,))
    return EpilogueStructure(roots[name], pairs, numbers, arrays)


def device_epilogue(structure: EpilogueStructure, name: str = "Epilogue") -> str:
    """The text of one C++ struct, for every compiler. Its members are what the function captured
    (``lowering``); its functions are const:

        Tile tile(batch)                               once for a tile of the result
        Row row(tile, m)                               once for each row
        Column column(tile, n)                         once for each column
        float value(acc, tile, row, column)            for each element, or
        float value(gate, up, tile, row, column)       for each pair

    (The other one of these is there, too, and never called: kernels are no templates.) Rows and
    columns beyond the result may be asked for: nothing outside of an array is read.
    """
    kept = kept_at(_LEVELS, [structure.value])
    text, element = level_structs(_LEVELS, kept)
    element |= {coordinate(x, Type.FLOAT): x for x in structure.sums}
    sums = "".join(f"float {x}, " for x in structure.sums)
    inputs = f"{sums}const Tile& tile, const Row& row, const Column& column"
    never = "float, " * (1 if structure.pairs else 2) + "const Tile&, const Row&, const Column&"
    lines = [
        f"struct {name} {{",
        *members(structure.numbers, structure.arrays),
        *text,
        *function_text("float", "value", inputs, structure.value, element),
        f"  KS_DEVICE float value({never}) const {{ return 0.f; }}",
        "};",
        "",
    ]
    return "\n".join(lines)

"""What users write of a product's elements on their way out, as one expression: epilogues."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
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
from kernelseam.expressions.reductions import (
    Reduction,
    device_reductions,
    names_in,
    reductions_of,
    reductions_text,
    roots_of,
)
from kernelseam.expressions.scores import shifted
from kernelseam.expressions.text import read, refused, written
from kernelseam.expressions.tracing import Kind, Trace, record_of, trace
from kernelseam.frozen import dataclass

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
    ``arrays`` (dtype, rank) of captured arrays. With ``reductions``, which are taken in turn,
    ``value`` is the element at the first of them, and what the last leaves is the result.
    """

    value: Node
    pairs: str
    numbers: tuple[Type, ...]
    arrays: tuple[tuple[str, int], ...]
    reductions: tuple[Reduction, ...] = ()

    @property
    def roots(self) -> dict[str, Node]:
        """All of its nodes that something is computed by, by the names that they have in a text."""
        name = f"epilogue_{self.pairs}" if self.pairs else "epilogue"
        return {name: self.value, **roots_of(self.reductions)}

    @property
    def loads(self) -> list[Node]:
        """The elements of captured arrays that it reads."""
        return [n for n in order(self.roots.values()) if n.operation == "load"]

    @property
    def counts_matrices(self) -> bool:
        """Whether it tells matrices from one another by their number."""
        reads = any("batch" in x.reads for x in self.roots.values())
        return reads or any(r.by_matrix for r in self.reductions)

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
        nodes = order(self.roots.values())
        nodes = [n for n in nodes if n.arguments and _LEVELS.of(n) == "element"]
        return Counter(n.operation for n in nodes)

    def __str__(self) -> str:
        text = f"epilogue={self.value}" + (f" of {self.pairs}" if self.pairs else "")
        for r in self.reductions:
            text += f", {r.operation}[{r.axes}] of {r.value}, then {r.rest}"
        return text


@dataclass(frozen=True, eq=False)
class EpilogueExpression:
    """An epilogue, traced: the structure that binaries are made of, what it captured, and the
    arrays that its reductions are written to. ``function`` is the user's own."""

    structure: EpilogueStructure
    numbers: tuple[int | float, ...]
    arrays: tuple[Any, ...]
    function: EpilogueFunction | None = None
    results: tuple[Any, ...] = ()

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
    traced = _trace(function, pairs)
    structure = _structure([traced], pairs, [traced.root])
    return EpilogueExpression(structure, traced.numbers, traced.arrays, function)


class Reduced(NamedTuple):
    """A sum or a maximum in an epilogue: as ``Reduction``, of functions (acc, m, n, batch); None
    changes nothing."""

    operation: str
    rows: int
    columns: int
    by_matrix: bool
    value: EpilogueFunction | None
    rest: EpilogueFunction | None


def reduced_epilogue(
    function: EpilogueFunction | None,
    pairs: str,
    reduced: Sequence[Reduced],
    results: Sequence[Any],
) -> EpilogueExpression:
    """Trace an epilogue with reductions: ``function`` is what comes before the first of them.
    ``results``: the arrays that they are written to. Raises InvalidValue as ``traced_epilogue``."""
    identity = Trace(coordinate(*ACC[0]), (), ())
    functions = [function, *(f for r in reduced for f in (r.value, r.rest))]
    traces = [
        identity if f is None else _trace(f, "" if i else pairs) for i, f in enumerate(functions)
    ]
    roots, numbers, arrays = list[Node](), list[int | float](), list[Any]()
    for one in traces:
        roots.append(shifted(one.root, len(numbers), len(arrays)))
        numbers += one.numbers
        arrays += one.arrays
    structure = _structure(traces, pairs, roots)
    reductions = tuple(
        Reduction(r.operation, r.rows, r.columns, r.by_matrix, value, rest)
        for r, value, rest in zip(reduced, roots[1::2], roots[2::2], strict=True)
    )
    structure = structure._replace(reductions=reductions)
    return EpilogueExpression(structure, tuple(numbers), tuple(arrays), None, tuple(results))


def _trace(function: EpilogueFunction, pairs: str) -> Trace:
    return trace(_PAIRS if pairs else _PLAIN, function)


def _structure(traces: Sequence[Trace], pairs: str, roots: Sequence[Node]) -> EpilogueStructure:
    """Of what the traces captured, the first root its value; the roots count all that was
    captured."""
    types = dict.fromkeys(range(sum(len(x.numbers) for x in traces)), Type.INT32)
    types |= {n.value: n.type for n in order(roots) if n.operation == "argument"}
    arrays = tuple((dtype_name(x), len(x.shape)) for t in traces for x in t.arrays)
    return EpilogueStructure(roots[0], pairs, tuple(types.values()), arrays)


def record(function: EpilogueFunction, pairs: str = "") -> Record:
    """What the trace of a function, which was traced, depends on beside its code."""
    return record_of(_PAIRS if pairs else _PLAIN, function)


@lru_cache(512)
def epilogue_text(structure: EpilogueStructure) -> str:
    """A structure as text (``expressions.text``)."""
    text = written(structure.roots, structure.numbers, structure.arrays)
    if not structure.reductions:
        return text
    return f"{text}{_REDUCTIONS}{reductions_text(structure.reductions)}"


_REDUCTIONS = "; reductions "


@lru_cache(512)
def epilogue_of(text: str) -> EpilogueStructure:
    """The structure of a text. Raises InvalidValue for what is none."""
    own, _, given = text.partition(_REDUCTIONS)
    pairs = next((p for p in (HALVES, INTERLEAVED) if f"; epilogue_{p} " in own), "")
    name = f"epilogue_{pairs}" if pairs else "epilogue"
    try:
        roots, numbers, arrays = read(own, (name, *names_in(given or "[]")))
        reductions = reductions_of(given or "[]", roots)
    except (KeyError, TypeError, ValueError) as e:
        raise refused(text) from e
    return EpilogueStructure(roots[name], pairs, numbers, arrays, reductions)


def device_epilogue(structure: EpilogueStructure, name: str = "Epilogue") -> str:
    """The text of one C++ struct, for every compiler. Its members are what the function captured
    (``lowering``); its functions are const:

        Tile tile(batch)                               once for a tile of the result
        Row row(tile, m)                               once for each row
        Column column(tile, n)                         once for each column
        float value(acc, tile, row, column)            for each element, or
        float value(gate, up, tile, row, column)       for each pair

    (The other one of these is there, too, and never called: kernels are no templates.) Rows and
    columns beyond the result may be asked for: nothing outside of an array is read. What else there
    is of reductions, ``device_reductions`` says.
    """
    kept = kept_at(_LEVELS, [*structure.roots.values()])
    text, element = level_structs(_LEVELS, kept)
    element |= {coordinate(x, Type.FLOAT): x for x, _ in (*ACC, *PAIR)}
    sums = "".join(f"float {x}, " for x in structure.sums)
    inputs = f"{sums}const Tile& tile, const Row& row, const Column& column"
    never = "float, " * (1 if structure.pairs else 2) + "const Tile&, const Row&, const Column&"
    lines = [
        f"struct {name} {{",
        *members(structure.numbers, structure.arrays),
        *text,
        *function_text("float", "value", inputs, structure.value, element),
        f"  KS_DEVICE float value({never}) const {{ return 0.f; }}",
        *device_reductions(structure.reductions, element),
        "};",
        "",
    ]
    return "\n".join(lines)

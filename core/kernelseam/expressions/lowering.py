"""From expressions to device code: the text of one C++ struct, for every compiler.

Its members are what the function captured: ``number0``, … and ``array0``, …, each ``{base,
stride_0, …, extent_0, …}`` in elements. It needs ``tile/element.h``. Its functions say how often
something is computed; each is const, and all a kernel needs of an expression:

    Tile tile(b, h, q_len, kv_len)             once for a head's block
    Row row(tile, q_idx)                       once for each query
    Column column(tile, kv_idx)                once for each key
    float score(score, tile, row, column)      for each element: of the scaled product, base e
    bool visible(tile, row, column)            for each element, where ``HAS_MASK``
    float slope(score, tile, row, column)      ∂score/∂(scaled product)
    float factorN(score, tile, row, column)    what array gradient N multiplies the score's with
    Diagonal diagonal(tile, distance)          once for each q_idx − kv_idx, by who likes to:
    score(…, diagonal), visible(…, diagonal)   the same for an element, given that of its distance
    Rows rows<LANES>(tile, q_first, q_last)    once for a block's queries (the last one inclusive)
    Columns columns<LANES>(tile, kv_first, kv_last)   once for its keys
    bool any<LANES>(tile, rows, columns)       whether some of its pairs may be visible
    bool every<LANES>(tile, rows, columns)     whether all its pairs are visible

LANES neighbouring lanes of a warp, by default one, ask for the same block together: each reads a
part of captured arrays' ranges. All lanes of the warp must call then. Queries and keys beyond the
sequence may be asked for: nothing outside of an array is read.
Constants: ``HAS_SCORE`` and ``HAS_MASK`` (whether score and visible are more than the identity and
true), ``OPERATIONS`` (of an element), ``AFFINE`` (score = a·x + b) and ``FACTOR_OF_TILE`` (where a
is one number for a tile: then there is ``float factor(tile)``). ``HAS_DIAGONAL``: whether what
depends on the distance alone is worth its own computation; ``DIAGONAL_IS_BIT``: it is true or
false, and nothing else; ``OPERATIONS_BESIDE``: what is left to an element then.
``ROW_IS_LOADED``: whether row() reads arrays. ``COLUMNS_MAY_BE_ALIKE``: whether visible() reads one
number of a key that many may share, as those of a document do; it is the last member.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kernelseam.expressions.blocks import WHOLE, Blocks
from kernelseam.expressions.bounds import CORNERS, Bounds, bounds
from kernelseam.expressions.derivatives import affine, array_gradients, slope
from kernelseam.expressions.nodes import (
    Node,
    Type,
    constant,
    coordinate,
    make,
    order,
    rebuilt,
    substitute,
)
from kernelseam.expressions.operations import OPERATIONS

C_TYPES = {Type.BOOLEAN: "bool", Type.INT32: "int", Type.INT64: "i64", Type.FLOAT: "float"}
ELEMENTS = {
    "bool": "bool",
    "uint8": "unsigned char",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "i64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "float",
    "float64": "double",
}
"""Element types of captured arrays."""


class Levels(NamedTuple):
    """How often what depends on some coordinates alone is computed."""

    places: Mapping[str, tuple[str, ...]]
    """By level, the coordinates that are known there: "tile" first, whose are known everywhere;
    "row" and "column", which meet in elements, as "rows" and "columns" do in a block."""
    element: frozenset[str]
    """Coordinates that only elements have."""

    def of(self, n: Node) -> str:
        """How often a node is computed: once for each of these."""
        own = [level for level, places in self.places.items() if n.reads & {*places}]
        if n.reads & self.element or len(own) > 1 + ("tile" in own):
            return "element"
        return own[-1] if own else "tile"


_TILE = ("b", "h", "q_len", "kv_len")
_LEVELS = Levels(
    {
        "tile": _TILE,
        "row": ("q_idx",),
        "column": ("kv_idx",),
        "diagonal": ("distance",),
        "rows": CORNERS["q_idx"],
        "columns": CORNERS["kv_idx"],
    },
    frozenset({"score"}),
)
_BLOCK = "rows", "columns"
"""Levels of a block of queries × keys, which lanes may ask for together."""
_TOGETHER = "  template<int LANES = 1>"
_DISTANCE = coordinate("distance")
_DISTANCES = {
    make("sub", coordinate("q_idx"), coordinate("kv_idx")): _DISTANCE,
    make("sub", coordinate("kv_idx"), coordinate("q_idx")): make("neg", _DISTANCE),
}
_WORTHWHILE, _MOST_KEPT = 2, 2
"""Operations on a distance that are worth a level of their own, a load alone is; and numbers that
it may keep."""


class Structure(NamedTuple):
    """A score and a mask as one expression: what a binary is made of. Hashable.

    ``numbers`` are the types of captured numbers, ``arrays`` (dtype, rank) of captured arrays.
    """

    score: Node
    visible: Node
    numbers: tuple[Type, ...]
    arrays: tuple[tuple[str, int], ...]
    blocks: Blocks | None = None
    """Which blocks the mask leaves, in memory: the last array."""

    @property
    def has_score(self) -> bool:
        return self.score.operation != "coordinate"

    @property
    def has_mask(self) -> bool:
        return self.visible != constant(True) or self.blocks is not None

    @property
    def seen(self) -> tuple[Node, Bounds]:
        """(whether a query sees a key, bounds of it over a block), by the mask and its blocks."""
        return _seen(self.visible, len(self.arrays) - 1, self.blocks)

    @property
    def key(self) -> str:
        """The same for equal structures, in every process."""
        listed = repr(([int(t) for t in self.numbers], self.arrays, self.blocks)).encode()
        digests = self.score.digest + self.visible.digest + listed
        return hashlib.blake2b(digests, digest_size=12).hexdigest()

    def __str__(self) -> str:
        parts = [f"score_mod={self.score}"] * self.has_score
        return ", ".join([*parts, *[f"mask_mod={self.visible}"] * self.has_mask])


@lru_cache(512)
def _seen(mask: Node, array: int, blocks: Blocks | None) -> tuple[Node, Bounds]:
    return (mask, bounds(mask)) if blocks is None else blocks.over(mask, array)


def _not_negative(n: Node) -> bool:
    match n.operation:
        case "coordinate":
            return n.type is not Type.FLOAT and n != _DISTANCE
        case "constant":
            return bool(n.value >= 0)
        case "add" | "mul" | "min" | "cast" | "shr":
            return all(map(_not_negative, n.arguments))
        case "where":
            return all(map(_not_negative, n.arguments[1:]))
        case "floordiv" | "mod":
            divisor = n.arguments[1]
            positive = divisor.operation == "constant" and divisor.value > 0
            return positive and (n.operation == "mod" or _not_negative(n.arguments[0]))
        case "max" | "bitand":
            return any(map(_not_negative, n.arguments))
    return n.operation == "abs"


def _literal(n: Node) -> str:
    if n.type is Type.INT64:
        return f"({n.value + 1}ll - 1)" if n.value == -(2**63) else f"{n.value}ll"
    if n.type is Type.INT32:
        return "(-2147483647 - 1)" if n.value == -(2**31) else str(n.value)
    if n.type is Type.BOOLEAN:
        return str(n.value).lower()
    x = float(np.clip(np.float64(n.value), np.finfo("f4").min, np.finfo("f4").max))
    if math.isinf(n.value):
        return "infinity()" if n.value > 0 else "-infinity()"
    if math.isnan(n.value):
        return "quiet_nan()"
    text = f"{np.float32(x):.9g}"
    return (text if "." in text or "e" in text else text + ".") + "f"


def _is_normal(x: float) -> bool:
    return 2.0**-126 <= abs(x) <= 2.0**126


def _with_products(root: Node) -> Node:
    """With products in the place of a score's divisions by a number, or by a square root whose
    square is no subnormal: they are within two roundings, too."""
    done: dict[Node, Node] = {}
    for n in order([root]):
        new = rebuilt(n, tuple(done[x] for x in n.arguments))
        if new.operation == "div" and "score" in new.reads:
            x, y = new.arguments
            if y.operation == "constant" and _is_normal(y.value):
                new = make("mul", x, constant(1 / y.value, Type.FLOAT))
            elif y.operation == "sqrt" and _is_above_squares(y.arguments[0]):
                new = make("mul", x, make("rsqrt", y.arguments[0]))
        done[n] = new
    return done[root]


def _is_above_squares(n: Node) -> bool:
    """Whether a float is a square and a normal number above 0, added."""
    if n.operation != "add":
        return False
    square, more = n.arguments
    is_square = square.operation == "mul" and square.arguments[0] == square.arguments[1]
    return is_square and more.operation == "constant" and more.value > 0 and _is_normal(more.value)


class _Body:
    """Statements that compute nodes, each once, of what has names already."""

    def __init__(self, names: Mapping[Node, str]) -> None:
        self.names, self.lines = dict(names), list[str]()
        self.ranges = dict[str, str]()

    def __call__(self, n: Node) -> str:
        for x in order([n], self.names):
            self.names[x] = self._named(x)
        return self.names[n]

    def _named(self, n: Node) -> str:
        if n.operation == "constant":
            return _literal(n)
        if n.operation == "argument":
            return f"number{n.value}"
        text = _text(n, [self.names[x] for x in n.arguments])
        if n.operation in ("least", "most"):  # both ends of a range are found together
            text = f"{self._range(text)}.{n.operation}"
        name = f"x{len(self.lines)}"
        self.lines.append(f"    const {C_TYPES[n.type]} {name} = {text};")
        return name

    def _range(self, text: str) -> str:
        if text not in self.ranges:
            self.ranges[text] = f"range{len(self.ranges)}"
            self.lines.append(f"    const auto {self.ranges[text]} = {text};")
        return self.ranges[text]


def _text(n: Node, x: Sequence[str]) -> str:
    match n.operation:
        case "detach":
            return x[0]
        case "cast" if n.arguments[0].type is Type.FLOAT and n.type is not Type.BOOLEAN:
            return f"{'to_int' if n.type is Type.INT32 else 'to_int64'}({x[0]})"
        case "cast":
            return f"({C_TYPES[n.type]})({x[0]})"
        case "load":
            array = f"array{n.value[0]}"
            signs = map(_not_negative, n.arguments)
            places = [_place(array, i, *at) for i, at in enumerate(zip(x, signs, strict=True))]
            element = f"{array}.base[{' + '.join(places) or '0'}]"
            return f"Loaded<{C_TYPES[n.type]}, {ELEMENTS[n.value[1]]}>::from({element})"
        case "least" | "most":
            axis, array = n.value[3].index(True), f"array{n.value[0]}"
            fixed = [(i, at) for i, at in enumerate(x[::2]) if i != axis]
            base = " + ".join([f"{array}.base", *(_place(array, i, at, False) for i, at in fixed)])
            inputs = f"{base}, {array}.stride_{axis}, {array}.extent_{axis}"
            ends = f"(i64){x[2 * axis]}, (i64){x[2 * axis + 1]}"
            return f"extrema<{C_TYPES[n.type]}, LANES>({inputs}, {ends})"
        case "block_bits":
            index, plane = n.value
            every = str(plane == WHOLE).lower()
            return f"block_bits<{every}>(array{index}, {plane}, {', '.join(x)})"
        case "floordiv" | "mod" if n.type is not Type.FLOAT and all(
            map(_not_negative, n.arguments)
        ):
            if n.arguments[1].operation == "constant" and n.arguments[1].value:
                return f"{x[0]} {'/' if n.operation == 'floordiv' else '%'} {x[1]}"
        case "rsqrt" if _is_above_squares(n.arguments[0]):
            return f"rsqrt_fast({x[0]})"
        case "div" | "sqrt" if "score" in n.reads:  # of indices it is exact, as masks round down
            return f"{'divide' if n.operation == 'div' else 'sqrt'}_fast({', '.join(x)})"
    return OPERATIONS[n.operation].text.format(*x)


def _place(array: str, axis: int, index: str, not_negative: bool) -> str:
    """An index's part of an element's place."""
    moved = "inside_of" if not_negative else "wrapped"
    return f"{moved}({index}, {array}.extent_{axis}) * {array}.stride_{axis}"


def device_struct(structure: Structure, name: str = "Expression") -> str:
    """The struct's text; see above."""
    seen, whole = structure.seen
    functions = {"score": _with_products(structure.score), "visible": seen}
    functions["slope"] = _with_products(slope(structure.score))
    line = affine(structure.score)
    of_tile = line is not None and _LEVELS.of(line[0]) == "tile"
    for i, gradient in enumerate(array_gradients(structure.score)):
        functions[f"factor{i}"] = _with_products(gradient.factor)
    blocks = {"any": whole.high, "every": whole.low}
    beside = {n: substitute(functions[n], _DISTANCES) for n in ("score", "visible")}
    by_distance = _is_worthwhile(kept_at(_LEVELS, [*beside.values()])["diagonal"])
    if not by_distance:
        beside = {n: functions[n] for n in beside}
    kept = kept_at(_LEVELS, [*functions.values(), *blocks.values(), *beside.values()])
    lines = [f"struct {name} {{", *members(structure.numbers, structure.arrays)]
    constants = {
        "HAS_SCORE": structure.has_score,
        "HAS_MASK": structure.has_mask,
        "AFFINE": line is not None,
        "FACTOR_OF_TILE": of_tile,
        "HAS_DIAGONAL": by_distance,
        "DIAGONAL_IS_BIT": [n.type for n in kept["diagonal"]] == [Type.BOOLEAN],
        "ROW_IS_LOADED": any(n.operation == "load" for n in order(kept["row"])),
        "COLUMNS_MAY_BE_ALIKE": _may_be_alike(seen, kept["column"]),
    }
    lines += [f"  static constexpr bool {k} = {str(v).lower()};" for k, v in constants.items()]
    seen_beside = [beside["score"], beside["visible"]]
    for name, roots in (("", [structure.score, seen]), ("_BESIDE", seen_beside)):
        lines.append(f"  static constexpr int OPERATIONS{name} = {_operations(roots)};")
    text, element = level_structs(_LEVELS, kept)
    lines += text
    tile = fields_of("tile", _TILE, kept["tile"])
    element[coordinate("score", Type.FLOAT)] = "score"
    block = dict(tile)
    for level in _BLOCK:
        block |= fields_of(level, _LEVELS.places[level], kept[level])
    inputs = "const Tile& tile, const Row& row, const Column& column"
    for function, root in functions.items():
        first = "" if function == "visible" else "float score, "
        lines += function_text(C_TYPES[root.type], function, first + inputs, root, element)
    for function, root in beside.items():
        first = "" if function == "visible" else "float score, "
        more = first + inputs + ", const Diagonal& diagonal"
        lines += function_text(C_TYPES[root.type], function, more, root, element)
    if of_tile and line is not None:
        lines += function_text("float", "factor", "const Tile& tile", line[0], tile)
    inputs = "const Tile& tile, const Rows& rows, const Columns& columns"
    for function, root in blocks.items():  # which may ask for ranges of both, as of a distance's
        lines += [_TOGETHER, *function_text("bool", function, inputs, root, block)]
    return "\n".join([*lines, "};", ""])


def _operations(functions: Sequence[Node]) -> int:
    """How many operations an element takes."""
    return sum(bool(n.arguments) and _LEVELS.of(n) == "element" for n in order(functions))


def _may_be_alike(visible: Node, kept: Sequence[Node]) -> bool:
    """Whether elements read of a key one number that is kept of it, and not its own."""
    elements = (n for n in order([visible]) if _LEVELS.of(n) == "element")
    own = coordinate("kv_idx") in [x for n in elements for x in n.arguments]
    return not own and len(kept) == 1 and kept[0].type is not Type.BOOLEAN


def _is_worthwhile(kept: Sequence[Node]) -> bool:
    """Whether what is kept of a distance is computed apart from elements."""
    own = [n for n in order(kept) if n.arguments and _LEVELS.of(n) == "diagonal"]
    worth = len(own) >= _WORTHWHILE or any(n.operation == "load" for n in own)
    return worth and len(kept) <= _MOST_KEPT


def kept_at(levels: Levels, functions: Sequence[Node]) -> dict[str, list[Node]]:
    """Nodes that are computed less often than what uses them, by level."""
    kept: dict[str, dict[Node, None]] = {level: {} for level in levels.places}
    uses: list[tuple[str, Node]] = [("element", r) for r in functions]
    uses += [(levels.of(n), x) for n in order(functions) for x in n.arguments]
    for user, n in uses:
        own = levels.of(n)
        kept_there = own != "element" and user != own
        if kept_there and (n.arguments or n.operation == "load"):
            kept[own][n] = None
    return {level: list(nodes) for level, nodes in kept.items()}


def members(numbers: Sequence[Type], arrays: Sequence[tuple[str, int]]) -> Iterator[str]:
    """What a struct has of captured numbers and arrays."""
    for i, type in enumerate(numbers):
        yield f"  {C_TYPES[type]} number{i};"
    for i, (dtype, rank) in enumerate(arrays):
        strides = "".join(f" i64 stride_{axis};" for axis in range(rank))
        extents = "".join(f" int extent_{axis};" for axis in range(rank))
        yield f"  struct {{ const {ELEMENTS[dtype]}* base;{strides}{extents} }} array{i};"


def fields_of(level: str, places: Sequence[str], kept: Sequence[Node]) -> dict[Node, str]:
    """What a level's struct has, as the functions that take it call it."""
    own = {coordinate(x): f"{level}.{x}" for x in places}
    return own | {n: f"{level}.x{i}" for i, n in enumerate(kept)}


def level_structs(
    levels: Levels, kept: Mapping[str, Sequence[Node]]
) -> tuple[list[str], dict[Node, str]]:
    """The levels' structs with the functions that fill them in; what an element's functions call
    what is in them."""
    tile = fields_of("tile", levels.places["tile"], kept["tile"])
    lines, element = list[str](), dict(tile)
    for level, places in levels.places.items():
        lines += _level_text(level, places, kept[level], {} if level == "tile" else tile)
        if level in ("row", "column", "diagonal"):
            element |= fields_of(level, places, kept[level])
    return lines, element


def _level_text(
    level: str, places: Sequence[str], kept: Sequence[Node], outer: Mapping[Node, str]
) -> list[str]:
    """A level's struct and the function that fills it in."""
    fields = [f"int {x};" for x in places]
    fields += [f"{C_TYPES[n.type]} x{i};" for i, n in enumerate(kept)]
    inputs = ", ".join(f"int {x}" for x in places)
    inputs = inputs if level == "tile" else f"const Tile& tile, {inputs}"
    body = _Body({**outer, **{coordinate(x): x for x in places}})
    results = [*places, *map(body, kept)]
    together = [_TOGETHER] * (level in _BLOCK)
    return [
        f"  struct {level.title()} {{ {' '.join(fields)} }};",
        *together,
        f"  KS_DEVICE {level.title()} {level}({inputs}) const {{",
        *body.lines,
        f"    return {{{', '.join(results)}}};",
        "  }",
    ]


def function_text(
    type: str, name: str, inputs: str, root: Node, names: Mapping[Node, str]
) -> list[str]:
    """A member function that computes a node."""
    body = _Body(names)
    result = body(root)
    return [
        f"  KS_DEVICE {type} {name}({inputs}) const {{",
        *body.lines,
        f"    return {result};",
        "  }",
    ]

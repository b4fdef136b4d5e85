"""Epilogues where torch traces, compiles or exports the call: as in ``mods``, an expression's text
and numbers are options of an operator, the tensors that it captures its operands. Imports torch.

Names, functions and partials of functions may also be made in what is compiled; a closure over
tensors must be made outside of it, for Dynamo makes no function of one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelseam.epilogues import Gated, Reduce, as_one, reduces, refused_reductions
from kernelseam.errors import InvalidValue
from kernelseam.expressions.epilogues import (
    EpilogueExpression,
    EpilogueStructure,
    epilogue_of,
    epilogue_text,
    record,
    traced_epilogue,
)
from kernelseam.interop.torch_library.mods import (
    CAPTURED,
    Traced,
    captures_of,
    guarded,
    guards_of,
    operands_of,
    raise_refusal,
    read,
    refusal,
)

Tensor = Any
_ANY_FLOAT, _ANY_INT = 1.5, 2
"""Stand for numbers that a partial has; small ones, since Python may count up to them."""


def traced(epilogue: Any, like: Tensor) -> Traced:
    """Of an epilogue, while torch traces its caller; ``like``: a tensor on the device."""
    if reduces(epilogue) or not isinstance(epilogue, EpilogueExpression):
        one = as_one(epilogue)
        epilogue = traced_epilogue(one.function, one.pairs)
    text = epilogue_text(epilogue.structure)
    return operands_of("epilogue", text, epilogue.numbers, epilogue.arrays, like)


def _compiled(epilogue: Any, like: Tensor) -> Traced:
    """``traced`` as Dynamo follows it."""
    parts = list(epilogue) if isinstance(epilogue, list | tuple) else [epilogue]
    if any(isinstance(x, Reduce) for x in parts):
        raise refused_reductions()
    described = _described(tuple([_spec(x, True) for x in parts]), True)
    if described is None:
        described = _described(tuple([_spec(x, False) for x in parts]), False)
    raise_refusal(described)
    text, numbers, arrays, guards = described
    functions = [x.function if isinstance(x, Gated) else x for x in parts]
    for guard in guards:
        guarded(functions, *guard)
    values = [float(read(functions[which], path)) for which, path in numbers]
    found = [read(functions[which], path) for which, path in arrays]
    return operands_of("epilogue", text, values, found, like)


traced._torchdynamo_inline = _compiled  # type: ignore[attr-defined]


def _spec(x: Any, any_number: bool) -> Any:
    """What Dynamo can hand over of an epilogue: functions and constants, no tensors; of numbers
    what they are, or with ``any_number`` their types."""
    if isinstance(x, Gated):
        return "gated", x.pairs, _spec(x.function, any_number)
    if isinstance(x, functools.partial):
        named = tuple([(name, _argument(y, any_number)) for name, y in x.keywords.items()])
        return "partial", x.func, tuple([_argument(y, any_number) for y in x.args]), named
    return "itself", x


def _argument(x: Any, any_number: bool) -> Any:
    if isinstance(x, torch.Tensor):
        return "tensor", x.dtype, x.dim()
    if any_number and isinstance(x, float):
        return "itself", _ANY_FLOAT
    if isinstance(x, int) and not isinstance(x, bool):
        # a range makes a constant of an int that Dynamo made symbolic
        return "itself", _ANY_INT if any_number else range(x).stop
    return "itself", x


def _rebuilt(spec: Any) -> Any:
    match spec:
        case "gated", pairs, inner:
            return Gated(_rebuilt(inner), pairs)
        case "partial", function, arguments, named:
            values = {name: _rebuilt(x) for name, x in named}
            return functools.partial(function, *map(_rebuilt, arguments), **values)
        case "tensor", dtype, rank:
            return torch.empty((1,) * rank, dtype=dtype)
        case _:
            return spec[1]


def _described(specs: Any, any_number: bool) -> Any:
    """(the expression's text; where its numbers and arrays are read, and what beside them it
    depends on: the number of a part and a path). With ``any_number``, None where it depends on the
    value of what may be a stand-in. Or ``refusal``."""
    try:
        one = as_one([_rebuilt(x) for x in specs])
        expression = traced_epilogue(one.function, one.pairs)
    except InvalidValue as e:  # which a stand-in may have caused
        return None if any_number else refusal(e)

    def within(path: Any) -> Any:
        """The part that a path of the whole leads into, and the path from there. Several parts are
        captured by what applies them in turn, as (first, others)."""
        if len(specs) == 1:
            return 0, path
        (_, cell), *rest = path
        return (1 + rest[0][1], tuple(rest[1:])) if cell else (0, tuple(rest))

    own = record(one.function, one.pairs)
    if any_number and any(x in (_ANY_FLOAT, _ANY_INT) for x in own.constants.values()):
        return None
    named = {i for i, x in enumerate(specs) if isinstance(x[1], str) and x[0] == "itself"}
    depth = 0 if len(specs) == 1 else 1
    guards = [
        (*at, kind, value)
        for path, kind, value in guards_of(own)
        if len(path) > depth + (len(path) > 0 and path[0] == ("cell", 1))
        and (at := within(path))[0] not in named
    ]
    guards += [(*within(path), "same", within(known)) for path, known in own.same]
    numbers, arrays = (tuple(map(within, x)) for x in (own.numbers, own.arrays))
    return epilogue_text(expression.structure), numbers, arrays, tuple(guards)


_described._dynamo_marked_constant = True  # type: ignore[attr-defined]


def with_epilogue(
    options: tuple[Any, ...], arrays: dict[str, Any], epilogue: Any
) -> tuple[Any, ...]:
    """What ``ops.expressions.with_epilogue`` does, while Dynamo compiles the caller."""
    text, numbers, found = traced(epilogue, arrays["a"])
    arrays |= dict(zip(CAPTURED, found, strict=False))
    return (*options, text, tuple(numbers))


def expression_of(text: str, numbers: Any, tensors: Any) -> EpilogueExpression:
    """An operator's options and operands as the functions on arrays take them."""
    structure = structure_of(text)
    return EpilogueExpression(structure, *captures_of(structure, numbers, tensors))


def structure_of(text: str) -> EpilogueStructure:
    """An operator's option. Raises InvalidValue for one with sums or maxima, which an operator has
    no results for."""
    structure = epilogue_of(text)
    if structure.reductions:
        raise refused_reductions()
    return structure

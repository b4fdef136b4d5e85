"""score_mod and mask_mod where torch traces, compiles or exports the call: the expression's text
and numbers are options of one operator, captured tensors its operands.

Dynamo asks once for the text (``_described``) and reads captured objects by its own means: a
function of the same code over other tensors and numbers reuses what was compiled; one whose text
differs compiles anew. Imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch

from kernelseam.descriptors.common.captured import captured
from kernelseam.errors import InvalidValue, format_value
from kernelseam.expressions.block_mask import BlockMask, words_of_torch
from kernelseam.expressions.captures import READ, Record, dtype_name
from kernelseam.expressions.epilogues import EpilogueStructure
from kernelseam.expressions.lowering import Structure
from kernelseam.expressions.nodes import Type
from kernelseam.expressions.scores import ScoreExpression, records, score_expression
from kernelseam.expressions.text import structure_of, text_of

Tensor = Any
MOST = 8
_DEFAULTS = ("__defaults__", "__kwdefaults__")
_FIELDS = "score_mod, mask_mod"
CAPTURED = tuple(captured(i) for i in range(MOST))
"""Operands of an operator for captured tensors."""


class Traced(NamedTuple):
    """An expression as options and operands of an operator."""

    expression: str
    captured_numbers: list[float]
    arrays: list[Tensor]


def traced(score_mod: Any, mask_mod: Any, block_mask: Any, like: Tensor) -> Traced:
    """The expression of these functions while torch traces their caller; ``like``: a tensor on the
    device."""
    own = score_expression(score_mod, mask_mod, block_mask)
    return operands_of(_FIELDS, text_of(own.structure), own.numbers, own.arrays, like)


def _compiled(score_mod: Any, mask_mod: Any, block_mask: Any, like: Tensor) -> Traced:
    """``traced`` for Dynamo, which inlines it."""
    blocks, lengths, words = None, [], []
    if block_mask is not None:
        if mask_mod is not None:
            raise InvalidValue(
                "mask_mod", "given", "is that of block_mask where there is one", "Leave it out"
            )
        mask_mod = block_mask.mask_mod
        if isinstance(block_mask, BlockMask):
            blocks = (*block_mask.block_size, block_mask.decides)
            lengths, words = [block_mask.q_len, block_mask.kv_len], [block_mask.words]
        else:
            sizes, own, made = words_of_torch(block_mask)
            blocks, lengths, words = (*sizes, True), [*own], [made]
    if blocks is not None:  # sizes that change from call to call are no constants to Dynamo before
        blocks = (index(blocks[0]), index(blocks[1]), blocks[2])
    described = _described(score_mod, mask_mod, blocks)
    raise_refusal(described)
    text, numbers, arrays, guards = described
    functions = (score_mod, mask_mod)
    for guard in guards:
        guarded(functions, *guard)
    values = [float(read(functions[which], path)) for which, path in numbers]
    found = [read(functions[which], path) for which, path in arrays]
    return operands_of(_FIELDS, text, [*values, *lengths], [*found, *words], like)


traced._torchdynamo_inline = _compiled  # type: ignore[attr-defined]


def _described(score_mod: Any, mask_mod: Any, blocks: Any) -> Any:
    """(the expression's text, paths of its numbers and arrays, guards: each with the number of the
    function and a path), or a ``refusal``."""
    mask = None
    if blocks is not None:
        *sizes, decides = blocks
        words = np.zeros((1, 1, 1, 1, 2), np.int32)
        mask = BlockMask(mask_mod, 1, 1, (sizes[0], sizes[1]), words, decides)
    try:
        own = score_expression(score_mod, None if mask else mask_mod, mask)
    except InvalidValue as e:
        return refusal(e)
    numbers: list[Any] = []
    arrays: list[Any] = []
    guards: list[Any] = []
    for which, record in enumerate(records(score_mod, mask_mod)):
        if record is None:
            continue
        numbers += [(which, path) for path in record.numbers]
        arrays += [(which, path) for path in record.arrays]
        guards += [(which, *guard) for guard in guards_of(record)]
        guards += [(which, path, "same", (which, known)) for path, known in record.same]
    return text_of(own.structure), tuple(numbers), tuple(arrays), tuple(guards)


def refusal(e: InvalidValue) -> Any:
    """An error as data, in place of a description: an exception from a function that Dynamo calls
    without inlining it would be an internal error."""
    return (e.field, format_value(e.value), e.rule, e.remedy), (), (), ()


def raise_refusal(described: Any) -> None:
    """Raise the InvalidValue of a ``refusal``, in code that Dynamo inlines."""
    first = described[0]
    if not isinstance(first, str):
        field, value, rule, remedy = first
        # f"": Dynamo cannot guard type(value) of what a marked constant returned
        raise InvalidValue(field, f"{value}", rule, remedy)


def guards_of(record: Record) -> list[tuple[Any, str, Any]]:
    """The guards of a trace for Dynamo: (path, kind, value), for ``guarded``. Guards on missing
    defaults are left out: they follow from the code, and Dynamo cannot read them of a function that
    it made."""
    guards = [(path, "equal", x) for path, x in record.constants.items()]
    for path, guard in record.captures:
        if guard[0] == "value":
            if guard[2] is None and path[-1:] and path[-1][-1] in _DEFAULTS:
                continue
            guards.append((path, "equal", guard[2]))
        elif guard[0] == "sequence":
            guards.append((path, "length", guard[1]))
        elif guard[0] == "code" and path:
            guards.append((path, "code", 0))
    return guards


# what torch.compiler.assume_constant_result sets: called, it imports Dynamo, which takes seconds
_described._dynamo_marked_constant = True  # type: ignore[attr-defined]


def read(x: Any, path: Any) -> Any:
    """The object at a path."""
    for step, *name in path:
        x = READ[step](x, *name)
    return x


def guarded(functions: Any, which: int, path: Any, kind: str, value: Any) -> None:
    """Read the object at a path, so that Dynamo guards on it."""
    x = read(functions[which], path)
    if kind == "same":
        assert x is read(functions[value[0]], value[1])
    elif kind == "equal":
        assert x == value
    elif kind == "length":
        assert len(x) == value
    else:
        assert callable(x)


def operands_of(
    field: str, text: str, numbers: Sequence[Any], arrays: Sequence[Any], like: Tensor
) -> Traced:
    """An expression's text, numbers and arrays as options and operands, on the device of ``like``.
    ``field``: the parameter's name in errors."""
    if len(arrays) > MOST:
        raise InvalidValue(
            field,
            f"capture {len(arrays)} arrays",
            f"capture at most {MOST} where torch traces, compiles or transforms the call",
            "Join some of them, or call it outside, under torch.compiler.disable",
        )
    tensors = [x if isinstance(x, torch.Tensor) else torch.as_tensor(x) for x in arrays]
    placed = [x if x.device == like.device else x.to(like.device) for x in tensors]
    return Traced(text, [float(x) for x in numbers], placed)


def captures_of(
    structure: Structure | EpilogueStructure,
    numbers: Sequence[float],
    tensors: Sequence[Tensor | None],
) -> tuple[tuple[float, ...], tuple[Tensor, ...]]:
    """(numbers, arrays) that an expression captures, from an operator's options and operands.
    Raises InvalidValue where they do not match the expression."""
    types, arrays = structure.numbers, structure.arrays
    whole = [t is Type.FLOAT or float(x).is_integer() for x, t in zip(numbers, types, strict=False)]
    if len(numbers) != len(types) or not all(whole):
        kinds = ", ".join("float" if t is Type.FLOAT else "int" for t in types)
        raise InvalidValue(
            "captured_numbers",
            list(numbers),
            f"must be what the expression captures: [{kinds}]",
            "Pass them in its order",
        )
    for i, x in enumerate((*tensors, *[None] * (len(arrays) - len(tensors)))):
        actual = None if x is None else (dtype_name(x), x.dim())
        wanted = arrays[i] if i < len(arrays) else None
        if actual != wanted:
            raise InvalidValue(
                captured(i),
                None if x is None else f"a tensor of {dtype_name(x)} with {x.dim()} axes",
                "must be None: the expression captures fewer arrays"
                if wanted is None
                else f"must be a tensor of {wanted[0]} with {wanted[1]} axes, as the expression "
                "captures it",
                "Pass captured arrays in its order",
            )
    of_types = zip(numbers, types, strict=True)
    typed = tuple(x if t is Type.FLOAT else int(x) for x, t in of_types)
    return typed, tuple(tensors[: len(arrays)])


def with_expression(
    options: tuple[Any, ...], arrays: dict[str, Any], score_mod: Any, mask_mod: Any, block_mask: Any
) -> tuple[Any, ...]:
    """``ops.expressions.with_expression`` while Dynamo compiles the caller."""
    text, numbers, found = traced(score_mod, mask_mod, block_mask, arrays["q"])
    arrays |= dict(zip(CAPTURED, found, strict=False))
    return (*options, text, tuple(numbers))


def expression_of(
    operands: Mapping[str, Tensor], options: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An operator's operands and options for the functions on arrays: with the traced expression in
    place of its text and captures."""
    if "expression" not in options:
        return dict(operands), dict(options)
    given = dict(options)
    structure, numbers = structure_of(given.pop("expression")), given.pop("captured_numbers")
    typed, arrays = captures_of(structure, numbers, [operands.get(n) for n in CAPTURED])
    own = {n: x for n, x in operands.items() if n not in CAPTURED}
    return own, {**given, "score_mod": ScoreExpression(structure, typed, arrays)}

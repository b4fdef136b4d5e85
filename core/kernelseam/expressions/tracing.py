"""From Python functions to expressions: each is called with stand-ins for its coordinates, twice,
as one that draws random numbers has no expression.

Where Python itself needs a captured number's value (``if``, ``range``, ``math``), the function is
traced again with that number as a constant. A trace is remembered by the function's code: another
function of that code, over other arrays and numbers, is only asked for these.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

from kernelseam.errors import InvalidValue
from kernelseam.expressions.captures import Lifter, Record
from kernelseam.expressions.functions import Untraceable, as_node
from kernelseam.expressions.nodes import Node, Type, cast, coordinate
from kernelseam.expressions.values import NeedsNumbers, Path, Value, _input
from kernelseam.forking import new_lock

Function = Callable[..., Any]
LENGTHS = ("q_len", "kv_len")
"""Offered by keyword to a score_mod and a mask_mod: the lengths of the element's own sequence."""
_REMEMBERED = 256
_OWN = os.path.dirname(__file__) + os.sep


class Kind(NamedTuple):
    """What the functions of a kind are called with, and what they return."""

    field: str
    """What callers know such a function as."""
    usage: str
    """How to write one, for errors."""
    coordinates: tuple[tuple[str, Type], ...]
    """By position."""
    to: Type
    keywords: tuple[str, ...] = ()
    """Names of int32 coordinates that a function gets where it has parameters of these names."""


class Trace(NamedTuple):
    """A function as an expression, with what it captured, in the order of first use."""

    root: Node
    numbers: tuple[int | float, ...]
    arrays: tuple[Any, ...]


class _Known(NamedTuple):
    record: Record
    root: Node


_known: OrderedDict[Any, list[_Known]] = OrderedDict()
_lock = new_lock()


def trace(kind: Kind, function: Function) -> Trace:
    """A function of this kind as an expression.

    Raises InvalidValue, with the user's line, for what has no expression.
    """
    if not callable(function):
        raise InvalidValue(
            kind.field, function, "must be a function", "Pass a function, or leave it out"
        )
    key = (_code(function), kind)
    for known in _known.get(key, ()):
        if (own := known.record.read(function)) is not None:
            return Trace(known.root, *own)
    lifter, root = _traced(kind, function)
    root = cast(root, kind.to)
    with _lock:
        _known.setdefault(key, []).insert(0, _Known(lifter.record, root))
        del _known[key][16:]
        _known.move_to_end(key)
        while len(_known) > _REMEMBERED:
            _known.popitem(last=False)
    return Trace(root, lifter.numbers, lifter.arrays)


def record_of(kind: Kind, function: Function) -> Record:
    """What the trace of a function that was traced depends on."""
    known = _known[_code(function), kind]
    return next(x.record for x in known if x.record.read(function) is not None)


def forget() -> None:
    """Drop all remembered traces."""
    with _lock:
        _known.clear()


def _code(function: Any) -> Any:
    """What functions must share to be alike at all; what is inside is guarded."""
    return getattr(getattr(function, "__func__", function), "__code__", type(function))


def _traced(kind: Kind, function: Function) -> tuple[Lifter, Node]:
    constants: frozenset[Path] = frozenset()
    while True:
        try:
            lifter, root = _once(kind, function, constants)
            if _once(kind, function, constants)[1] != root:
                raise Untraceable(
                    "two calls of it differ: it draws random numbers, or changes what it reads",
                    "Draw them before, into an array",
                )
            return lifter, root
        except NeedsNumbers as needed:
            constants |= needed.paths
        except Exception as error:
            raise _explained(kind.field, error, function) from error


def _once(kind: Kind, function: Function, constants: frozenset[Path]) -> tuple[Lifter, Node]:
    lifter, torch = Lifter(constants), sys.modules.get("torch")
    inputs = [Value(lifter, coordinate(*c)) for c in kind.coordinates]
    named = {n: Value(lifter, coordinate(n)) for n in asked(function, kind.keywords)}
    with torch.enable_grad() if torch is not None else nullcontext():
        return lifter, as_node(_input(_call(kind, lifter.lift(function, ()), inputs, named)))


def _call(kind: Kind, lifted: Any, inputs: list[Value], named: dict[str, Value]) -> Any:
    try:
        inspect.signature(lifted).bind(*inputs, **named)
    except TypeError as error:
        raise Untraceable(
            f"it is called with {len(inputs)} arguments, and {error}",
            f"Write {kind.usage}",
        ) from error
    except ValueError:  # no signature is known
        pass
    return lifted(*inputs, **named)


def asked(function: Function, keywords: tuple[str, ...] = LENGTHS) -> tuple[str, ...]:
    """Those of the keywords that a function has parameters for."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()
    return tuple(n for n in keywords if n in parameters)


def _frames(traceback: types.TracebackType | None) -> Iterator[tuple[str, int]]:
    while traceback:
        yield traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next


def _explained(field: str, error: Exception, function: Any) -> InvalidValue:
    """The error with the last line that is the user's."""
    folders = (f"{os.sep}{name}{os.sep}" for name in ("torch", "numpy", "jax"))
    foreign = (_OWN, *folders, f"{os.sep}functools.py")
    lines = [(f, n) for f, n in _frames(error.__traceback__) if not any(x in f for x in foreign)]
    if lines:
        file, number = lines[-1]
        value = f"{file}:{number}: {linecache.getline(file, number).strip()}"
    else:
        code = getattr(function, "__code__", None)
        value = (
            f"{code.co_filename}:{code.co_firstlineno}" if code else str(type(function).__name__)
        )
    if isinstance(error, Untraceable):
        return InvalidValue(field, value, error.rule, error.remedy)
    rule = f"called with stand-ins for its coordinates it raises {type(error).__name__}: {error}"
    return InvalidValue(
        field, value, rule, "Use arithmetic, comparisons, where and functions of one element"
    )

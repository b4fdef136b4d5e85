"""What a function captures: closures, globals, defaults, partials, bound methods, attributes.

Tracing calls a copy of the function whose captured numbers and arrays are *lifted*: replaced by
values of the trace. (Else ``array[q_idx]`` would index the array itself, and a closure's 128 could
not be told from a literal.) The user's objects are not changed.

Each captured object has a path from the function and a guard. Another function of the same code
whose objects pass the guards has the same trace; only its numbers and arrays are then read
(``Record``).
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import numbers
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from kernelseam.expressions.functions import ELEMENT_TYPES, Untraceable
from kernelseam.expressions.nodes import Node, Type, order
from kernelseam.expressions.values import Argument, Captured, Path, Value, call

READ: dict[str, Callable[..., Any]] = {
    "cell": lambda x, i: x.__closure__[i].cell_contents,
    "global": lambda x, name: x.__globals__[name],
    "attribute": getattr,
    "item": lambda x, i: x[i],
    "has": hasattr,
    "length": len,
    "truth": bool,
}
"""How each kind of path step reads an object."""
_PLAIN = bool | int | float | str | bytes | Enum | None
_LIBRARIES = ("torch.", "numpy.", f"{__name__.partition('.')[0]}.")


def _guard(x: Any) -> tuple[Any, ...]:
    """What another function's object at this path must equal for the trace to hold."""
    if isinstance(x, bool | str | bytes | None):
        return "value", type(x), x
    if isinstance(x, int | float):
        return "number", type(x)
    if _is_array(x):
        return "array", dtype_name(x), len(x.shape)
    if isinstance(x, types.FunctionType):
        return "code", x.__code__
    if isinstance(x, types.MethodType):
        return "code", x.__func__.__code__
    if isinstance(x, tuple | list):
        return "sequence", len(x), type(x)
    if isinstance(x, dict):
        return "keys", tuple(x)
    one = isinstance(x, type | types.ModuleType | types.BuiltinFunctionType | np.ufunc)
    if one or _jax_home(x) or _wrapped(x):
        return "object", id(x), x  # which is kept, so that its id is not used again
    if _has_members(x):
        return "type", type(x)
    return "value", type(x), x if isinstance(x, Hashable) else copy.copy(x)


def _has_members(x: Any) -> bool:
    """Whether an object's attributes are lifted one by one; not for plain values, types, modules
    and torch's own."""
    values = _PLAIN | numbers.Number | type | types.ModuleType | types.BuiltinFunctionType
    of_torch = f"{type(x).__module__}.".startswith(("torch._C.", "torch._ops."))
    own = hasattr(x, "__dict__") or hasattr(type(x), "__slots__")
    return own and not of_torch and not isinstance(x, values)


def dtype_name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _is_array(x: Any) -> bool:
    shape = getattr(x, "shape", None)
    return isinstance(shape, tuple) and hasattr(x, "dtype") and not isinstance(x, np.generic)


def _plain(x: Any) -> Any:
    return x.item() if isinstance(x, np.generic) else x


@functools.lru_cache(256)
def _globals(code: types.CodeType) -> frozenset[str]:
    """Names of the globals that a function or a nested one reads."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    inner = (_globals(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return frozenset(own.union(*inner))


@functools.lru_cache(256)
def _attributes(code: types.CodeType) -> frozenset[str]:
    """Names that a function or a nested one may read as attributes."""
    inner = (_attributes(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return frozenset(code.co_names).union(*inner)


class Capture(NamedTuple):
    """The path of a captured object, and its guard."""

    path: Path
    guard: tuple[Any, ...]


class Record(NamedTuple):
    """Everything that a trace depends on besides the function's code."""

    captures: tuple[Capture, ...]
    constants: Mapping[Path, int | float]
    """Numbers whose values decided Python's control flow, so that the trace holds for these values
    alone."""
    numbers: tuple[Path, ...]
    arrays: tuple[Path, ...]
    same: tuple[tuple[Path, Path], ...] = ()
    """Pairs of paths that read the same array or function; the trace knows it by the second."""

    def read(self, root: Any) -> tuple[tuple[int | float, ...], tuple[Any, ...]] | None:
        """The numbers and arrays of another function; None where its trace may differ."""
        found: dict[Path, Any] = {(): root}
        try:
            for path, guard in self.captures:
                if path:
                    step, *name = path[-1]
                    found[path] = _plain(READ[step](found[path[:-1]], *name))
                if _guard(found[path]) != guard:
                    return None
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return None
        if any(found[path] != value for path, value in self.constants.items()):
            return None
        if any(found[path] is not found[known] for path, known in self.same):
            return None
        numbers = tuple(found[path] for path in self.numbers)
        if not all(_fits(x) for x in numbers):
            return None  # the trace says so
        return numbers, tuple(found[path] for path in self.arrays)


def _fits(x: int | float) -> bool:
    return isinstance(x, float) or -(2**31) <= x < 2**31


class Lifter:
    """Lifts the captured objects of one function, and records them."""

    def __init__(self, constants: frozenset[Path]) -> None:
        self._constant = constants
        self._captures: dict[Path, Capture] = {}
        self._constants: dict[Path, int | float] = {}
        self._numbers: dict[Path, int | float] = {}
        self._arrays: dict[Path, Any] = {}
        self._same: dict[Path, Path] = {}
        self._copies: dict[int, tuple[Any, types.FunctionType, Path]] = {}
        self._attributes: frozenset[str] = frozenset()

    @property
    def record(self) -> Record:
        return Record(
            tuple(self._captures.values()),
            self._constants,
            tuple(self._numbers),
            tuple(self._arrays),
            tuple(self._same.items()),
        )

    @property
    def numbers(self) -> tuple[int | float, ...]:
        return tuple(self._numbers.values())

    @property
    def arrays(self) -> tuple[Any, ...]:
        return tuple(self._arrays.values())

    def number(self, path: Path, value: int | float) -> Node:
        if not _fits(value):
            raise Untraceable(
                f"the captured number {value} does not fit int32, which kernels take",
                "Write it into the function, or capture an array of int64",
            )
        self._numbers.setdefault(path, value)
        index = list(self._numbers).index(path)
        return Node("argument", Type.FLOAT if isinstance(value, float) else Type.INT32, (), index)

    def array(self, path: Path, array: Any) -> tuple[int, str, int]:
        name = dtype_name(array)
        if name not in ELEMENT_TYPES:
            raise Untraceable(
                f"arrays of {name} cannot be captured", f"Convert it to {', '.join(ELEMENT_TYPES)}"
            )
        known = next((p for p, x in self._arrays.items() if x is array), path)
        self._arrays.setdefault(known, array)
        if known != path:
            self._same[path] = known
        return list(self._arrays).index(known), name, len(array.shape)

    def constant(self, path: Path, value: Any) -> Any:
        """The value, recorded as a constant that another function must have too."""
        self._captures.setdefault(path, Capture(path, _guard(value)))
        if isinstance(value, int | float) and not isinstance(value, bool):
            self._constants[path] = value
        return value

    def paths(self, n: Node) -> set[Path]:
        numbers = list(self._numbers)
        return {numbers[x.value] for x in order([n]) if x.operation == "argument"}

    def lift(self, x: Any, path: Path) -> Any:
        x = _plain(x)
        if isinstance(x, Value | Captured | Members):
            return x
        self._captures.setdefault(path, Capture(path, _guard(x)))
        if isinstance(x, int | float) and not isinstance(x, bool):
            if path in self._constant:
                self._constants[path] = x
                return x
            return Argument(self, path, x)
        if _is_array(x):
            return Captured(self, path, x) if len(x.shape) else Captured(self, path, x)[()]
        if isinstance(x, np.ufunc):
            return x
        if not isinstance(x, functools.partial) and (home := _jax_home(x)):
            return _of_jax(x, home)
        if (inner := _wrapped(x)) is not None:
            return self.lift(inner, (*path, ("attribute", "__wrapped__")))
        if isinstance(x, types.FunctionType):
            foreign = f"{x.__module__}.".startswith(_LIBRARIES) and not x.__closure__
            return x if foreign else self._function(x, path)
        if isinstance(x, functools.partial):
            parts = (("func", x.func), ("args", x.args), ("keywords", x.keywords))
            own = {n: self.lift(y, (*path, ("attribute", n))) for n, y in parts}
            return functools.partial(own["func"], *own["args"], **own["keywords"])
        if isinstance(x, types.MethodType):
            owner = Members(self, x.__self__, (*path, ("attribute", "__self__")))
            return types.MethodType(
                self.lift(x.__func__, (*path, ("attribute", "__func__"))), owner
            )
        if isinstance(x, tuple | list):
            items = [self.lift(y, (*path, ("item", i))) for i, y in enumerate(x)]
            if hasattr(x, "_fields"):
                return type(x)(*items)
            return items if isinstance(x, list) else tuple(items)
        if isinstance(x, dict):
            return {k: self.lift(y, (*path, ("item", k))) for k, y in x.items()}
        if isinstance(x, type | types.ModuleType):
            self._namespace(x, path)
        return Members(self, x, path) if _has_members(x) else x

    def _namespace(self, x: Any, path: Path) -> None:
        """A class or a module is not lifted: its constants are recorded."""
        home = x.__name__ if isinstance(x, types.ModuleType) else x.__module__
        known = {*sys.stdlib_module_names, *(n.rstrip(".") for n in _LIBRARIES), "jax"}
        if home.partition(".")[0] in known and home != "__main__":
            return
        for name in sorted(self._attributes):
            value, inner = inspect.getattr_static(x, name, ...), (*path, ("attribute", name))
            if isinstance(value, _PLAIN):
                self.constant(inner, value)
            elif isinstance(value, type | types.ModuleType) and inner not in self._captures:
                self._captures[inner] = Capture(inner, _guard(value))
                self._namespace(value, inner)

    def _function(self, f: types.FunctionType, path: Path) -> types.FunctionType:
        if id(f) in self._copies:
            _, copy, known = self._copies[id(f)]
            if known != path:
                self._same[path] = known
            return copy
        cells = tuple(types.CellType() for _ in f.__closure__ or ())
        scope = dict(f.__globals__)
        copy = types.FunctionType(f.__code__, scope, f.__name__, None, cells)
        self._copies[id(f)] = f, copy, path
        self._attributes |= _attributes(f.__code__)
        for name in sorted(_globals(f.__code__) & scope.keys()):
            scope[name] = self.lift(scope[name], (*path, ("global", name)))
        for i, (cell, old) in enumerate(zip(cells, f.__closure__ or (), strict=True)):
            try:
                contents = old.cell_contents
            except ValueError:  # not yet assigned: read, it raises as the user's does
                continue
            cell.cell_contents = self.lift(contents, (*path, ("cell", i)))
        for name in ("__defaults__", "__kwdefaults__"):
            lifted = self.lift(getattr(f, name), (*path, ("attribute", name)))
            setattr(copy, name, lifted)
        if cells:  # each place may have another of its code
            del self._copies[id(f)]
        return copy


def _jax_home(x: Any) -> str:
    """The JAX module that an object is, or is a function or dtype of; else ""."""
    if isinstance(x, types.ModuleType):
        return x.__name__ if f"{x.__name__}.".startswith("jax.") else ""
    if not callable(x) or not f"{getattr(x, '__module__', '')}.".startswith("jax."):
        return ""
    name = getattr(x, "__name__", "")
    modules = ("jax.numpy", "jax.nn")
    return next((m for m in modules if getattr(sys.modules.get(m), name, None) is x), "jax")


def _wrapped(x: Any) -> types.FunctionType | None:
    """The function that ``jax.jit`` or a like decorator wraps."""
    inner = getattr(x, "__wrapped__", None) if callable(x) else None
    plain = isinstance(x, types.FunctionType | types.MethodType | type)
    return inner if isinstance(inner, types.FunctionType) and not plain else None


_JAX_NN = ("gelu", "relu", "sigmoid", "silu", "softplus")
"""Functions with the same arguments as torch's, except gelu's default."""


def _of_jax(x: Any, home: str) -> Any:
    """A stand-in for a JAX module or function that maps names to traced functions: JAX's own have
    no protocol by which an argument could take over."""
    if isinstance(x, types.ModuleType):
        return JaxModule(x)
    name = x.__name__

    def compute(*arguments: Any, **options: Any) -> Any:
        if not any(isinstance(y, Value) for y in (*arguments, *options.values())):
            with sys.modules["jax"].ensure_compile_time_eval():  # where JAX traces, too
                return x(*arguments, **options)
        if isinstance(x, type):
            return call("astype", *arguments, x)
        if home != "jax.numpy" and (home != "jax.nn" or name not in _JAX_NN):
            raise Untraceable(
                f"{x.__module__}.{name} is not supported",
                f"Use jax.numpy's functions, or {', '.join(_JAX_NN)} of jax.nn",
            )
        if name == "gelu":
            tanh = arguments[1] if len(arguments) > 1 else options.get("approximate", True)
            return call(name, arguments[0], approximate="tanh" if tanh else "none")
        return call(name, *arguments, **options)

    compute.__name__ = name
    return compute


class JaxModule:
    """``jax.numpy`` and its like for a traced function."""

    def __init__(self, of: types.ModuleType) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        x = getattr(self._of, name)
        home = _jax_home(x)
        return _of_jax(x, home) if home else x


class Members:
    """A proxy of an object whose attributes and items are lifted when they are read."""

    def __init__(self, lifter: Lifter, of: Any, path: Path) -> None:
        lifter._captures.setdefault(path, Capture(path, _guard(of)))
        self.__dict__.update(_lifter=lifter, _of=of, _path=path)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """For isinstance."""
        return type(self.__dict__["_of"])

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._of, name):
            self._lifter.constant((*self._path, ("has", name)), False)
        x = getattr(self._of, name)
        path = (*self._path, ("attribute", name))
        if isinstance(x, types.MethodType) and x.__self__ is self._of:
            inner = (*path, ("attribute", "__func__"))
            self._lifter._captures.setdefault(path, Capture(path, _guard(x)))
            return types.MethodType(self._lifter.lift(x.__func__, inner), self)
        return self._lifter.lift(x, path)

    def __call__(self, *args: Any, **options: Any) -> Any:
        name = "forward" if hasattr(self._of, "forward") else "__call__"
        if not isinstance(getattr(type(self._of), name, None), types.FunctionType):
            kind = type(self._of).__name__
            raise Untraceable(f"a {kind} is called", "Write what it computes in the function")
        return self.__getattr__(name)(*args, **options)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, Value):
            i = i.__index__()
        return self._lifter.lift(self._of[i], (*self._path, ("item", i)))

    def __len__(self) -> int:
        return int(self._lifter.constant((*self._path, ("length",)), len(self._of)))

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def __bool__(self) -> bool:
        return bool(self._lifter.constant((*self._path, ("truth",)), bool(self._of)))

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, type):
            return False
        kind = type(self._of).__name__
        raise Untraceable(f"a {kind} is compared", "Compare a number or a string that it has")

    __hash__ = object.__hash__

    def __setattr__(self, name: str, value: Any) -> None:
        raise Untraceable(
            f"the function assigns the attribute {name}", "Compute it before, outside of it"
        )

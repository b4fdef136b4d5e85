"""What a traced function computes with: stand-ins for a score, an index, a number and an array.

Python's operators, NumPy's functions and torch's all end in ``functions.FUNCTIONS``.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any, Protocol

from kernelseam.expressions.functions import ELEMENT_TYPES, Untraceable, as_node, function
from kernelseam.expressions.nodes import Node, Type

Path = tuple[Any, ...]
"""How something is reached from the traced function: see ``captures``."""


class Recorder(Protocol):
    """Numbers and arrays that become arguments once they are used."""

    def number(self, path: Path, value: int | float) -> Node: ...

    def array(self, path: Path, array: Any) -> tuple[int, str, int]:
        """Its index, dtype and rank."""
        ...

    def lift(self, x: Any, path: Path) -> Any: ...

    def paths(self, n: Node) -> set[Path]:
        """Those of the numbers that a node is made of."""
        ...


class NeedsNumbers(Exception):
    """Python needs the values of these numbers (``if``, ``range``, ``math``): constants then."""

    def __init__(self, paths: set[Path]) -> None:
        self.paths = paths


def call(name: str, *arguments: Any, **options: Any) -> Value:
    """A function, by name, of values and numbers."""
    recorder = next(x for x in (*arguments, *options.values()) if isinstance(x, Value)).recorder
    compute, reflected = function(name)
    if reflected:
        arguments = arguments[::-1]
    inputs = [_input(x) for x in arguments]
    try:
        node = compute(*inputs, **{k: _input(x) for k, x in options.items()})
    except TypeError as error:
        raise Untraceable(f"{name}: {error}", "Write it with fewer arguments") from error
    torch = sys.modules.get("torch")  # under its no_grad in the function: it is on outside
    constant = torch is not None and not torch.is_grad_enabled() and node.type is Type.FLOAT
    return Value(recorder, Node("detach", Type.FLOAT, (node,)) if constant else node)


def _input(x: Any) -> Any:
    if isinstance(x, Value):
        return x.node
    if isinstance(x, Captured):
        raise Untraceable(
            "an array is used without indices",
            "Write array[i, …] with an index for each of its axes",
        )
    return x


class Value:
    """A number of the element: a score, an index, or what is computed of them."""

    __array_priority__ = 1000.0

    def __init__(self, recorder: Recorder, node: Node) -> None:
        self.recorder, self._node = recorder, node

    @property
    def node(self) -> Node:
        return self._node

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ == "__get__":  # an attribute of a tensor
            return getattr(args[0], func.__self__.__name__)
        if func.__name__ == "__getitem__":
            raise Untraceable(
                "a tensor that was made inside the function is indexed", "Make it outside"
            )
        name, options = func.__name__, kwargs or {}
        if options.get("inplace") or name.rstrip("_") + "_" == name:
            raise Untraceable(
                f"{name} changes its argument in place",
                f"Use what torch.{name.strip('_')} returns",
            )
        return call(name.strip("_"), *args, **options)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **options: Any) -> Any:
        if method != "__call__":
            raise Untraceable(
                f"{ufunc.__name__}.{method} is of whole arrays", "Write it for one element"
            )
        return call(ufunc.__name__, *args, **options)

    def __array_function__(self, func: Any, types: Any, args: Any, options: Any) -> Any:
        return call(func.__name__, *args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("dtype", "device", "shape", "ndim"):
            return self._tensor_attribute(name)
        return functools.partial(call, name, self)

    def _tensor_attribute(self, name: str) -> Any:
        """That of the scalar tensor that FlexAttention hands to a mod; NumPy's without torch."""
        if name in ("shape", "ndim"):
            return () if name == "shape" else 0
        dtypes = {Type.BOOLEAN: "bool", Type.INT32: "int32", Type.INT64: "int64"}
        dtype = dtypes.get(self.node.type, "float32")
        torch = sys.modules.get("torch")
        if name == "device":
            return torch.device("cpu") if torch else "cpu"
        return getattr(torch, dtype) if torch else dtype

    def _number(self, rule: str, remedy: str) -> Any:
        if not self.node.reads and (paths := self.recorder.paths(self.node)):
            raise NeedsNumbers(paths)
        raise Untraceable(
            f"{rule} needs one value, and this differs from element to element", remedy
        )

    def __bool__(self) -> bool:
        result: bool = self._number(
            "Python's if, and, or, not, in, min, max or a chained comparison",
            "Write where(condition, a, b), & | ~, minimum or maximum, (a <= x) & (x <= b)",
        )
        return result

    def __float__(self) -> float:
        result: float = self._number(
            "a Python float (math.…, float())", "Write the function of NumPy, torch or kernelseam"
        )
        return result

    def __index__(self) -> int:
        result: int = self._number(
            "a Python int (range, a list's index, int())",
            "Write x.astype(int) or x.int(), or index an array instead of a list",
        )
        return result

    __int__ = __index__

    def __hash__(self) -> int:
        result: int = self._number(
            "a dict's or a set's key", "Index an array, or write where and =="
        )
        return result

    def __iter__(self) -> Any:
        raise Untraceable(
            "a score, a sum or an index is one number, without elements", "Use it as it is"
        )


class Argument(Value):
    """A number that the function captures: the kernel's argument from its first use on."""

    def __init__(self, recorder: Recorder, path: Path, value: int | float) -> None:
        self.recorder, self.path, self.value = recorder, path, value

    @property
    def node(self) -> Node:
        return self.recorder.number(self.path, self.value)

    def _number(self, rule: str, remedy: str) -> Any:
        raise NeedsNumbers({self.path})


class Captured:
    """An array that the function captures, with its first indices."""

    def __init__(
        self, recorder: Recorder, path: Path, array: Any, at: tuple[Node, ...] = ()
    ) -> None:
        self.recorder, self.path, self.of, self.at = recorder, path, array, at

    def __getitem__(self, at: Any) -> Any:
        at = at if isinstance(at, tuple) else (at,)
        if any(isinstance(i, slice) or i is None or i is Ellipsis for i in at):
            raise Untraceable(
                "an array is sliced inside the function", "Slice it before, outside of the function"
            )
        places = self.at + tuple(as_node(_input(i)) for i in at)
        if any(i.type is Type.FLOAT for i in places):
            raise Untraceable("an array's index is a float", "Convert it to an integer")
        value = self.recorder.array(self.path, self.of)
        if len(places) > value[2]:
            raise Untraceable(
                f"{len(places)} indices for an array of {value[2]} axes", "Use as many as it has"
            )
        if len(places) < value[2]:
            return Captured(self.recorder, self.path, self.of, places)
        return Value(self.recorder, Node("load", ELEMENT_TYPES[value[1]], places, value))

    @property
    def shape(self) -> tuple[Any, ...]:
        lifted = self.recorder.lift(self.of.shape, (*self.path, ("attribute", "shape")))
        return tuple(lifted)[len(self.at) :]

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def __len__(self) -> int:
        return operator.index(self.shape[0])

    def __iter__(self) -> Any:
        return map(self.__getitem__, range(len(self)))

    def __bool__(self) -> bool:
        return bool(_input(self))

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "ndim"):
            return getattr(self.of, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise Untraceable(
            f".{name} of a whole array inside the function", "Compute it before, outside of it"
        )

    def _whole(self, *_: Any) -> Any:
        _input(self)


def _operator(name: str, reflected: bool) -> Callable[..., Any]:
    if reflected:
        return lambda x, y: call(name, y, x)
    return lambda *xs: call(name, *xs)


_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "invert"),
    *("and", "or", "xor", "lshift", "rshift", "lt", "le", "gt", "ge", "eq", "ne"),
)
for _name in _OPERATORS:
    setattr(Value, f"__{_name}__", _operator(_name, False))
    setattr(Value, f"__r{_name}__", _operator(_name, True))
    setattr(Captured, f"__{_name}__", Captured._whole)
    setattr(Captured, f"__r{_name}__", Captured._whole)

"""A number of a trace."""

from __future__ import annotations

import math
import operator
from typing import Any


def value_of(x: Any) -> Any:
    """The number that a symbol stands for; of another number itself."""
    return x.value if type(x) is Symbol else x


def _binary(name: str) -> tuple[Any, Any]:
    def forward(self: Symbol, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        return self.trace.arithmetic(name, (self, other))

    def backward(self: Symbol, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        return self.trace.arithmetic(name, (other, self))

    return forward, backward


class Symbol:
    """A number of a trace. It passes for an int or a float."""

    __slots__ = ("node", "trace", "value")

    def __init__(self, trace: Any, node: str, value: Any) -> None:
        self.trace, self.node, self.value = trace, node, value

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.value)

    __add__, __radd__ = _binary("+")
    __sub__, __rsub__ = _binary("-")
    __mul__, __rmul__ = _binary("*")
    __floordiv__, __rfloordiv__ = _binary("//")
    __truediv__, __rtruediv__ = _binary("/")
    __mod__, __rmod__ = _binary("%")
    __pow__, __rpow__ = _binary("**")
    __lshift__, __rlshift__ = _binary("<<")
    __rshift__, __rrshift__ = _binary(">>")
    __and__, __rand__ = _binary("&")
    __or__, __ror__ = _binary("|")
    __xor__, __rxor__ = _binary("^")

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __neg__(self) -> Any:
        return self.trace.arithmetic("negative", (self,))

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self.trace.arithmetic("abs", (self,))

    def bit_length(self) -> Any:
        return self.trace.arithmetic("bits", (self,))

    def __lt__(self, other: Any) -> Any:
        return self._compared("<", self, other)

    def __gt__(self, other: Any) -> Any:
        return self._compared("<", other, self)

    def __le__(self, other: Any) -> Any:
        if type(self.value) is float or isinstance(other, float):  # NaN is not at most itself
            return self._compared("<", self, other) or self._compared("==", self, other)
        greater = self._compared("<", other, self)
        return greater if greater is NotImplemented else not greater

    def __ge__(self, other: Any) -> Any:
        if type(self.value) is float or isinstance(other, float):
            return self._compared("<", other, self) or self._compared("==", self, other)
        less = self._compared("<", self, other)
        return less if less is NotImplemented else not less

    def __eq__(self, other: object) -> Any:
        return self._compared("==", self, other)

    def __ne__(self, other: object) -> Any:
        equal = self._compared("==", self, other)
        return equal if equal is NotImplemented else not equal

    def _compared(self, name: str, x: Any, y: Any) -> Any:
        if not (isinstance(x, int | float) and isinstance(y, int | float)):
            return NotImplemented
        return self.trace.compare(name, x, y)

    def fixed(self) -> Any:
        """Its value, which becomes a condition."""
        if not self.trace.compare("==", self, self.value):
            raise Untraceable("a NaN decides what is computed")
        return self.value

    def __bool__(self) -> bool:
        return not self.trace.compare("==", self, 0)

    def __hash__(self) -> int:
        return hash(self.fixed())

    def __index__(self) -> int:
        return operator.index(self.fixed())

    def __int__(self) -> int:
        return int(self.fixed())

    def __float__(self) -> float:
        return float(self.fixed())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.fixed(), digits)

    def __trunc__(self) -> int:
        return int(math.trunc(self.fixed()))

    def __floor__(self) -> int:
        return int(math.floor(self.fixed()))

    def __ceil__(self) -> int:
        return int(math.ceil(self.fixed()))

    def __repr__(self) -> str:
        return repr(self.fixed())

    def __format__(self, spec: str) -> str:
        return format(self.fixed(), spec)


class Untraceable(Exception):
    """A computation that no function of its numbers repeats."""

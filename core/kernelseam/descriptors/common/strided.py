"""What descriptors over strided operands have in common: stride fields, operands to addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Generic, Self, TypeVar

from kernelseam.contract import ArrayInfo, Device, Problem, Runtime
from kernelseam.descriptors.common.operands import (
    check_layout,
    dtype_of,
    left_out,
    pointer,
    resolve,
    without_arrays,
)
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.descriptors.common.validation import packed, stride, vector_bytes
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass

P = TypeVar("P", bound=Problem)


@dataclass(frozen=True, eq=False, kw_only=True)
class StridedDescriptor(Generic[P]):
    """A frozen dataclass whose operands and stride fields AXES names; ``__post_init__`` validates
    them, and ends with ``_keep``."""

    AXES: ClassVar[Mapping[str, tuple[str, ...]]]
    """Operand → its axes that have a stride field."""
    CALLED: ClassVar[Mapping[str, str]] = {}
    """Operand → its name in stride fields, where it differs."""
    _problem: P = field(init=False, repr=False)
    _arrays: Mapping[str, ArrayInfo] = field(init=False, repr=False)

    @classmethod
    def stride_fields(cls, name: str) -> tuple[str, ...]:
        """The stride fields of an operand, outermost first."""
        called = cls.CALLED.get(name, name.lower())
        return tuple(f"stride_{called}_{axis}" for axis in cls.AXES.get(name, ()))

    @property
    def device(self) -> Device | None:
        """The device of the arrays; None without arrays."""
        return next((i.device for i in self._arrays.values()), None)

    def problem(self) -> P:
        """The hashable part, without pointers."""
        return self._problem

    def operands(self) -> dict[str, object]:
        """The operands by their names, as far as they are given."""
        return {n: v for n in self.AXES if (v := getattr(self, n)) is not None}

    def simplified(self) -> tuple[Self, str]:
        """Itself: there is no simpler descriptor."""
        return self, ""

    def without_arrays(self) -> Self:
        """The same over the addresses of its arrays: it keeps no memory alive."""
        return without_arrays(self, self._arrays, **self._found())

    def _found(self) -> dict[str, object]:
        """Fields that were read from the arrays."""
        return {}

    def resolve(self, operands: Mapping[str, object], runtime: Runtime, device: Device) -> Resolved:
        """Addresses of the operands. Raises InvalidValue where an array does not fit the
        problem."""
        return resolve(self._problem.operands, operands, self._arrays, self._packed_strides, device)

    def _keep(self, problem: P, infos: Mapping[str, ArrayInfo], by_axes: bool = False) -> None:
        """Keep the problem and the arrays' views. Raises InvalidValue for memory that is too large,
        for a result that overlaps itself, and for an array that does not fit. ``by_axes``: AXES
        names the axes of operands, which are not (batch, head, row) then."""
        fields = self.stride_fields if by_axes else None
        check_layout(problem.operands, infos, self._packed_strides, fields)
        object.__setattr__(self, "_problem", problem)
        object.__setattr__(self, "_arrays", infos)

    def _given(self, name: str) -> list[Any]:
        return [getattr(self, field_name) for field_name in self.stride_fields(name)]

    def _axis_strides(self, name: str) -> list[Any]:
        """The stride fields of the axes that the operand has here."""
        return self._given(name)

    @cached_property
    def _packed_strides(self) -> dict[str, bool]:
        return left_out({n: self._axis_strides(n) for n in self.AXES})

    def _strides_of(
        self, name: str, shape: Sequence[int], dtype: DType, order: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Strides of all axes but the contiguous last: validated where given, packed where left
        out, in ``order`` (outermost first)."""
        given = self._valid(name, dtype)
        order = order or range(len(given))
        strides = packed([*(shape[i] for i in order), shape[-1]], [*(given[i] for i in order), 1])
        return tuple(strides[list(order).index(i)] for i in range(len(given)))

    def _valid(self, name: str, dtype: DType) -> list[int | None]:
        """The strides that are given, validated."""
        return [
            None if s is None else stride(field_name, s, dtype)
            for field_name in self.stride_fields(name)
            for s in (getattr(self, field_name),)
        ]

    def _vector(
        self,
        name: str,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: DType,
        infos: Mapping[str, ArrayInfo],
    ) -> int:
        """Bytes of the widest access that the operand's rows and its address allow."""
        return vector_bytes(dtype, shape, strides, pointer(name, getattr(self, name), infos))

    def _walks(
        self, shapes: Mapping[str, Sequence[int]], dtype: DType, infos: Mapping[str, ArrayInfo]
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
        """Strides of operands of one dtype, and bytes of the widest accesses, by name."""
        strides = {n: self._strides_of(n, shape, dtype) for n, shape in shapes.items()}
        return strides, {n: self._vector(n, x, strides[n], dtype, infos) for n, x in shapes.items()}

    def _refuse_idle(self, name: str, *more: str) -> None:
        """Refuse fields that describe an operand which is not there."""
        if getattr(self, name) is None:
            for field_name in (*self.stride_fields(name), *more):
                if (value := getattr(self, field_name)) is not None:
                    raise InvalidValue(
                        field_name,
                        value,
                        f"describes {name}",
                        f"Give {name} too (0: it will be bound)",
                    )

    def _kind(
        self, field_name: str, names: Sequence[str], default: DType, infos: Mapping[str, ArrayInfo]
    ) -> DType:
        """The element type of operands that have one of their own: named, that of their arrays, or
        the default; no wider than the accumulator."""
        dtype = dtype_of(field_name, getattr(self, field_name), infos, names) or default
        if dtype.itemsize > default.accumulator.itemsize:
            where = next((n for n in names if n in infos), "")
            raise InvalidValue(
                where or field_name,
                f"an array of {dtype}" if where else dtype,
                f"must be no wider than {default.accumulator}, in which products of {default} "
                "are summed",
                "Convert it, or widen what is multiplied",
            )
        return dtype

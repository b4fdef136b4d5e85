"""An operation on arrays while it is planned: what the functions that describe it call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kernelseam.contract import ArrayInfo, OperandRule
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass
from kernelseam.ops.array_call import (
    ArrayCall,
    ArrayPlan,
    Infos,
    Result,
    layout_of,
    new_array,
)
from kernelseam.planning.planner import built_plan as plan
from kernelseam.plugins import plugins


class Operation:
    """A call while it is planned: its arrays, the results that it allocates, its launches."""

    def __init__(self, infos: Infos, implementation: str | None) -> None:
        self.infos, self.implementation = infos, implementation
        self.repeatable = True
        """Whether the planned call can serve later calls, over other addresses."""
        self._results: list[Result] = []
        self._launches: list[ArrayPlan] = []
        self._options: dict[str, str] = {}

    def new_result(
        self, name: str, shape: Sequence[int], dtype: DType, like: str, option: str = ""
    ) -> None:
        """Allocate an array for a result on the device of the array named ``like``, of the same
        library where possible. ``option``: the option that sets its dtype, for errors."""
        self._options[name] = option
        self.infos[name] = info = self.new_array(name, shape, dtype, self.infos[like])
        self._results.append(Result(name, tuple(shape), dtype, like, layout_of(info)))

    def new_array(
        self, name: str, shape: Sequence[int], dtype: DType, like: ArrayInfo
    ) -> ArrayInfo:
        """The array for a result."""
        return new_array(name, shape, dtype, like)

    def launch(
        self,
        operands: Mapping[str, ArrayInfo],
        descriptor: Callable[[], Any],
        names: Mapping[str, str] | None = None,
        reword: Callable[[InvalidValue], InvalidValue] | None = None,
    ) -> None:
        """Plan ``descriptor()``; it is launched once the whole call is planned.

        ``operands``: views by their names in the descriptor, each starting at the first element of
        one of the arrays. ``names``: those arrays' names where they differ. ``reword``: turns an
        error about addresses into one with the caller's names.
        """
        # A cached plan must not keep anyone's memory alive.
        bare = descriptor().without_arrays()
        new_plan = plan(
            bare, device=next(iter(operands.values())).device, implementation=self.implementation
        )
        rules = {rule.name: rule for rule in new_plan.problem.operands}
        arrays = tuple([(names or {}).get(name, name) for name in operands])
        self._launches.append(
            ArrayPlan(new_plan, tuple([rules[name] for name in operands]), arrays, reword)
        )

    def launch_lists(
        self,
        operands: Mapping[str, ArrayInfo],
        descriptor: Any,
        names: Mapping[str, str],
        written: Collection[str] = ("C",),
    ) -> None:
        """Plan and bind a descriptor over lists of matrix addresses, for this call only: the lists
        hold addresses of these arrays. ``operands``: the arrays that contain the matrices, of which
        some are written."""
        self.repeatable = False
        new_plan = plan(
            descriptor,
            device=next(iter(operands.values())).device,
            implementation=self.implementation,
        )
        rules = [
            OperandRule(n, x.dtype, x.shape, x.strides, 1, written=n in written)
            for n, x in operands.items()
        ]
        arrays = tuple([names.get(name, name) for name in operands])
        self._launches.append(ArrayPlan(new_plan, tuple(rules), arrays, None, new_plan.bind()))

    def reword(self, error: InvalidValue) -> InvalidValue:
        """An error about a new result, as one about the option that set its dtype."""
        if not (option := self._options.get(error.field)):
            return error
        return InvalidValue(
            option, self.infos[error.field].dtype, error.rule, "Name another, or leave it out"
        )

    def planned(self) -> ArrayCall:
        """The part of the call that is cached."""
        device = next(iter(self.infos.values())).device
        runtime, planned = (
            plugins().backend(device.backend).runtime,
            [x for x in self._launches if x.call is None],
        )
        new = {r.name for r in self._results}
        outputs = [
            n
            for x in self._launches
            for rule, n in zip(x.rules, x.arrays, strict=True)
            if rule.written
        ]
        return ArrayCall(
            tuple(self._results),
            tuple(self._launches),
            device,
            runtime,
            max((x.plan.allocation_bytes for x in planned), default=0),
            len(planned) < len(self._launches),
            tuple(n for n in dict.fromkeys(outputs) if n not in new),
        )


@dataclass(frozen=True, eq=False)
class Cleared:
    """A ``compute`` of ``operate`` on torch tensors and torch's current stream, of which the
    results of these names are 0 where no launch writes them."""

    compute: Callable[..., None]
    results: tuple[str, ...]

    def __call__(self, operation: Operation, *options: Any) -> None:
        self.compute(operation, *options)


@dataclass(frozen=True, eq=False)
class ByNumbers:
    """A ``compute`` of ``operate`` that calls on torch tensors take without descriptors: a function
    of its own packs their launches from addresses, extents and strides."""

    compute: Callable[..., None]
    function: Callable[..., Any]
    """``function(on, infos, names, options, implementation)``: as ``traced_call.Function``."""

    def __call__(self, operation: Operation, *options: Any) -> None:
        self.compute(operation, *options)


def cleared_in(compute: object) -> tuple[str, ...]:
    """The results that are set to 0 before anything is launched."""
    return compute.results if isinstance(compute, Cleared) else ()


def check_rank(name: str, info: ArrayInfo, axes: Sequence[str]) -> None:
    """Raise InvalidValue unless the array has as many axes as ``axes`` (names, for the message)."""
    if len(info.shape) != len(axes):
        raise InvalidValue(
            name,
            f"an array of shape {list(info.shape)}",
            f"must have {len(axes)} axes, [{', '.join(axes)}]",
            "Add or remove axes with reshape",
        )


def unexpanded_shape(info: ArrayInfo) -> tuple[int, ...]:
    """An array's shape with extent 1 along every axis of stride 0 (as torch.expand makes them). An
    empty array's shape stays."""
    if 0 in info.shape:
        return info.shape
    return tuple(1 if s == 0 else n for n, s in zip(info.shape, info.strides, strict=True))


def not_none(**arrays: object) -> dict[str, object]:
    """The arrays that are not None."""
    return {name: x for name, x in arrays.items() if x is not None}

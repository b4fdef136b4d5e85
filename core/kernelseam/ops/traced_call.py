"""A call on arrays as a function of its numbers: extents, strides, addresses, and the options that
are numbers.

``compute`` runs once over symbols, as it does over an array's numbers; what it describes is a
problem of symbols, and what kernels make of that are launches of symbols. All that is not a number
(dtypes, options, the spec, implementations, tiles, binaries) is constant. So the function computes
results' shapes, a workspace's size and arguments, and nothing else; it returns None where a
condition that a check, a tile or an argument made does not hold, and the call is planned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, is_dataclass, replace
from functools import cache
from typing import Any, cast

from kernelseam.contract import WORKSPACE_ALIGNMENT, ArrayInfo, Device, Launches, Runtime
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.descriptors.common.validation import packed
from kernelseam.dtypes import DType
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass
from kernelseam.kernels.traced_template import template
from kernelseam.kernels.traced_text import Selection, Text, listed, numbers_of, selection_of
from kernelseam.kernels.tracing import TracedStep, traced_launches, traced_memset, traced_steps
from kernelseam.ops.operation import Operation
from kernelseam.planning.checks import check_addresses, check_overlap
from kernelseam.symbolic import Facts, Symbol, Trace, Untraceable, most
from kernelseam.tuned.classes import representative

Selections = tuple[Selection, ...]
"""For each problem of a call."""
_SOMEWHERE = 1 << 40
"""Addresses that nothing reads, for tracing."""
_WORKSPACE, _ZEROED = "w", "z"
_MOST_EXTENT, _MOST_STRIDE = (1 << 22) - 1, (1 << 30) - 1
"""Of calls that are traced together, where the traced one has no larger: the bytes that arrays span
are no more than an int64 holds, and are not asked for."""
Packed = tuple[tuple[Any, ...], Any, tuple[Callable[[int], None], ...]]
"""Results, the workspace, launches."""


@dataclass(frozen=True, eq=False)
class Function:
    """A call by chosen kernels. ``run(packers, empty, zeroed, *addresses, *numbers)`` returns what
    is ``Packed``, or None; ``empty(shape, strides, dtype)`` allocates.
    ``zeroed(size)``: the address of memory that is 0 where the launches begin, and that they leave
    0; 0 where there is none, and a part of the workspace is set to 0 first."""

    run: Callable[..., Packed | None]
    once: tuple[Callable[..., Any], ...]
    """Packers of launches that run once, at once; ``kept``: of those that may be kept."""
    kept: tuple[Callable[..., Any], ...]
    results: tuple[str, ...]
    """Names of what it allocates."""
    written: tuple[str, ...]
    """The caller's arrays that it writes."""
    zeroes: bool
    """Whether it asks for memory of 0."""
    stages: bool = False
    """Whether launches read what was copied to the device on torch's current stream."""
    fixed: Callable[..., Callable[..., Packed | None] | None] | None = None
    """``fixed(*numbers)(empty, zeroed, *addresses)``: as ``run`` with ``once``, all that does not
    depend on an address computed before. None where that serves no call of these numbers."""


@dataclass(frozen=True, eq=False)
class Kernels:
    """What computes problems of a class, and functions that call it, the latest first."""

    selections: Selections
    functions: list[Function] = field(default_factory=list)


@dataclass(frozen=True)
class _Traced:
    problem: Any
    """Its numbers are symbols."""
    represented: Any
    addresses: Mapping[str, int]


class _Operation(Operation):
    """A call over symbols."""

    def __init__(self, infos: dict[str, ArrayInfo], trace: Trace) -> None:
        super().__init__(infos, None)
        self.trace = trace
        self.new: dict[str, ArrayInfo] = {}
        self.traced: list[_Traced] = []
        self.written: list[str] = []
        """The caller's arrays that launches write."""

    def new_array(
        self, name: str, shape: Sequence[int], dtype: DType, like: ArrayInfo
    ) -> ArrayInfo:
        n = len(self.new)
        address = self.trace.input(f"a{n}", _SOMEWHERE * (n + 2))
        strides = packed(shape, [None] * len(shape))
        info = ArrayInfo(address, tuple(shape), strides, dtype, like.device, "torch", None)
        self.new[name] = info
        return info

    def launch(
        self,
        operands: Mapping[str, ArrayInfo],
        descriptor: Callable[[], Any],
        names: Mapping[str, str] | None = None,
        reword: Any = None,
    ) -> None:
        problem = _fixed_specs(descriptor().simplified()[0].problem())
        addresses = {name: info.pointer for name, info in operands.items()}
        rules = tuple([r for r in problem.operands if r.name in addresses])
        check_addresses(rules, Resolved(addresses, ()))
        arrays = {name: (names or {}).get(name, name) for name in operands}
        written = [r for r in rules if r.written and arrays[r.name] not in self.new]
        if written:
            # A result is memory of its own.
            others = tuple([r for r in rules if arrays[r.name] not in self.new])
            check_overlap(others, Resolved(addresses, ()))
            if self.traced:
                raise Untraceable("several launches, one of which writes an array of the caller's")
        self.written += [arrays[r.name] for r in written]
        self.traced.append(_Traced(problem, representative(problem), addresses))

    def launch_lists(self, operands: Any, descriptor: Any, names: Any, written: Any = ()) -> None:
        raise Untraceable("lists of addresses")


class TracedCall:
    """A call traced for one path through its checks: which class it is of, and functions for the
    kernels of classes."""

    def __init__(
        self,
        compute: Callable[..., None],
        arrays: Mapping[str, ArrayInfo],
        options: Callable[[Callable[[Any], Any]], tuple[Any, ...]],
        implementation: str | None,
        device: Device,
        runtime: Runtime,
    ) -> None:
        """``options(symbol)``: the call's options with symbols for numbers, which are the first
        numbers; extents and strides follow. Raises Untraceable, and what ``compute`` raises."""
        self._device, self._runtime, self._implementation = device, runtime, implementation
        facts: Facts = {}
        for _ in range(2):  # what the first shows of the numbers, the second need not ask
            self._trace = Trace(facts)
            self._numbers, self._addresses = list[str](), list[str]()
            given = options(self._symbol)
            infos = {name: self._view(info) for name, info in arrays.items()}
            operation = _Operation(infos, self._trace)
            compute(operation, *given)
            facts = self._trace.facts(frozenset((*self._addresses, *_addresses_of(operation.new))))
        self._text = Text(self._trace)
        self._traced, self._new = tuple(operation.traced), dict(operation.new)
        if not self._traced:
            raise Untraceable("nothing is launched")
        self.written = tuple(dict.fromkeys(operation.written))
        self.results = tuple(self._new)
        self._late = frozenset((*self._addresses, *_addresses_of(self._new)))
        varied, self._represented = self._text.problems([t.represented for t in self._traced])
        if any(map(self._trace.dependence(self._late), varied)):
            raise Untraceable("an address decides which class a problem is of")
        lines, _ = self._trace.code(varied, self._late)
        self.class_of = self._text.compiled(
            "class_of", ", ".join(self._numbers), [*lines, f"return {self._text.of(varied)}"]
        )
        """``class_of(*numbers)``: the numbers of the representatives that vary; None where a
        condition does not hold that needs no address."""
        self._by_selections: dict[Selections, Kernels] = {}

    @cached_property
    def takes(self) -> Callable[..., bool | None]:
        """``takes(*addresses, *numbers)``: whether a call takes the same path through the checks,
        as far as its own numbers decide; None where not."""
        conditions, _ = self._trace.code((), frozenset(_addresses_of(self._new)))
        inputs = ", ".join((*self._addresses, *self._numbers))
        return self._text.compiled("takes", inputs, [*conditions, "return True"])

    def kernels_of(self, values: tuple[Any, ...]) -> Kernels | None:
        """The kernels of the class of which ``class_of`` returned ``values``, which classes share;
        None where they are not all kernels that can be traced."""
        selections = self._choose(values)
        return (
            None
            if selections is None
            else self._by_selections.setdefault(selections, Kernels(selections))
        )

    def _symbol(self, value: Any, most: int = _MOST_EXTENT) -> Any:
        name = f"n{len(self._numbers)}"
        self._numbers.append(name)
        return self._trace.input(name, value, most)

    def _view(self, info: ArrayInfo) -> ArrayInfo:
        self._addresses.append(name := f"p{len(self._addresses)}")
        pointer = self._trace.input(name, info.pointer)
        shape = tuple([self._symbol(n) for n in info.shape])
        strides = tuple([self._symbol(n, _MOST_STRIDE) for n in info.strides])
        return ArrayInfo(
            pointer, shape, strides, info.dtype, info.device, info.kind, None, info.writable
        )

    def _choose(self, values: tuple[Any, ...]) -> Selections | None:
        """The kernels of a class; None where not all are kernels of the core's making."""
        selections = list[Selection]()
        for problem in self._represented(*values):
            selection = selection_of(problem, self._device, self._implementation)
            if selection is None:
                return None
            selections.append(selection)
        return tuple(selections)

    def function(self, selections: Selections) -> Function | None:
        """The call by these kernels, for problems like the one that was traced; None where they do
        not take it."""
        with self._trace.branch(self._late):
            launches = []
            for t, (implementation, tile) in zip(self._traced, selections, strict=True):
                launches.append(traced_launches(implementation, t.problem, tile, self._device))
            if None in launches:
                return None
            return self._function(selections, cast(list[Launches], launches))

    def _function(self, selections: Selections, launches: Sequence[Launches]) -> Function:
        need, zeroed, steps, zeroing = 0, 0, list[TracedStep](), set[int]()
        at = self._trace.input(_WORKSPACE, _SOMEWHERE)
        zeros = self._trace.input(_ZEROED, _SOMEWHERE)
        for t, (implementation, _), x in zip(self._traced, selections, launches, strict=True):
            size, alignment = x.workspace_bytes, x.workspace_alignment
            if size != 0:
                need = most(need, size + alignment - WORKSPACE_ALIGNMENT)
            place = at if alignment <= WORKSPACE_ALIGNMENT else -(-at // alignment) * alignment
            if x.zeroed_bytes:
                zeroed = most(zeroed, x.zeroed_bytes)
                zeroing.add(len(steps))
                size = x.zeroed_bytes
                steps.append(traced_memset(self._runtime, self._device, zeros, 0, size))
            steps += traced_steps(
                x, implementation.toolchain, self._runtime, self._device, t.addresses, place, zeros
            )
        if not steps:
            raise Untraceable("nothing is launched")
        results = list(self._new.values())
        outputs = [x for info in results for x in (*info.shape, *info.strides)]
        floats = -(-need // 4)
        outputs += [floats, zeroed, *(x for s in steps for x in numbers_of(s))]
        places = self._late | {_WORKSPACE, _ZEROED}
        early, late = self._trace.code(outputs, places)
        body, work = list[str](), "None"
        torch: Any = sys.modules["torch"]
        names = self._trace.namespace
        for i, info in enumerate(results):
            names[f"d{i}"] = getattr(torch, info.dtype.value)
            shape, strides = self._text.of(info.shape), self._text.of(info.strides)
            early += [f"shape{i} = {shape}", f"strides{i} = {strides}"]
            body += [f"r{i} = empty(shape{i}, strides{i}, d{i})", f"a{i} = r{i}.data_ptr()"]
        if floats != 0:
            names["float32"] = torch.float32
            work = "work"
            body.append(f"there = {f'zeroed({self._trace.text(zeroed)})' if zeroing else 0}")
            allocated = f"empty(({self._trace.text(floats)},), (1,), float32)"
            if all(x.workspace_bytes is x.zeroed_bytes for x in launches):
                allocated = f"None if there else {allocated}"
            body += [
                f"work = {allocated}",
                f"{_WORKSPACE} = 0 if work is None else work.data_ptr()",
            ]
            body.append(f"{_ZEROED} = there or {_WORKSPACE}")
        body += late
        made = listed(f"r{i}" for i in range(len(results)))

        def returned(packed: list[str]) -> str:
            for i in zeroing:
                packed[i] = f"*(() if there else ({packed[i]},))"
            return f"return {made}, {work}, {listed(packed)}"

        packers = listed(f"k{i}" for i in range(len(steps)))
        packed = [self._text.packed(i, s) for i, s in enumerate(steps)]
        inputs = ("packers", "empty", "zeroed", *self._addresses, *self._numbers)
        lines = [f"{packers} = packers", *early, *body, returned([*packed])]
        run = self._text.compiled("run", ", ".join(inputs), lines)
        once, kept = tuple([s.once for s in steps]), tuple([s.kept for s in steps])

        names["once"], is_late = once, self._trace.dependence(places)
        for i, step in enumerate(steps):
            if (found := template(self._text, i, step, is_late)) is not None:
                early, body = early + found.once, body + found.always
                packed[i] = found.packed
        again = [f"def again(empty, zeroed, {', '.join(self._addresses)}):"]
        again += [f"    {line}" for line in (*body, returned(packed))]
        lines = [f"{packers} = once", *early, *again, "return again"]
        compiled = cache(self._text.compiles("fixed", ", ".join(self._numbers), lines))
        return Function(
            run,
            once,
            kept,
            self.results,
            self.written,
            bool(zeroing),
            fixed=lambda *numbers: compiled()(*numbers),
        )


def _addresses_of(new: Mapping[str, ArrayInfo]) -> list[str]:
    """Of arrays that a call allocates."""
    return [f"a{i}" for i in range(len(new))]


def _fixed_specs(problem: Any) -> Any:
    """The problem, whose specs have plain numbers: they are part of the binary's key."""
    changed = {}
    for f in fields(problem):
        value = getattr(problem, f.name)
        if f.name == "spec":
            changed[f.name] = _fixed(value)
        elif is_dataclass(value):
            changed[f.name] = _fixed_specs(value)
    return replace(problem, **changed)


def _fixed(value: Any) -> Any:
    if type(value) is Symbol:
        return value.fixed()
    if isinstance(value, tuple):
        return tuple([_fixed(x) for x in value])
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _fixed(getattr(value, f.name)) for f in fields(value)})
    return value

"""Plans of problems that differ from earlier ones only in numbers, such as extents and strides, by
generated Python functions of these numbers: see ``known_problems``.

As with torch.compile's dynamic shapes, a problem is traced with symbols for its numbers, and each
condition met on the way becomes a guard. One function computes the problem's class, which decides
the kernels; others the workspace's size and, with addresses, the launches. A problem for which a
guard fails is planned in the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from kernelseam.contract import Device, FastRuntime, Launches, Runtime
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.errors import KernelSeamError
from kernelseam.forking import new_lock
from kernelseam.kernels.traced_text import Selection, Text, listed, numbers_of, selection_of
from kernelseam.kernels.tracing import traced_launches, traced_steps
from kernelseam.planning.checks import check_operands
from kernelseam.plugins import plugins
from kernelseam.symbolic import Trace, Untraceable
from kernelseam.tuned.classes import representative
from kernelseam.tuned.numbers import numbers, with_numbers

Enqueue = Callable[[int], None]
_MOST_SPECS, _MOST_CLASSES, _MOST_TRACES = 1024, 1024, 16
_SOMEWHERE = 1 << 40
"""The distance of made-up addresses, which only tracing uses."""
_WORKSPACE = "w"


@dataclass(eq=False)
class _Function:
    """The generated functions of one choice of kernels; both return None where a guard fails."""

    sizes: Callable[..., tuple[int, int, int] | None]
    """``sizes(*numbers)``: the workspace's bytes, alignment, and bytes that must be zero."""
    bind: Callable[[tuple[str, ...]], Callable[..., tuple[Enqueue, ...] | None] | None]
    """``bind(names)(*addresses, workspace, *numbers)``: the launches over operands of these names;
    ``bind(names)`` is None where they cannot be traced."""


@dataclass
class _Known:
    """See kernelseam.known_problems.KnownLaunches."""

    workspace_bytes: int
    workspace_alignment: int
    zeroed_bytes: int
    _function: _Function
    _numbers: tuple[Any, ...]

    def bind(self, pointers: Mapping[str, int], workspace: int) -> tuple[Enqueue, ...] | None:
        try:
            run = self._function.bind(tuple(pointers))
            if run is None:
                return None
            return run(*pointers.values(), workspace, *self._numbers)
        except Exception:  # the ordinary way raises the proper error
            return None


class _Traced:
    """A problem traced with symbols for its numbers, on one path through the computation of its
    class."""

    def __init__(
        self, problem: Any, count: int, device: Device, implementation: str | None
    ) -> None:
        """``count``: how many numbers the problem has."""
        self._device, self._implementation = device, implementation
        self._runtime: Runtime = plugins().backend(device.backend).runtime
        self._trace, self._inputs = Trace(), list[str]()
        self._text = Text(self._trace)
        self._problem = with_numbers(problem, map(self._symbol, numbers(problem)))
        if len(self._inputs) != count:
            raise Untraceable("a number below 0, or a part that not all such problems have")
        varied, self._represented = self._text.problems([representative(self._problem)])
        lines, _ = self._trace.code(varied, frozenset())
        self.class_of = self._compiled("class_of", [*lines, f"return {self._text.of(varied)}"])
        self._selections: dict[tuple[Any, ...], Selection | None] = {}
        """Kernels by class."""
        self.functions: dict[Selection | None, list[_Function]] = {}
        """By kernels, which several classes may share; the latest first."""

    def _symbol(self, value: Any) -> Any:
        if type(value) not in (int, float) or (type(value) is int and value < 0):
            return value  # a part of the structure
        self._inputs.append(name := f"n{len(self._inputs)}")
        return self._trace.input(name, value)

    def _compiled(self, name: str, body: list[str], before: tuple[str, ...] = ()) -> Any:
        return self._text.compiled(name, ", ".join((*before, *self._inputs)), body)

    def selection(self, given: tuple[Any, ...]) -> Selection | None:
        """The kernels for a problem of these numbers; None where these are none of the core's,
        or where a guard of the traced path fails."""
        values = self.class_of(*given)
        if values is None:
            return None
        if values not in self._selections:
            while len(self._selections) >= _MOST_CLASSES:
                self._selections.pop(next(iter(self._selections), ()), None)
            (represented,) = self._represented(*values)
            self._selections[values] = selection_of(represented, self._device, self._implementation)
        return self._selections[values]

    def function(self, selection: Selection) -> _Function | None:
        """Traces the choice of launches with these kernels, and generates functions from it."""
        with self._trace.branch(frozenset()):
            launches = self._launches(selection, self._fresh())
            if launches is None:
                return None
            sizes = launches.workspace_bytes, launches.workspace_alignment, launches.zeroed_bytes
            lines, _ = self._trace.code(sizes, frozenset())
            computed = self._compiled("sizes", [*lines, f"return {self._text.of(sizes)}"])
        runs: dict[tuple[str, ...], Any] = {}

        def bind(names: tuple[str, ...]) -> Any:
            if names not in runs:
                if len(runs) >= _MOST_TRACES:
                    return None
                runs[names] = None  # where it cannot be traced
                with self._trace.branch(frozenset()):
                    runs[names] = self._run(selection, names)
            return runs[names]

        return _Function(computed, bind)

    def _fresh(self) -> Any:
        """The problem without what an earlier branch of the trace cached on it."""
        return with_numbers(self._problem, numbers(self._problem))

    def _launches(self, selection: Selection, problem: Any) -> Launches | None:
        implementation, tile = selection
        return traced_launches(implementation, problem, tile, self._device)

    def _run(self, selection: Selection, names: tuple[str, ...]) -> Any:
        problem = self._fresh()
        # A view lies where its operand does, as v of latent attention.
        views = {rule.name: rule.same_as or rule.name for rule in problem.operands}
        places = [_SOMEWHERE * (names.index(views[name]) + 2) for name in names]
        addresses = {
            name: self._trace.input(f"p{i}", place)
            for i, (name, place) in enumerate(zip(names, places, strict=True))
        }
        at = self._trace.input(_WORKSPACE, _SOMEWHERE)
        check_operands(problem.operands, Resolved(addresses, ()))
        launches = self._launches(selection, problem)
        if launches is None:
            return None
        toolchain = selection[0].toolchain
        # Zeroed once, when the plan is bound: the launches reset the bytes that they use.
        launches = replace(launches, zeroed_bytes=0)
        steps = traced_steps(launches, toolchain, self._runtime, self._device, addresses, at, at)
        if not steps:
            raise Untraceable("nothing is launched")
        lines, _ = self._trace.code([x for s in steps for x in numbers_of(s)], frozenset())
        for i, step in enumerate(steps):
            self._trace.namespace[f"k{i}"] = step.kept
        packed = listed(self._text.packed(i, s) for i, s in enumerate(steps))
        inputs = (*(f"p{i}" for i in range(len(names))), _WORKSPACE)
        return self._compiled("run", [*lines, f"return {packed}"], inputs)


@dataclass(eq=False)
class _Spec:
    """Problems that differ in numbers alone."""

    traced: list[_Traced] = field(default_factory=list)
    planned: int = 0
    """How many problems were planned: the first is not traced, as no other like it may come."""
    failures: int = 0

    def find(self, given: tuple[Any, ...]) -> _Known | None:
        for traced in self.traced:
            try:
                for function in traced.functions.get(traced.selection(given), ()):
                    sizes = function.sizes(*given)
                    if sizes is not None:
                        return _Known(*sizes, function, given)
            except ArithmeticError:
                continue
        return None

    def learn(
        self, given: tuple[Any, ...], problem: Any, device: Device, implementation: str | None
    ) -> None:
        self.planned += 1
        if self.planned < 2 or self.failures >= _MOST_TRACES:
            return
        self.failures += 1
        try:
            traced = _Traced(problem, len(given), device, implementation)
            selection = traced.selection(given)
            if selection is None or (function := traced.function(selection)) is None:
                return
            known = next((t for t in self.traced if t.class_of(*given) is not None), None)
            if known is None:
                self.traced = [traced, *self.traced[: _MOST_TRACES - 1]]
                known = traced
            others = known.functions.get(selection, [])
            known.functions[selection] = [function, *others[: _MOST_TRACES - 1]]
            self.failures -= 1
        except (Untraceable, KernelSeamError, ArithmeticError):
            return


class _Specs:
    """By structure, device and named implementation."""

    def __init__(self) -> None:
        self.entries: dict[Hashable, _Spec] = {}
        self.lock = new_lock()


class KnownProblems:
    """See kernelseam.known_problems.KnownProblems."""

    def find(self, problem: Any, device: Device, implementation: str | None) -> _Known | None:
        entries = plugins().cache_of(_Specs).entries
        if not entries:
            return None
        try:
            key, given = _parted(problem)
        except AttributeError:  # a part that not all such problems have
            return None
        spec = entries.get((key, device, implementation))
        return None if spec is None else spec.find(given)

    def learn(self, problem: Any, device: Device, implementation: str | None) -> None:
        runtime = plugins().backend(device.backend).runtime
        if device.is_host or not isinstance(runtime, FastRuntime):
            return
        specs = plugins().cache_of(_Specs)
        try:
            key, given = _parted(problem)
        except AttributeError:
            return
        with specs.lock:
            spec = specs.entries.setdefault((key, device, implementation), _Spec())
            while len(specs.entries) > _MOST_SPECS:
                specs.entries.pop(next(iter(specs.entries)))
            spec.learn(given, problem, device, implementation)


_READERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {}


def _parted(problem: Any) -> tuple[Hashable, tuple[Any, ...]]:
    """A problem's structure without its numbers, and the numbers, in the order of
    ``tuned.numbers.numbers``."""
    kind: Any = type(problem)
    read = _READERS.get(kind)
    if read is None:
        read = _READERS[kind] = _reader(problem)
    parts = read(problem)
    given, others = list[Any](), list[Any]()
    for x in parts:
        for y in x if type(x) is tuple else (x,):
            if (type(y) is int and y >= 0) or type(y) is float:
                given.append(y)
                others.append(type(y))
            else:
                others.append(y)
    return (kind, tuple(others)), tuple(given)


def _reader(problem: Any) -> Callable[[Any], tuple[Any, ...]]:
    """A function that reads the fields of a type's problems, nested ones too; a spec is one."""

    def paths(x: Any, to: str) -> list[str]:
        found = []
        for f in fields(x):
            value = getattr(x, f.name)
            inner = is_dataclass(value) and f.name != "spec"
            found += paths(value, f"{to}.{f.name}") if inner else [f"{to}.{f.name}"]
        return found

    read: Callable[[Any], tuple[Any, ...]] = eval(f"lambda p: ({', '.join(paths(problem, 'p'))},)")
    return read

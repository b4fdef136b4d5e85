"""Launches over lists of products whose spec and class are known: arguments are packed from the
problem's numbers, and nothing is chosen, compiled or traced again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

from kernelseam.contract import ArchRow, Device
from kernelseam.descriptors.gemm.grouped_pointers_problem import GroupedGemmPointersProblem
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.dispatch import select
from kernelseam.errors import InvalidValue, Unsupported
from kernelseam.frozen import dataclass
from kernelseam.kernels.kernel import KernelImplementation
from kernelseam.kernels.traced_text import Selection, Text, listed, numbers_of
from kernelseam.kernels.tracing import Enqueue, traced_launches, traced_steps
from kernelseam.plugins import plugins
from kernelseam.symbolic import Trace, Untraceable
from kernelseam.tuned.classes import class_of_lists

_MOST, _MOST_TRACES = 1024, 16
_SOMEWHERE = 1 << 40
"""Placeholder addresses for tracing, which nothing reads."""
_WORKSPACE = "w"
WORKSPACE_WORDS = 32
"""Workspaces begin at multiples of so many 64-bit words."""


@dataclass(frozen=True)
class ListedLaunches:
    """The launches of one problem."""

    workspace_words: int
    """64-bit words of workspace, a multiple of ``WORKSPACE_WORDS``."""
    _function: _Function
    _numbers: tuple[Any, ...]

    def packed(
        self, addresses: Mapping[str, int], workspace: int, kept: bool
    ) -> tuple[Enqueue, ...] | None:
        """The launches over lists at these addresses, to run once, before others are packed, or
        where ``kept`` any number of times."""
        return self._function.packed(addresses, workspace, kept, self._numbers)


@dataclass(frozen=True)
class _Numbers:
    """The numbers of a problem from which its launches are computed. Group sizes are missing: a
    kernel that needs them cannot be traced."""

    spec: Any
    groups: int
    most: tuple[int, int, int]
    even: GemmProblem
    alpha: float
    beta: float
    tiles: Callable[[int, int], int]

    reads_inputs = GroupedGemmPointersProblem.reads_inputs


def _numbers(p: GroupedGemmPointersProblem) -> tuple[float, ...]:
    """The numbers that vary among problems of a spec."""
    even = p.even
    rows = even.a_strides[2], even.b_strides[2], even.c_strides[2]
    return (
        p.groups,
        *p.most,
        even.M,
        even.N,
        even.K,
        even.batch,
        *rows,
        float(p.alpha),
        float(p.beta),
    )


def _traced(
    problem: GroupedGemmPointersProblem, trace: Trace
) -> tuple[_Numbers, dict[tuple[int, int], Any]]:
    """The problem over symbols n0, …, with symbols c0, … for numbers of tiles (by a tile's rows and
    columns), which are made when a kernel asks for them."""
    counts: dict[tuple[int, int], Any] = {}

    def tiles(rows: int, columns: int) -> Any:
        if (rows, columns) not in counts:
            value = problem.tiles(rows, columns)
            counts[rows, columns] = trace.input(f"c{len(counts)}", value)
        return counts[rows, columns]

    given = [trace.input(f"n{i}", x) for i, x in enumerate(_numbers(problem))]
    groups, m, n, k, *of_even, a, b, c, alpha, beta = given
    even = replace(
        problem.even,
        **dict(zip(("M", "N", "K", "batch"), of_even, strict=True)),
        a_strides=(0, 0, a),
        b_strides=(0, 0, b),
        c_strides=(0, 0, c),
        alpha=alpha,
        beta=beta,
    )
    return _Numbers(problem.spec, groups, (m, n, k), even, alpha, beta, tiles), counts


class _Function:
    """The launches of a kernel and tile as a function of a problem's numbers, valid for problems
    that meet the conditions which the traced one met."""

    def __init__(
        self, selection: Selection, problem: GroupedGemmPointersProblem, device: Device
    ) -> None:
        """Raises Untraceable, AttributeError."""
        implementation, tile = selection
        if traced_launches(implementation, problem, tile, device) is None:
            raise Untraceable("it does not take the problem")
        trace = Trace()
        traced, counts = _traced(problem, trace)
        launches = implementation.composition.launches(traced, tile, device)
        if launches.zeroed_bytes or launches.workspace_alignment > 8 * WORKSPACE_WORDS:
            raise Untraceable("a workspace that is not any memory")
        self._names = [rule.name for rule in problem.operands]
        addresses = {
            n: trace.input(f"p{i}", _SOMEWHERE * (i + 2)) for i, n in enumerate(self._names)
        }
        at = trace.input(_WORKSPACE, _SOMEWHERE)
        steps = traced_steps(
            launches,
            implementation.toolchain,
            plugins().backend(device.backend).runtime,
            device,
            addresses,
            at,
            at,
        )
        if not steps:
            raise Untraceable("nothing is launched")
        words = -(-launches.workspace_bytes // (8 * WORKSPACE_WORDS)) * WORKSPACE_WORDS
        text = Text(trace)
        self._tiles = tuple(counts)
        inputs = [f"n{i}" for i in range(len(_numbers(problem)))]
        inputs += [f"c{i}" for i in range(len(counts))]
        lines, _ = trace.code([words], frozenset())
        self._words = text.compiled(
            "words", ", ".join(inputs), [*lines, f"return {text.number(words)}"]
        )
        inputs = [*(f"p{i}" for i in range(len(addresses))), _WORKSPACE, *inputs]
        lines, _ = trace.code([x for s in steps for x in numbers_of(s)], frozenset())

        def packing(packers: list[Callable[..., Enqueue]]) -> Callable[..., tuple[Enqueue, ...]]:
            text.namespace.update({f"k{i}": pack for i, pack in enumerate(packers)})
            packed = listed(text.packed(i, s) for i, s in enumerate(steps))
            return text.compiled("packed", ", ".join(inputs), [*lines, f"return {packed}"])

        self._kept = packing([s.kept for s in steps])
        self._once = packing([s.once for s in steps]) if len(steps) == 1 else self._kept

    def launches(self, problem: GroupedGemmPointersProblem) -> ListedLaunches | None:
        """The problem's launches; None if it does not meet the conditions."""
        numbers = (*_numbers(problem), *[problem.tiles(*x) for x in self._tiles])
        try:
            words = self._words(*numbers)
        except ArithmeticError:
            return None
        return None if words is None else ListedLaunches(words, self, numbers)

    def packed(
        self, addresses: Mapping[str, int], workspace: int, kept: bool, numbers: tuple[Any, ...]
    ) -> tuple[Enqueue, ...] | None:
        """See ``ListedLaunches``."""
        run = self._kept if kept else self._once
        return run(*[addresses[n] for n in self._names], workspace, *numbers)


@dataclass(frozen=True)
class _Class:
    """The kernel and tile of a class, and its functions, which classes with the same kernel and
    tile share."""

    selection: Selection
    row: ArchRow
    functions: list[_Function]


class ListedKernels:
    """Known launches by spec, class, device and named implementation."""

    def __init__(self) -> None:
        self._classes: dict[Hashable, _Class | None] = {}
        """Class → its kernel; None if its problems must be planned."""
        self._functions: dict[Hashable, list[_Function]] = {}
        """Functions by spec, kernel and device."""

    def find(
        self, problem: GroupedGemmPointersProblem, device: Device, implementation: str | None
    ) -> ListedLaunches | None:
        """The launches of a problem; None if it must be planned."""
        key = (problem.spec, class_of_lists(problem), device, implementation)
        if key not in self._classes:
            _make_room(self._classes)
            self._classes[key] = self._class(problem, device, implementation)
        if (of := self._classes[key]) is None:
            return None
        chosen, tile = of.selection
        if not chosen.composition.takes(problem, tile, of.row, device):
            return None
        for function in of.functions:
            if (found := function.launches(problem)) is not None:
                return found
        try:
            if len(of.functions) >= _MOST_TRACES:
                raise Untraceable("conditions of problems differ too much")
            function = _Function(of.selection, problem, device)
        except (InvalidValue, Unsupported, Untraceable, AttributeError):
            self._classes[key] = None
            return None
        of.functions.append(function)
        return function.launches(problem)

    def _class(
        self, problem: GroupedGemmPointersProblem, device: Device, implementation: str | None
    ) -> _Class | None:
        selection = _selection(problem, device, implementation)
        if selection is None:
            return None
        row = selection[0].toolchain.arch_row(device.arch)
        _make_room(self._functions)
        functions = self._functions.setdefault((problem.spec, selection, device), [])
        return _Class(selection, row, functions)


def _selection(
    problem: GroupedGemmPointersProblem, device: Device, implementation: str | None
) -> Selection | None:
    """The chosen kernel and tile; None if the implementation is not one of the core's kernel
    definitions."""
    try:
        choice = select(problem, device, implementation)
    except (InvalidValue, Unsupported):
        return None
    chosen = choice.implementation
    if not isinstance(chosen, KernelImplementation):
        return None
    return chosen, chosen.tile(problem, device, choice.variant)


def _make_room(entries: dict[Hashable, Any]) -> None:
    while len(entries) >= _MOST:
        entries.pop(next(iter(entries), None), None)

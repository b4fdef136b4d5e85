"""The short path of calls on torch tensors: where similar calls were planned before, nothing is
described, checked or chosen again.

A `Caller` is for one signature: all of a call but its tensors and the options that are numbers. A
call at the addresses of an earlier one launches with the arguments packed then (`Repeat`).
Otherwise the tensors' dtypes select a `_Kind`; extents, strides and numbers select a class, whose
generated function (`traced_call`) packs the arguments. Other calls are planned, and traced for
later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from kernelseam.arrays import torch as torch_arrays
from kernelseam.arrays.guards import Guard, guard_maker, tensor_guard
from kernelseam.contract import ArrayInfo, FastRuntime
from kernelseam.errors import KernelSeamError
from kernelseam.forking import new_lock
from kernelseam.ops import array_call
from kernelseam.ops.array_call import ArrayCall, Infos, put
from kernelseam.ops.known_call import KnownCall, repeat_of, repeat_of_planned
from kernelseam.ops.on_torch import OnTorch, Zeroed, none_zeroed
from kernelseam.ops.operation import ByNumbers, cleared_in
from kernelseam.ops.repeat import ALIGNMENT, Repeat
from kernelseam.ops.split import Split, split_of
from kernelseam.ops.traced_call import Function, Kernels, Packed, TracedCall
from kernelseam.planning.binding import in_order
from kernelseam.symbolic import Untraceable
from kernelseam.torch_dispatch import recorded

Compute = Callable[..., None]
MOST_PATHS = 16
"""Traces kept: of a kind of tensors, each another path through the checks, and of a class's
kernels."""
_MOST_KINDS, _MOST_GUARDS = 8, 4
_OFTEN = 16
"""How often a call comes at the same addresses before a `Repeat` is made of it, which takes as much
time as ten repeated calls save."""
_FEW_TENSORS = 16
"""Calls with n times as many tensors, such as lists of products, have 1/(1 + n) of the cache."""


class _Kind:
    """Calls of one signature on tensors of the same dtypes, numbers of axes and device."""

    def __init__(self, tensors: tuple[Any, ...], on: OnTorch) -> None:
        self.on = on
        self.guard_of = guard_maker(tensors)
        self.holds = self.guard_of(tensors, extents=False)
        self.read = _reader(tensors)
        self._calls: list[TracedCall] = []
        self._classes: dict[tuple[TracedCall, tuple[Any, ...]], Kernels | None] = {}
        self.own = list[Function]()
        """The function of a ``ByNumbers``, which needs no tracing, if the signature has one."""
        self.known: dict[tuple[Any, ...], Function | KnownCall] = {}
        """What last served calls of these numbers: a KnownCall from the second call on."""
        self.last: tuple[Any, ...] = ()
        """The numbers of the last call whose numbers were read."""
        self.latest: KnownCall | None = None
        """Calls of numbers that came twice in a row, or that follow such: a guard compares the
        tensors, so that extents and strides need not be read."""
        self.runs = False
        """Whether ``latest`` has served a call since it was set."""
        self._failures = 0

    def again(
        self,
        known: Function | KnownCall,
        numbers: tuple[Any, ...],
        given: tuple[Any, ...],
        tensors: tuple[Any, ...],
    ) -> KnownCall:
        """The KnownCall for numbers that ``known`` served last. ``given``: the options' numbers."""
        if isinstance(known, Function):
            self.known[numbers] = known = KnownCall(known, given, numbers)
        if self.last == numbers or self.runs:
            known.holds, self.runs = self.guard_of(tensors), False
            self.latest = known
        return known

    def packed(
        self, pointers: list[int], numbers: tuple[Any, ...], stream: object
    ) -> tuple[Function, Packed] | None:
        """The function that serves a call whose numbers are new, and what it returned; None where
        none does."""
        made_by = self.on.empty, self.on.zeroed if stream is None else none_zeroed
        for call in self._calls or (None,):  # a ByNumbers traces none
            functions = self.own
            if call is not None:
                try:
                    values = call.class_of(*numbers)
                except ArithmeticError:
                    continue
                if values is None:  # the call goes another way through the checks
                    continue
                kernels = self._classes.get((call, values)) or self._kernels_of(call, values)
                functions = [] if kernels is None else kernels.functions
            for function in functions:
                try:
                    packed = function.run(function.once, *made_by, *pointers, *numbers)
                except Exception:
                    continue
                if packed is not None:
                    if call is not None:
                        put(self.known, numbers, function)
                    return function, packed
        return None

    def _kernels_of(self, call: TracedCall, values: tuple[Any, ...]) -> Kernels | None:
        """The kernels of a call's class; None where they cannot be traced."""
        key = call, values
        if key in self._classes:
            return self._classes.get(key)
        put(self._classes, key, kernels := call.kernels_of(values))
        return kernels

    def learn(
        self, pointers: list[int], numbers: tuple[Any, ...], trace: Callable[[], TracedCall]
    ) -> None:
        """Trace a call that no function served."""
        if self._failures >= MOST_PATHS:
            return
        self._failures += 1
        try:
            traced = trace()
            call = next((c for c in self._calls if _takes(c, pointers, numbers)), None)
            if call is None:
                call = traced
                self._calls = [traced, *self._calls[: MOST_PATHS - 1]]
            values = call.class_of(*numbers)
            kernels = None if values is None else self._kernels_of(call, values)
            if kernels is None or len(kernels.functions) >= MOST_PATHS:
                return
            if (function := traced.function(kernels.selections)) is not None:
                kernels.functions.insert(0, function)
                self._failures -= 1
        except (Untraceable, KernelSeamError, ArithmeticError):
            return


def _takes(call: TracedCall, pointers: list[int], numbers: tuple[Any, ...]) -> bool:
    try:
        return call.takes(*pointers, *numbers) is not None
    except ArithmeticError:
        return False


def _reader(tensors: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], tuple[int, ...]]:
    """Shapes and strides, in order, of tensors of which as many come twice, and have as many axes,
    as of these."""
    places = dict[int, list[int]]()
    for i, x in enumerate(tensors):
        places.setdefault(id(x), []).append(i)
    parts = ""
    for i, x in enumerate(tensors):
        at, *again = places[id(x)]
        if not x.ndim:
            continue
        read_here = f"*t[{i}].shape, *t[{i}].stride()"
        if again:
            read_here = f"*n{at}" if at != i else f"*(n{i} := ({read_here}))"
        parts += f"{read_here}, "
    read: Callable[..., tuple[int, ...]] = eval(f"lambda t: ({parts})")
    return read


class Caller:
    """Calls of one signature."""

    def __init__(
        self,
        compute: Compute,
        names: tuple[str, ...],
        implementation: str | None,
        zeroed: Zeroed,
    ) -> None:
        self._zeroed = zeroed
        self._compute, self._names, self._implementation = compute, names, implementation
        self._places = {n: i for i, n in enumerate(names)}
        self._most = max(array_call.MAX_ENTRIES // (1 + len(names) // _FEW_TENSORS), 1)
        self._cleared = cleared_in(compute)
        self._kinds: list[_Kind] = []
        self.recent: dict[Hashable, tuple[Repeat, Guard]] = {}
        """Earlier calls, by addresses and the options' numbers: repeated where the guard holds for
        the tensors."""
        self._seen: dict[Hashable, list[Any]] = {}
        """By the same, a call's numbers and how often it came."""
        self._layouts: dict[Hashable, Repeat] = {}
        """Of planned calls, by their tensors' layouts."""
        self._lock = new_lock()

    def call(
        self,
        place: Hashable,
        tensors: tuple[Any, ...],
        pointers: list[int],
        given: tuple[Any, ...],
        stream: object,
    ) -> dict[str, Any] | None:
        """The results by name; None, with nothing launched, where the call must be planned.
        ``place``: the addresses and the options that are numbers. No trace may be active."""
        for kind in self._kinds:
            on, known, packed = kind.on, kind.latest, None
            if known is None or known.given != given or not known.holds(*tensors):
                if not kind.holds(*tensors):
                    continue
                known = None
            if not on.is_current():
                return on.within(self.call, place, tensors, pointers, given, stream)
            if known is not None:
                numbers, kind.runs = known.numbers, True
            else:
                numbers = (*given, *kind.read(tensors))
                served = kind.known.get(numbers)
                if served is not None:
                    known = kind.again(served, numbers, given, tensors)
                kind.last = numbers
            if known is not None:
                function, zeroed = known.function, on.zeroed if stream is None else none_zeroed
                try:
                    packed = known.again(on.empty, zeroed, *pointers)
                except Exception:  # the planned call raises the proper error
                    break
            if packed is None:
                found = kind.packed(pointers, numbers, stream)
                if found is None:
                    break
                (function, packed), known = found, None
                if kind.runs:  # the next may be like it
                    kind.again(function, numbers, given, tensors)
            made, workspace, launches = packed
            if self._cleared:
                named = zip(function.results, made, strict=True)
                torch_arrays.clear([x for name, x in named if name in self._cleared])
            if stream is None:
                handle = on.stream()
                for launch in launches:
                    launch(handle)
            else:
                on.launch(in_order(launches), workspace, stream)
            if function.written:
                on.count_writes(tuple([tensors[self._places[n]] for n in function.written]))
            seen = self._seen.get(place)
            if seen is None or seen[0] != numbers:
                put(self._seen, place, [numbers, 1], self._most)
            elif seen[1] < _OFTEN:
                seen[1] += 1
            elif not (zeroes := function.zeroes and stream is None) or on.zeroed(0):
                # not a graph's call, whose workspace is larger
                what = on, made, workspace, self._places, self._cleared
                repeat = repeat_of(known or KnownCall(function, given, numbers), *what, zeroes)
                put(self.recent, place, (repeat, kind.guard_of(tensors)), self._most)
            return dict(zip(function.results, made, strict=True))
        return self._planned(place, tensors, pointers, given, stream)

    def again(
        self, tensors: tuple[Any, ...], given: tuple[Any, ...], takes: Callable[..., bool]
    ) -> tuple[Any, ...] | None:
        """The results in order, on torch's current stream, of a call with the numbers of its kind's
        ``latest``, or with others where ``takes(*tensors)``; None, with nothing launched, for other
        calls."""
        for kind in self._kinds:
            known, on = kind.latest, kind.on
            if known is None or known.given != given:
                continue
            if not known.holds(*tensors):
                if not kind.holds(*tensors) or not takes(*tensors):
                    continue
                pointers = list(map(on.address_of, tensors))
                results = self.call((*pointers, *given), tensors, pointers, given, None)
                return None if results is None else tuple(results.values())
            if self._cleared or not on.is_current():
                return None
            try:
                packed = known.again(on.empty, on.zeroed, *map(on.address_of, tensors))
            except Exception:  # the planned call raises the proper error
                return None
            if packed is None:
                return None
            made, _, launches = packed
            handle, written = on.stream(), known.function.written
            for launch in launches:
                launch(handle)
            if written:
                on.count_writes(tuple([tensors[self._places[n]] for n in written]))
            kind.runs = True
            return made
        return None

    def _planned(
        self,
        place: Hashable,
        tensors: tuple[Any, ...],
        pointers: list[int],
        given: tuple[Any, ...],
        stream: object,
    ) -> dict[str, Any] | None:
        """By a planned call on tensors of the same layouts."""
        repeat = self._by_layout(tensors, pointers, given) if self._layouts else None
        if repeat is None or recorded(tensors):
            return None
        guard = next((x for x in repeat.guards if x(*tensors)), None)
        if guard is None:
            guard = tensor_guard(tensors)
            repeat.guards = (guard, *repeat.guards[: _MOST_GUARDS - 1])
        put(self.recent, place, (repeat, guard))
        return repeat.call(tensors, pointers, stream)

    def _by_layout(
        self, tensors: tuple[Any, ...], pointers: list[int], given: tuple[Any, ...]
    ) -> Repeat | None:
        if any(not x or x % ALIGNMENT for x in pointers):
            return None
        layouts = torch_arrays.layouts(tensors)
        return None if layouts is None else self._layouts.get((*given, *layouts))

    def learn(
        self,
        infos: Infos,
        tensors: tuple[Any, ...],
        pointers: list[int],
        options: tuple[Any, ...],
        planned: ArrayCall,
        workspace: ArrayInfo | None,
        is_new: bool,
    ) -> None:
        """From a call that was planned. ``is_new``: no call like it was planned before."""
        if not isinstance(planned.runtime, FastRuntime):
            return
        given, _ = split_of(options).parted(options)
        with self._lock:
            kind = next((k for k in self._kinds if k.holds(*tensors)), None)
            seen = kind is not None
            if kind is None:
                on = OnTorch(planned.runtime, planned.device, tensors[0], self._zeroed)
                kind = _Kind(tensors, on)
                if isinstance(self._compute, ByNumbers):
                    function = self._compute.function
                    kind.own = [function(on, infos, self._names, options, self._implementation)]
                self._kinds = [kind, *self._kinds[: _MOST_KINDS - 1]]
            if kind.own:
                return
            if is_new and seen:
                self._trace(kind, infos, tensors, pointers, options, planned)
            layouts = torch_arrays.layouts(tensors)
            if layouts is not None and not any(not x or x % ALIGNMENT for x in pointers):
                repeat = repeat_of_planned(planned, infos, workspace, kind.on, self._cleared)
                put(self._layouts, (*given, *layouts), repeat)

    def _trace(
        self,
        kind: _Kind,
        infos: Infos,
        tensors: tuple[Any, ...],
        pointers: list[int],
        options: tuple[Any, ...],
        planned: ArrayCall,
    ) -> None:
        arrays = {n: infos[n] for n in self._names}

        def trace() -> TracedCall:
            return TracedCall(
                self._compute,
                arrays,
                partial(Split.replaced, options),
                self._implementation,
                planned.device,
                planned.runtime,
            )

        given, _ = split_of(options).parted(options)
        kind.learn(pointers, (*given, *kind.read(tensors)), trace)

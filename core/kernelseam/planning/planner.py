"""From a descriptor to a plan: choose an implementation and build its launches, once per problem,
device and implementation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from functools import partial

from kernelseam.contract import Device, Problem
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.dispatch import (
    build,
    check_backend,
    check_name,
    find_device,
    preferred_backend,
    select,
)
from kernelseam.errors import InvalidValue, UnknownName
from kernelseam.forking import new_lock
from kernelseam.known_problems import known_problems
from kernelseam.planning.calls import Built, Plan
from kernelseam.plugins import forget, plugins

__all__ = ["MAX_PLANS", "Plans", "built_plan", "forget", "plan"]

MAX_PLANS = 1024
"""Cached plans; beyond that the oldest are dropped."""


class Plans:
    """A cache of choices and built launches by problem, device and implementation. It holds no
    arrays."""

    def __init__(self) -> None:
        self.entries: OrderedDict[Hashable, Built] = OrderedDict()
        self._lock = new_lock()

    def get(self, key: Hashable) -> Built | None:
        with self._lock:
            return self.entries.get(key)

    def put(self, key: Hashable, built: Built) -> None:
        with self._lock:
            self.entries[key] = built
            while len(self.entries) > MAX_PLANS:
                self.entries.popitem(last=False)


def check_descriptor(value: object) -> None:
    """Raise InvalidValue for what is no descriptor."""
    if isinstance(value, type) or not hasattr(value, "simplified"):
        raise InvalidValue(
            "descriptor",
            type(value).__name__,
            "must be a descriptor",
            "Fill in one: BatchedGemmStrided, Attention, QkvProjection or another",
        )


def named_device(device: Device | str | None, backend: str | None = None) -> Device:
    """As ``find_device``; a refusal names ``device`` where it was given."""
    try:
        return find_device(device, backend)
    except UnknownName as e:
        if device is None:
            raise
        raise UnknownName("device", device, e.rule, e.remedy) from None


def plan(
    descriptor: Descriptor,
    *,
    device: Device | str | None = None,
    backend: str | None = None,
    implementation: str | None = None,
) -> Plan:
    """Choose an implementation and build its launches.

    ``device``: a Device or "backend:index"; by default that of the descriptor's arrays; without
    arrays the first device of the preferred backend. That is ``backend``, else ``use_backend``'s,
    else KERNELSEAM_BACKEND's; arrays must be on a device of it.

    Plans are cached by problem, device and implementation: planning again is cheap.
    Raises InvalidValue, UnknownName, Unsupported or CompileError.
    """
    known = known_problems()
    descriptor, note, problem, target = _described(descriptor, device, backend, implementation)
    plans, key = plugins().cache_of(Plans), (problem, target, implementation)
    if plans.get(key) is None:
        if (launches := known.find(problem, target, implementation)) is not None:
            later = partial(_built, plans, key, problem, target, implementation)
            return Plan(descriptor, problem, target, later, note, launches)
        _built(plans, key, problem, target, implementation)
        known.learn(problem, target, implementation)
    built = _built(plans, key, problem, target, implementation)
    return Plan(descriptor, problem, target, built, note)


def built_plan(
    descriptor: Descriptor, *, device: Device | None = None, implementation: str | None = None
) -> Plan:
    """As ``plan``, but always built, also where problems like it were planned before: for
    callers that keep their own record of known problems."""
    descriptor, note, problem, target = _described(descriptor, device, None, implementation)
    plans, key = plugins().cache_of(Plans), (problem, target, implementation)
    built = _built(plans, key, problem, target, implementation)
    return Plan(descriptor, problem, target, built, note)


def _described(
    descriptor: Descriptor,
    device: Device | str | None,
    backend: str | None,
    implementation: str | None,
) -> tuple[Descriptor, str, Problem, Device]:
    """The descriptor to compute, why it is not the one that was given, its problem and device."""
    check_descriptor(descriptor)
    for name, given in (("backend", backend), ("implementation", implementation)):
        if given is not None:
            check_name(name, given)
    array_device: Device | None = getattr(descriptor, "device", None) if device is None else None
    descriptor, note = descriptor.simplified()
    target = array_device or named_device(device, backend)
    if array_device is not None:
        check_backend(preferred_backend(backend), array_device)
    elif backend is not None and target.backend != backend:
        raise InvalidValue("backend", backend, f"the device is {target}", "Name one of the two")
    return descriptor, note, descriptor.problem(), target


def _built(
    plans: Plans, key: Hashable, problem: Problem, device: Device, implementation: str | None
) -> Built:
    """From the cache, or chosen and built."""
    built = plans.get(key)
    if built is None:
        choice = select(problem, device, implementation)
        built = build(choice, problem, device, named=implementation is not None)
        plans.put(key, built)
    return built

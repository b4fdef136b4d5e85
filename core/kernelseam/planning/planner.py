"""From a descriptor to a plan: an implementation is chosen and its launches are built, once for
each problem, device and implementation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from kernelseam.contract import Device, PlanParts
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.dispatch import (
    Choice,
    build,
    check_backend,
    find_device,
    name_of,
    preferred_backend,
    select,
)
from kernelseam.errors import InvalidValue, UnknownName
from kernelseam.forking import new_lock
from kernelseam.planning.calls import Plan
from kernelseam.plugins import forget, plugins

__all__ = ["KEPT", "Plans", "forget", "plan"]

KEPT = 1024
"""Plans that are remembered; then the oldest go."""


class Plans:
    """What was chosen and built with the plugins that remember it, by problem, device and
    implementation. No array is kept with it."""

    def __init__(self) -> None:
        self.kept: OrderedDict[Hashable, tuple[Choice, PlanParts]] = OrderedDict()
        self._lock = new_lock()

    def get(self, key: Hashable) -> tuple[Choice, PlanParts] | None:
        with self._lock:
            return self.kept.get(key)

    def put(self, key: Hashable, built: tuple[Choice, PlanParts]) -> None:
        with self._lock:
            self.kept[key] = built
            while len(self.kept) > KEPT:
                self.kept.popitem(last=False)


def plan(
    descriptor: Descriptor,
    *,
    device: Device | str | None = None,
    backend: str | None = None,
    implementation: str | None = None,
) -> Plan:
    """Choose an implementation and build its launches.

    ``device``: a Device or "backend:index"; by default that of the descriptor's arrays, which must
    be of the backend asked for (``backend``, over ``use_backend``, over KERNELSEAM_BACKEND), else
    that backend's first.

    Plans are remembered by problem, device and implementation: asking again is cheap.
    Raises InvalidValue, UnknownName, Unsupported or CompileError.
    """
    if isinstance(descriptor, type) or not hasattr(descriptor, "simplified"):
        raise InvalidValue(
            "descriptor",
            type(descriptor).__name__,
            "must be a descriptor",
            "Fill in one: BatchedGemmStrided, Attention, QkvProjection or another",
        )
    backend, implementation = (
        None if x is None else name_of(n, x)
        for n, x in (("backend", backend), ("implementation", implementation))
    )
    where: Device | None = getattr(descriptor, "device", None) if device is None else None
    descriptor, note = descriptor.simplified()
    problem = descriptor.problem()
    try:
        target = where or find_device(device, backend)
    except UnknownName as e:
        if device is None:
            raise
        raise UnknownName("device", device, e.rule, e.remedy) from None
    if where is not None:
        check_backend(preferred_backend(backend), where)
    elif backend is not None and target.backend != backend:
        raise InvalidValue("backend", backend, f"the device is {target}", "Name one of the two")
    plans = plugins().remembered(Plans)
    key = (problem, target, implementation)
    remembered = plans.get(key)
    if remembered is None:
        choice = select(problem, target, implementation)
        remembered = build(choice, problem, target, named=implementation is not None)
        plans.put(key, remembered)
    choice, parts = remembered
    return Plan(descriptor, problem, target, parts, choice, note)

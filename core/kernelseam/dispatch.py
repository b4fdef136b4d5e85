"""Which implementation computes a problem: an explicit choice, else the cheapest that takes it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from kernelseam.contract import Cost, Device, DeviceLimits, Implementation, Problem
from kernelseam.errors import InvalidValue, Refusal, UnknownName, Unsupported
from kernelseam.plugins import Plugins, plugins

_backend: ContextVar[str | None] = ContextVar("kernelseam_backend", default=None)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, ``name`` is the backend wherever a call names none."""
    plugins().backend(name)
    token = _backend.set(name)
    try:
        yield
    finally:
        _backend.reset(token)


def preferred_backend(backend: str | None = None) -> str | None:
    """The backend asked for: the argument, over ``use_backend``, over KERNELSEAM_BACKEND; None where none is."""
    return backend or _backend.get() or os.environ.get("KERNELSEAM_BACKEND") or None


def check_backend(wanted: str | None, device: Device) -> None:
    """Refuse arrays on ``device`` where another backend is asked for."""
    if wanted is not None and device.backend != wanted:
        raise InvalidValue(
            "backend", wanted, f"the arrays are on {device}",
            f"Move them to a device of {wanted}, or let the arrays choose: name no backend (backend=, use_backend and "
            "KERNELSEAM_BACKEND name one)",
        )


def find_device(device: Device | str | None = None, backend: str | None = None) -> Device:
    """A device from a Device, a name ("backend" or "backend:index"), or the default.

    The default is the first device of the preferred backend, else of the backend of highest priority.
    """
    if isinstance(device, Device):
        return device
    found = plugins()
    index = 0
    if device is not None:
        match = re.fullmatch(r"([^:]+)(?::([0-9]{1,9}))?", device) if isinstance(device, str) else None
        if match is None:
            raise UnknownName(
                "device", device, "must be a Device, BACKEND or BACKEND:INDEX", "For example numpy or numpy:0"
            )
        backend, index = match[1], int(match[2] or 0)
    wanted = preferred_backend(backend)
    devices = list(found.backend(wanted).runtime.devices()) if wanted else found.devices()
    for d in devices:
        if wanted is None or d.index == index:
            return d
    raise UnknownName(
        "device", f"{wanted}:{index}", f"backend {wanted} has {len(devices)} device(s) here",
        "See `kernelseam doctor`, or use another backend",
    )


@dataclass(frozen=True)
class Candidate:
    """One implementation's answer: its cost, or its refusal."""

    implementation: Implementation
    refusal: str | None
    cost: Cost | None


@dataclass(frozen=True)
class Choice:
    """The implementation chosen, and every answer that led to it."""

    implementation: Implementation
    candidates: tuple[Candidate, ...]


def consider(problem: Problem, device: Device, found: Plugins | None = None) -> tuple[Candidate, ...]:
    """Ask every implementation of the operation on the device's backend, cheapest first, refusals last."""
    answers: list[Candidate] = []
    for i in (found or plugins()).registry.implementations:
        if i.operation != problem.operation or i.backend != device.backend:
            continue
        try:
            refusal = i.supports(problem, device) or None
            cost = None if refusal else i.cost(problem, device)
            if refusal is None and not (cost is not None and cost.seconds >= 0):
                raise ValueError(f"it predicts a cost of {cost}")
        except Exception as e:  # a broken implementation must not harm the others
            refusal, cost = f"its check raised {type(e).__name__}: {e}", None
        answers.append(Candidate(i, refusal, cost))
    return tuple(sorted(answers, key=lambda a: a.cost.seconds if a.cost else float("inf")))


def select(problem: Problem, device: Device, implementation: str | None = None) -> Choice:
    """The implementation for a problem on a device.

    Raises UnknownName if ``implementation`` names none, Unsupported if it (or, without a name, every one)
    refuses, with each one's own reason.
    """
    candidates = consider(problem, device)
    pool = candidates
    if implementation is not None:
        pool = tuple(c for c in candidates if c.implementation.name == implementation)
        if not pool:
            raise UnknownName(
                "implementation", implementation,
                f"must be one of {', '.join(c.implementation.name for c in candidates) or 'none'} "
                f"for {problem.operation} on {device.backend}",
                f"See `kernelseam explain {problem.operation}`",
            )
    for c in pool:
        if c.refusal is None:
            return Choice(c.implementation, candidates)
    raise Unsupported(problem, [Refusal(c.implementation.name, c.refusal or "") for c in pool])


def roofline(problem: Problem, limits: DeviceLimits, efficiency: float = 1.0) -> Cost:
    """The time that memory or arithmetic needs at least, whichever is longer, over ``efficiency``."""
    rate = limits.operations_per_second.get(problem.compute_dtype.value, 1e11)
    seconds = max(problem.operations / rate, problem.bytes_moved / limits.bytes_per_second)
    return Cost(problem.bytes_moved, problem.operations, limits.launch_seconds + seconds / efficiency)

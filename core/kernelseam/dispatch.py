"""Which implementation computes a problem: an explicit choice, else the cheapest that takes it."""

from __future__ import annotations

import os
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from kernelseam.contract import EMULATED, Cost, Device, DeviceLimits, Implementation, PlanParts, Problem
from kernelseam.errors import BrokenImplementation, InvalidValue, Refusal, UnknownName, Unsupported
from kernelseam.plugins import Plugins, plugins

_backend: ContextVar[str | None] = ContextVar("kernelseam_backend", default=None)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, ``name`` is the backend wherever a call names none."""
    plugins().backend(name_of("backend", name))
    token = _backend.set(name)
    try:
        yield
    finally:
        _backend.reset(token)


def preferred_backend(backend: str | None = None) -> str | None:
    """The backend asked for: the argument, over ``use_backend``, over KERNELSEAM_BACKEND; None where none is.

    Raises UnknownName for an argument that is no name.
    """
    if backend is not None:
        return name_of("backend", backend)
    return _backend.get() or os.environ.get("KERNELSEAM_BACKEND") or None


def name_of(field: str, value: object) -> str:
    """A name as it is asked for. Raises UnknownName for anything else, which tables of names could not be asked for."""
    if not isinstance(value, str):
        raise UnknownName(field, value, "must be a name", "Name one of those that `kernelseam doctor` lists")
    return value


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

    The default is the first device of the preferred backend, else of the backend of highest priority; an emulated
    device is taken only where it or its backend is named.
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
    devices = list(found.devices_of(found.backend(wanted))) if wanted is not None else [
        d for d in found.devices() if d.evidence != EMULATED
    ]
    for d in devices:
        if wanted is None or d.index == index:
            return d
    raise UnknownName(
        "device", f"{wanted}:{index}", f"backend {wanted} has {len(devices)} device(s) here",
        "See `kernelseam doctor`, or use another backend",
    )


@dataclass(frozen=True)
class Candidate:
    """One implementation's answer: that it takes the problem at this cost, or why not (then at what cost it would,
    where it can tell)."""

    implementation: Implementation
    refusal: str | None
    cost: Cost | None
    error: str = ""
    """The traceback, where the refusal is that it is broken."""


@dataclass(frozen=True)
class Choice:
    """The implementation chosen, and every answer that led to it."""

    implementation: Implementation
    candidates: tuple[Candidate, ...]


def consider(problem: Problem, device: Device, found: Plugins | None = None) -> tuple[Candidate, ...]:
    """Ask every implementation of the operation on the device's backend, cheapest first, refusals last."""
    answers = [
        ask(i, problem, device) for i in (found or plugins()).registry.implementations
        if i.operation == problem.operation and i.backend == device.backend
    ]
    return _ordered(answers)


def ask(implementation: Implementation, problem: Problem, device: Device) -> Candidate:
    """Its answer; one that is broken refuses, for it must not harm the others."""
    refusal, cost = None, None
    try:
        refusal = implementation.supports(problem, device) or None
        cost = implementation.cost(problem, device)
        if not (cost is not None and cost.seconds >= 0):
            raise ValueError(f"it predicts a cost of {cost}")
    except Exception as e:
        if refusal is None:
            return Candidate(implementation, f"its check raised {type(e).__name__}: {e}", None, _text(e))
        cost = None  # nobody promised one for a problem that is refused
    return Candidate(implementation, refusal, cost)


def _text(error: Exception) -> str:
    """The traceback as text: kept as it is, it would keep every caller's arrays alive."""
    return "".join(traceback.format_exception(error))


def _ordered(answers: list[Candidate]) -> tuple[Candidate, ...]:
    return tuple(sorted(answers, key=lambda a: a.cost.seconds if a.cost and a.refusal is None else float("inf")))


def build(choice: Choice, problem: Problem, device: Device, *, named: bool = False) -> tuple[Choice, PlanParts]:
    """The chosen implementation's launches.

    One that raises is passed over for the next cheapest, with a BrokenImplementation warning; where none is left, or
    the implementation was ``named``, what the first raised is raised. Too little memory is no fault: it is raised.
    """
    answers = list(choice.candidates)
    first: Exception | None = None
    for place, candidate in enumerate(choice.candidates):
        if candidate.refusal is not None or (named and candidate.implementation is not choice.implementation):
            continue
        try:
            parts = candidate.implementation.build(problem, device)
        except MemoryError:
            raise
        except Exception as e:
            first = first or e
            answers[place] = replace(candidate, refusal=f"its build raised {type(e).__name__}: {e}", error=_text(e))
            continue
        if first is not None:
            _warn_of(answers, candidate.implementation, problem, device)
            choice = Choice(candidate.implementation, _ordered(answers))
        return choice, parts
    assert first is not None
    raise first


def _warn_of(answers: list[Candidate], taken: Implementation, problem: Problem, device: Device) -> None:
    broken = "; ".join(f"{a.implementation.name}: {a.refusal}" for a in answers if a.error)
    message = f"{taken.name} computes {problem} on {device}, for what would be faster is broken. {broken}"
    warnings.warn(message, BrokenImplementation, stacklevel=4)


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
                "Name one of these, or leave it out",
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

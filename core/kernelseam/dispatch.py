"""Which implementation computes a problem: an explicit choice, else a tuned one, else the cheapest
that takes it."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from kernelseam.containment import Contained, told, traceback_of
from kernelseam.contract import EMULATED, Cost, Device, Implementation, PlanParts, Problem
from kernelseam.contract_values import held, held_parts, held_refusal
from kernelseam.errors import BrokenImplementation, InvalidValue, Refusal, UnknownName, Unsupported
from kernelseam.plugins import Plugins, plugins
from kernelseam.variants import SEPARATOR, build_of, variants_of

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
    """The backend asked for: the argument, over ``use_backend``, over KERNELSEAM_BACKEND; None
    where none is.

    Raises UnknownName for an argument that is no name.
    """
    if backend is not None:
        return name_of("backend", backend)
    return _backend.get() or _in_environment() or None


def _variable() -> Callable[[], str | None]:
    """What reads the variable. os.environ encodes the name at every look, which takes longer than a
    launch; what it keeps the encoded names in is read where it is what it is known to be, and
    nobody has put another in its place."""
    name, environ = "KERNELSEAM_BACKEND", os.environ
    kept, encode = (getattr(environ, n, None) for n in ("_data", "encodekey"))
    if not isinstance(kept, dict) or encode is None:
        return lambda: os.environ.get(name)
    encoded = encode(name)
    return lambda: os.environ.get(name) if encoded in kept or os.environ is not environ else None


_in_environment = _variable()


def name_of(field: str, value: object) -> str:
    """A name as it is asked for. Raises UnknownName for anything else, which tables of names could
    not be asked for."""
    if not isinstance(value, str):
        raise UnknownName(
            field, value, "must be a name", "Name one of those that `kernelseam doctor` lists"
        )
    return value


def check_backend(wanted: str | None, device: Device) -> None:
    """Refuse arrays on ``device`` where another backend is asked for."""
    if wanted is not None and device.backend != wanted:
        raise InvalidValue(
            "backend",
            wanted,
            f"the arrays are on {device}",
            f"Move them to a device of {wanted}, or let the arrays choose: name no backend "
            "(backend=, use_backend and "
            "KERNELSEAM_BACKEND name one)",
        )


def find_device(device: Device | str | None = None, backend: str | None = None) -> Device:
    """A device from a Device, a name ("backend" or "backend:index"), or the default.

    The default is the first device of the preferred backend, else of the backend of highest
    priority; an emulated device is taken only where it or its backend is named.
    """
    if isinstance(device, Device):
        return device
    found = plugins()
    index = 0
    if device is not None:
        match = (
            re.fullmatch(r"([^:]+)(?::([0-9]{1,9}))?", device) if isinstance(device, str) else None
        )
        if match is None:
            raise UnknownName(
                "device",
                device,
                "must be a Device, BACKEND or BACKEND:INDEX",
                "For example numpy or numpy:0",
            )
        backend, index = match[1], int(match[2] or 0)
    wanted = preferred_backend(backend)
    devices = (
        list(found.devices_of(found.backend(wanted)))
        if wanted is not None
        else [d for d in found.devices() if d.evidence != EMULATED]
    )
    for d in devices:
        if wanted is None or d.index == index:
            return d
    raise UnknownName(
        "device",
        f"{wanted}:{index}",
        f"backend {wanted} has {len(devices)} device(s) here",
        "See `kernelseam doctor`, or use another backend",
    )


@dataclass(frozen=True)
class Candidate:
    """One implementation's answer: that it takes the problem at this cost, or why not (then at what
    cost it would, where it can tell)."""

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
    variant: str = ""
    """Which of the implementation's ways; "" where that is its own choice."""
    by: str = "model"
    """What chose: "named" (the caller), "tuned" (a measurement) or "model" (the least predicted
    time)."""


def consider(
    problem: Problem, device: Device, found: Plugins | None = None
) -> tuple[Candidate, ...]:
    """Ask every implementation of the operation on the device's backend, cheapest first, refusals
    last."""
    # once around all of them: each would watch for signals anew
    with Contained("an implementation's check"):
        answers = [
            ask(i, problem, device)
            for i in (found or plugins()).registry.implementations
            if i.operation == problem.operation and i.backend == device.backend
        ]
    return _ordered(answers)


def ask(implementation: Implementation, problem: Problem, device: Device) -> Candidate:
    """Its answer; one that is broken refuses, for it must not harm the others."""
    refusal, cost = None, None
    try:
        with Contained(f"the check of {implementation.name!r}"):
            refusal = held_refusal(implementation.name, implementation.supports(problem, device))
            cost = held(
                f"cost() of {implementation.name!r}", implementation.cost(problem, device), Cost
            )
    except Exception as e:
        if refusal is None:
            return Candidate(implementation, f"its check raised {told(e)}", None, traceback_of(e))
        cost = None  # nobody promised one for a problem that is refused
    return Candidate(implementation, refusal, cost)


def _ordered(answers: list[Candidate]) -> tuple[Candidate, ...]:
    return tuple(
        sorted(
            answers, key=lambda a: a.cost.seconds if a.cost and a.refusal is None else float("inf")
        )
    )


def build(
    choice: Choice, problem: Problem, device: Device, *, named: bool = False
) -> tuple[Choice, PlanParts]:
    """The chosen implementation's launches.

    One that raises is passed over for the next cheapest, with a BrokenImplementation warning; where
    none is left, or the implementation was ``named``, what the first raised is raised. Too little
    memory is no fault: it is raised.
    """
    answers = list(choice.candidates)
    first: Exception | None = None
    in_turn = sorted(
        enumerate(answers), key=lambda x: x[1].implementation is not choice.implementation
    )
    for place, candidate in in_turn:
        chosen = candidate.implementation is choice.implementation
        if candidate.refusal is not None or (named and not chosen):
            continue
        try:
            parts = _built(
                candidate.implementation, problem, device, choice.variant if chosen else ""
            )
        except MemoryError:
            raise
        except Exception as e:
            first = first or e
            answers[place] = replace(
                candidate, refusal=f"its build raised {told(e)}", error=traceback_of(e)
            )
            continue
        if first is not None:
            _warn_of(answers, candidate.implementation, problem, device)
            choice = Choice(candidate.implementation, _ordered(answers))
        return choice, parts
    assert first is not None
    raise first


def _built(
    implementation: Implementation, problem: Problem, device: Device, variant: str
) -> PlanParts:
    with Contained(f"the build of {implementation.name!r}, {problem.operation} on {device},"):
        return held_parts(implementation.name, build_of(implementation, problem, device, variant))


def _warn_of(
    answers: list[Candidate], taken: Implementation, problem: Problem, device: Device
) -> None:
    broken = "; ".join(f"{a.implementation.name}: {a.refusal}" for a in answers if a.error)
    message = (
        f"{taken.name} computes {problem} on {device}, for what would be faster is broken. {broken}"
    )
    warnings.warn(message, BrokenImplementation, stacklevel=4)


def select(problem: Problem, device: Device, implementation: str | None = None) -> Choice:
    """The implementation for a problem on a device; ``implementation`` is a name, or NAME:VARIANT.

    Raises UnknownName if ``implementation`` names none, Unsupported if it (or, without a name,
    every one) refuses, with each one's own reason.
    """
    candidates = consider(problem, device)
    pool, name, variant = candidates, "", ""
    if implementation is not None:
        name, _, variant = implementation.partition(SEPARATOR)
        pool = tuple(c for c in candidates if c.implementation.name == name)
        if not pool:
            known = ", ".join(c.implementation.name for c in candidates) or "none"
            raise _unknown(implementation, known, problem, device)
    elif tuned := _tuned(candidates, problem, device):
        return tuned
    for c in pool:
        if c.refusal is None:
            if variant:
                known = ", ".join(
                    name + SEPARATOR + v.name
                    for v in variants_of(c.implementation, problem, device)
                )
                if implementation not in known.split(", "):
                    raise _unknown(implementation, known or name, problem, device)
            return Choice(
                c.implementation,
                candidates,
                variant,
                "model" if implementation is None else "named",
            )
    raise Unsupported(problem, [Refusal(c.implementation.name, c.refusal or "") for c in pool])


def _unknown(implementation: object, known: str, problem: Problem, device: Device) -> UnknownName:
    return UnknownName(
        "implementation",
        implementation,
        f"must be one of {known} for {problem.operation} on {device.backend}",
        "Name one of these, or leave it out",
    )


def _tuned(candidates: tuple[Candidate, ...], problem: Problem, device: Device) -> Choice | None:
    """What was measured to be the fastest, if it takes this problem of its class, too."""
    # not before a plan is made: importing kernelseam stays quick
    from kernelseam.tuned.store import tuned_choice

    found = tuned_choice(problem, device)
    if found is None:
        return None
    for c in candidates:
        if c.implementation.name == found.implementation and c.refusal is None:
            try:
                offered = (
                    {v.name for v in variants_of(c.implementation, problem, device)}
                    if found.variant
                    else {""}
                )
            except Exception as e:
                said = (
                    f"{c.implementation.name} was tuned for {problem} on {device}, and its "
                    "variants raised"
                )
                warnings.warn(f"{said} {type(e).__name__}: {e}", BrokenImplementation, stacklevel=4)
                return None
            if found.variant in offered:
                return Choice(c.implementation, candidates, found.variant, "tuned")
    return None

"""Chooses the implementation of a problem: the named one, else the tuned one, else of those that
support it the one with the lowest predicted time."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, cast

from kernelseam.containment import Contained, error_text, traceback_text
from kernelseam.contract import EMULATED, Cost, Device, Implementation, PlanParts, Problem
from kernelseam.contract_values import validated, validated_parts, validated_refusal
from kernelseam.errors import BrokenImplementation, InvalidValue, Refusal, UnknownName, Unsupported
from kernelseam.frozen import dataclass
from kernelseam.plugins import Plugins, plugins
from kernelseam.registry import Registry
from kernelseam.tuned.classes import batch_invariant, representative
from kernelseam.variants import SEPARATOR, build_of, variants_of

_backend: ContextVar[str | None] = ContextVar("kernelseam_backend", default=None)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, ``name`` is the backend of calls that name none."""
    plugins().backend(check_name("backend", name))
    token = _backend.set(name)
    try:
        yield
    finally:
        _backend.reset(token)


def preferred_backend(backend: str | None = None) -> str | None:
    """The requested backend: the argument, over ``use_backend``, over KERNELSEAM_BACKEND, or None.

    Raises UnknownName for an argument that is no name.
    """
    if backend is not None:
        return check_name("backend", backend)
    if (chosen := chosen_backend()) is not None:
        return chosen
    return os.environ.get(_VARIABLE) or None


chosen_backend = _backend.get
"""By ``use_backend``."""
_VARIABLE = "KERNELSEAM_BACKEND"
# os.environ encodes the name at every look-up, which takes longer than a launch
in_environment: Callable[[], Any] = partial(os.environ.get, _VARIABLE)
"""What the variable is set to, encoded or not; None where it is not set."""
if hasattr(os.environ, "encodekey") and isinstance(getattr(os.environ, "_data", None), dict):
    in_environment = partial(cast(Any, os.environ)._data.get, os.environ.encodekey(_VARIABLE))


def check_name(field: str, value: object) -> str:
    """Return ``value`` if it is a str, else raise UnknownName."""
    if not isinstance(value, str):
        raise UnknownName(
            field, value, "must be a name", "Name one of those that `kernelseam doctor` lists"
        )
    return value


def check_backend(backend: str | None, device: Device) -> None:
    """Raise InvalidValue for arrays on ``device`` where another backend is requested."""
    if backend is not None and device.backend != backend:
        raise InvalidValue(
            "backend",
            backend,
            f"the arrays are on {device}",
            f"Move them to a device of {backend}, or let the arrays choose: name no backend "
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
    current = plugins()
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
        list(current.devices_of(current.backend(wanted)))
        if wanted is not None
        else [d for d in current.devices() if d.evidence != EMULATED]
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
    """An implementation's answer for a problem: its predicted cost, or the reason why it does not
    support the problem. Both None: it was not asked."""

    implementation: Implementation
    refusal: str | None
    cost: Cost | None
    error: str = ""
    """The traceback, where ``supports`` raised."""
    rank: float = math.inf
    """Predicted seconds, of the problem's class, by which candidates are ordered."""
    foreign: bool = False
    """Whether a plugin other than the backend's registered it, on an arch whose cost model was
    fitted to measured times. Its own costs were not: it is ordered last until it is named or
    tuned."""

    @property
    def takes(self) -> bool:
        """Whether it was asked and supports the problem."""
        return self.cost is not None and self.refusal is None


@dataclass(frozen=True)
class Choice:
    """The chosen implementation, and the answers of all candidates."""

    implementation: Implementation
    candidates: tuple[Candidate, ...]
    variant: str = ""
    """The implementation's variant; "" for its default."""
    by: str = "model"
    """What decided: "named" (the caller), "tuned" (a measurement) or "model" (the lowest predicted
    time)."""


def consider(
    problem: Problem,
    device: Device,
    current: Plugins | None = None,
    *,
    name: str | None = None,
    whole: bool = True,
) -> tuple[Candidate, ...]:
    """Every implementation of the operation on the device's backend: cheapest first, refusals last.

    ``name``: only those of this name. ``whole``, for reports: ask also for the costs of those that
    refuse, and ask the ``last_resort`` ones even where another takes the problem.
    """
    registry = (current or plugins()).registry
    fitted = _has_fitted_costs(registry, device)
    answers: list[Candidate] = []
    known = [
        i
        for i in registry.implementations_of(problem.operation, device.backend)
        if name in (None, i.name)
    ]
    for i in sorted(known, key=_is_last_resort):
        asked = whole or not (_is_last_resort(i) and any(a.takes for a in answers))
        answer = ask(i, problem, device, whole) if asked else Candidate(i, None, None)
        is_foreign = fitted and registry.is_foreign(i)
        answers.append(replace(answer, foreign=True) if is_foreign else answer)
    return _ordered(answers)


def _is_last_resort(implementation: Implementation) -> bool:
    return getattr(implementation, "last_resort", False) is True


def _has_fitted_costs(registry: Registry, device: Device) -> bool:
    """Whether the backend's predictions for the device's arch were fitted to measured times."""
    backend = registry.backends.get(device.backend)
    if backend is None or backend.toolchain is None:
        return False
    try:
        costs = backend.toolchain.arch_row(device.arch).costs
    except Exception:  # a plugin's code; an arch that it does not know
        return False
    return costs is not None and costs.is_measured


def ask(
    implementation: Implementation, problem: Problem, device: Device, whole: bool = True
) -> Candidate:
    """One implementation's answer; one that raises does not support the problem. ``whole``: also
    the cost of one that refuses."""
    refusal, cost, rank = None, None, math.inf
    try:
        with Contained(f"the check of {implementation.name!r}"):
            refusal = validated_refusal(
                implementation.name, implementation.supports(problem, device)
            )
            if refusal is not None and not whole:
                return Candidate(implementation, refusal, None)
            cost = validated(
                f"cost() of {implementation.name!r}", implementation.cost(problem, device), Cost
            )
            rank = (
                cost.seconds
                if refusal is not None
                else _rank(implementation, problem, device, cost)
            )
    except Exception as e:
        if refusal is None:
            return Candidate(
                implementation, f"its check raised {error_text(e)}", None, traceback_text(e)
            )
        cost = None  # cost() may raise for a problem that is not supported
    return Candidate(implementation, refusal, cost, rank=rank)


def _rank(implementation: Implementation, problem: Problem, device: Device, cost: Cost) -> float:
    """The predicted time by which implementations are ordered: for the representative of the
    problem's class, so that a whole class has one choice; the problem's own where the
    implementation predicts none for the representative."""
    ranked = representative(problem)
    if ranked is problem or ranked == problem:
        return cost.seconds
    try:
        return implementation.cost(ranked, device).seconds
    except Exception:
        return cost.seconds


def _ordered(answers: list[Candidate]) -> tuple[Candidate, ...]:
    def key(a: Candidate) -> tuple[bool, bool, bool, float]:
        takes = a.takes
        last = _is_last_resort(a.implementation)
        return not takes, last, a.foreign, a.rank if takes else math.inf

    return tuple(sorted(answers, key=key))


def build(
    choice: Choice, problem: Problem, device: Device, *, named: bool = False
) -> tuple[Choice, PlanParts]:
    """Build the launches of the chosen implementation.

    If its build raises, the next cheapest is built, with a BrokenImplementation warning. If none is
    left, or the implementation was ``named``, the first error is raised. A MemoryError is always
    raised.
    """
    answers = list(choice.candidates)
    first: Exception | None = None
    ordered = sorted(
        enumerate(answers), key=lambda x: x[1].implementation is not choice.implementation
    )
    for position, candidate in ordered:
        chosen = candidate.implementation is choice.implementation
        if named and not chosen:
            continue
        answers[position] = candidate = _asked(candidate, problem, device)
        if candidate.refusal is not None:
            continue
        try:
            parts = _build_checked(
                candidate.implementation, problem, device, choice.variant if chosen else ""
            )
        except MemoryError:
            raise
        except Exception as e:
            first = first or e
            answers[position] = replace(
                candidate, refusal=f"its build raised {error_text(e)}", error=traceback_text(e)
            )
            continue
        if first is not None:
            _warn_broken(answers, candidate.implementation, problem, device)
            choice = Choice(candidate.implementation, _ordered(answers))
        return choice, parts
    assert first is not None
    raise first


def _asked(candidate: Candidate, problem: Problem, device: Device) -> Candidate:
    """The candidate, asked now if it was not before."""
    if candidate.takes or candidate.refusal is not None:
        return candidate
    return replace(ask(candidate.implementation, problem, device), foreign=candidate.foreign)


def _build_checked(
    implementation: Implementation, problem: Problem, device: Device, variant: str
) -> PlanParts:
    with Contained(f"the build of {implementation.name!r}, {problem.operation} on {device},"):
        parts = build_of(implementation, problem, device, variant)
        return validated_parts(implementation.name, parts, problem, device)


def _warn_broken(
    answers: list[Candidate], chosen: Implementation, problem: Problem, device: Device
) -> None:
    broken = "; ".join(f"{a.implementation.name}: {a.refusal}" for a in answers if a.error)
    message = (
        f"{chosen.name} computes {problem} on {device}, as faster implementations are broken. "
        f"{broken}"
    )
    warnings.warn(message, BrokenImplementation, stacklevel=5)


def select(problem: Problem, device: Device, implementation: str | None = None) -> Choice:
    """The implementation for a problem on a device; ``implementation`` is a name, or NAME:VARIANT.

    Raises UnknownName if ``implementation`` names none, Unsupported if it (or, without a name,
    every one) refuses, with each one's own reason.
    """
    name, _, variant = (implementation or "").partition(SEPARATOR)
    candidates = consider(
        problem, device, name=None if implementation is None else name, whole=False
    )
    if implementation is not None:
        if not candidates:
            known = ", ".join(c.implementation.name for c in consider(problem, device)) or "none"
            raise _unknown(implementation, known, problem, device)
    elif tuned := _tuned(candidates, problem, device):
        return tuned
    for c in candidates:
        if c.takes:
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
    raise Unsupported(
        problem, [Refusal(c.implementation.name, c.refusal or "") for c in candidates]
    )


def _unknown(implementation: object, known: str, problem: Problem, device: Device) -> UnknownName:
    return UnknownName(
        "implementation",
        implementation,
        f"must be one of {known} for {problem.operation} on {device.backend}",
        "Name one of these, or leave it out",
    )


def _tuned(candidates: tuple[Candidate, ...], problem: Problem, device: Device) -> Choice | None:
    """The tuned choice of the problem's class, if it supports this problem. None for a
    batch-invariant one: classes differ by extents, which must not decide there."""
    if batch_invariant(problem):
        return None
    # imported late, to keep importing kernelseam fast
    from kernelseam.tuned.store import tuned_choice

    tuned = tuned_choice(problem, device)
    if tuned is None:
        return None
    for c in candidates:
        if c.implementation.name == tuned.implementation and _asked(c, problem, device).takes:
            try:
                offered = (
                    {v.name for v in variants_of(c.implementation, problem, device)}
                    if tuned.variant
                    else {""}
                )
            except Exception as e:
                said = (
                    f"{c.implementation.name} was tuned for {problem} on {device}, and its "
                    "variants raised"
                )
                warnings.warn(f"{said} {type(e).__name__}: {e}", BrokenImplementation, stacklevel=4)
                return None
            if tuned.variant in offered:
                return Choice(c.implementation, candidates, tuned.variant, "tuned")
    return None

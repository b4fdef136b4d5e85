"""One parity case on one implementation, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from kernelseam.containment import Contained, traceback_of
from kernelseam.contract import EMULATED, Device, Implementation, Problem
from kernelseam.dispatch import consider
from kernelseam.errors import Unsupported
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.subnormals import flushes
from kernelseam.parity.cases.case import Case
from kernelseam.parity.running.stages import Computed, Made, computed, judged, made
from kernelseam.plugins import Plugins, plugins

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """An implementation of one operation on one device."""

    device: Device
    implementation: str
    operation: str
    own: bool
    """Whether it is the core's (the reference, a shared kernel): then it must take every case that
    does not say otherwise. A plugin's own takes what it is made for, and gives a reason for the
    rest."""
    flushed: bool = False
    """Whether the device's matrix units lose subnormals."""

    def __str__(self) -> str:
        return f"{self.device.backend}-{self.implementation}"


def targets(
    found: Plugins | None = None, backend: str | None = None, device: Device | None = None
) -> list[Target]:
    """Every implementation registered for one device of each backend, or of one backend: its first,
    or ``device``.

    An emulated device is taken only where it or its backend is named.
    """
    known = found or plugins()
    if device is not None:
        here = [device]
    elif backend is not None:
        here = (
            list(known.devices_of(known.backend(backend)))
            if backend in known.registry.backends
            else []
        )
    else:
        here = [d for d in known.devices() if d.evidence != EMULATED]
    first = {d.backend: d for d in reversed(here)}
    return [
        Target(d, i.name, i.operation, _own(i), flushes(b, d))
        for b in sorted(known.registry.backends.values(), key=lambda b: b.priority)
        if (d := first.get(b.name)) is not None
        for i in known.registry.implementations
        if i.backend == b.name
    ]


def _own(implementation: Implementation) -> bool:
    # kernels of plugins are made implementations by the core
    maker = getattr(implementation, "composition", implementation)
    return type(maker).__module__.partition(".")[0] == "kernelseam"


@dataclass(frozen=True)
class Outcome:
    """What became of a case: exactly one of verdict, refusal and error is there."""

    case: Case
    backend: str
    implementation: str
    verdict: Verdict | None = None
    refusal: str | None = None
    error: str | None = None
    """A traceback."""
    seconds: float = 0.0
    """Wall time of data, plan, launch and comparison together."""
    may_refuse: bool = False
    computing: float = 0.0
    """Seconds of these for plan, launches and copies."""

    @property
    def status(self) -> str:
        """ "passed", "failed", "refused" (as it may) or "error"."""
        if self.verdict is not None:
            return "passed" if self.verdict.passed else "failed"
        return "refused" if self.refusal is not None and self.may_refuse else "error"

    @property
    def detail(self) -> str:
        """Why, in words."""
        if self.verdict is not None:
            return self.verdict.message
        if self.refusal is not None:
            return self.refusal if self.may_refuse else f"refused what it must take: {self.refusal}"
        return self.error or ""

    def require(self) -> None:
        """Raise AssertionError unless the case passed or was refused as it may be."""
        if self.status in ("failed", "error"):
            raise AssertionError(
                f"{self.case.name} on {self.backend}-{self.implementation}: {self.detail}"
            )


@dataclass(frozen=True)
class Ran:
    """What an implementation did with a case's data: results, or else a refusal or an error."""

    computed: Computed | None = None
    refusal: str | None = None
    error: str | None = None
    seconds: float = 0.0
    """Of plan, launches and copies."""


def run_case(case: Case, target: Target, *, separate: bool = False) -> Outcome:
    """Run a case. Nothing is raised: whatever goes wrong is in the outcome.

    ``separate``: each block of memory is an allocation that ends with its last element, for memory
    checkers; else one allocation holds all of them between guards, and what is written outside the
    output is found here.
    """
    start = time.perf_counter()
    before = guarded(made, case, separate)
    ran = Ran(error=before) if isinstance(before, str) else attempt(case, target, before)
    verdict = None
    if ran.computed is not None and not isinstance(before, str):
        verdict = guarded(judged, case, before, ran.computed, target.flushed)
    return outcome(case, target, ran, verdict, time.perf_counter() - start)


def guarded(work: Callable[..., T], *arguments: Any) -> T | str:
    """What the work returns, or the traceback of what it raises."""
    try:
        return work(*arguments)
    except Exception as e:
        return traceback_of(e)


def attempt(case: Case, target: Target, before: Made) -> Ran:
    """Compute a case's data on a target, which may refuse."""
    start = time.perf_counter()
    found, refusal, error = None, _exemption(case, target), None
    if refusal is None:
        try:
            with Contained(f"{target.implementation} on {target.device}"):
                found = computed(case, target.device, target.implementation, before)
        except Unsupported as e:
            error = _broken_check(e, target)
            refusal = None if error else "; ".join(r.reason for r in e.refusals)
        except Exception as e:
            error = traceback_of(e)
    return Ran(found, refusal, error, time.perf_counter() - start)


def outcome(
    case: Case, target: Target, ran: Ran, verdict: Verdict | str | None, seconds: float
) -> Outcome:
    """What became of a case; a verdict that is a text says why there is none."""
    error = verdict if isinstance(verdict, str) else ran.error
    may_refuse = (
        not target.own
        or target.implementation in case.may_refuse
        or _exemption(case, target) is not None
    )
    return Outcome(
        case,
        target.device.backend,
        target.implementation,
        None if isinstance(verdict, str) else verdict,
        ran.refusal,
        error,
        seconds,
        may_refuse,
        ran.seconds,
    )


def _exemption(case: Case, target: Target) -> str | None:
    """Why one of the core's own is not asked."""
    return dict(case.exempt).get(target.implementation) if target.own else None


def _broken_check(refused: Unsupported, target: Target) -> str | None:
    """The traceback of a check that raised: dispatch takes that for a refusal, and here it is an
    error."""
    answers = consider(cast(Problem, refused.problem), target.device)
    return next(
        (a.error for a in answers if a.error and a.implementation.name == target.implementation),
        None,
    )

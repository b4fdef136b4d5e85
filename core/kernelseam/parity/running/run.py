"""One parity case on one implementation, and its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kernelseam.containment import Contained, traceback_text
from kernelseam.contract import EMULATED, Device, Implementation, Problem
from kernelseam.dispatch import consider
from kernelseam.errors import Unsupported
from kernelseam.frozen import dataclass
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.subnormals import flushes
from kernelseam.parity.running.stages import Computed, Prepared, compute, judge, prepare
from kernelseam.plugins import Plugins, plugins
from kernelseam.samples.case import Case

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """An implementation of one operation on one device."""

    device: Device
    implementation: str
    operation: str
    builtin: bool
    """Whether it comes from the core (the reference, a shared kernel): then it must run every case
    that does not exempt it. A plugin's implementation runs what it supports, and gives a reason for
    the rest."""
    flushed: bool = False
    """Whether the device's matrix units flush subnormals to zero."""

    def __str__(self) -> str:
        return f"{self.device.backend}-{self.implementation}"


def targets(
    known: Plugins | None = None, backend: str | None = None, device: Device | None = None
) -> list[Target]:
    """Every implementation registered for one device of each backend, or of one backend: its first,
    or ``device``.

    An emulated device is taken only where it or its backend is named.
    """
    known = known or plugins()
    if device is not None:
        devices = [device]
    elif backend is not None:
        devices = (
            list(known.devices_of(known.backend(backend)))
            if backend in known.registry.backends
            else []
        )
    else:
        devices = [d for d in known.devices() if d.evidence != EMULATED]
    first = {d.backend: d for d in reversed(devices)}
    return [
        Target(d, i.name, i.operation, _own(i), flushes(b, d))
        for b in sorted(known.registry.backends.values(), key=lambda b: b.priority)
        if (d := first.get(b.name)) is not None
        for i in known.registry.implementations
        if i.backend == b.name
    ]


def _own(implementation: Implementation) -> bool:
    # the core wraps the kernels of plugins as implementations; one of its compositions that is
    # made for some archs has kernels of a plugin
    maker = getattr(implementation, "composition", implementation)
    core = type(maker).__module__.partition(".")[0] == "kernelseam"
    return core and not getattr(maker, "archs", ())


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: exactly one of verdict, refusal and error is set."""

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
    """Of these, the seconds for plan, launches and copies."""

    @property
    def status(self) -> str:
        """ "passed", "failed", "refused" (as allowed) or "error"."""
        if self.verdict is not None:
            return "passed" if self.verdict.passed else "failed"
        return "refused" if self.refusal is not None and self.may_refuse else "error"

    @property
    def detail(self) -> str:
        """The reason, as text."""
        if self.verdict is not None:
            return self.verdict.message
        if self.refusal is not None:
            return self.refusal if self.may_refuse else f"refused what it must take: {self.refusal}"
        return self.error or ""

    def require(self) -> None:
        """Raise AssertionError unless the case passed or was refused as allowed."""
        if self.status in ("failed", "error"):
            raise AssertionError(
                f"{self.case.name} on {self.backend}-{self.implementation}: {self.detail}"
            )


@dataclass(frozen=True)
class Attempt:
    """One implementation's attempt at a case: results, or else a refusal or an error."""

    computed: Computed | None = None
    refusal: str | None = None
    error: str | None = None
    seconds: float = 0.0
    """Of plan, launches and copies."""


def run_case(case: Case, target: Target, *, separate: bool = False) -> Outcome:
    """Run a case. Raises nothing: whatever goes wrong is in the outcome.

    ``separate``: each block of memory is an allocation that ends with its last element, for memory
    checkers; else one allocation holds all of them between guards, and writes outside the output
    are detected here.
    """
    start = time.perf_counter()
    before = result_or_traceback(prepare, case, separate)
    ran = Attempt(error=before) if isinstance(before, str) else attempt(case, target, before)
    verdict = None
    if ran.computed is not None and not isinstance(before, str):
        verdict = result_or_traceback(judge, case, before, ran.computed, target.flushed)
    return outcome(case, target, ran, verdict, time.perf_counter() - start)


def result_or_traceback(work: Callable[..., T], *arguments: Any) -> T | str:
    """What ``work`` returns, or the traceback of what it raises."""
    try:
        return work(*arguments)
    except Exception as e:
        return traceback_text(e)


def attempt(case: Case, target: Target, before: Prepared) -> Attempt:
    """Compute a case's data on a target, which may refuse."""
    start = time.perf_counter()
    results, refusal, error = None, _exemption(case, target), None
    if refusal is None:
        try:
            with Contained(f"{target.implementation} on {target.device}"):
                results = compute(case, target.device, target.implementation, before)
        except Unsupported as e:
            error = _broken_check(e, target)
            refusal = None if error else "; ".join(r.reason for r in e.refusals)
        except Exception as e:
            error = traceback_text(e)
    return Attempt(results, refusal, error, time.perf_counter() - start)


def outcome(
    case: Case, target: Target, ran: Attempt, verdict: Verdict | str | None, seconds: float
) -> Outcome:
    """The outcome of an attempt. A ``verdict`` that is a str says why there is none."""
    error = verdict if isinstance(verdict, str) else ran.error
    may_refuse = (
        not target.builtin
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
    """Why one of the core's implementations is not run on this case."""
    return dict(case.exempt).get(target.implementation) if target.builtin else None


def _broken_check(refused: Unsupported, target: Target) -> str | None:
    """The traceback of a ``supports`` that raised: dispatch treats that as a refusal, here it is an
    error."""
    answers = consider(cast(Problem, refused.problem), target.device)
    return next(
        (a.error for a in answers if a.error and a.implementation.name == target.implementation),
        None,
    )

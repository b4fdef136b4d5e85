"""Timing every configuration to compute a problem, in turns, and keeping the fastest.

Configurations take turns, round after round, so that a device that grows warm slows them all:
timing one to its end before the next misleads by more than the configurations differ. Those that
take much longer than the best are timed once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelseam import planning
from kernelseam.contract import EMULATED, Cost, Device, PlanParts, Problem, Runtime
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.dispatch import Candidate, Choice, consider
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue, Refusal, Unsupported
from kernelseam.planning import Plan
from kernelseam.plugins import plugins
from kernelseam.tuned.classes import batch_invariant
from kernelseam.tuned.store import Timed, Tuned, keep
from kernelseam.variants import SEPARATOR, Variant, build_of, variants_of

ROUNDS, ROUND_SECONDS, MOST_RUNS = 6, 0.03, 200
"""Of each configuration that stays: about 0.2 s in all."""
HOPELESS = 1.5
"""Times the best, beyond which a configuration is not timed again."""
ALIGNED = 16
"""Bytes that every allocation is a multiple of."""
EQUAL = 1.01
"""Times the best, up to which a configuration counts as equal: then the model's own is kept."""
NOT_KEPT = "not kept: a batch-invariant problem is computed in one way in every batch"


@dataclass
class Configuration:
    """One implementation, or one of its variants, and what became of it."""

    candidate: Candidate
    variant: str
    predicted: Cost | None
    parts: PlanParts | None = None
    failure: str = ""
    samples: list[float] = field(default_factory=list)

    @property
    def implementation(self) -> str:
        return self.candidate.implementation.name

    @property
    def name(self) -> str:
        """As a caller may name it."""
        return self.implementation + (SEPARATOR + self.variant if self.variant else "")

    @property
    def seconds(self) -> float | None:
        """The median; None where it was not timed."""
        return statistics.median(self.samples) if self.samples else None


@dataclass(frozen=True)
class Tuning:
    """What was measured of one problem."""

    problem: Problem
    device: Device
    configurations: tuple[Configuration, ...]
    """The fastest first, then those that failed."""
    refused: tuple[Refusal, ...]
    chosen: Configuration
    model: Configuration
    """What is taken without tuning."""
    path: Path | None
    """Where the choice was kept."""
    note: str = ""


def tune(
    descriptor: Descriptor,
    device: Device,
    operands: Mapping[str, object] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Tuning:
    """Time every configuration to compute a descriptor's problem over its operands, and keep the
    fastest for the problem's class.

    ``operands``: those that are not in the descriptor, as ``Plan.bind`` takes them; results are
    overwritten. ``progress(configuration, done, all)`` is called before each configuration is built
    and before each round. Raises InvalidValue for an emulated device, Unsupported where nothing
    takes the problem, OSError or Untrusted where the choice cannot be kept.
    """
    if device.evidence == EMULATED:
        raise InvalidValue(
            "device",
            device,
            "its times are those of a program on the host and say nothing of the hardware",
            "Tune on the hardware",
        )
    descriptor, note = descriptor.simplified()
    problem = descriptor.problem()
    candidates = consider(problem, device)
    refused = tuple(
        Refusal(c.implementation.name, c.refusal) for c in candidates if c.refusal is not None
    )
    configurations = [
        w for c in candidates if c.refusal is None for w in _configurations(c, problem, device)
    ]
    if not configurations:
        raise Unsupported(problem, refused)
    say = progress or (lambda configuration, done, all: None)
    runtime = plugins().backend(device.backend).runtime
    with runtime.activate(device):
        _time(descriptor, device, operands or {}, candidates, configurations, runtime, say)
    timed = sorted((w for w in configurations if w.samples), key=lambda w: w.seconds or 0.0)
    if not timed:
        raise Unsupported(
            problem, (*refused, *(Refusal(w.name, w.failure) for w in configurations))
        )
    best, model = timed[0].seconds or 0.0, configurations[0]
    chosen = model if model.samples and (model.seconds or 0.0) <= EQUAL * best else timed[0]
    path = None
    if batch_invariant(problem):
        note = "; ".join(filter(None, (note, NOT_KEPT)))
    else:
        times = tuple(Timed(w.implementation, w.variant, w.seconds or 0.0) for w in timed)
        path = keep(
            problem, device, Tuned(chosen.implementation, chosen.variant, str(problem), times)
        )
        planning.forget()
    failed = [w for w in configurations if not w.samples]
    return Tuning(problem, device, (*timed, *failed), refused, chosen, model, path, note)


def _configurations(
    candidate: Candidate, problem: Problem, device: Device
) -> Iterator[Configuration]:
    """A candidate's, its own choice first."""
    failure, found = "", tuple[Variant, ...]()
    try:
        found = variants_of(candidate.implementation, problem, device)
    except Exception as e:
        failure = f"its variants raised {type(e).__name__}: {e}"
    if not found:
        yield Configuration(candidate, "", candidate.cost, failure=failure)
    for v in found:
        yield Configuration(candidate, v.name, v.cost)


def _time(
    descriptor: Descriptor,
    device: Device,
    operands: Mapping[str, Any],
    candidates: tuple[Candidate, ...],
    configurations: list[Configuration],
    runtime: Runtime,
    say: Callable[[str, int, int], None],
) -> None:
    problem, launches = descriptor.problem(), {}
    for done, configuration in enumerate(configurations):
        say(configuration.name, done, len(configurations) + ROUNDS)
        if configuration.failure:
            continue
        try:
            configuration.parts = build_of(
                configuration.candidate.implementation, problem, device, configuration.variant
            )
        except Exception as e:  # a configuration that is broken must not stop the others
            configuration.failure = f"its build raised {type(e).__name__}: {e}"
    # One serves all in turn, but for those that leave zeros in theirs for the next launch, or want
    # it more aligned.
    sharing = [
        w.name
        for w in configurations
        if w.parts and not w.parts.zeroed_bytes and w.parts.workspace_alignment <= ALIGNED
    ]
    need = max(
        (w.parts.workspace_bytes for w in configurations if w.parts and w.name in sharing),
        default=0,
    )
    workspace = runtime.empty((-(-need // 4),), DType.float32, device) if need else None
    for configuration in configurations:
        if configuration.parts is None:
            continue
        choice = Choice(configuration.candidate.implementation, candidates, configuration.variant)
        made = Plan(descriptor, problem, device, configuration.parts, choice)
        space = (
            workspace
            if configuration.parts.workspace_bytes and configuration.name in sharing
            else None
        )
        try:
            launch = made.bind(workspace=space, **operands).launcher()
            runtime.time(launch, device, 1)
            launches[configuration.name] = launch, min(runtime.time(launch, device, 3))
        except Exception as e:
            configuration.failure = f"its call raised {type(e).__name__}: {e}"
    fastest = min((once for _, once in launches.values()), default=0.0)
    for turn in range(ROUNDS):
        say(f"round {turn + 1}", len(configurations) + turn, len(configurations) + ROUNDS)
        for configuration in configurations:
            if configuration.name not in launches:
                continue
            launch, once = launches[configuration.name]
            if once > HOPELESS * fastest:
                configuration.samples = configuration.samples or [once]
                continue
            runs = int(min(max(ROUND_SECONDS / max(once, 1e-9), 1), MOST_RUNS))
            configuration.samples += runtime.time(launch, device, runs)

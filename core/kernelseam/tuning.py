"""Tuning: time all configurations (implementations and variants) of a problem, and store the
fastest.

They are timed in interleaved rounds, so that a device that warms up and slows down affects all
alike. Those that are much slower than the best are timed once.
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
from kernelseam.planning.planner import check_descriptor, named_device
from kernelseam.plugins import plugins
from kernelseam.tuned.classes import batch_invariant
from kernelseam.tuned.store import Timed, Tuned, keep
from kernelseam.variants import SEPARATOR, Variant, build_of, variants_of

ROUNDS, ROUND_SECONDS, MOST_RUNS = 6, 0.03, 200
"""Rounds, seconds per round and most runs per round of a configuration: about 0.2 s in all."""
SLOW_FACTOR = 1.5
"""Configurations slower than the best by more than this factor are timed once."""
ALLOCATION_ALIGNMENT = 16
"""Bytes: the alignment of every allocation."""
TIE_FACTOR = 1.01
"""Within this factor of the best, the cost model's choice is kept."""
NOT_STORED = "not kept: a batch-invariant problem is computed in one way in every batch"


@dataclass
class Configuration:
    """An implementation or variant with its measurements."""

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
        """NAME or NAME:VARIANT, as a caller may name it."""
        return self.implementation + (SEPARATOR + self.variant if self.variant else "")

    @property
    def seconds(self) -> float | None:
        """The median; None where it was not timed."""
        return statistics.median(self.samples) if self.samples else None


@dataclass(frozen=True)
class Tuning:
    """The measurements of one problem."""

    problem: Problem
    device: Device
    configurations: tuple[Configuration, ...]
    """The fastest first, then those that failed."""
    refused: tuple[Refusal, ...]
    chosen: Configuration
    model: Configuration
    """The cost model's choice, used without tuning."""
    path: Path | None
    """Where the choice was stored."""
    note: str = ""


def tune(
    descriptor: Descriptor,
    device: Device | str | None = None,
    operands: Mapping[str, object] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Tuning:
    """Time all configurations of a descriptor's problem over its operands, and store the fastest
    for the problem's class.

    ``device``: as ``plan`` takes it. ``operands``: those that are not in the descriptor, as
    ``Plan.bind`` takes them; results are overwritten. ``progress(configuration, done, all)`` is
    called before each configuration is built and before each round. Raises InvalidValue for an
    emulated device, Unsupported where no implementation supports the problem, OSError or Untrusted
    where the choice cannot be stored.
    """
    check_descriptor(descriptor)
    device = named_device(device)
    if operands is not None and not isinstance(operands, Mapping):
        raise InvalidValue(
            "operands", operands, "must map names to arrays or addresses", "Give a dict, or nothing"
        )
    if progress is not None and not callable(progress):
        raise InvalidValue(
            "progress", progress, "must be a function", "Give progress(configuration, done, all)"
        )
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
    chosen = model if model.samples and (model.seconds or 0.0) <= TIE_FACTOR * best else timed[0]
    path = None
    if batch_invariant(problem):
        note = "; ".join(filter(None, (note, NOT_STORED)))
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
    """A candidate's configurations, its default first."""
    failure, variants = "", tuple[Variant, ...]()
    try:
        variants = variants_of(candidate.implementation, problem, device)
    except Exception as e:
        failure = f"its variants raised {type(e).__name__}: {e}"
    if not variants:
        yield Configuration(candidate, "", candidate.cost, failure=failure)
    for v in variants:
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
        except Exception as e:  # the others are still timed
            configuration.failure = f"its build raised {type(e).__name__}: {e}"
    # They share one workspace, unless they keep zeroed bytes there or need more alignment.
    sharing = [
        w.name
        for w in configurations
        if w.parts
        and not w.parts.zeroed_bytes
        and w.parts.workspace_alignment <= ALLOCATION_ALIGNMENT
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
        plan = Plan(descriptor, problem, device, (choice, configuration.parts))
        space = (
            workspace
            if configuration.parts.workspace_bytes and configuration.name in sharing
            else None
        )
        try:
            launch = plan.bind(workspace=space, **operands).launcher()
            runtime.time(launch, device, 1)
            launches[configuration.name] = launch, min(runtime.time(launch, device, 3))
        except InvalidValue:  # of the operands: it is the same for all
            raise
        except Exception as e:
            configuration.failure = f"its call raised {type(e).__name__}: {e}"
    fastest = min((once for _, once in launches.values()), default=0.0)
    for turn in range(ROUNDS):
        say(f"round {turn + 1}", len(configurations) + turn, len(configurations) + ROUNDS)
        for configuration in configurations:
            if configuration.name not in launches:
                continue
            launch, once = launches[configuration.name]
            if once > SLOW_FACTOR * fastest:
                configuration.samples = configuration.samples or [once]
                continue
            runs = int(min(max(ROUND_SECONDS / max(once, 1e-9), 1), MOST_RUNS))
            configuration.samples += runtime.time(launch, device, runs)

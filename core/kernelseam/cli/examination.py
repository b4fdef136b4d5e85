"""The doctor's check: every implementation on a few small problems, compared with the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kernelseam.containment import Contained
from kernelseam.contract import EMULATED, Backend, Device, Implementation, Problem
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.dispatch import ask
from kernelseam.errors import WrongResult
from kernelseam.frozen import dataclass
from kernelseam.oracle.subnormals import flushes
from kernelseam.parity.matrix import named
from kernelseam.parity.running.run import Target, run_case
from kernelseam.planning import plan
from kernelseam.plugins import Failure, Plugins, failure
from kernelseam.samples.case import Case
from kernelseam.samples.operations import operands
from kernelseam.samples.operations.operands import describe

PROBE = 1 << 40
"""Placeholder address of the first operand, and the distance between operands."""

CASES = {
    "gemm": ("gemm-f16-nt", "gemm-f32-nt", "gemm-f16-nt-pointers-device"),
    "grouped_gemm": ("grouped-gemm-f16-m-nn", "grouped-gemm-f32-m-nn"),
    "grouped_gemm_pointers": ("grouped-lists-f16-nn", "grouped-lists-f32-nn"),
    "attention": ("attention-f16-64-causal-gqa-8-2", "attention-f32-64-causal"),
    "attention_bwd": ("attention-bwd-f16-64-causal", "attention-bwd-f32-64"),
    "merge_states": ("merge-states-f16-f16", "merge-states-f32-f32"),
    "paged_cache": ("paged-cache-append-f16-rotary", "paged-cache-append-f32"),
    "qkv_projection": ("qkv-projection-f16-rotary-halves", "qkv-projection-f32-rotary-pairs"),
    "output_projection": ("output-projection-f16-bias-residual", "output-projection-f32"),
    "qkv_projection_bwd": ("qkv-projection-bwd-f16-bias", "qkv-projection-bwd-f32-bias"),
    "output_projection_bwd": ("output-projection-bwd-f16-bias", "output-projection-bwd-f32-bias"),
}
"""By operation, of the parity matrix: in half and in single precision, and over pointer arrays."""


@dataclass(frozen=True)
class Finding:
    """The result of one implementation on one device. ``state`` is "right", "refuses" or
    "broken"."""

    implementation: str
    operation: str
    device: str
    plugin: str
    state: str
    detail: str


def examine(
    known: Plugins, devices: Sequence[tuple[Backend, Device]]
) -> tuple[list[Finding], list[Failure]]:
    """Run every implementation on the devices, except emulated ones, and report which are broken.

    Case by case, so that each case's oracle is computed once for all implementations.
    """
    trials = [
        _Trial(
            i,
            backend,
            device,
            known.registry.owners.get((i.backend, i.operation, i.name), i.backend),
        )
        for backend, device in devices
        if device.evidence != EMULATED
        for i in known.registry.implementations
        if i.backend == backend.name
    ]
    for operation in dict.fromkeys(t.implementation.operation for t in trials):
        for case in map(named, CASES.get(operation, ())):
            for trial in trials:
                if trial.implementation.operation == operation and trial.failure is None:
                    trial.run(case)
    return [t.finding for t in trials], [t.failure for t in trials if t.failure is not None]


class _Trial:
    """One implementation on one device, with its results so far."""

    def __init__(self, i: Implementation, backend: Backend, device: Device, plugin: str) -> None:
        self.implementation, self._backend, self._device, self._plugin = i, backend, device, plugin
        self._passed, self._refusals = 0, list[str]()
        self.failure: Failure | None = None

    def run(self, case: Case) -> None:
        """Run one more case. An error is kept as ``failure``."""
        stage, i = "call", self.implementation
        try:
            with Contained("the trial"):
                layout, runtime = operands.layout(case, False), self._backend.runtime
                apart = {name: PROBE * (n + 1) for n, name in enumerate(layout.placements)}
                descriptor: Descriptor = describe(case, layout, apart, runtime, self._device)
                problem = descriptor.simplified()[0].problem()
                answer = ask(i, problem, self._device)
                if answer.error:
                    self._broken(
                        Failure(self._plugin, "supports", answer.refusal or "", answer.error)
                    )
                    return
                if answer.refusal is not None:
                    self._refusals.append(f"{problem}: {answer.refusal}")
                    return
                stage = "build"
                plan(descriptor, device=self._device, implementation=i.name)
                stage = "call"
                flushed = flushes(self._backend, self._device)
                _run(case, Target(self._device, i.name, i.operation, False, flushed), problem)
            self._passed += 1
        except _Raised as e:
            self._broken(Failure(self._plugin, stage, str(e).strip().rpartition("\n")[2], str(e)))
        except WrongResult as e:
            self._broken(failure(self._plugin, "numbers", e))
        except Exception as e:
            self._broken(failure(self._plugin, stage, e))

    def _broken(self, failure: Failure) -> None:
        i = self.implementation
        self._summary = f"at {failure.stage}: {failure.message}"
        self.failure = replace(
            failure, message=f"{i.name} of {i.operation} on {self._device}: {failure.message}"
        )

    @property
    def finding(self) -> Finding:
        """The result of all cases."""
        state, detail = "right", f"{self._passed} problems, each within its tolerance"
        if self.failure is not None:
            state, detail = "broken", self._summary
        elif not self._passed:
            nothing = f"there are no small problems of {self.implementation.operation}"
            state, detail = "refuses", "; ".join(self._refusals) or nothing
        i = self.implementation
        return Finding(i.name, i.operation, str(self._device), self._plugin, state, detail)


class _Raised(Exception):
    """The traceback of an exception within a parity case."""


def _run(case: Case, target: Target, problem: Problem) -> None:
    """Raises WrongResult, or _Raised for any other error."""
    outcome = run_case(case, target)
    if outcome.verdict is None:
        raise _Raised(outcome.error or outcome.refusal)
    if not outcome.verdict.passed:
        finding = f"{outcome.verdict.message}, the worst of {outcome.verdict.checked} elements"
        raise WrongResult(target.implementation, str(target.device), problem, finding)

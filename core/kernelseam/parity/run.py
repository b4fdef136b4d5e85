"""One parity case on one implementation: memory on the device, plan, bind, call, fetch, verdict."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np

from kernelseam.contract import EMULATED, Backend, Device, Implementation, Problem, Runtime
from kernelseam.dispatch import consider
from kernelseam.errors import Unsupported
from kernelseam.parity import attention_bwd_data, attention_data, check, data, oracle
from kernelseam.parity.cases import AttentionCase, BackwardCase, Case, GemmCase, MergeCase
from kernelseam.parity.check import Verdict
from kernelseam.parity.description import describe as describe
from kernelseam.parity.memory import Layout, never_written
from kernelseam.parity.oracle import Array
from kernelseam.parity.oracle_bwd import Gradient
from kernelseam.planning import plan
from kernelseam.plugins import Plugins, plugins

FLUSHES = "KS_FLUSHES_SUBNORMALS"
"""The constant of an arch's row that says that its matrix units lose subnormals."""


@dataclass(frozen=True)
class Target:
    """An implementation of one operation on one device."""

    device: Device
    implementation: str
    operation: str
    own: bool
    """Whether it is the core's (the reference, a shared kernel): then it must take every case that does not say
    otherwise. A plugin's own takes what it is made for, and gives a reason for the rest."""
    flushed: bool = False
    """Whether the arch's row in the toolchain's table defines FLUSHES as 1."""

    def __str__(self) -> str:
        return f"{self.device.backend}-{self.implementation}"


def targets(
    found: Plugins | None = None, backend: str | None = None, device: Device | None = None
) -> list[Target]:
    """Every implementation registered for one device of each backend, or of one backend: its first, or ``device``.

    An emulated device is taken only where it or its backend is named.
    """
    known = found or plugins()
    if device is not None:
        here = [device]
    elif backend is not None:
        here = list(known.devices_of(known.backend(backend))) if backend in known.registry.backends else []
    else:
        here = [d for d in known.devices() if d.evidence != EMULATED]
    first = {d.backend: d for d in reversed(here)}
    return [
        Target(d, i.name, i.operation, _own(i), flushes(b, d))
        for b in sorted(known.registry.backends.values(), key=lambda b: b.priority)
        if (d := first.get(b.name)) is not None
        for i in known.registry.implementations if i.backend == b.name
    ]


def flushes(backend: Backend, device: Device) -> bool:
    """Whether the row of the device's arch says that its matrix units lose subnormals."""
    if backend.toolchain is None or device.arch not in backend.toolchain.archs:
        return False
    return dict(backend.toolchain.arch_row(device.arch).defines).get(FLUSHES) == "1"


def _own(implementation: Implementation) -> bool:
    return type(implementation).__module__.partition(".")[0] == "kernelseam"


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

    @property
    def status(self) -> str:
        """"passed", "failed", "refused" (as it may) or "error"."""
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
            raise AssertionError(f"{self.case.name} on {self.backend}-{self.implementation}: {self.detail}")


def run_case(case: Case, target: Target, *, separate: bool = False) -> Outcome:
    """Run a case. Nothing is raised: whatever goes wrong is in the outcome.

    ``separate``: each block of memory is an allocation that ends with its last element, for memory checkers; else one
    allocation holds all of them between guards, and what is written outside the output is found here.
    """
    start = time.perf_counter()
    verdict, refusal, error = None, None, None
    exempt = dict(case.exempt) if isinstance(case, AttentionCase) and target.own else {}
    if reason := exempt.get(target.implementation):
        return Outcome(case, target.device.backend, target.implementation, refusal=reason, may_refuse=True)
    try:
        verdict = _run(case, target, separate)
    except Unsupported as e:
        refusal = "; ".join(r.reason for r in e.refusals)
        error = _broken_check(e, target)
        refusal = None if error else refusal
    except Exception as e:
        error = "".join(traceback.format_exception(e))
    may_refuse = not target.own or target.implementation in case.may_refuse
    seconds = time.perf_counter() - start
    return Outcome(
        case, target.device.backend, target.implementation, verdict, refusal, error, seconds, may_refuse
    )


def _broken_check(refused: Unsupported, target: Target) -> str | None:
    """The traceback of a check that raised: dispatch takes that for a refusal, and here it is an error."""
    answers = consider(cast(Problem, refused.problem), target.device)
    return next((a.error for a in answers if a.error and a.implementation.name == target.implementation), None)


def _run(case: Case, target: Target, separate: bool) -> Verdict:
    layout, inputs = data.layout(case, separate), data.values(case)
    runtime = plugins().backend(target.device.backend).runtime
    before = layout.buffers()
    layout.write(before, inputs)
    with runtime.activate(target.device), np.errstate(all="ignore"):
        held = {name: runtime.from_host(b.view(np.float32), target.device) for name, b in before.items()}
        addresses = _addresses(layout, {name: _pointer(runtime, x) for name, x in held.items()})
        made = describe(case, layout, addresses, runtime, target.device)
        call = plan(made, device=target.device, implementation=target.implementation).bind()
        fetched = []
        for _ in range(2 if repeatable(case) else 1):
            call()
            runtime.synchronize(target.device)
            fetched.append({
                name: np.ascontiguousarray(runtime.to_host(x)).view(np.uint8).reshape(-1) for name, x in held.items()
            })
    first, last = fetched[0], fetched[-1]
    if changed := sum(int((first[name] != last[name]).sum()) for name in first):
        return Verdict(False, math.inf, (), 0, f"{changed} bytes differ after a second launch on the same inputs")
    return judge(case, layout, before, first, target.flushed)


def repeatable(case: Case) -> bool:
    """Whether a second launch has the same inputs, so that it must give the same bits; the largest cases run once."""
    if isinstance(case, BackwardCase) and not case.deterministic:
        return False
    return case.sample is None and (not isinstance(case, GemmCase) or case.beta == 0)


def _pointer(runtime: Runtime, array: object) -> int:
    info = runtime.describe(array)
    if info is None or info.pointer % 16:
        raise AssertionError(f"the runtime's from_host must give memory it knows, aligned to 16 bytes, not {info}")
    return info.pointer


def _addresses(layout: Layout, buffers: Mapping[str, int]) -> dict[str, int]:
    """Address of each operand's block, offset included."""
    blocks, found = layout.blocks(), {}
    for name, p in layout.places.items():
        buffer, start = blocks[p.block]
        found[name] = buffers[buffer] + start + p.offset * p.dtype.itemsize
    return found


def judge(
    case: Case, layout: Layout, before: Mapping[str, Array], after: Mapping[str, Array], flushed: bool = False
) -> Verdict:
    """Hold memory after a run against the oracle, and against itself before the run."""
    written = data.outputs(case)
    stray = layout.stray(before, after, written)
    if stray:
        return Verdict(False, math.inf, (), 0, stray)
    results = {name: layout.read(after, name) for name in written}
    for name, x in results.items():
        missed = never_written(x)
        if missed.any():
            where = tuple(int(i) for i in np.unravel_index(int(missed.argmax()), x.shape))
            return Verdict(
                False, math.inf, where, x.size,
                f"{name}{list(where)} and {missed.sum() - 1} more hold what memory starts with: never written, or "
                "computed from memory outside the operands",
            )
    return verdict(case, results, flushed)


def verdict(case: Case, results: Mapping[str, Array], flushed: bool = False) -> Verdict:
    """Hold results by name, [batch, head, row, column], against the oracle."""
    numbers = _rows(case)
    if isinstance(case, GemmCase):
        return check.gemm_verdict(
            _gemm_oracle(case), case.K, case.dtype, results["C"], results["C"].shape[:-1], numbers,
            zero_mean=case.data != "positive", exact=case.exact, flushed=flushed,
        )
    if isinstance(case, MergeCase):
        x = data.values(case)
        return check.merge_states(x["outs"], x["lses"], results["out"], results.get("lse"), flushed=flushed)
    if isinstance(case, BackwardCase):
        return check.attention_bwd(_backward_oracle(case), case.dtype, results, flushed=flushed)
    return check.attention_verdict(
        _attention_oracle(case), case.S_k, case.head_dim, case.dtype, results["out"], results.get("lse"),
        results["out"].shape[:-1], numbers, flushed,
    )


def _rows(case: Case) -> oracle.Rows:
    if case.sample is None or isinstance(case, MergeCase | BackwardCase):
        return None
    rows = case.M if isinstance(case, GemmCase) else case.S_q
    return oracle.sample_rows(case.batch * case.num_heads * rows, case.sample)


@lru_cache(maxsize=8)
def _gemm_oracle(case: GemmCase) -> oracle.GemmResult:
    x = data.values(case)
    return oracle.gemm(
        x["A"], x["B"], x.get("C"), case.alpha, case.beta, case.a_transposed, case.b_transposed, _rows(case)
    )


@lru_cache(maxsize=8)
def _attention_oracle(case: AttentionCase) -> oracle.AttentionResult:
    x = data.values(case)
    return oracle.attention(
        x["q"], x["k"], x["v"], case.causal, case.scale_used, _rows(case), attention_data.variant(case, x)
    )


@lru_cache(maxsize=8)
def _backward_oracle(case: BackwardCase) -> dict[str, Gradient]:
    return attention_bwd_data.wanted(case, data.values(case))


def run_all(cases: list[Case], wanted: list[Target], *, separate: bool = False) -> Iterator[Outcome]:
    """Every case on every target of its operation, case by case so that the oracle speaks once."""
    for case in cases:
        for target in wanted:
            if target.operation == case.operation:
                yield run_case(case, target, separate=separate)

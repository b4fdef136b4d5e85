"""What the doctor tries out: every implementation on a few small problems, its numbers held against the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from kernelseam.cli.running import normal
from kernelseam.cli.shapes import AttentionShape, GemmShape
from kernelseam.containment import Contained
from kernelseam.contract import EMULATED, Backend, Device, Implementation, Problem
from kernelseam.descriptors import Attention
from kernelseam.dispatch import ask
from kernelseam.dtypes import DType
from kernelseam.errors import WrongResult
from kernelseam.parity import data
from kernelseam.parity.cases import AttentionCase, BackwardCase, MergeCase
from kernelseam.parity.description import describe
from kernelseam.parity.projection_case import ProjectionCase
from kernelseam.parity.run import Target, flushes, run_case
from kernelseam.planning import Descriptor, plan
from kernelseam.plugins import Failure, Plugins, failure

F16, F32 = DType.float16, DType.float32
Made = MergeCase | BackwardCase | ProjectionCase
"""Parity cases, which make their own memory."""
SHAPES: dict[str, tuple[GemmShape | AttentionShape | Made, ...]] = {
    "gemm": tuple(
        GemmShape(2, 3, 65, 72, 40, a_transposed=False, b_transposed=True, dtype=d, layout=layout, spacing="scattered")
        for d, layout in ((F16, "strided"), (F32, "strided"), (F16, "pointers"))
    ),
    "attention": tuple(
        AttentionShape(
            1, heads=4, seq_len=65, kv_seq_len=129, head_dim=64, kv_heads=2, value_dim=64, causal=True, dtype=d,
            layout="bhsd",
        )
        for d in (F16, F32)
    ),
    "merge_states": tuple(MergeCase(f"merge-{d}", d, d) for d in (F16, F32)),
    "attention_bwd": tuple(
        BackwardCase(
            f"attention-bwd-{d}",
            AttentionCase(
                f"attention-{d}", d, batch=1, num_heads=4, kv_heads=2, S_q=65, S_k=129, head_dim=64, value_dim=64,
                causal=True,
            ),
        )
        for d in (F16, F32)
    ),
    "qkv_projection": tuple(
        ProjectionCase(f"qkv-projection-{d}", "qkv_projection", d, bias=F32, rotary="halves", first_position=3)
        for d in (F16, F32)
    ),
    "output_projection": tuple(
        ProjectionCase(f"output-projection-{d}", "output_projection", d, bias=F32, residual=d) for d in (F16, F32)
    ),
    **{
        operation: tuple(ProjectionCase(f"{operation}-{d}", operation, d, bias=F32) for d in (F16, F32))
        for operation in ("qkv_projection_bwd", "output_projection_bwd")
    },
}
"""By operation: in half and in single precision, and over lists of addresses."""


@dataclass(frozen=True)
class Finding:
    """How one implementation did on one device. ``state`` is "right", "refuses" or "broken"."""

    implementation: str
    operation: str
    device: str
    plugin: str
    state: str
    detail: str


def examine(known: Plugins, backend: Backend) -> tuple[list[Finding], list[Failure]]:
    """Try every implementation on every device of a backend, emulated ones left out, and tell which are broken."""
    findings: list[Finding] = []
    failures: list[Failure] = []
    for device in known.devices_of(backend):
        for i in known.registry.implementations:
            if i.backend != backend.name or device.evidence == EMULATED:
                continue
            plugin = known.registry.owners.get((i.backend, i.operation, i.name), i.backend)
            finding, failed = _try(i, backend, device, plugin)
            findings.append(finding)
            failures += failed
    return findings, failures


def _try(i: Implementation, backend: Backend, device: Device, plugin: str) -> tuple[Finding, list[Failure]]:
    taken, refusals = 0, []
    finding = Finding(i.name, i.operation, str(device), plugin, "right", "")
    for shape in SHAPES.get(i.operation, ()):
        stage = "call"
        try:
            with Contained("the trial"), _bound(shape, backend, device) as descriptor:
                problem = descriptor.simplified()[0].problem()
                answer = ask(i, problem, device)
                if answer.error:
                    said = Failure(plugin, "supports", answer.refusal or "", answer.error)
                    return _broken(finding, said)
                if answer.refusal is not None:
                    refusals.append(f"{problem}: {answer.refusal}")
                    continue
                stage = "build"
                made = plan(descriptor, device=device, implementation=i.name)
                stage = "call"
                if isinstance(shape, Made):
                    _run(shape, Target(device, i.name, i.operation, False, flushes(backend, device)), problem)
                else:
                    made.bind(check=True)()
                taken += 1
        except _Raised as e:
            return _broken(finding, Failure(plugin, stage, str(e).strip().rpartition("\n")[2], str(e)))
        except WrongResult as e:
            return _broken(finding, failure(plugin, "numbers", e))
        except Exception as e:
            return _broken(finding, failure(plugin, stage, e))
    if not taken:
        why = "; ".join(refusals) or f"nothing is known to try {i.operation} with"
        return replace(finding, state="refuses", detail=why), []
    return replace(finding, detail=f"{taken} problems, each within its tolerance"), []


class _Raised(Exception):
    """What a parity case's run raised, as a traceback."""


def _run(case: Made, target: Target, problem: Problem) -> None:
    """Raises WrongResult, and _Raised for all else that goes wrong."""
    outcome = run_case(case, target)
    if outcome.verdict is None:
        raise _Raised(outcome.error or outcome.refusal)
    if not outcome.verdict.passed:
        finding = f"{outcome.verdict.message}, the worst of {outcome.verdict.checked} elements"
        raise WrongResult(target.implementation, str(target.device), problem, finding)


def _broken(finding: Finding, said: Failure) -> tuple[Finding, list[Failure]]:
    what = f"{finding.implementation} of {finding.operation} on {finding.device}"
    told = replace(said, message=f"{what}: {said.message}")
    return replace(finding, state="broken", detail=f"at {said.stage}: {said.message}"), [told]


@contextmanager
def _bound(
    shape: GemmShape | AttentionShape | Made, backend: Backend, device: Device
) -> Iterator[Descriptor]:
    """The problem over memory of the device, random N(0,1), which lives as long as the block; a parity case, which has
    memory of its own where it is run, over made-up addresses."""
    if isinstance(shape, Made):
        layout = data.layout(shape, False)
        yield describe(shape, layout, dict.fromkeys(layout.places, 1 << 40), backend.runtime, device)
        return
    rng, runtime, lie = np.random.default_rng(0), backend.runtime, shape.shapes()
    kinds = shape.dtypes() if isinstance(shape, GemmShape) else dict.fromkeys(lie, shape.dtype)
    arrays = {name: runtime.from_host(normal(rng, lie[name], kinds[name]), device) for name in lie}
    if isinstance(shape, AttentionShape):
        yield Attention.from_arrays(arrays["q"], arrays["k"], arrays["v"], arrays["out"], causal=shape.causal)
    elif shape.layout == "pointers":
        yield shape.descriptor(**{name: info.pointer for name, x in arrays.items() if (info := runtime.describe(x))})
    else:
        yield shape.descriptor(**arrays)

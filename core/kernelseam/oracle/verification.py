"""``bind(check=True)``: the results of a call compared with the float64 oracle."""

from __future__ import annotations

from typing import Any

from kernelseam.contract import Problem, Runtime
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem
from kernelseam.descriptors.attention.merge_problem import MergeProblem
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.descriptors.cache.problem import PagedCacheProblem
from kernelseam.descriptors.gemm.grouped_pointers_problem import GroupedGemmPointersProblem
from kernelseam.descriptors.gemm.grouped_problem import GroupedGemmProblem
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.descriptors.projection.backward_problem import (
    OutputProjectionBwdProblem,
    QkvProjectionBwdProblem,
)
from kernelseam.descriptors.projection.problem import OutputProjectionProblem, QkvProjectionProblem
from kernelseam.errors import InvalidValue, WrongResult
from kernelseam.oracle import verification_projection as projection
from kernelseam.oracle.operands import Operands
from kernelseam.oracle.subnormals import flushes
from kernelseam.oracle.verification_attention import (
    AttentionBwdVerifier,
    AttentionVerifier,
    MergeVerifier,
)
from kernelseam.oracle.verification_cache import PagedCacheVerifier
from kernelseam.oracle.verification_gemm import GemmVerifier
from kernelseam.oracle.verification_grouped import GroupedGemmPointersVerifier, GroupedGemmVerifier
from kernelseam.oracle.verification_projection import ProjectionVerifier, QkvVerifier
from kernelseam.oracle.verifier import Verifier
from kernelseam.planning import Plan
from kernelseam.plugins import plugins

VERIFIERS: dict[type, Verifier[Any]] = {
    GemmProblem: GemmVerifier(),
    GroupedGemmProblem: GroupedGemmVerifier(),
    GroupedGemmPointersProblem: GroupedGemmPointersVerifier(),
    AttentionProblem: AttentionVerifier(),
    AttentionBwdProblem: AttentionBwdVerifier(),
    MergeProblem: MergeVerifier(),
    PagedCacheProblem: PagedCacheVerifier(),
    QkvProjectionProblem: QkvVerifier(),
    OutputProjectionProblem: ProjectionVerifier(projection.output),
    QkvProjectionBwdProblem: ProjectionVerifier(projection.qkv_gradients),
    OutputProjectionBwdProblem: ProjectionVerifier(projection.output_gradients),
}
"""Class of a problem → its verifier."""


def verifier_of(problem: Problem) -> Verifier[Any]:
    """The verifier of a problem's results. Raises InvalidValue where the oracle cannot compute
    them."""
    verifier = VERIFIERS.get(type(problem))
    why = (
        f"the oracle has no formula of {problem.operation}"
        if verifier is None
        else verifier.refuse(problem)
    )
    if verifier is None or why is not None:
        raise InvalidValue(
            "check",
            f"True for {problem}",
            f"cannot be checked: {why}",
            "Bind without check, and compare the results with your own",
        )
    return verifier


class Verification:
    """One run of a call: created before the launches, to copy inputs that they overwrite;
    ``require`` compares the results after them.

    Both copy whole operands to the host and wait for the device. Raises InvalidValue where the
    oracle cannot compute the results.
    """

    def __init__(self, plan: Plan, pointers: dict[str, int], runtime: Runtime) -> None:
        self._plan, self._operands = plan, Operands(pointers, runtime, plan.device)
        self._verifier = verifier_of(plan.problem)
        self._kept = self._verifier.kept(plan.problem, self._operands)

    def require(self) -> None:
        """Raises WrongResult where a number is beyond its tolerance."""
        plan, problem = self._plan, self._plan.problem
        if not _writes(problem):
            return
        flushed = flushes(plugins().backend(plan.device.backend), plan.device)
        verdict = self._verifier.verdict(problem, self._operands, self._kept, flushed)
        if not verdict.passed:
            finding = f"{verdict.message}, the worst of {verdict.checked} elements"
            raise WrongResult(plan.implementation, str(plan.device), problem, finding)


def _writes(problem: Problem) -> bool:
    """Whether a result has elements; the rule of an address list does not say it of its arrays."""
    return any(
        rule.span and (rule.written or rule.name in ("C_ptrs", "out_ptrs"))
        for rule in problem.operands
    )

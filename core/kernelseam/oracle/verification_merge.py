"""``bind(check=True)`` of merged states."""

from __future__ import annotations

from kernelseam.descriptors.attention.merge_problem import MergeProblem
from kernelseam.oracle import check
from kernelseam.oracle.operands import Array, Operands
from kernelseam.oracle.verifier import Verifier


class MergeVerifier(Verifier[MergeProblem]):
    """All that ``MergeStates`` describes."""

    def refuse(self, problem: MergeProblem) -> str | None:
        # A step of an attention with split keys, whose problem does not name lists and offsets.
        if problem.spec.pointers or problem.spec.packed:
            return "a merge into lists or packed rows is verified as part of its attention alone"
        return None

    def verdict(
        self, problem: MergeProblem, operands: Operands, kept: dict[str, Array], flushed: bool
    ) -> check.Verdict:
        x = {r.name: operands.strided(r, r.shape[0]) for r in problem.operands}
        return check.merge_states(**x, flushed=flushed)

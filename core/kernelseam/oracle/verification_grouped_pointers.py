"""``bind(check=True)`` of grouped GEMMs over lists."""

from __future__ import annotations

import numpy as np

from kernelseam.descriptors.gemm.grouped_pointers_problem import GroupedGemmPointersProblem
from kernelseam.oracle import check, formulas
from kernelseam.oracle.operands import Array, Operands
from kernelseam.oracle.sampling import ORACLE_OPERATIONS
from kernelseam.oracle.verifier import Verifier


class GroupedGemmPointersVerifier(Verifier[GroupedGemmPointersProblem]):
    """Of large results some columns of each group."""

    def kept(self, problem: GroupedGemmPointersProblem, operands: Operands) -> dict[str, Array]:
        if not problem.beta:
            return {}
        groups = range(problem.groups)
        return {f"C[{g}]": np.array(operands.listed(problem, "C", g)) for g in groups}

    def verdict(
        self,
        problem: GroupedGemmPointersProblem,
        operands: Operands,
        kept: dict[str, Array],
        flushed: bool,
        zero_mean: bool = False,
    ) -> check.Verdict:
        p, product = problem, problem.spec.product
        part = min(ORACLE_OPERATIONS / max(p.operations, 1), 1)

        def one(g: int) -> check.Verdict:
            a, b, c = (operands.listed(p, n, g) for n in "ABC")
            n = p.sizes[g][1]
            some = np.unique(np.linspace(0, n - 1, max(int(n * part), min(n, 1))).astype(np.int64))
            old = kept.get(f"C[{g}]")
            b = b.T if product.b_transposed else b
            result = formulas.gemm(
                (a.T if product.a_transposed else a)[None, None],
                b[None, None, :, some],
                None if old is None else old[None, None, :, some],
                p.alpha,
                p.beta,
            )
            return check.gemm_verdict(
                result,
                p.sizes[g][2],
                product.dtype,
                c[:, some],
                c.shape[:1],
                None,
                zero_mean=zero_mean,
                flushed=flushed,
                precision=product.precision,
            )

        return check.worst_of(map(one, range(p.groups)))

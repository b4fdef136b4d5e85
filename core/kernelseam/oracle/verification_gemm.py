"""``bind(check=True)`` of batched GEMMs."""

from __future__ import annotations

from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.oracle import check
from kernelseam.oracle.epilogues import Epilogue
from kernelseam.oracle.operands import Array, Operands
from kernelseam.oracle.sampling import sampled
from kernelseam.oracle.verifier import Verifier


def refuse_epilogue(spec: GemmSpec) -> str | None:
    """Why a product with an epilogue is not verified."""
    if spec.epilogue is None:
        return None
    return "the oracle calls an epilogue itself, and a plan has no functions"


class GemmVerifier(Verifier[GemmProblem]):
    """Of large results some rows."""

    def refuse(self, problem: GemmProblem) -> str | None:
        return refuse_epilogue(problem.spec)

    def kept(self, problem: GemmProblem, operands: Operands) -> dict[str, Array]:
        # the residual may be C
        read = {"C": problem.beta != 0, "residual": problem.spec.residual is not None}
        return {name: operands.gemm(problem, name) for name, needed in read.items() if needed}

    def verdict(
        self,
        problem: GemmProblem,
        operands: Operands,
        kept: dict[str, Array],
        flushed: bool,
        epilogue: Epilogue | None = None,
        zero_mean: bool = False,
    ) -> check.Verdict:
        """``epilogue``: the problem's, which only the caller has as a function."""
        p = problem
        a, b, c = (operands.gemm(p, name) for name in "ABC")
        return check.gemm(
            a,
            b,
            c,
            kept.get("C"),
            alpha=p.alpha,
            beta=p.beta,
            a_transposed=p.spec.a_transposed,
            b_transposed=p.spec.b_transposed,
            bias=operands.gemm(p, "bias") if p.spec.bias else None,
            residual=kept.get("residual"),
            batch_group=p.c_batch_group,
            head_group=p.c_head_group,
            rows=sampled(4 * p.N * p.K * p.summed),
            zero_mean=zero_mean,
            flushed=flushed,
            precision=p.spec.precision,
            a_scales=_scales(p, operands, "a_scales"),
            b_scales=_scales(p, operands, "b_scales"),
            epilogue=epilogue,
        )


def _scales(p: GemmProblem, operands: Operands, name: str) -> Array | None:
    """As the oracle takes them: of rows or columns, or those of blocks of every element."""
    if not p.spec.scales:
        return None
    scales = operands.gemm(p, name)
    if p.spec.scale_block is None:
        return scales
    m, n, k = p.spec.scale_block
    outer, most = (m, p.M) if name == "a_scales" else (n, p.N)
    whole: Array = scales.repeat(outer, axis=2)[:, :, :most].repeat(k, axis=3)[..., : p.K]
    return whole

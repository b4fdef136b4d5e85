"""``bind(check=True)`` of grouped GEMMs."""

from __future__ import annotations

import numpy as np

from kernelseam.descriptors.gemm.grouped_pointers_problem import GroupedGemmPointersProblem
from kernelseam.descriptors.gemm.grouped_problem import GroupedGemmProblem
from kernelseam.oracle import check, formulas
from kernelseam.oracle.epilogues import Epilogue
from kernelseam.oracle.grouped import grouped_gemm
from kernelseam.oracle.operands import Array, Operands
from kernelseam.oracle.sampling import ORACLE_OPERATIONS
from kernelseam.oracle.verification_gemm import refuse_epilogue
from kernelseam.oracle.verifier import Verifier


class GroupedGemmVerifier(Verifier[GroupedGemmProblem]):
    """Of large results some columns; of groups along N, and with an epilogue, some rows."""

    def refuse(self, problem: GroupedGemmProblem) -> str | None:
        return refuse_epilogue(problem.spec.product)

    def kept(self, problem: GroupedGemmProblem, operands: Operands) -> dict[str, Array]:
        return {"C": _read(problem, operands, "C")} if problem.beta else {}

    def verdict(
        self,
        problem: GroupedGemmProblem,
        operands: Operands,
        kept: dict[str, Array],
        flushed: bool,
        epilogue: Epilogue | None = None,
        zero_mean: bool = False,
    ) -> check.Verdict:
        """``epilogue``: the problem's, which only the caller has as a function."""
        p, product, along = problem, problem.spec.product, problem.spec.along
        a, b, c, offsets = (_read(p, operands, n) for n in ("A", "B", "C", "offsets"))
        a = a.swapaxes(1, 2) if product.a_transposed else a
        b = b.swapaxes(1, 2) if product.b_transposed else b
        scales = [_read(p, operands, n) for n in ("a_scales", "b_scales")] if product.scales else []
        ends = [int(x) for x in offsets]
        last = ends[-1] if ends else 0
        indices = {n: _read(p, operands, n)[:last] for n in p.spec.indices if p.reads_inputs}
        places = indices.pop("c_indices", None)
        old = kept.get("C")
        if places is not None:
            c, old = c[:, places], None if old is None else old[:, places]
        written, before = (None if x is None else _written(x, ends, along) for x in (c, old))
        assert written is not None
        # A result is cut along an axis that no offset divides; an epilogue has all columns, so that
        # of its rows, which offsets divide, the rest is taken out of the groups.
        by_rows = along == "n" or epilogue is not None
        axis, lines = (-2, last if epilogue is not None else p.M) if by_rows else (-1, p.N)
        most = max(int(ORACLE_OPERATIONS / max(p.operations / max(lines, 1), 1)), 1)
        some = np.unique(np.linspace(0, lines - 1, min(most, lines)).astype(np.int64))
        at = None
        if epilogue is not None:
            at = some, np.searchsorted(ends, some, side="right")
            ends = [int(x) for x in np.searchsorted(some, ends)]
            indices = {n: x[some] for n, x in indices.items()}
        written, before = (None if x is None else x.take(some, axis) for x in (written, before))
        assert written is not None
        if by_rows and "a_indices" not in indices:
            a = a[:, some]
        elif not by_rows:
            b = b[:, :, some]
        if scales and by_rows and "a_indices" not in indices:
            scales[0] = scales[0][:, some]
        elif scales and not by_rows:
            block = (product.scale_block or (1, 1, 1))[1]
            scales[1] = scales[1][:, some // block]
        result = grouped_gemm(
            a,
            b,
            ends,
            along,
            before,
            alpha=p.alpha,
            beta=p.beta,
            a_scales=scales[0] if scales else None,
            b_scales=scales[1] if scales else None,
            scale_block=product.scale_block
            and (1, product.scale_block[1] if by_rows else 1, product.scale_block[2]),
            **indices,
        )
        return check.gemm_verdict(
            result,
            longest(ends) if along == "k" else p.K,
            product.dtype,
            written,
            written.shape[:-1],
            None,
            zero_mean=zero_mean,
            flushed=flushed,
            precision=product.precision,
            epilogue=epilogue,
            places=at,
        )


def longest(ends: list[int]) -> int:
    """The size of the largest group."""
    return max((int(n) for n in np.diff([0, *ends])), default=0)


def _written(c: Array, ends: list[int], along: str) -> Array:
    """The part of C that belongs to groups, as ``grouped_gemm`` has it."""
    if along == "k":
        return c
    last = ends[-1] if ends else 0
    part: Array = c[0][:last] if along == "m" else c[0][:, :last]
    return part


def _read(p: GroupedGemmProblem, operands: Operands, name: str) -> Array:
    (rule,) = (r for r in p.operands if r.name == name)
    whole = rule.shape[0]
    if name in ("A", "B"):
        whole = p.matrices(name)
    return operands.strided(rule, whole)


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

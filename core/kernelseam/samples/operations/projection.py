"""The projections and their gradients: four operations with one class of cases."""

from __future__ import annotations

from kernelseam.oracle import check
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.projections import Results
from kernelseam.samples.data import projection as data
from kernelseam.samples.data import projection_places as places
from kernelseam.samples.operations.operation import Arrays, Operation, Placed
from kernelseam.samples.projection_case import ProjectionCase


class Projection(Operation[ProjectionCase, Results | places.Expected]):
    """The operation ``name``."""

    data = data

    def __init__(self, name: str) -> None:
        self.name = name

    def repeatable(self, case: ProjectionCase) -> bool:
        return not case.in_place

    def describe(self, case: ProjectionCase, placed: Placed) -> data.Described:
        return data.describe(case, placed.layout, placed.addresses)

    def expected(self, case: ProjectionCase, inputs: Arrays) -> Results | places.Expected:
        if case.appended:
            return places.expected(case, inputs)
        return data.expected(case, inputs)

    def verdict(
        self,
        case: ProjectionCase,
        expected: Results | places.Expected,
        results: Arrays,
        flushed: bool = False,
    ) -> Verdict:
        if isinstance(expected, tuple):
            return places.verdict(case, expected, results, flushed)
        return check.projection(
            expected,
            case.dtype,
            results,
            zero_mean=case.data != "positive",
            exact=case.exact,
            flushed=flushed,
        )

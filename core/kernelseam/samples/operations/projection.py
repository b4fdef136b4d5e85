"""The projections and their gradients: four operations with one class of cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernelseam.contract import Device, Runtime
from kernelseam.oracle import check
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import Array
from kernelseam.oracle.projections import Results
from kernelseam.samples.data import projection as data
from kernelseam.samples.data.memory import Layout, Placement
from kernelseam.samples.operations.operation import Operation
from kernelseam.samples.projection_case import ProjectionCase


class Projection(Operation[ProjectionCase, Results]):
    """The operation ``name``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def draw(self, case: ProjectionCase, rng: np.random.Generator) -> dict[str, Array]:
        return data.values(case, rng)

    def placements(self, case: ProjectionCase) -> dict[str, Placement]:
        return data.placements(case)

    def outputs(self, case: ProjectionCase) -> tuple[str, ...]:
        return data.outputs(case)

    def repeatable(self, case: ProjectionCase) -> bool:
        return not case.in_place

    def describe(
        self,
        case: ProjectionCase,
        layout: Layout,
        addresses: Mapping[str, Any],
        runtime: Runtime,
        device: Device,
    ) -> data.Described:
        return data.describe(case, layout, addresses)

    def expected(self, case: ProjectionCase, inputs: Mapping[str, Array]) -> Results:
        return data.expected(case, inputs)

    def verdict(
        self,
        case: ProjectionCase,
        expected: Results,
        results: Mapping[str, Array],
        *,
        flushed: bool = False,
    ) -> Verdict:
        return check.projection(
            expected,
            case.dtype,
            results,
            zero_mean=case.data != "positive",
            exact=case.exact,
            flushed=flushed,
        )

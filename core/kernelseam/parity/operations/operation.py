"""What the matrix asks of an operation: cases, operands, a descriptor over them, a verdict."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from kernelseam.contract import Device, Runtime
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import Array, Rows, sample_rows
from kernelseam.parity.cases.case import Case
from kernelseam.parity.cases.common import Plant
from kernelseam.parity.data.memory import Layout, Place

C = TypeVar("C", bound=Case)
E = TypeVar("E")
"""What the oracle gives for a case."""


class Operation(ABC, Generic[C, E]):
    """One operation of the matrix. Arrays are the host's, [batch, head, row, column] whatever the
    view."""

    name: str
    """As cases and implementations name it."""

    @abstractmethod
    def cases(self) -> list[C]:
        """Every case, in the order of the report."""

    @abstractmethod
    def draw(self, case: C, rng: np.random.Generator) -> dict[str, Array]:
        """Random inputs by name."""

    def derived(self, case: C, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Inputs that follow from the others."""
        return {}

    @abstractmethod
    def places(self, case: C) -> dict[str, Place]:
        """Where every operand lies."""

    @abstractmethod
    def outputs(self, case: C) -> tuple[str, ...]:
        """Names of what is written."""

    @abstractmethod
    def describe(
        self,
        case: C,
        layout: Layout,
        addresses: Mapping[str, Any],
        runtime: Runtime,
        device: Device,
    ) -> Descriptor:
        """The descriptor over addresses."""

    @abstractmethod
    def expected(self, case: C, inputs: Mapping[str, Array]) -> E:
        """What the oracle gives, of ``rows`` where some are sampled."""

    @abstractmethod
    def verdict(
        self, case: C, expected: E, results: Mapping[str, Array], *, flushed: bool = False
    ) -> Verdict:
        """Results by name held against the oracle within the operation's tolerance. ``flushed``:
        subnormals count as lost."""

    def repeatable(self, case: C) -> bool:
        """Whether a second launch has the same inputs, so that it must give the same bits; the
        largest cases run once."""
        return case.sample is None

    def lead(self, case: C) -> tuple[int, ...]:
        """The axes of a result before its columns: their product counts its rows."""
        raise NotImplementedError(f"cases of {self.name} are compared whole")

    def values(self, case: C) -> dict[str, Array]:
        """Inputs by name: drawn from a seed that is the case's name, its plants put in."""
        found = self.draw(case, np.random.default_rng(zlib.crc32(case.name.encode())))
        for p in case.plants:
            _plant(found[p.operand], p)
        return {**found, **self.derived(case, found)}

    def layout(self, case: C, separate: bool = False) -> Layout:
        """Every operand's place in buffers: see ``Layout``."""
        return Layout(self.places(case), separate)

    def rows(self, case: C) -> Rows:
        """Numbers of the rows that are compared; None: all."""
        if case.sample is None:
            return None
        return sample_rows(math.prod(self.lead(case)), case.sample)


def _plant(x: Array, plant: Plant) -> None:
    x[tuple(slice(None) if i is None else i for i in plant.index)] = plant.value

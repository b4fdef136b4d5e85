"""The interface of an operation: operands, descriptor, verdict."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from kernelseam.contract import Device, Runtime
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.frozen import dataclass
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import Array, Rows, sample_rows
from kernelseam.samples.case import Case
from kernelseam.samples.common import InjectedValue
from kernelseam.samples.data.descriptors import address_list
from kernelseam.samples.data.memory import Layout

C = TypeVar("C", bound=Case)
E = TypeVar("E")
"""The oracle's results for a case."""
Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class Placed:
    """A case's operands in memory, as descriptors are made of them."""

    layout: Layout
    addresses: Mapping[str, Any]
    runtime: Runtime
    device: Device

    def listed(self, view: str, name: str) -> object:
        """The address of every matrix of an operand, as ``data.descriptors.listed``."""
        at = self.layout, name, self.addresses[name]
        return address_list(view, *at, self.runtime, self.device)


class Operation(ABC, Generic[C, E]):
    """One operation. Arrays are the host's, [batch, head, row, column] whatever the
    view."""

    name: str
    """The name that cases and implementations use."""
    data: Any
    """The module of its operands: ``values``, ``placements`` and ``outputs`` of a case."""

    def derived(self, case: C, inputs: Arrays) -> dict[str, Array]:
        """Inputs computed from the random ones."""
        return {}

    def outputs(self, case: C) -> tuple[str, ...]:
        names: tuple[str, ...] = self.data.outputs(case)
        return names

    @abstractmethod
    def describe(self, case: C, placed: Placed) -> Descriptor:
        """The descriptor over addresses."""

    @abstractmethod
    def expected(self, case: C, inputs: Arrays) -> E:
        """The oracle's results, for ``rows`` only where rows are sampled."""

    @abstractmethod
    def verdict(self, case: C, expected: E, results: Arrays, flushed: bool = False) -> Verdict:
        """Results by name compared with the oracle's within the operation's tolerance. ``flushed``:
        the device may flush subnormals to zero."""

    def repeatable(self, case: C) -> bool:
        """Whether a second launch sees the same inputs and so must give the same bits; False also
        for the largest cases, which run once."""
        return case.sample is None

    def lead(self, case: C) -> tuple[int, ...]:
        """A result's shape without columns; the product is its number of rows."""
        raise NotImplementedError(f"cases of {self.name} are compared whole")

    def values(self, case: C) -> dict[str, Array]:
        """Inputs by name: random, seeded by the case's name, then the injected values."""
        inputs = self.data.values(case, np.random.default_rng(zlib.crc32(case.name.encode())))
        for p in case.injected:
            _inject(inputs[p.operand], p)
        return {**inputs, **self.derived(case, inputs)}

    def layout(self, case: C, separate: bool = False) -> Layout:
        """Every operand's placement in buffers: see ``Layout``."""
        return Layout(self.data.placements(case), separate)

    def rows(self, case: C) -> Rows:
        """Indices of the rows to compare; None: all."""
        if case.sample is None:
            return None
        return sample_rows(math.prod(self.lead(case)), case.sample)


def _inject(x: Array, injection: InjectedValue) -> None:
    x[tuple(slice(None) if i is None else i for i in injection.index)] = injection.value

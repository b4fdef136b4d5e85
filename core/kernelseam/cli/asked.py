"""A problem that a command line describes, as a sample's case; and its operands on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.contract import Device
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.frozen import dataclass
from kernelseam.oracle.epilogues import Epilogue
from kernelseam.plugins import plugins
from kernelseam.samples.case import Case
from kernelseam.samples.data.memory import Layout
from kernelseam.samples.epilogues import for_oracle
from kernelseam.samples.gemm_case import GemmCase
from kernelseam.samples.operations import operands
from kernelseam.samples.operations.operands import describe
from kernelseam.samples.operations.table import operation_of

Array = npt.NDArray[Any]


class Memory:
    """A case's operands on a device, each in its own allocation; outputs are filled with NaN."""

    def __init__(self, case: Case, values: Mapping[str, Array], device: Device) -> None:
        self.layout, self.device = operands.layout(case, separate=True), device
        self.runtime = plugins().backend(device.backend).runtime
        host = self.layout.buffers()
        self.layout.write(host, values)
        self.buffers = {
            name: self.runtime.from_host(b.view(np.float32), device) for name, b in host.items()
        }

    def descriptor(self, case: Case) -> Descriptor:
        """The case's descriptor over these operands."""
        placements = operands.layout(case).placements
        addresses = {}
        for name, p in placements.items():
            info = self.runtime.describe(self.buffers[p.block])
            assert info is not None
            addresses[name] = info.pointer + p.offset * p.dtype.itemsize
        return describe(case, Layout(placements), addresses, self.runtime, self.device)

    def read(self, name: str) -> Array:
        """An operand on the host, [batch, head, row, column]; 0 for elements without memory."""
        block = self.layout.placements[name].block
        bytes_ = (
            np.ascontiguousarray(self.runtime.to_host(self.buffers[block]))
            .view(np.uint8)
            .reshape(-1)
        )
        return self.layout.read({block: bytes_}, name)


def over_placeholders(case: Case) -> Descriptor:
    """The descriptor of a case over addresses of which nothing is read. Raises InvalidValue."""
    if isinstance(case, GemmCase) and case.view != "strided":
        # checks extents before lists of that length are made
        over_placeholders(replace(case, view="strided", scattered=False))
    host, layout = plugins().backend("numpy").runtime, operands.layout(case)
    addresses = {n: (i + 1) << 48 for i, n in enumerate(layout.placements)}
    return describe(case, layout, addresses, host, host.devices()[0])


@dataclass(frozen=True)
class Asked:
    """The problem that a command line asks for."""

    case: Case
    named: tuple[str, ...] = ()
    """Options of extents that were given."""

    def descriptor(self) -> Descriptor:
        """The descriptor, over placeholder addresses. Raises InvalidValue."""
        return over_placeholders(self.case)

    def memory(self, device: Device, seed: int = 0) -> Memory:
        """Random operands on a device."""
        values = operation_of(self.case).data.values(self.case, np.random.default_rng(seed))
        return Memory(self.case, values, device)

    @property
    def elements(self) -> int:
        """Of the results."""
        placements = operands.layout(self.case).placements
        return sum(math.prod(placements[n].shape) for n in operands.outputs(self.case))

    @property
    def epilogue(self) -> Epilogue | None:
        """The case's, as the oracle takes it."""
        if not getattr(self.case, "epilogue", ""):
            return None
        return for_oracle(operation_of(self.case).data.epilogue(self.case))

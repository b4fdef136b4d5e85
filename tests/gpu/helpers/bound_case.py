"""A parity case's memory on an NVIDIA GPU with a call bound to it, to be launched often."""

from __future__ import annotations

from typing import Any

import numpy as np
from kernelseam.contract import Device
from kernelseam.kernels.kernel import KernelImplementation
from kernelseam.parity.running.stages import Computed, Prepared, prepare
from kernelseam.planning import Call, plan
from kernelseam.plugins import plugins
from kernelseam.samples.case import Case
from kernelseam.samples.operations.operands import describe
from kernelseam.variants import SEPARATOR

from benchmarks import precompile


class Held:
    """The case's buffers, as they were made and as launches leave them. Raises what ``plan``
    raises."""

    def __init__(
        self, case: Case, device: Device, implementation: str, before: Prepared | None = None
    ) -> None:
        self.case, self.before = case, before or prepare(case)
        self._runtime = plugins().backend(device.backend).runtime
        layout = self.before.layout
        import cupy

        with cupy.cuda.Device(device.index):
            self._fresh = {
                n: cupy.asarray(b.view(np.uint8)) for n, b in self.before.buffers.items()
            }
        self._held = {name: x.copy() for name, x in self._fresh.items()}
        addresses = {
            name: self._held[buffer].data.ptr + start + p.offset * p.dtype.itemsize
            for name, p in layout.placements.items()
            for buffer, start in (layout.blocks()[p.block],)
        }
        described: Any = describe(case, layout, addresses, self._runtime, device)
        self.call: Call = plan(described, device=device, implementation=implementation).bind()

    def renew(self) -> None:
        """Memory as it was made, on CuPy's current stream: inputs, and outputs that nobody has
        written."""
        for name, x in self._held.items():
            x[...] = self._fresh[name]

    def refill(self, other: Prepared) -> None:
        """From now on another case's data, which lie the same way."""
        assert {n: b.nbytes for n, b in other.buffers.items()} == {
            n: x.nbytes for n, x in self._held.items()
        }
        for name, x in self._fresh.items():
            x.set(other.buffers[name].view(np.uint8).reshape(x.shape))

    def launch(self, stream: Any) -> None:
        """Renew and call, on that stream of CuPy's."""
        with stream:
            self.renew()
        self.call(stream.ptr)

    def bytes(self) -> dict[str, Any]:
        """A copy of the memory, on CuPy's current stream."""
        return {name: x.copy() for name, x in self._held.items()}

    def differs(self, first: dict[str, Any]) -> Any:
        """Whether a byte is another than in an earlier copy: on the device, and on CuPy's current
        stream."""
        return sum((x != first[name]).any() for name, x in self._held.items()) > 0

    def computed(self) -> Computed:
        """The memory on the host, as ``parity.stages.judge`` takes it."""
        return Computed({name: x.get() for name, x in self._held.items()}, 0)


def configurations(case: Case, device: Device, implementation: str) -> dict[str, tuple[Any, ...]]:
    """The configurations in which a kernel takes a case, "sm90:128x192…" or its name where it has
    one, each with its binaries (kernel, spec, tile); none where it refuses."""
    problem, result = precompile.problem_of(case, device), {}
    for known in plugins().registry.implementations:
        if (known.backend, known.name, known.operation) != (
            device.backend,
            implementation,
            case.operation,
        ):
            continue
        if (
            not isinstance(known, KernelImplementation)
            or known.supports(problem, device) is not None
        ):
            continue
        toolchain = plugins().backend(device.backend).toolchain
        assert toolchain is not None
        row = toolchain.arch_row(device.arch)
        variants = {
            f"{implementation}{SEPARATOR}{n}": t
            for n, t in known.composition.variants(problem, row, device).items()
        }
        for name, tile in (
            variants or {implementation: known.composition.tile(problem, row, device)}
        ).items():
            kernels = known.composition.launches(problem, tile, device).kernels
            result[name] = tuple((x.kernel, x.problem.spec, x.tile) for x in kernels)
    return result


def unlike(case: Case, device: Device, implementation: str, times: int, beside: bool = True) -> int:
    """Of so many launches over the same inputs, how many have other bits than the first.

    ``beside``: another stream launches the same over memory of its own all the while, and is
    compared as well.
    """
    import cupy

    whole = [Held(case, device, implementation)]
    if beside:
        whole.append(Held(case, device, implementation, whole[0].before))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in whole]
    device_of = cupy.cuda.Device(device.index)
    device_of.synchronize()
    whole[0].launch(streams[0])
    with streams[0]:
        first = whole[0].bytes()
    streams[0].synchronize()
    counts = []
    for stream in streams:
        with stream:
            counts.append(cupy.zeros((), cupy.int64))
    for _ in range(times):
        for held, stream, count in zip(whole, streams, counts, strict=True):
            held.launch(stream)
            with stream:
                count += held.differs(first)
    device_of.synchronize()
    return sum(int(c) for c in counts)

"""Sums of listed rows of torch tensors in one launch. Imports the kernels, which processes that
only use the host do not need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from kernelseam.arrays import describe
from kernelseam.contract import Device
from kernelseam.kernels.gemm.bag_sums import (
    BAG_SUMS,
    CHUNK,
    BagSumsProblem,
    BagSumsSpec,
    BagSumsTile,
)
from kernelseam.kernels.kernel import KernelImplementation, KernelStep
from kernelseam.plugins import plugins

Tensor = Any


def launched(x: Tensor, rows: Tensor, ends: Tensor, out: Tensor, plus: Tensor | None) -> bool:
    """Whether a kernel computes ``out`` [results, columns]: of result i the sum of x's rows that
    ``rows``, int64, lists from ends[i] to ends[i + 1], int64 [results + 1], and of ``plus`` [parts,
    results, columns] over its parts. Both are contiguous."""
    if not out.numel():
        return True
    x = x if x.stride(1) == 1 else x.contiguous()
    size = x.element_size()
    of = {"x": x, "rows": rows, "ends": ends, "out": out}
    of |= {} if plus is None else {"plus": plus}
    widths = [y.data_ptr() for n, y in of.items() if n not in ("rows", "ends")]
    widths += [x.stride(0) * size, out.shape[1] * size]
    info, parts = describe(x), 0 if plus is None else len(plus)
    device = info.device
    spec = BagSumsSpec(info.dtype, size if any(n % CHUNK for n in widths) else CHUNK)
    problem = BagSumsProblem(spec, len(rows), out.shape[0], out.shape[1], x.stride(0), parts)
    step = _step(problem, device)
    if step is None:
        return False
    tile, addresses = BagSumsTile(), {"plus": 0, **{n: y.data_ptr() for n, y in of.items()}}
    arguments = step.signature.pack(BAG_SUMS.values(problem, tile, device) | addresses)
    config = replace(step.config, grid=(BAG_SUMS.grid(problem, tile, device), 1, 1))
    runtime: Any = plugins().backend(device.backend).runtime
    stream = runtime.call_state(device, "torch").current_stream()
    with runtime.activate(device):
        step.kernel.prepare(config, arguments)(stream)
    return True


class _Steps(dict[tuple[Device, BagSumsSpec], KernelStep | None]):
    """Loaded kernels; None where there is none."""


def _step(problem: BagSumsProblem, device: Device) -> KernelStep | None:
    """The kernel for the problem, where there is one."""
    toolchain = plugins().backend(device.backend).toolchain
    if toolchain is None or BAG_SUMS.refuse(problem, toolchain.arch_row(device.arch)):
        return None
    known, key = plugins().cache_of(_Steps), (device, problem.spec)
    if key not in known:
        kernel = KernelImplementation(BAG_SUMS, toolchain)
        refused = kernel.supports(problem, device) is not None
        known[key] = None if refused else cast(KernelStep, kernel.build(problem, device).steps[0])
    return known[key]

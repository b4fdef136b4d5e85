"""Memory for a problem without pointer arrays: random inputs, sized by its operands' rules."""

from __future__ import annotations

import numpy as np

from kernelseam.cli.running import normal
from kernelseam.contract import Device, Problem
from kernelseam.plugins import plugins


def random_operands(
    problem: Problem, device: Device, seed: int = 0
) -> tuple[dict[str, int], tuple[object, ...]]:
    """Allocate and fill operands. Returns addresses by name, and the arrays that own the memory."""
    runtime, rng = plugins().backend(device.backend).runtime, np.random.default_rng(seed)
    addresses, arrays = {}, []
    for rule in problem.operands:
        assert rule.dtype is not None, "pointer arrays are built from their matrices"
        if rule.written:
            array = runtime.empty((rule.span,), rule.dtype, device)
        else:
            array = runtime.from_host(normal(rng, (rule.span,), rule.dtype), device)
        info = runtime.describe(array)
        assert info is not None
        addresses[rule.name] = info.pointer
        arrays.append(array)
    return addresses, tuple(arrays)

"""Merging partial attentions on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from kernelseam.contract import Device, PlanParts
from kernelseam.descriptors.attention.merge_problem import MergeProblem
from kernelseam.reference.implementation import NumpyImplementation, operand_arrays, recorded
from kernelseam.reference.scratch import carve, scratch_bytes, shaped

_ELEMENTS = 1 << 16  # of the parts' LSEs and of the result's rows in one block


class NumpyMerge(NumpyImplementation[MergeProblem]):
    """Every dtype, any strides; computed in float32, parts of float64 in float64."""

    operation = "merge_states"

    def supports(self, problem: MergeProblem, device: Device) -> str | None:
        for option in ("pointers", "packed"):
            if getattr(problem.spec, option):
                return f"{option} is not supported by this kernel"
        return None

    def build(self, problem: MergeProblem, device: Device) -> PlanParts:
        step = _MergeStep(problem, device)
        return PlanParts((step,), scratch_bytes(step.sizes, step.dtype))


class _MergeStep:
    """One block of a head's rows after another."""

    def __init__(self, problem: MergeProblem, device: Device) -> None:
        p = self.problem = problem
        self.dtype = p.spec.dtype.accumulator
        self.rows = max(min(p.rows, _ELEMENTS // max(p.parts, p.spec.value_dim, 1)), 1)
        self.sizes = p.parts * self.rows, self.rows * p.spec.value_dim, self.rows * p.spec.value_dim
        self.record = recorded("merge_states", device, (p.num_heads, p.batch, 1))

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        p = self.problem
        outs, lses, out, *rest = operand_arrays(p.operands, pointers).values()
        scratch = carve(workspace, self.sizes, self.dtype)

        def launch(stream: int) -> None:
            with np.errstate(all="ignore"):
                for b, h, i in itertools.product(
                    range(p.batch), range(p.num_heads), range(0, p.rows, self.rows)
                ):
                    block = (b, h, slice(i, min(i + self.rows, p.rows)))
                    n = block[2].stop - i
                    weights = shaped(scratch[0], p.parts, n)
                    part, acc = (shaped(x, n, p.spec.value_dim) for x in scratch[1:])
                    np.copyto(weights, lses[:, *block])
                    empty = np.isneginf(weights)
                    top = weights.max(axis=0, initial=-np.inf)
                    weights -= np.where(np.isneginf(top), 0, top)
                    np.exp(weights, out=weights)
                    total = weights.sum(axis=0)
                    acc[...] = 0
                    for m in range(p.parts):
                        np.multiply(outs[m, *block], weights[m, :, None], out=part)
                        part[empty[m]] = 0  # also where it is not finite
                        acc += part
                    acc /= np.where(total == 0, 1, total)[:, None]
                    out[block] = acc
                    if rest:
                        rest[0][block] = np.log(total) + top

        return launch

"""Kernel definition of cuda_kernels/sm90/attention/forward.h where q, k and v are of e4m3."""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap

from kernelseam.contract import ArchRow, Device
from kernelseam.descriptors.attention.options import STORED
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec, dims_name
from kernelseam.dtypes import DType
from kernelseam.kernels.attention.fp8 import (
    SCALE_AXES,
    refuse_fp8,
    scales_structure,
)
from kernelseam.kernels.signature import Signature, Structure

from kernelseam_cuda.sm90.attention import HopperAttention, is_ragged
from kernelseam_cuda.sm90.attention_e4m3_tiles import E4M3_ATTENTION
from kernelseam_cuda.sm90.attention_refusals import BANDED
from kernelseam_cuda.sm90.attention_tiles import HopperAttentionTile

_SCALES = ("q_scales", "k_scales", "v_scales")
_PARAMETER = Structure(tuple((name[0], scales_structure(name)) for name in _SCALES))


class HopperE4m3Attention(HopperAttention):
    """Attention forward of e4m3, multiplied as it is: P, too, is rounded to e4m3."""

    name = "sm90-e4m3"
    known_tiles = E4M3_ATTENTION
    few_queries = ()
    supported = BANDED | STORED

    def refuse(self, problem: AttentionProblem, row: ArchRow) -> str | None:
        spec = problem.spec
        if spec.dtype_q is not DType.float8_e4m3fn:
            return f"q is of {spec.q}: it takes {DType.float8_e4m3fn}"
        if "blocks" in (spec.q_scales, spec.kv_scales):
            return "blocks of queries or of keys have scales of their own: it takes one a head"
        return super().refuse(problem, row) or refuse_fp8(problem, row)

    def refuse_dims(self, spec: AttentionSpec) -> str | None:
        """Values are transposed in whole panels."""
        if (spec.head_dim, spec.value_dim) in self.widths:
            return None
        return f"head dims {spec.dims}: it takes {', '.join(starmap(dims_name, self.widths))}"

    def has_mask(self, spec: AttentionSpec) -> bool:
        """Lengths, too: four consumers leave no registers for what masks V."""
        return super().has_mask(spec) or is_ragged(spec)

    def tiles(self, spec: AttentionSpec, row: ArchRow) -> tuple[HopperAttentionTile, ...]:
        """Three consumers where a causal mask is all that hides keys: a window would serialise
        their products; lengths, packed sequences and pages were not timed."""
        alone = not (spec.window or is_ragged(spec))
        return tuple(t for t in super().tiles(spec, row) if t.groups != 3 or alone)

    def signature(self, spec: AttentionSpec) -> Signature:
        plain = super().signature(spec)
        if not spec.q_scales:
            return plain
        return replace(plain, parameters=(*plain.parameters, ("scales", _PARAMETER)))

    def values(
        self, problem: AttentionProblem, tile: HopperAttentionTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        values = super().values(p, tile, device)
        if not p.spec.q_scales:
            return values
        walks = (p.q_scale_strides, p.k_scale_strides, p.v_scale_strides)
        return values | {
            f"{name}_{axis}": stride
            for name, walk in zip(_SCALES, walks, strict=True)
            for axis, stride in zip(SCALE_AXES, walk, strict=True)
        }

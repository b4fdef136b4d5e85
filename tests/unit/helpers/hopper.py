"""The arch and the device for which kernel definitions of Hopper's are asked."""

from __future__ import annotations

from kernelseam.contract import Device, DeviceLimits
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam_cuda import archs

ROW = archs.row("sm_90a")
H200 = Device(
    "cuda", 0, "sm_90a", limits=DeviceLimits(compute_units=132, shared_bytes_per_block=232_448)
)


def with_rates(**operations_per_second: float) -> Device:
    """The same with the memory's rate, and those of these dtypes."""
    limits = DeviceLimits(132, 232_448, 0, 4.9e12, operations_per_second)
    return Device("cuda", 0, "sm_90a", limits=limits)


def gradients(p: AttentionProblem, **spec: object) -> AttentionBwdProblem:
    """Of an attention: dq, dk and dv lie as q, k and v. ``spec``: fields of
    ``AttentionBwdSpec``."""
    whole = AttentionBwdSpec(p.spec, **spec)  # type: ignore[arg-type]
    return AttentionBwdProblem(whole, p, p.out_strides, p.q_strides, p.k_strides, p.v_strides)

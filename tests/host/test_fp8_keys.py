"""Keys and values, and queries, of 8 bits on the host platform: what their bits are, which arch
converts which, that ``decode`` loses no case, and lengths that change between calls of one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernelseam.contract import Device
from kernelseam.descriptors import Attention, BatchedGemmStrided
from kernelseam.dispatch import consider
from kernelseam.dtypes import E4M3, DType
from kernelseam.oracle import check
from kernelseam.oracle.formulas import Variant
from kernelseam.planning import plan
from kernelseam.plugins import Plugins
from kernelseam.samples.common import DECODE
from kernelseam_hostcpp.runtime import DEVICES, HostArray
from own_cases import on_devices, require_passed

PROBE = """
KS_KERNEL(16, 1) probe(const e4m3* patterns, float* wide) {
  for (int i = lane(); i < 256; i += WARP) wide[i] = to_sum(patterns[i]);
}
"""
OWN = dict(zip((d.arch for d in DEVICES), E4M3, strict=True))
"""The dtype that each arch converts: in registers as it is multiplied, and on its way to shared
memory."""
SHORT = {DType.float8_e4m3fn: "e4m3fn", DType.float8_e4m3fnuz: "e4m3fnuz"}
CASES = (
    "f16-64-8-pages-uneven",
    "f16-64-8-nan-scale",
    "bf16-128-causal-8-pages",
    "bf16-128-8-split-blocks",
    "bf16-128-8-q-1-query",
    "f16-64-8-q-pages-blocks",
    "bf16-128-8-q-split",
)


@pytest.mark.parametrize("dtype", E4M3, ids=str)
def test_every_pattern_is_the_number_that_ml_dtypes_has(
    probe: Callable[..., None], dtype: DType
) -> None:
    patterns, wide = np.arange(256, dtype=np.uint8), np.zeros(256, np.float32)
    probe(PROBE, 16, patterns, wide, e4m3=1 + E4M3.index(dtype))
    np.testing.assert_array_equal(wide, patterns.view(dtype.numpy).astype(np.float32))


OFTEN = {
    "f16-64-8-nan-scale",
    "bf16-128-causal-8-pages",
    "f16-64-8-q-pages-blocks",
    "bf16-128-8-q-split",
}


@pytest.mark.parametrize(("name", "device"), on_devices(CASES, OFTEN))
def test_parity(hostcpp: Plugins, name: str, device: Device) -> None:
    """``decode`` on data and on the ramp; none is refused. (What is for attention's other kernel,
    and products of 8 bits: test_host_matrix.py.)"""
    case = f"attention-{name.replace('-8-', f'-{SHORT[OWN[device.arch]]}-')}"
    for ramp in ("", "-ramp"):
        require_passed(f"{case}{ramp}", device, DECODE)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.arch)
def test_the_other_dtype_is_refused_by_name(hostcpp: Plugins, device: Device) -> None:
    (other,) = set(E4M3) - {OWN[device.arch]}
    fields: dict[str, Any] = {"S_q": 1, "S_k": 64, "head_dim": 64, "dtype": "float16"}
    problem = Attention(batch=1, num_heads=2, **fields, dtype_kv=other).problem()
    refusals = {c.implementation.name: c.refusal for c in consider(problem, device)}
    reason = f"k and v are {other}: {device.arch} converts {OWN[device.arch]}"
    assert refusals["shared"] == refusals[DECODE] == reason
    product = BatchedGemmStrided(M=8, N=8, K=8, dtype=other).problem()
    refusals = {c.implementation.name: c.refusal for c in consider(product, device)}
    assert refusals["shared"] == f"{device.arch} multiplies {OWN[device.arch]}, not {other}"


def test_scales_of_blocks_that_lie_differently_are_refused(hostcpp: Plugins) -> None:
    fields: dict[str, Any] = {"S_q": 1, "S_k": 64, "head_dim": 64, "dtype": "float16"}
    scales: dict[str, Any] = {"k_scales": 0, "v_scales": 0, "scale_block": 8}
    problem = Attention(
        batch=1, num_heads=2, **fields, **scales, dtype_kv=E4M3[0], stride_v_scales_head=9
    ).problem()
    refusals = {c.implementation.name: c.refusal for c in consider(problem, DEVICES[0])}
    assert (
        refusals["shared"]
        == refusals[DECODE]
        == ("k_scales has strides (16, 8, 1) and v_scales (18, 9, 1): of blocks it takes the same")
    )


@pytest.mark.parametrize("scale_block", [None, 1, 4])
def test_lengths_that_change_between_calls(hostcpp: Plugins, scale_block: int | None) -> None:
    """One call of ``decode``; scales of pages that no sequence reaches are NaN."""
    rng, page, width, batch = np.random.default_rng(2), 8, 12, 5
    q = rng.standard_normal((batch, 1, 6, 32)).astype(np.float16)
    k, v = (
        rng.standard_normal((batch * width, page, 2, 32)).astype(E4M3[0].numpy) for _ in range(2)
    )
    table = rng.permutation(batch * width).astype(np.int32).reshape(batch, width)
    shape = (batch, 2) if scale_block is None else (batch * width, page // scale_block, 2)
    scales = [rng.uniform(0.2, 2, shape).astype(np.float32) for _ in "kv"]
    lengths, out = np.zeros(batch, np.int32), np.zeros_like(q)
    used = [s.copy() for s in scales]
    made = Attention.from_arrays(
        *(HostArray(x) for x in (q, k, v, out)),
        layout="bshd",
        block_table=HostArray(table),
        kv_lengths=HostArray(lengths),
        k_scales=HostArray(used[0]),
        v_scales=HostArray(used[1]),
        scale_block=scale_block,
    )
    call = plan(made, device=DEVICES[0], implementation=DECODE).bind()
    for told in ([96, 1, 0, 17, 8], [5, 96, 40, 0, 96], [0] * 5):
        lengths[:] = told
        reached = np.unique(
            np.concatenate([t[: -(-n // page)] for t, n in zip(table, told, strict=True)])
        )
        if scale_block is not None:
            for s, own in zip(used, scales, strict=True):
                s[:] = np.nan
                s[reached] = own[reached]
        call()

        def dense(x: Any) -> Any:
            return x[table].reshape(batch, width * page, 2, -1).transpose(0, 2, 1, 3)

        def of_keys(x: Any) -> Any:
            if scale_block is None:
                return np.broadcast_to(x[..., None], (batch, 2, width * page))
            return dense(np.repeat(x, scale_block, 1))[..., 0]

        variant = Variant(kv_lengths=told, k_scales=of_keys(scales[0]), v_scales=of_keys(scales[1]))
        verdict = check.attention(
            q.transpose(0, 2, 1, 3),
            dense(k),
            dense(v),
            out.transpose(0, 2, 1, 3),
            causal=False,
            variant=variant,
        )
        assert verdict, verdict.message

"""On an NVIDIA GPU, every kernel of one arch ("sm90…"), and those of few queries, rows or columns:
many tiles a block, 100 repeats with the same bits, graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import kernelseam
import pytest
from kernelseam.contract import Device
from kernelseam.parity.matrix import named
from kernelseam.parity.running.run import Target, run_case, targets
from kernelseam.parity.running.stages import judge, prepare
from kernelseam.plugins import plugins
from kernelseam.samples.attention_bwd_case import BackwardCase
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.case import Case
from kernelseam.samples.product_case import ProductCase
from kernelseam.samples.projection_case import ProjectionCase
from kernelseam.variants import SEPARATOR

pytestmark = pytest.mark.gpu
pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
BACKEND = plugins().registry.backends.get("cuda")
if BACKEND is None or not BACKEND.runtime.devices():
    pytest.skip("gpu is missing: no NVIDIA device here", allow_module_level=True)
DEVICE: Device = BACKEND.runtime.devices()[0]
cupy = pytest.importorskip("cupy")

from bound_case import Held, configurations, precompile, unlike  # noqa: E402
from fast_cases import CASES  # noqa: E402

FAST = tuple(
    (t.implementation, t.operation)
    for t in targets(device=DEVICE)
    if t.implementation.startswith(("sm90", "decode", "gemv")) and DEVICE.arch == "sm_90a"
)
TIMES = 100
MATRIX = (
    "attention-f16-64",
    "attention-bf16-128",
    "attention-f16-64-causal-250x255",
    "attention-bf16-128-causal-250x250",
    "attention-f16-192v128",
    "attention-f16-256",
    "attention-f16-64-rises-far",
    "attention-f16-64-causal-sequences",
    "attention-bf16-128-causal-nan-in-hidden-v",
    "attention-f16-64-causal-nan-in-hidden-v",
    "attention-bwd-f16-64",
    "attention-bwd-bf16-128-causal",
    "attention-bwd-f16-64-causal-sequences",
    "attention-bwd-f16-256",
    "attention-bwd-bf16-256-window-softcap-sinks",
    "attention-bwd-f16-256-causal-sequences",
    "gemm-f16-nt",
    "gemm-bf16-nn-large",
    "gemm-f16-tn",
    "gemm-f32-nn-tf32",
    "gemm-f32-nt-tf32x3",
)
"""Cases of the matrix whose bits are looked at, too: one tile a block."""


CONFIGURATIONS = {
    name: {
        w: units
        for i, o in FAST
        if o == case.operation
        for w, units in configurations(case, DEVICE, i).items()
    }
    for name, case in {**CASES, **{n: named(n) for n in MATRIX}}.items()
}
"""Of each case: the configurations of the kernels that take it, and their binaries."""


PROJECTIONS = (
    "qkv_projection",
    "output_projection",
    "qkv_projection_bwd",
    "output_projection_bwd",
)
EVERY_WAY = (
    "attention-f16-64-many-tiles",
    "attention-f16-64-causal-many-tiles",
    "attention-bwd-f16-64-causal-many-tiles",
    "attention-bwd-bf16-128-causal-many-tiles",
    "gemm-f16-nt-many-tiles",
    "gemm-bf16-nn-many-tiles",
    "gemm-bf16-nt-many-tiles-added",
    "gemm-f16-nt-many-tiles-pointers",
    "gemm-bf16-nt-many-tiles-one-matrix",
    "gemm-f16-nt-many-tiles-to-f32",
    *(f"gemm-f32-{o}-many-tiles-{p}" for o in ("nn", "nt", "tt") for p in ("tf32", "tf32x3")),
)
"""Cases that every tile runs; the others run with the tile that is chosen for them."""


def _chosen(name: str, every: tuple[str, ...] = EVERY_WAY) -> list[str]:
    """The first configuration of each kernel that takes the case, or all."""
    known = CONFIGURATIONS[name]
    first = {w.partition(SEPARATOR)[0]: w for w in reversed(known)}
    return [w for w in known if name in every or w in first.values()]


def _pairs(names: Iterable[str], every: tuple[str, ...] = EVERY_WAY) -> list[Any]:
    return [
        pytest.param(configuration, CASES.get(name) or named(name), id=f"{name}-on-{configuration}")
        for name in names
        for configuration in _chosen(name, every)
    ]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """All at once, by every core."""
    configurations_run = [
        CONFIGURATIONS[name][configuration]
        for name in CONFIGURATIONS
        for configuration in _chosen(name)
    ]
    units = {repr(u): u for binaries in configurations_run for u in binaries}
    assert precompile.compile_all(list(units.values()), DEVICE) == []


def test_there_are_fast_kernels_where_they_belong() -> None:
    assert {
        ("sm90", "attention"),
        ("sm90", "attention_bwd"),
        ("sm90", "gemm"),
        ("sm90-tf32", "gemm"),
        ("sm90-e4m3", "attention"),
        ("sm90-latent", "attention"),
        ("decode", "attention"),
        ("gemv", "gemm"),
        *(("sm90", o) for o in PROJECTIONS),
    } <= set(FAST) or DEVICE.arch != "sm_90a"
    assert (
        len({configuration for found in CONFIGURATIONS.values() for configuration in found}) >= 7
        or DEVICE.arch != "sm_90a"
    ), "every GEMM tile"


@pytest.mark.parametrize(("implementation", "case"), _pairs(CASES))
def test_many_tiles_a_block_are_right(implementation: str, case: Case) -> None:
    outcome = run_case(case, Target(DEVICE, implementation, case.operation, builtin=False))
    outcome.require()
    assert outcome.status == "passed", outcome.detail


@pytest.mark.parametrize(("implementation", "case"), _pairs(CONFIGURATIONS))
def test_a_hundred_repeats_have_the_same_bits(implementation: str, case: Case) -> None:
    """Each from memory as it was made, beside the same on another stream."""
    if not getattr(case, "deterministic", True):
        pytest.skip("sums in any order: bits differ from launch to launch")
    assert unlike(case, DEVICE, implementation, TIMES) == 0


def _others_data(case: Case) -> Case:
    if isinstance(case, AttentionCase):
        return replace(case, ramp=True)
    if isinstance(case, BackwardCase):
        return replace(case, forward=replace(case.forward, ramp=True))
    if isinstance(case, ProjectionCase):
        return replace(case, data="positive")
    assert isinstance(case, ProductCase)
    return replace(case, data="positive" if case.data == "integers" else "integers")


@pytest.mark.parametrize(("implementation", "case"), _pairs(CASES, EVERY_WAY[:4]))
def test_a_graph_replays_the_same_bits_and_new_inputs(implementation: str, case: Case) -> None:
    """Captured before it ever ran; replayed over the inputs that it was captured with, then over
    others: the bits of a call without a graph. Sums in any order have no bits to compare: each
    replay is judged instead."""
    held = Held(case, DEVICE, implementation)
    in_order = getattr(case, "deterministic", True)
    other, stream = _others_data(case), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device(DEVICE.index).synchronize()
    with stream:
        stream.begin_capture()
        held.call(stream.ptr)
        graph = stream.end_capture()
        for data in (case, other):
            if data is other:
                held.refill(prepare(other))
            held.renew()
            held.call(stream.ptr)
            direct = held.bytes()
            for _ in range(3):
                held.renew()
                graph.launch(stream)
                if in_order:
                    assert not bool(held.differs(direct))
                else:
                    stream.synchronize()
                    verdict = judge(data, prepare(data), held.computed())
                    assert verdict.passed, verdict.message
        stream.synchronize()


@pytest.mark.skipif(DEVICE.arch != "sm_90a", reason=f"{DEVICE.arch} has no kernel of its own")
@pytest.mark.parametrize(("dim", "all_bits"), [(64, False), (128, True), (256, False)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_hidden_value_changes_no_bits_but_of_what_was_nan(
    dim: int, all_bits: bool, value: float
) -> None:
    """Rows that are made again (64, 256) keep what was right; where V is searched ahead (128), all
    is as it was."""
    keys, key, column = 300, 171, 5
    q, k, v = (
        cupy.random.default_rng(i).standard_normal((2, 4, keys, dim)).astype(cupy.float16)
        for i in range(3)
    )
    results = [kernelseam.attention(q, k, v, causal=True, return_lse=True, implementation="sm90")]
    v[:, :, key, column] = value
    results.append(
        kernelseam.attention(q, k, v, causal=True, return_lse=True, implementation="sm90")
    )
    (before, lse), (after, lse_after) = results
    assert bool((lse == lse_after).all())
    others = cupy.arange(dim) != column
    assert bool((before[..., others] == after[..., others]).all()), "other columns"
    seen, hidden = after[:, :, key:, column], after[:, :, :key, column]
    assert not bool(cupy.isfinite(seen).any())
    was = before[:, :, :key, column]
    assert float(abs(hidden.astype("f4") - was.astype("f4")).max()) <= 2e-3
    assert bool((hidden == was)[:, :, : key - 64].all()), "rows whose warps see no such key"
    assert not all_bits or bool((hidden == was).all())

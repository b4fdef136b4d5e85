"""Every kind of fault of a softmax that is guarded by its sums is caught by a case, which the right
one passes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from calibration import guarded_softmax, tile_model
from calibration import samples as calibration
from kernelseam.contract import Device
from kernelseam.dtypes import DType
from kernelseam.oracle import tolerances
from kernelseam.parity.cases.attention import attention_cases
from kernelseam.parity.cases.attention_guards import guards
from kernelseam.parity.matrix import named
from kernelseam.parity.running.run import Outcome, Target, run_case
from kernelseam.planning import forget
from kernelseam.plugins import plugins
from kernelseam.samples.attention_case import AttentionCase

BFLOAT16 = DType.bfloat16.numpy
FAULTS = {
    "limit-not-checked": "attention-f16-64-rises-sums",
    "nan-below-limit": "attention-bf16-64-from-nothing",
    "one-row-checked": "attention-f16-64-rises-sums-every-24",
    "one-lane-checked": "attention-f16-64-rises-sums-at-the-end",
    "infinite-by-sums": "attention-f16-64-rises-infinite",
    "masked-not-raised": "attention-f16-64-causal-rises-sums-twice",
    "rare-keeps-p": "attention-f16-128-rises-sums",
    "rare-keeps-o": "attention-bf16-64-rises-again-and-again",
    "rare-keeps-l": "attention-bf16-64-rises-again-and-again",
    "rare-first-row": "attention-f16-64-rises-sums-every-24",
    "rare-unscaled": "attention-f16-64-rises-infinite",
    "rare-by-sum": "attention-f16-128-faint",
    "half-leads": "attention-f16-128-faint",
}


@pytest.fixture
def host() -> Iterator[Device]:
    results = plugins().registry.implementations
    kept = list(results)
    yield plugins().backend("numpy").runtime.devices()[0]
    results[:] = kept
    forget()


def _run(host: Device, name: str, fault: str = "") -> Outcome:
    implementation = guarded_softmax.guarded(fault)
    plugins().registry.add_implementation(implementation)
    return run_case(named(name), Target(host, implementation.name, "attention", builtin=True))


def test_every_fault_has_its_case() -> None:
    assert set(FAULTS) == set(guarded_softmax.GUARDED_FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(host: Device, fault: str) -> None:
    right = _run(host, FAULTS[fault])
    assert right.status == "passed", right.detail
    wrong = _run(host, FAULTS[fault], fault)
    assert wrong.status == "failed", wrong.detail
    assert wrong.verdict is not None and wrong.verdict.worst > 4


WAYS = {
    "attention-f16-64-rises-sums": {"sums"},
    "attention-f16-64-rises-sums-at-the-end": {"sums"},
    "attention-bf16-128-rises-far": {"tops"},
    "attention-f16-128-rises-infinite-at-the-end": {"tops"},
    "attention-bf16-64-rises-again-and-again": {"sums"},
    "attention-f16-64-from-nothing": {"tops"},
    "attention-f16-64-rises-sums-every-24": {"sums"},
    "attention-f16-64-rises-nan-in-q": {"sums", "tops"},
    "attention-bf16-128-rises-inf-in-k": {"sums", "tops"},
    "attention-f16-128-faint": {"sums"},
    "attention-bf16-128-causal-rises-far": {"tops"},
    "attention-f16-64-causal-rises-sums": {"sums"},
    "attention-f16-128-rises-sums-early": {"sums"},
    "attention-f16-64-falls-infinite": set(),
    "attention-f16-64": set(),
    "attention-f16-64-causal-nan-in-hidden-v": set(),
}


@pytest.mark.parametrize("name", WAYS)
def test_cases_go_the_ways_that_they_name(
    host: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = set()
    for way in ("sums", "tops"):
        real = getattr(guarded_softmax, f"_rebase_by_{way}")
        monkeypatch.setattr(
            guarded_softmax,
            f"_rebase_by_{way}",
            lambda *a, way=way, real=real: (missing.add(way), real(*a))[1],
        )
    outcome = _run(host, name)
    assert outcome.status == "passed", outcome.detail
    assert missing == WAYS[name]


def test_a_lanes_columns_are_those_of_its_accumulator() -> None:
    """Element i of a thread belongs to its row i/2 % 2 and to column 8·(i/4) + 2·(lane % 4) + i %
    2."""
    rng = np.random.default_rng(1)
    p = rng.random((64, 128)).astype(np.float32)
    sums = guarded_softmax.lane_sums(p)
    for warp, lane in np.ndindex(4, 32):
        row = 16 * warp + lane // 4
        own = [(row + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2) for i in range(64)]
        for r in (row, row + 8):
            assert sums[r, lane % 4] == pytest.approx(
                sum(p[at] for at in own if at[0] == r), rel=1e-5
            )


def test_tiles_are_the_hopper_kernels() -> None:
    tiles = pytest.importorskip(
        "kernelseam_cuda.sm90.attention_tiles", reason="the CUDA plugin is not installed"
    )
    for head_dim in (64, 128, 192, 256):
        for hides in (True, False):
            assert guarded_softmax.tile(head_dim, hides) in [
                guarded_softmax.Tile(t.groups, t.bn, t.turns)
                for t in tiles.ATTENTION
                if t.head_dim == head_dim and t.hides in (None, hides)
            ]


def test_constants_are_the_hopper_kernels() -> None:
    toolchain = pytest.importorskip(
        "kernelseam_cuda.toolchain", reason="the CUDA plugin is not installed"
    )
    source = toolchain.sources()["sm90/attention/softmax.h"]
    assert f"constexpr float LIMIT = {guarded_softmax.LIMIT:.0f}.f;" in source
    assert (
        f"constexpr float LARGEST_SUM = {guarded_softmax.LARGEST_SUM:.0e}f;".replace("e+", "e")
        in source
    )
    assert f"int HEADROOM = 0, int RISE = {guarded_softmax.STAYS:.0f}>" in source


def test_cases_are_of_specs_that_others_compile() -> None:
    """They ask for numbers and for no kernels of their own, and their blocks are many."""

    def spec(c: AttentionCase) -> tuple[object, ...]:
        return c.dtype, c.head_dim, c.value_dim, c.causal, c.lse

    mine = {c.name for c in guards()}
    others = {spec(c) for c in attention_cases() if c.name.removesuffix("-ramp") not in mine}
    for c in guards():
        assert spec(c) in others and 300 <= c.S_k <= 700, c.name


def test_constants_have_room() -> None:
    rng = np.random.default_rng(7)
    samples = [s for _ in range(40) for s in calibration.guarded_samples(rng)]
    assert len(samples) == 40 and {s.kind.split()[-1] for s in samples} == {"float16", "bfloat16"}
    assert max(s.ratio for s in samples) < 1
    assert 0.1 < max(s.needed for s in samples) < tolerances.ATTENTION_CONSTANT / 2


@pytest.mark.parametrize(
    ("size", "finite"), [(2.0**103, True), (2.0**115, False)], ids=["within", "beyond"]
)
def test_how_large_values_may_be(size: float, finite: bool) -> None:
    """Below 2^113/S_k all is well; beyond it a weight of nearly 2^15 may overflow where an online
    softmax's is 1."""
    S_k, D = 512, 64
    q, k, v = (np.zeros((n, D), BFLOAT16) for n in (64, S_k, S_k))
    # one key of weight 2^13.7, which two rows of a thread may have
    q[:, 1], k[3, 1], v[...] = 8, 9.5, size
    with np.errstate(all="ignore"):
        guarded, _ = guarded_softmax.attention(q, k, v, False, 0.125)
        online, _ = tile_model.attention(q, k, v, False, 0.125)
    assert np.isfinite(online.astype(np.float32)).all()
    assert np.isfinite(guarded.astype(np.float32)).all() == finite

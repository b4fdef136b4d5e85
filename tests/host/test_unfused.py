"""gemm-softmax-gemm on the host platform: three launches whatever the extents, against oracle and
fused kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam.contract import Device, DeviceLimits
from kernelseam.descriptors import Attention
from kernelseam.dtypes import DType
from kernelseam.errors import Unsupported
from kernelseam.kernels import shared_implementations
from kernelseam.kernels.attention.unfused import Unfused, UnfusedAttention
from kernelseam.oracle import check
from kernelseam.parity.matrix import matrix, named
from kernelseam.parity.running.run import Target, run_case
from kernelseam.planning import plan
from kernelseam.plugins import Plugins
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.common import DECODE, NAN_EXEMPTIONS, PREFIX_GROUPS, UNFUSED
from kernelseam_hostcpp import HostArray, HostToolchain
from kernelseam_hostcpp.executable import problem_of
from kernelseam_hostcpp.runtime import DEVICES

KERNELS = ["gemm", "softmax", "gemm"]
RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float16)


def target(device: Device = DEVICES[0]) -> Target:
    return Target(device, UNFUSED, "attention", builtin=True)


def test_the_case_the_project_started_from(hostcpp: Plugins) -> None:
    """16 entries of 16 heads with 32 pages of keys end to end, the last page short: as nested
    loops, a product, a softmax and a product for each page."""
    batch, heads, pages, size, dim, queries = 16, 16, 32, 4, 16, 3
    loops = [(b, h, page) for b in range(batch) for h in range(heads) for page in range(pages)]
    assert len(loops) * len(KERNELS) == 24_576
    keys = pages * size - 1
    q, k, v = (
        normal(batch, heads, queries, dim),
        *(normal(batch, heads, pages, size, dim) for _ in range(2)),
    )
    for x in (k, v):
        x[:, :, -1, size - 1] = np.nan  # behind the last key lies no operand
    ends = [x.reshape(batch, heads, pages * size, dim)[:, :, :keys] for x in (k, v)]
    assert all(x.base is not None and not x.flags.c_contiguous for x in ends), (
        "no copy: one row stride over all pages"
    )
    actual = {}
    for name, kernels in ((UNFUSED, KERNELS), ("shared", ["attention_forward"])):
        with kernelseam.trace() as launches:
            out, lse = kernelseam.attention(
                *(HostArray(x) for x in (q, *ends)),
                layout="bhsd",
                return_lse=True,
                implementation=name,
            )
        assert [r.kernel for r in launches] == kernels
        assert all(r.kind == "kernel" for r in launches)
        verdict = check.attention(q, *ends, out.host, lse.host, causal=False)
        assert verdict.passed, verdict.message
        actual[name] = out.host.astype(float), lse.host
    (a, a_lse), (b, b_lse) = actual.values()
    np.testing.assert_allclose(a, b, atol=2e-3)
    np.testing.assert_allclose(a_lse, b_lse, atol=1e-5)


@pytest.mark.parametrize(
    ("batch", "heads", "keys"), [(1, 1, 1), (1, 40, 9), (33, 2, 70), (3, 1, 300)]
)
def test_three_launches_whatever_the_extents(
    hostcpp: Plugins, batch: int, heads: int, keys: int
) -> None:
    q, k, v = normal(batch, heads, 5, 16), *(normal(batch, heads, keys, 16) for _ in range(2))
    with kernelseam.trace() as launches:
        out = kernelseam.attention(
            *(HostArray(x) for x in (q, k, v)), layout="bhsd", implementation=UNFUSED
        )
    assert [r.kernel for r in launches] == KERNELS
    verdict = check.attention(q, k, v, out.host, causal=False)
    assert verdict.passed, verdict.message


EDGES = (
    "attention-f16-64-mask-rows",
    "attention-f16-64-minus-inf-all",
    "attention-f16-64-causal-masked-rows",
)
"""Rows without a key that weighs anything, for each reason there is."""


def _other_rows(case: AttentionCase) -> bool:
    """Packed, in pages or anywhere."""
    return case.view != "strided" or bool(case.page_size) or case.q_sequences is not None


def _parameters() -> Iterator[object]:
    """By default the edges, and the cases that have a value in a field of the spec, beside its head
    dims, which none before had; on the other arch slow."""
    for device in DEVICES:
        seen: set[object] = set()
        for case in matrix(operation="attention"):
            assert isinstance(case, AttentionCase)
            if UNFUSED in case.may_refuse and (case.precision is None or _other_rows(case)):
                continue
            spec = problem_of(case, DEVICES[0]).spec
            dims = ("head_dim", "value_dim")
            values = {(f.name, getattr(spec, f.name)) for f in fields(spec) if f.name not in dims}
            new = values - seen
            slow = (not new and case.name not in EDGES) or device is not DEVICES[0]
            slow |= case.batch * case.num_heads > 2000
            seen |= set() if slow else new
            yield pytest.param(
                case,
                device,
                id=f"{case.name}-on-{device.arch}",
                marks=[pytest.mark.slow("no value of the spec is new")] if slow else [],
            )


@pytest.mark.parametrize(("case", "device"), list(_parameters()))
def test_parity(hostcpp: Plugins, case: AttentionCase, device: Device) -> None:
    outcome = run_case(case, target(device))
    outcome.require()
    if case.exempt:
        assert outcome.status == "refused" and outcome.detail == dict(NAN_EXEMPTIONS)[UNFUSED]
        pytest.skip(f"it does not promise what the case asks: {outcome.detail}")
    assert outcome.verdict is not None and outcome.verdict.worst <= 1


@pytest.mark.parametrize(
    "name", ["attention-f16-64-mask-keys-nan-in-v", "attention-f16-64-window-nan-in-hidden-v"]
)
def test_a_masked_value_that_is_not_finite_leaks_as_documented(hostcpp: Plugins, name: str) -> None:
    """An exemption that is no longer needed fails here."""
    case = named(name)
    assert isinstance(case, AttentionCase) and case.exempt == NAN_EXEMPTIONS
    outcome = run_case(replace(case, exempt=()), target())
    assert outcome.status == "failed" and outcome.verdict is not None
    assert "nan" in outcome.verdict.message


def test_no_keys_are_one_launch_and_zeros(hostcpp: Plugins) -> None:
    """No scores to make: the softmax writes the LSE, the second product's sum is empty."""
    q, k = normal(2, 2, 3, 16), normal(2, 2, 0, 16)
    with kernelseam.trace() as launches:
        out, lse = kernelseam.attention(
            *(HostArray(x) for x in (q, k, k)),
            layout="bhsd",
            return_lse=True,
            implementation=UNFUSED,
        )
    assert [r.kernel for r in launches] == ["softmax", "gemm"]
    assert not out.host.any() and np.isneginf(lse.host).all()


def test_small_probabilities_are_not_lost_in_float16(hostcpp: Plugins) -> None:
    """Among 30000 keys each has a probability below the smallest normal float16."""
    q, k = np.zeros((1, 1, 1, 16), np.float16), np.zeros((1, 1, 30_000, 16), np.float16)
    v = (1 + np.arange(16, dtype=np.float16) / 16) * np.ones((1, 1, 30_000, 1), np.float16)
    out = kernelseam.attention(
        *(HostArray(x) for x in (q, k, v)), layout="bhsd", implementation=UNFUSED
    ).host
    verdict = check.attention(q, k, v, out, causal=False)
    assert verdict.passed, verdict.message


@pytest.mark.parametrize("invariant", [False, True])
def test_batch_invariance_is_one_tile_whatever_the_extents(invariant: bool) -> None:
    """Tiles of other sizes sum in another order."""
    row = HostToolchain().arch_row("host")
    (small,) = (t for t in row.tiles["gemm"] if DType.float16 in t.dtypes and t.teams == 1)
    row = replace(row, tiles={"gemm": (replace(small, bm=128, bn=128, bk=64), small)})
    chosen = {
        Unfused().tile(
            Attention(
                batch=n,
                num_heads=2,
                S_q=256,
                S_k=256,
                head_dim=64,
                dtype="float16",
                batch_invariant=invariant,
            ).problem(),
            row,
            replace(DEVICES[0], limits=DeviceLimits(compute_units=64)),
        )
        for n in (1, 64)
    }
    assert len(chosen) == (1 if invariant else 2)


INTS = np.zeros(8, np.int32)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "paged": (
        {"block_table": INTS[:4].reshape(2, 2), "kv_lengths": INTS[:2], "kv_layout": "hnd"},
        (
            r"k and v are paged: it takes pages that lie end to end, .* block tables and gapped "
            r"pages are refused"
        ),
    ),
    "lengths": (
        {"kv_lengths": INTS[:2]},
        r"kv_lengths: its products take as many keys for every entry of the batch",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_it_refuses_by_name(hostcpp: Plugins, name: str) -> None:
    options, words = REFUSED[name]
    q, k = normal(2, 2, 3, 16), normal(2, 2, 8, 16)
    given = {n: HostArray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    descriptor = Attention.from_arrays(
        *(HostArray(x) for x in (q, k, k, np.zeros_like(q))), **given
    )
    with pytest.raises(Unsupported, match=f"gemm-softmax-gemm.*{words}"):
        plan(descriptor, implementation=UNFUSED)
    assert plan(descriptor).implementation == "shared"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("attention-f64-32-causal", "it has no float64"),
        ("attention-f16-64-causal-sequences", "q are packed: it takes strided rows"),
    ],
)
def test_dtypes_and_views_that_it_refuses(case: str, words: str) -> None:
    problem = problem_of(named(case), DEVICES[0])
    assert UnfusedAttention(HostToolchain()).supports(problem, DEVICES[0]) == words


def test_scores_that_memory_does_not_hold_are_refused() -> None:
    descriptor = Attention(batch=2, num_heads=4, S_q=1000, S_k=1001, head_dim=64, dtype="float16")
    scores = 2 * 4 * 1000 * 1008  # rows padded to 8 elements
    unfused = UnfusedAttention(HostToolchain())
    assert unfused.launches(descriptor.problem(), DEVICES[0]).workspace_bytes == scores * (4 + 2)
    for memory, fits in ((scores * 6, True), (scores * 6 - 1, False)):
        device = replace(DEVICES[0], limits=replace(DEVICES[0].limits, memory_bytes=memory))
        expected = (
            f"it needs a workspace of {scores * 6} bytes, more than the device's memory, {memory}"
        )
        assert unfused.supports(descriptor.problem(), device) == (None if fits else expected)
    alone = Attention(batch=2, num_heads=4, S_q=1000, S_k=1001, head_dim=64, dtype="float32")
    assert unfused.launches(alone.problem(), DEVICES[0]).workspace_bytes == scores * 4, (
        "probabilities in their place"
    )


def test_it_is_the_last_resort() -> None:
    """Whatever is predicted, dispatch does not take it where a fused kernel takes the problem."""
    shared = [i for i in shared_implementations(HostToolchain()) if i.operation == "attention"]
    last = [i.name for i in shared if getattr(i, "last_resort", False)]
    assert [i.name for i in shared] == ["shared", DECODE, PREFIX_GROUPS, UNFUSED]
    assert last == [UNFUSED]

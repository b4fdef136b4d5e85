"""Cases of the parity matrix on emulated devices, and what the page of them covers."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from kernelseam.contract import EMULATED, Device
from kernelseam.dispatch import consider
from kernelseam.dtypes import E4M3, DType
from kernelseam.parity.matrix import matrix
from kernelseam.parity.running.run import targets
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.common import PREFIX_GROUPS, UNFUSED
from kernelseam.samples.operations.operands import problem_of

pytest.importorskip("kernelseam_rocm_emulator", reason="kernelseam-rocm-emulator is not installed")
import emulated_parity as page  # noqa: E402
from kernelseam_rocm import archs, plugin  # noqa: E402
from kernelseam_rocm_emulator import checkout  # noqa: E402
from kernelseam_rocm_emulator.devices import devices  # noqa: E402

ARCHS = ["gfx942", "gfx950", "gfx1100", "gfx1201", "gfx1151", "gfx1200"]


def emulated(arch: str) -> Device:
    """The arch's device; skips the test where there is none."""
    result = checkout.find()
    if isinstance(result, str):
        pytest.skip(f"tinygrad is missing: {result}")
    try:
        plugin.backend().toolchain.compiler()  # type: ignore[union-attr]
    except Exception as e:
        pytest.skip(f"hiprtc is missing: {e}")
    return next(
        d for d in plugin.backend().runtime.devices() if d.arch == arch and d.evidence == EMULATED
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_what_archs_do_not_have_is_no_error(arch: str) -> None:
    """Cases of TF32 and of 8 bits: parity says of a card that it refuses them, not that it
    fails."""
    device = archs.row(arch).product
    assert device is not None
    own = [t.implementation for t in targets(device=device)
           if t.builtin and t.operation == "attention"]  # fmt: skip
    assert {"shared", UNFUSED, PREFIX_GROUPS} <= set(own)
    for case in matrix(operation="attention"):
        assert isinstance(case, AttentionCase)
        if case.precision is None and (case.dtype_kv is None or case.prefix_groups is None):
            continue
        problem = problem_of(case, plugin.backend().runtime, device)
        for name in own:
            (c,) = consider(problem, device, name=name)
            assert c.refusal is None or name in case.may_refuse, (case.name, name, c.refusal)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "name",
    [
        "gemm-f16-nt",
        "attention-f16-64-causal-7x129-ramp",
        "attention-f16-64-pages-16",
        "attention-f16-64-causal-bias-f32-gqa",
        "attention-bwd-f16-64-causal-33x129",
    ],
)
def test_parity(name: str, arch: str) -> None:
    from kernelseam.launch_trace import trace
    from kernelseam.parity.matrix import named
    from kernelseam.parity.running.run import run_case, targets

    device, case = emulated(arch), named(name)
    (target,) = (
        t
        for t in targets(device=device)
        if t.implementation == "shared" and t.operation == case.operation
    )
    with trace() as records:
        run_case(case, target).require()
    assert {(r.arch, r.evidence) for r in records} == {(arch, "emulated")}


@pytest.mark.parametrize("name", ["nn", "tt-integers", "nt-added"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1201"])
def test_parity_of_factors_of_8_bits(name: str, arch: str) -> None:
    from kernelseam.parity.matrix import named
    from kernelseam.parity.running.run import Target, run_case

    kind = "e4m3fnuz" if arch == "gfx942" else "e4m3fn"
    outcome = run_case(
        named(f"gemm-{kind}-{name}"), Target(emulated(arch), "shared", "gemm", False)
    )
    outcome.require()
    assert outcome.refusal is None


def test_the_cases_of_the_page_exist() -> None:
    chosen = [(name, group.implementation) for group in page.GROUPS for name in group.cases]
    assert {name for name, _ in chosen} <= set(page.cases()) and len(set(chosen)) == len(chosen)
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.LIMITS in text and page.INTRODUCTION in text
    assert "\n".join(page.covered(page.GROUPS)) in text
    operations = list(page.by_operation(page.GROUPS))
    assert operations == [
        "gemm",
        "grouped_gemm",
        "grouped_gemm_pointers",
        "paged_cache",
        "attention",
        "attention as decode",
        "attention as gemm-softmax-gemm",
        "attention_bwd",
        "merge_states",
        "qkv_projection",
        "output_projection",
        "qkv_projection_bwd",
        "output_projection_bwd",
    ]
    assert set(page.ARCHS) < set(ARCHS)
    assert not any(f"| {arch} |" in text for arch in set(ARCHS) - set(page.ARCHS))
    for arch in page.ARCHS:
        groups_of = page.taken(page.GROUPS, archs.row(arch))
        for what, groups in page.by_operation(groups_of).items():
            n = sum(len(g.cases) for g in groups)
            assert f"| {arch} | {what} | {n} | {n} |" in text, "every case passed"


def test_what_the_page_covers_of_attention() -> None:
    """Every view, every option, every dtype and both roles of few queries, forward and backward."""
    from kernelseam.samples.attention_bwd_case import BackwardCase
    from kernelseam.samples.attention_case import AttentionCase

    cases = [
        page.cases()[name]
        for group in page.GROUPS
        for name in group.cases
        if group.implementation == "shared"
    ]
    forward = [c for c in cases if isinstance(c, AttentionCase)]
    backward = [c.forward for c in cases if isinstance(c, BackwardCase)]
    for actual, halves in ((forward, ("page_size", "prefix", "mask")), (backward, ())):
        assert {c.dtype for c in actual} == {DType.float16, DType.bfloat16, DType.float32}
        for option in (
            "causal",
            "window",
            "alibi",
            "softcap",
            "bias",
            "sinks",
            "kv_lengths",
            *halves,
        ):
            assert any(getattr(c, option) for c in actual), option
        assert any(0 in (c.q_sequences or ()) for c in actual) and any(
            0 in (c.k_sequences or ()) for c in actual
        )
        assert any(c.num_heads > c.kv_heads for c in actual)
    paged = [c for c in forward if c.page_size]
    assert {c.page_size for c in paged} == {1, 16, 48, 256} and {c.S_q == 1 for c in paged} == {
        True,
        False,
    }
    assert any(n % c.page_size for c in paged for n in c.kv_lengths or ())
    assert any(c.view == "device" for c in forward) and any(c.bias_data == "holes" for c in forward)
    stored = [c for c in forward if c.dtype_kv]
    assert {c.dtype_kv for c in stored} == set(E4M3)
    assert any(c.page_size for c in stored) and any(c.k_sequences for c in stored)
    gradients = [c for c in cases if isinstance(c, BackwardCase)]
    assert any(c.bias_gradient for c in gradients) and any(c.sink_gradient for c in gradients)
    assert {c.deterministic for c in gradients} == {True, False}


def test_what_the_page_covers_of_products() -> None:
    """What a GEMM adds and sums, and both projections both ways."""
    from kernelseam.samples.gemm_case import GemmCase
    from kernelseam.samples.projection_case import ProjectionCase

    cases = [page.cases()[name] for group in page.GROUPS for name in group.cases]
    gemms = [c for c in cases if isinstance(c, GemmCase)]
    summed = [c for c in gemms if c.c_batch_group > 1 or c.c_head_group > 1]
    assert {c.dtype for c in gemms if c.bias and c.residual} == {
        DType.float16,
        DType.bfloat16,
        DType.float32,
    }
    assert {c.view for c in summed if c.bias and c.residual} == {"strided", "host"}
    assert any(c.c_batch_group > 1 and c.c_head_group > 1 for c in summed) and any(
        c.dtype_c for c in summed
    )
    assert any(c.in_place for c in gemms) and any(c.dtype_c for c in gemms if c.bias)
    projections = [c for c in cases if isinstance(c, ProjectionCase)]
    forward = [c for c in projections if c.operation == "qkv_projection"]
    assert {c.rotary for c in forward} == {"", "halves", "pairs"} and any(
        0 < c.rotated < c.head_dim for c in forward
    )
    assert {c.operand_layout("q").order for c in forward} == {"bhr", "brh"}
    assert {bool(c.page_size) for c in forward} == {True, False}
    for operation, rows in (
        ("output_projection", "attn_out"),
        ("output_projection_bwd", "attn_out"),
        ("qkv_projection_bwd", "dq"),
    ):
        actual = [c for c in projections if c.operation == operation]
        assert {c.operand_layout(rows).order for c in actual} == {"bhr", "brh"} and any(
            c.bias for c in actual
        )
        assert {c.dtype for c in actual} >= {DType.float16, DType.float32}
        assert not operation.endswith("bwd") or any(
            len(c.gradients) == 2 and c.bias for c in actual
        )
    assert any(c.residual and c.operand_layout("attn_out").order == "bhr" for c in projections)


@pytest.mark.parametrize("device", devices(0, 2**30), ids=str)
def test_the_page_covers_blocks_of_several_tiles(device: Device) -> None:
    from kernelseam.kernels import COMPOSITIONS
    from kernelseam.samples.operations.operands import describe, layout

    host, row = page.plugins().backend("numpy").runtime, archs.row(device.arch)
    actual = set()
    for case in (page.cases()[name] for group in page.GROUPS for name in group.cases):
        if case.operation in ("gemm", "qkv_projection_bwd"):
            lay = layout(case)
            at = {
                n: 2**20 + lay.blocks()[p.block][1] + p.offset * p.dtype.itemsize
                for n, p in lay.placements.items()
            }
            created, _ = describe(case, lay, at, host, host.devices()[0]).simplified()
            problem, composition = created.problem(), COMPOSITIONS[case.operation]
            for launch in composition.launches(
                problem, composition.tile(problem, row, device), device
            ).steps:
                spec = launch.problem.spec
                if getattr(launch.tile, "teams", 1) > 1:
                    actual.add(
                        (
                            spec.dtype,
                            spec.summed,
                            bool(spec.bias and spec.residual),
                            bool(spec.row_sums),
                        )
                    )
    half = DType.float16
    if row.warp_size == 64:
        # There blocks are shared by thousands of matrices alone, more than an emulator runs.
        assert not actual
        return
    assert actual == {
        (half, False, True, False),
        (half, True, False, False),
        (DType.float32, True, False, False),
        (half, True, False, True),
    }


def test_a_part_of_the_page_is_run_by_name(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert page.chosen(()) is page.GROUPS
    actual = page.chosen(("*pages-48*", "attention-bwd-f16-80v64"))
    assert [g.implementation for g in actual] == ["shared", "shared", "decode", "shared"]
    assert [(g.about, g.cases) for g in actual] == [
        ("pages of 1, 16, 48 and 256 keys, one query", ("attention-f16-64-pages-48",)),
        (
            "pages, several queries",
            (
                "attention-bf16-128-causal-pages-48-gqa",
                "attention-f16-64-causal-pages-48-window-sinks",
            ),
        ),
        (
            "one launch for all keys: rows of several heads, packed queries, values that are NaN",
            ("attention-bf16-128-causal-pages-48-gqa",),
        ),
        ("dense", ("attention-bwd-f16-80v64",)),
    ]
    device = Device("rocm", 0, "gfx942", evidence=EMULATED)
    monkeypatch.setattr(page.plugins().backend("rocm").runtime, "devices", lambda: (device,))
    for arguments, message in (
        (["--write", "--case", "*pages*"], "--write goes with neither --arch nor --case"),
        (["--case", "no-such-case"], "no case here has such a name: no-such-case"),
        (["--arch", "gfx90a"], "invalid choice: 'gfx90a'"),
    ):
        monkeypatch.setattr(sys, "argv", ["emulated_parity.py", *arguments])
        with pytest.raises(SystemExit):
            page.main()
        assert message in capsys.readouterr().err

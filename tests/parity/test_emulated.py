"""A covering choice of cases on every emulated AMD device, where KERNELSEAM_TINYGRAD names the
emulator. Each operand is an allocation of its own that ends at a guard page: a read behind a last
row ends the launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from kernelseam import attention, attention_paged, planning
from kernelseam.contract import EMULATED, Device
from kernelseam.dtypes import DType
from kernelseam.errors import CompileError
from kernelseam.oracle import check
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import PLAIN, Variant
from kernelseam.parity.matrix import named
from kernelseam.parity.running.run import Outcome, run_case, targets
from kernelseam.plugins import plugins

plugin = pytest.importorskip(
    "kernelseam_rocm.plugin", reason="hiprtc is missing: kernelseam-rocm is not installed"
)
from kernelseam_rocm_emulator import checkout  # noqa: E402

FOUND = checkout.find()
if not isinstance(FOUND, checkout.Checkout):
    pytest.skip(f"no emulator: {FOUND}", allow_module_level=True)
TOOLCHAIN: Any = plugin.backend().toolchain
try:
    TOOLCHAIN.compiler()
except CompileError as e:
    pytest.skip(f"hiprtc is missing: {e.log}", allow_module_level=True)

from mutant import Mutant  # noqa: E402

DEVICES = [d for d in plugins().backend("rocm").runtime.devices() if d.evidence == EMULATED]
OF_EACH_KIND = [d for d in DEVICES if d.arch in ("gfx942", "gfx950", "gfx1100", "gfx1201")]
CASES = (
    "gemm-f16-nt",
    "gemm-f16-tn",
    "gemm-bf16-nn-ragged-65x129x7",
    "gemm-f16-nt-unaligned",
    "gemm-f32-nn",
    "gemm-f16-nt-pointers",
    "gemm-f16-nt-sum-both",
    "gemm-f16-nt-310-of-13x11x9-bias-residual",
    "attention-f16-64-causal-65x65",
    "attention-bf16-128",
    "attention-f32-64-causal",
    "attention-f16-64-everything",
    "attention-f16-64-pages-16",
    "attention-f16-64-causal-sequences-gqa",
    "attention-f16-64-split-pages",
    "attention-bwd-f16-64-gqa-6-2",
    "attention-bwd-f16-64-causal-any-order",
    "attention-bwd-f16-64-bias-voids",
    "attention-bwd-f16-33v7",
    "merge-states-f32-f16",
    "qkv-projection-f16-rotary-halves",
    "qkv-projection-f16-pages-24-rotary",
    "output-projection-f16-bias-residual",
    "qkv-projection-bwd-f16-bias",
    "output-projection-bwd-f16-bias",
)
"""Of every operation: dtypes, transposes, views of memory, options, teams, atomics, several
launches."""


def _run(name: str, device: Device, implementation: str = "shared") -> Outcome:
    case = named(name)
    target = next(
        t
        for t in targets(device=device)
        if (t.operation, t.implementation) == (case.operation, implementation)
    )
    return run_case(case, target, separate=True)


@contextmanager
def _files(planted: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is planned within is compiled of these files."""
    monkeypatch.setattr(TOOLCHAIN, "platform_files", lambda arch: planted)
    planning.forget()
    try:
        yield
    finally:
        planning.forget()


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.arch)
@pytest.mark.parametrize("name", CASES)
def test_a_covering_choice(name: str, device: Device) -> None:
    _run(name, device).require()


WRITTEN = (
    "attention-bf16-128-mod-buckets-paged",
    "attention-bf16-128-mod-documents-blocks",
    "attention-bf16-128-mod-prefix-blocks-decoding",
    "gemm-f16-nt-epilogue-gated_options-ragged",
    "grouped-gemm-bf16-m-nn",
    "grouped-gemm-bf16-m-nn-epilogue-swiglu",
)
"""Scores, masks and epilogues of users, blocks that are passed over, and groups of products."""


@pytest.mark.parametrize("device", OF_EACH_KIND, ids=lambda d: d.arch)
@pytest.mark.parametrize("name", WRITTEN)
def test_functions_of_users_and_groups(name: str, device: Device) -> None:
    outcome = _run(name, device)
    outcome.require()
    assert outcome.refusal is None


STORED_CASES = (
    "attention-bf16-128-causal-%-q-blocks",
    "attention-f16-64-%-q-pages-blocks",
    "attention-bf16-64-%-q-nan",
    "gemm-%-nt-blocks-1x128x128",
    "gemm-%-nt-blocks-ragged",
)
"""Queries of 8 bits, and products with scales of blocks."""
OWN_STORED = [(d, s) for d in DEVICES for s in TOOLCHAIN.arch_row(d.arch).fp8_dtypes]


@pytest.mark.parametrize(("device", "stored"), OWN_STORED, ids=lambda x: getattr(x, "arch", x))
@pytest.mark.parametrize("name", STORED_CASES)
def test_of_8_bits(name: str, device: Device, stored: DType) -> None:
    outcome = _run(name.replace("%", stored.value.removeprefix("float8_")), device)
    outcome.require()
    assert outcome.refusal is None


BEYOND = (
    Mutant(
        "rows-beyond-the-last",
        "copy.h",
        "(wanted < most ? wanted : most)",
        "wanted",
        "gemm-f16-nt",
        "",
        "rows behind an operand's last one are read",
    ),
    Mutant(
        "chunks-beyond-the-end",
        "copy.h",
        "(EXACT ? column : min_of(column, cols_left - V) + BEFORE) * SIZE",
        "(column + BEFORE) * SIZE",
        "gemm-f16-nt",
        "",
        "chunks behind a row's end are read",
    ),
)


@pytest.mark.parametrize(
    "device", [d for d in DEVICES if d.arch in ("gfx942", "gfx1100")], ids=lambda d: d.arch
)
@pytest.mark.parametrize("mutant", BEYOND, ids=lambda m: m.name)
def test_a_read_behind_an_operand_ends_at_its_guard(
    mutant: Mutant, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _files(mutant.planted(dict(TOOLCHAIN.platform_files(device.arch))), monkeypatch):
        outcome = _run(mutant.case, device)
    assert outcome.status == "error", outcome.detail
    assert "DeviceError: kernel gemm on " in outcome.detail, outcome.detail
    assert " behind the end of an allocation of device memory" in outcome.detail, outcome.detail


TF32_CASES = (
    "gemm-f32-nt-tf32x3-ragged-65x129x7",
    "gemm-f32-tn-tf32",
    "gemm-f32-nn-tf32x3-inf-in-a",
    "grouped-lists-f32-nn-tf32",
    "grouped-gemm-f32-k-tn-tf32x3",
)


@pytest.mark.parametrize("device", [d for d in DEVICES if d.arch == "gfx942"], ids=lambda d: d.arch)
@pytest.mark.parametrize("name", TF32_CASES)
def test_float32_by_way_of_tf32(name: str, device: Device) -> None:
    outcome = _run(name, device)
    outcome.require()
    assert outcome.refusal is None


# ---------------------------------------------------------------- decode

DECODED = (
    "attention-bf16-128-causal-pages-48-gqa",
    "attention-f16-64-pages-16-nan-in-v",
    "attention-f16-64-causal-pages-16-sequences",
    "attention-f16-64-split-pages",
)
"""Several rows of a head, values that are not finite, packed queries, keys of several blocks."""


@pytest.mark.parametrize("device", OF_EACH_KIND, ids=lambda d: d.arch)
@pytest.mark.parametrize("name", DECODED)
def test_pages_are_decoded(name: str, device: Device) -> None:
    outcome = _run(name, device, "decode")
    outcome.require()
    assert outcome.refusal is None


DECODE_MUTANTS = (
    Mutant(
        "uniform-values-of-32-lanes",
        "platform_amd.h",
        "WARP == 64 ? x : __builtin_amdgcn_readfirstlane(x)",
        "WARP == 64 ? x : __builtin_amdgcn_readfirstlane(x + 1)",
        "attention-f16-64-split-pages",
        "",
        "uniform values of 32 lanes are others",
    ),
    Mutant(
        "addresses-in-lanes",
        "platform_amd.h",
        "Two{opaque(y.lo), opaque(y.hi)}",
        "Two{opaque(y.lo) + 128, opaque(y.hi)}",
        "attention-f16-64-split-pages",
        "",
        "addresses that 64 lanes keep are others",
    ),
)


@pytest.mark.parametrize(
    ("mutant", "arch"),
    zip(DECODE_MUTANTS, ("gfx1100", "gfx942"), strict=True),
    ids=lambda x: getattr(x, "name", x),
)
def test_what_is_planted_where_the_kinds_of_lanes_differ_is_found(
    mutant: Mutant, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = next(d for d in DEVICES if d.arch == arch)
    with _files(mutant.planted(dict(TOOLCHAIN.platform_files(arch))), monkeypatch):
        outcome = _run(mutant.case, device, "decode")
    assert outcome.status in ("failed", "error") and outcome.refusal is None, outcome.detail


# ---------------------------------------------------------------- kernels of one arch

GFX950 = [d for d in DEVICES if d.arch == "gfx950"]
OWN_CASES = (
    "attention-f16-64",
    "attention-bf16-128-causal",
    "attention-f16-64-gqa-6-2",
    "attention-f16-64-causal-sequences",
    "attention-f16-64-causal-nan-in-hidden-v",
    "attention-f16-64-extreme",
    "attention-f16-64-causal-lengths",
    "attention-f16-64-causal-window-33-any",
    "attention-f16-64-window-nan-in-hidden-v",
    "attention-f16-64-causal-pages-16",
)


@pytest.mark.parametrize("device", GFX950, ids=lambda d: d.arch)
@pytest.mark.parametrize("name", OWN_CASES)
def test_the_attention_of_gfx950(name: str, device: Device) -> None:
    _run(name, device, "gfx950").require()


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (700, None)},
    "pages": {"causal": True},
    "pages, window": {"causal": True, "window": (700, None)},
}


def _long(device: Device, dim: int, kind: str) -> Verdict:
    """More keys than the matrix has: the loop of three tiles, whose rings turn more than once, and
    the largest scores late, so that rows are rescaled there. Pages hold NaN where no key is, and
    so does a page that no entry of the table names."""
    S_q, S_k, heads, kv_heads = 40, 1100 if dim == 128 else 1900, 2, 1
    rng, runtime = np.random.default_rng(5), plugins().backend("rocm").runtime
    q = rng.standard_normal((1, heads, S_q, dim)).astype(np.float16)
    k, v = (rng.standard_normal((1, kv_heads, S_k, dim)).astype(np.float16) for _ in "kv")
    k *= (1 + np.arange(S_k) / S_k)[:, None].astype(np.float16)
    options = {"return_lse": True, "implementation": "gfx950", **KINDS[kind]}
    if "pages" in kind:
        page = 16
        table = rng.permutation(1 + -(-S_k // page)).astype(np.int32)[:-1]
        pages = [_in_pages(x[0, 0], table, page)[:, :, None] for x in (k, v)]
        lengths = np.array([S_k], np.int32)
        given, call = (q, *pages, table[None], lengths), attention_paged
        options |= {"causal": KINDS[kind].get("causal", False), "layout": "bhsd"}
    else:
        given, call = (q, k, v), attention
    out, lse = call(*(runtime.from_host(x, device) for x in given), **options)
    return check.attention(
        q,
        k,
        v,
        runtime.to_host(out),
        runtime.to_host(lse),
        causal="causal" in KINDS[kind],
        rows=None,
        variant=Variant(window=(700, 0)) if "window" in kind else PLAIN,
    )


def _in_pages(rows: Any, table: Any, page: int) -> Any:
    pages = np.full((len(table) + 1, page, rows.shape[1]), np.nan, rows.dtype)
    for j, row in enumerate(rows):
        pages[table[j // page], j % page] = row
    return pages


@pytest.mark.parametrize("device", GFX950, ids=lambda d: d.arch)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 128])
def test_many_keys_on_gfx950(dim: int, kind: str, device: Device) -> None:
    verdict = _long(device, dim, kind)
    assert verdict.passed, verdict.message


PLANTED = {
    "rows whose maximum moved keep old sums": ("o[d] *= fade;", ";", "causal"),
    "values are read from other columns' places": (
        "((2 * g + i % 4 / 2) ^ v_permutation(row))",
        "((2 * g + i % 4 / 2) ^ v_permutation(row + 1))",
        "causal",
    ),
    "hidden keys are seen": ("tile < clear;", "tile <= clear;", "causal"),
    "keys are overwritten before they are read": (
        "K.copy(ring + n * TILE, ahead);",
        "K.copy(ring + NEXT * TILE, ahead);",
        "causal",
    ),
    "keys beyond the last are seen": (
        "return seen.visible(0, mine, k_first + tile * BN + j);",
        "return tile * BN + j >= 0;",
        "full",
    ),
    "keys before a window are seen": ("tile >= opens)", "tile >= opens - 1)", "window"),
    "the ring turns where it is not at its first place": (
        "divide_up(full, 3) * 3",
        "divide_up(full, 3) * 3 - 1",
        "window",
    ),
    "values come from the pages of the next tile": (
        "V.copy(ring + V_RING + AFTER * TILE, behind);",
        "V.copy(ring + V_RING + AFTER * TILE, ahead);",
        "pages",
    ),
}
"""By what is wrong: what stands in the source, what is planted there, and which of KINDS shows
it."""


@pytest.mark.parametrize("device", GFX950, ids=lambda d: d.arch)
@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_in_the_attention_of_gfx950_is_found(
    what: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelseam_rocm.gfx950 import Gfx950Attention

    find, plant, kind = PLANTED[what]
    source, files = Gfx950Attention.source, dict(TOOLCHAIN.platform_files(device.arch))
    assert files[source].count(find) == 1
    files[source] = files[source].replace(find, plant)
    monkeypatch.setattr(Gfx950Attention, "sources", lambda self: files)
    with _files(files, monkeypatch):
        assert not _long(device, 128, kind).passed

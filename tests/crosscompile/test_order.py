"""Fences, waits and arrivals of Hopper's kernels are in order in their PTX. Bugs that a GPU may not
show are found there, without one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import kernel_table
import pytest
from compile_matrix import Covered
from kernelseam.compilation.build import KEY
from kernelseam.contract import Device, DeviceLimits, SourceBundle
from kernelseam.descriptors.gemm.grouped_problem import GroupedGemmSpec
from kernelseam.descriptors.gemm.problem import GemmSpec
from kernelseam.dtypes import DType
from kernelseam.errors import CompileError, SlowBinary
from kernelseam.kernels.kernel import bundle
from kernelseam.parity.matrix import named
from kernelseam.plugins import plugins

pytest.importorskip("kernelseam_cuda", reason="nvrtc is missing: kernelseam-cuda is not installed")
from kept_ptx import KeepsPtx  # noqa: E402
from kernelseam_cuda.runtime import CudaRuntime  # noqa: E402

TOOLCHAIN, KERNELS = KeepsPtx(CudaRuntime()), plugins().backend("cuda").kernels
try:
    TOOLCHAIN.compiler()
except CompileError as e:
    pytest.skip(f"nvrtc is missing: {e.log}", allow_module_level=True)

from kernelseam_cuda.sm90 import HopperGemm, HopperTf32Gemm  # noqa: E402
from kernelseam_cuda.sm90.attention_blocks import is_banded  # noqa: E402
from kernelseam_cuda.sm90.attention_bwd_tiles import HopperBackwardTile, HopperWideBackwardTile  # noqa: E402
from kernelseam_cuda.sm90.attention_e4m3_tiles import HopperE4m3AttentionTile  # noqa: E402
from kernelseam_cuda.sm90.attention_score_gradient import ScoreGradientTile  # noqa: E402
from kernelseam_cuda.sm90.grouped import HopperGroupedGemm  # noqa: E402
from kernelseam_cuda.sm90.latent_tiles import HopperLatentTile  # noqa: E402
from kernelseam_cuda.sm90.tf32_tiles import HopperTf32Tile  # noqa: E402
from kernelseam_cuda.sm90.tiles import GEMM, GROUPED, HopperGemmTile  # noqa: E402

ROOT = Path(__file__).parents[2]
from mutant import ORDER, Mutant  # noqa: E402
from mutants import LUCK, SM90  # noqa: E402
from order import ptx, violations  # noqa: E402

from benchmarks import precompile  # noqa: E402
from benchmarks.comparing import binaries  # noqa: E402

H200 = Device("cuda", 0, "sm_90a", limits=DeviceLimits(132, 232_448, 1 << 36))
CROSSING = "a step begins while products of the one before run"
"""Not asked where scores are capped, computed by an expression, or have a bias, or queries have
scales: the compiler puts a branch of the cap, of a factor that is not above 0, or of a bias's copy
behind the loop, and with an expression the end of a tile's last step behind another's."""
MET_STORES = "no proxy fence between stores to shared memory and the meeting of those who made them"
"""Not asked where a tile's blocks are listed: the search for the first one is a loop, and the
compiler puts the producer's steps far behind it. So its store of the tile, which only threads read,
after an arrival, stands right before another role's meeting."""
MET_READERS = "no proxy fence between fragments that were read and the meeting of readers"
"""Not asked of a bias: a warp reads rows that it alone has copied with cp.async, and where TMA
never writes."""
APART = {
    CROSSING,
    "results are stored while products run",
    "a slot is handed back while products read it",
    "a slot is handed back before all who read fragments there have met",
}
"""Of products that still run, and of a meeting that is left out. They are planted apart from the
others, which they may hide."""
GRADIENTS = {
    CROSSING,
    "results are stored while products run",
    "a slot is handed back while products read it",
    "no proxy fence between fragments that were read and the arrival that lets TMA in",
}
"""Not asked of gradients: dk's products cross from step to step, ds is handed on while dv's run,
and a stage of q is handed back, which those of a step before have read, while later ones run and
the next stage's row values are read. Those of a stage are read before its step's fence of ds."""


def order_of(made: SourceBundle, tile: Any) -> list[str]:
    return order_in(ptx(replace(made, defines=(*made.defines, (KEY, '"a key"')))), tile)


def order_in(text: str, tile: Any) -> list[str]:
    if isinstance(tile, HopperGemmTile):  # a slice's products run while the next one's begin
        return violations(text, ahead=1, handed=tile.store == "tma", gathered=True)
    if isinstance(tile, HopperTf32Tile):
        return violations(text, ahead=1, handed=True)
    if isinstance(tile, HopperBackwardTile | HopperWideBackwardTile):
        return [x for x in violations(text, handed=True) if x not in GRADIENTS]
    if isinstance(tile, ScoreGradientTile):
        return violations(text)
    if isinstance(tile, HopperLatentTile):
        converted = "e4m3x2" in text  # by threads, which fence what they store
        if tile.few and converted:  # only threads read what threads write
            return violations(text)
        return violations(text, handed=True, exchanged=True, copied=not converted)
    return violations(text, tile.out_stages, handed=isinstance(tile, HopperE4m3AttentionTile))


FAST = binaries.kernels("sm_90a", "sm90")
OFTEN = {
    (b.covered, tile)
    for b in kernel_table.binaries(TOOLCHAIN, "sm_90a", KERNELS)
    for tile in b.often
    if b.covered.kernel.name.startswith("sm90")
}
"""Binaries that every run of the tests compiles: with their PTX."""


def test_every_kernel_is_looked_at_often() -> None:
    """With tiles of each kind, and of attention with three quarters of them."""
    often = [(c, t) for c, t in FAST if c.often]
    assert set(often) >= OFTEN
    assert {(c.kernel.entry, type(t)) for c, t in OFTEN} == {
        (c.kernel.entry, type(t)) for c, t in often
    }
    tiles = [{t.name for c, t in some if "attention" in c.kernel.entry} for some in (OFTEN, often)]
    assert len(tiles[0]) > 0.75 * len(tiles[1])
    assert len({t for c, t in OFTEN if "gemm" in c.kernel.entry}) > 10
    assert len(OFTEN) < 0.4 * len(often)


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        pytest.param(
            c,
            t,
            id=f"{str(c).replace(' ', '-')}-{t.name}",
            marks=[pytest.mark.slow("a kernel of the same kind")] * ((c, t) not in OFTEN),
        )
        for c, t in FAST
    ],
)
def test_every_fast_kernel_is_in_order(kernel: Covered, tile: Any) -> None:
    made = bundle(kernel.kernel, kernel.spec, tile, TOOLCHAIN, "sm_90a")
    found = order_in(TOOLCHAIN.ptx(made, "sm_90a"), tile)
    rare = ("softcap", "q_scales", "expression", "bias")
    branches = (getattr(kernel.spec, name, None) for name in rare)
    halves = getattr(tile, "halves", False)  # whose second half has accumulators of its own
    capped = [CROSSING] * (halves or any(branches))
    if kernel.kernel.entry == "attention_forward_sm90":
        # What a block's threads leave for a cluster is read by threads.
        capped += [MET_STORES] * (tile.in_cluster or not is_banded(kernel.spec))
        capped += [MET_READERS] * (kernel.spec.bias is not None)
    # Maxima that a consumer's warps tell each other.
    capped += [MET_STORES] * getattr(tile, "few", False)
    forward = getattr(kernel.spec, "forward", None)
    if isinstance(tile, ScoreGradientTile):
        capped += [MET_READERS] * (forward is not None and forward.bias is not None)
    if forward is not None and forward.softcap:  # what ds is made of is stored for the warp itself
        capped += ["no proxy fence between fragments and the arrival that hands them over"]
    assert [x for x in found if x not in capped] == []


@cache
def clean(what: str) -> tuple[SourceBundle, Any, tuple[str, ...]]:
    """A small kernel as its sources are, its tile, and what is out of order."""
    if what == "gemm":
        kernel, spec = (
            HopperGemm(),
            GemmSpec(DType.bfloat16, DType.bfloat16, DType.float32, b_transposed=True),
        )
        tile: Any = min(
            (t for t in GEMM if t.store == "tma" and t.cluster > 1), key=lambda t: t.bm * t.bn
        )
    elif what == "tf32":
        kernel, single = HopperTf32Gemm(), DType.float32
        spec = GemmSpec(single, single, single, precision=what)
        tile = kernel.tiles(spec, TOOLCHAIN.arch_row("sm_90a"))[0]
    else:
        cases = {
            "cleans": "attention-bf16-128-causal-250x250",
            "gradients": "attention-bwd-bf16-128-causal",
            "transposes": "attention-f16-64-e4m3fn-q",
            "exchanges": "attention-bf16-576v512-causal-latent",
            "few": "attention-bf16-576v512-causal-latent-pages-64",
            "whole": "attention-bf16-576v512-scaled-rows-pages-64",
            "scales": "attention-bf16-576v512-causal-scaled-rows",
        }
        latent = dict.fromkeys(("exchanges", "few", "whole", "scales"), "sm90-latent")
        ways = {"transposes": "sm90-e4m3", **latent}
        implementation = ways.get(what, "sm90")
        found = precompile.units([named(cases.get(what, "attention-f16-64"))], H200, implementation)
        ((kernel, spec, tile),) = [u for u in found if u[0].multiplies]
        if getattr(tile, "in_cluster", False):
            tile = replace(tile, parts=1, in_cluster=False)
    made = bundle(kernel, spec, tile, TOOLCHAIN, "sm_90a")
    return made, tile, tuple(order_of(made, tile))


def place(mutant: Mutant) -> str:
    """Which kernel it is planted in: where only kernels that search V have the code, such a one."""
    places = {
        "sm90/attention/value_filter.h": "cleans",
        "sm90/attention/value_transpose.h": "transposes",
        "sm90/attention/latent_wide.h": "exchanges",
        "sm90/attention/latent_few_tiles.h": "few",
        "sm90/attention/latent_few_rows.h": "whole",
        "sm90/attention/latent_scaled_rows.h": "scales",
        "sm90/gemm/tf32_consumer.h": "tf32",
    }
    folders = {"sm90/attention/backward/": "gradients", "sm90/gemm/": "gemm"}
    kind = next((k for place, k in folders.items() if mutant.place.startswith(place)), "plain")
    return places.get(mutant.place, kind)


SAID = {m.name: m.reported.removeprefix(ORDER) for m in SM90 if m.reported.startswith(ORDER)}
BUGS = [m for m in SM90 if m.name in SAID]


def together() -> Iterator[tuple[str, list[Mutant]]]:
    """The bugs that are planted in a kernel at once: each is reported in words of its own."""
    rounds: dict[tuple[str, bool], list[list[Mutant]]] = {}
    for bug in BUGS:
        mine = rounds.setdefault((place(bug), SAID[bug.name] in APART), [])
        free = (r for r in mine if SAID[bug.name] not in {SAID[m.name] for m in r})
        if (found := next(free, None)) is not None:
            found.append(bug)
        else:
            mine.append([bug])
    return ((kind, r) for (kind, _), mine in rounds.items() for r in mine)


@pytest.mark.parametrize(
    ("kind", "bugs"),
    [pytest.param(k, bugs, id="-and-".join(m.name for m in bugs)) for k, bugs in together()],
)
def test_bugs_of_order_are_found(kind: str, bugs: list[Mutant]) -> None:
    made, tile, before = clean(kind)
    for bug in bugs:
        made = bug(made)
    expected = {SAID[m.name] for m in bugs}
    assert expected <= set(order_of(made, tile))
    assert not expected & set(before)


def test_rows_that_are_left_out_are_handed_back_by_all_who_waited_for_them() -> None:
    """No products keep a consumer's warps together there, and one that is a lap of the ring behind
    would wait for a phase that has passed."""
    kernel, tile = HopperGroupedGemm(), GROUPED[1]
    product = GemmSpec(DType.bfloat16, DType.bfloat16, DType.float32)
    made = bundle(kernel, GroupedGemmSpec("m", product), tile, TOOLCHAIN, "sm_90a")
    alone = Mutant(
        "left-out-alone",
        "sm90/gemm/consumer.h",
        "ring.wait_full(state), named_barrier_sync(1 + group, 128);",
        "ring.wait_full(state);",
        "",
        "",
        "a consumer's first warp hands back what the others may still wait for",
    )
    said = "a slot is handed back before all who wait for it have met"
    assert [order_of(x, tile) for x in (made, alone(made))] == [[], [said]]


@pytest.mark.slow("a compilation each: every run plants several at once")
@pytest.mark.parametrize("mutant", BUGS, ids=lambda m: m.name)
def test_a_bug_of_order_is_found(mutant: Mutant) -> None:
    made, tile, before = clean(place(mutant))
    assert SAID[mutant.name] in order_of(mutant(made), tile)
    assert SAID[mutant.name] not in before


@pytest.mark.parametrize("mutant", [m for m in SM90 if m.reported == "log"], ids=lambda m: m.name)
def test_a_bug_that_the_assembler_serialises_is_found(mutant: Mutant) -> None:
    made, *_ = clean("plain")
    with pytest.raises(SlowBinary, match=r"\(C7514\)"):
        TOOLCHAIN.compile(mutant(made), "sm_90a")


def test_a_block_that_would_wait_for_registers_does_not_compile() -> None:
    """Consumers that ask for more than the block was launched with wait for ever: in each kernel
    that shares registers out."""
    sharing = re.compile(r"(?<=CONSUMER_REGISTERS = )[1-9]\d*")
    seen = set()
    for covered, tile in sorted(OFTEN, key=str):
        made = bundle(covered.kernel, covered.spec, tile, TOOLCHAIN, "sm_90a")
        greedy = tuple((name, sharing.sub("248", text)) for name, text in made.files)
        if covered.kernel.source in seen or greedy == made.files:
            continue
        seen.add(covered.kernel.source)
        with pytest.raises(CompileError) as caught:
            TOOLCHAIN.compile(replace(made, files=greedy), "sm_90a")
        assert "registers_suffice" in caught.value.log, covered.kernel.source
    attention = ("forward", "backward", "backward_wide", "score_gradient", "latent")
    gemm = ("sm90/gemm/gemm.h", "sm90/gemm/tf32.h")
    assert seen == {*(f"sm90/attention/{name}.h" for name in attention), *gemm}


def test_binaries_of_other_options_are_others() -> None:
    """What is compiled ahead: options lie in a generated file, and constants may all be equal."""
    cases = [named(f"attention-{what}") for what in ("f16-64", "f16-128-causal", "bf16-128-causal")]
    each = [precompile.units([case], H200, "sm90") for case in cases]
    assert all(each) and len(precompile.units(cases, H200, "sm90")) == sum(map(len, each))


def test_every_rule_finds_a_bug() -> None:
    """And a GPU need not show what the rules or the assembler find."""
    assert len(set(SAID.values())) >= 17
    found = {*SAID, *(m.name for m in SM90 if m.reported == "log")}
    path = str(Path(__file__).relative_to(ROOT))
    assert {name for name, why in LUCK.items() if path in why} == found

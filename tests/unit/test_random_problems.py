"""The random problems of benchmarks/random_problems.py: what is drawn, and that the reference
computes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernelseam import planning
from kernelseam.descriptors.attention.options import SpecOption
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError
from kernelseam.parity.running import run
from kernelseam.parity.running.run import Target, run_case
from kernelseam.parity.running.stages import Computed, prepare
from kernelseam.plugins import plugins
from kernelseam.reference.attention import SUPPORTED
from kernelseam.reference.attention_tiling import Block
from kernelseam.reference.runtime import HostRuntime
from kernelseam.samples.attention_bwd_case import BackwardCase
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.case import Case
from kernelseam.samples.common import SHORT
from kernelseam.samples.data import attention as attention_data
from kernelseam.samples.data.memory import POISON, Layout, Placement
from kernelseam.samples.gemm_case import GemmCase
from kernelseam.samples.operations import operands
from kernelseam.samples.projection_case import ProjectionCase

from benchmarks import drawing, random_problems

FAMILIES = ("attention", "products")


def _drawn(family: str, seed: int, count: int) -> list[Case]:
    kinds = drawing.FAMILIES[family].kinds(np.random.default_rng(seed), 60)
    return [
        kinds[i % 60].draw(f"random-{seed}-{i}", np.random.default_rng((seed, i)))
        for i in range(count)
    ]


def test_the_kinds_cover_operations_views_and_options() -> None:
    kinds = drawing.attention.kinds(np.random.default_rng(0), 60)
    assert len(set(kinds)) == 60
    assert {k.operation for k in kinds} == {"attention", "attention_bwd", "merge_states"}
    assert {k.views for k in kinds if k.operation == "attention"} == set(drawing.attention.VIEWS)
    assert {o for k in kinds for o in k.options} == set(drawing.attention.OPTIONS)
    assert {k.dtype for k in kinds} == set(SHORT.values()) - {SHORT["f64"]}
    assert {k.any_order for k in kinds if k.operation == "attention_bwd"} == {True, False}
    for operation in ("attention", "attention_bwd"):
        mine = [k for k in kinds if k.operation == operation]
        assert {k.batch_invariant for k in mine} == {True, False}
        assert sum((k.head_dim, k.value_dim) in drawing.attention.ODD_DIMS for k in mine) >= 3
    wide = [k for k in kinds if (k.head_dim, k.value_dim) == drawing.attention.WIDE_DIMS]
    assert len(wide) >= 3 and {k.operation for k in wide} <= {"attention", "merge_states"}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_few_kinds_cover_products(seed: int) -> None:
    kinds = drawing.products.kinds(np.random.default_rng(seed), 40)
    assert len(set(kinds)) == 40
    gemms = [k for k in kinds if k.operation == "gemm"]
    projections = {o: [k for k in kinds if k.operation == o] for o in drawing.projection.HEADS}
    assert [len(gemms), *map(len, projections.values())] == [20, 8, 4, 4, 4]
    stored = [k for k in gemms if k.dtype.is_fp8]
    assert {k.dtype for k in gemms} == {*SHORT.values(), DType.float8_e4m3fn}
    assert len(stored) >= 4 and any(k.scales for k in stored)
    assert not any(k.scales and k.summed for k in gemms)
    assert {(k.a_transposed, k.b_transposed) for k in gemms} == {
        (a, b) for a in (0, 1) for b in (0, 1)
    }
    assert {k.view for k in gemms} == {"strided", "scattered", "even"} and any(
        k.dtype_c is not k.dtype for k in gemms
    )
    for option in ("summed", "bias", "residual", "narrow"):
        assert {bool(getattr(k, option)) for k in gemms} == {True, False}
    qkv = projections["qkv_projection"]
    assert {k.rotary for k in qkv} == {"", "halves", "pairs"} and {k.paged for k in qkv} == {
        True,
        False,
    }
    assert {bool(k.bias) for actual in projections.values() for k in actual} == {True, False}


@pytest.mark.parametrize("family", FAMILIES)
def test_options_of_a_spec_are_drawn(family: str) -> None:
    """Every option that a descriptor of the family has."""
    kinds = drawing.FAMILIES[family].kinds(np.random.default_rng(0), 400)
    if family == "products":
        gemms = [k for k in kinds if k.operation == "gemm"]
        assert {k.precision for k in gemms} == {None, "tf32", "tf32x3"}
        assert {k.scales for k in gemms} == set(drawing.gemm.SCALES)
        assert {k.scale_block for k in gemms if k.scales == "blocks"} == {
            *drawing.gemm.SCALE_BLOCKS
        }
        return
    forwards = [k for k in kinds if k.operation == "attention"]
    assert {k.scales for k in forwards} == {"", "tensor", "heads", "entries", "blocks"}
    assert {k.query_blocks for k in forwards} == {k.latent for k in forwards} == {True, False}
    assert {k.lse for k in kinds if k.operation == "merge_states"} == {True, False}
    cases = [c for c in _drawn(family, 0, 1200) if isinstance(c, AttentionCase)]
    kinds_of_data = {"normal", "extreme", "climbing", "falling", "holes", "voids", "faint"}
    assert {c.data for c in cases} == kinds_of_data
    assert {c.bias_data for c in cases if c.bias} >= {"normal", "holes", "voids", "low", "lowest"}
    assert {c.mask for c in cases} == {"", "random", "keys", "rows", "all"}
    for field in ("steps", "injected", "packed", "scale_block", "q_scale_block"):
        assert any(getattr(c, field) for c in cases), field


@pytest.mark.parametrize("family", FAMILIES)
def test_a_problem_is_its_number_s_alone(family: str) -> None:
    first, again, other = (_drawn(family, seed, 60) for seed in (1, 1, 2))
    assert first == again and first != other


def test_problems_are_small_and_ragged() -> None:
    cases = _drawn("attention", 0, 600)
    forwards = [c.forward if isinstance(c, BackwardCase) else c for c in cases]
    actual = [c for c in forwards if isinstance(c, AttentionCase)]
    assert max(c.batch * c.num_heads for c in actual) <= drawing.attention.MOST_HEADS
    longest = drawing.attention.LONGEST
    assert max(c.S_q for c in actual) <= longest and max(c.S_k for c in actual) > longest
    assert any(0 in (c.kv_lengths or ()) for c in actual) and any(c.page_size == 3 for c in actual)
    assert any(c.S_q % 16 and c.S_k % 16 for c in actual) and any(c.S_q == 1 for c in actual)


def test_products_are_of_every_size() -> None:
    cases = _drawn("products", 0, 1000)
    gemms = [c for c in cases if isinstance(c, GemmCase)]
    projections = [c for c in cases if isinstance(c, ProjectionCase)]
    assert max(c.batch * c.num_heads for c in gemms if max(c.M, c.N) <= 20) > 1000, (
        "teams share blocks"
    )
    assert all(
        any(getattr(c, n) == 0 for c in gemms)
        for n in ("M", "N", "K", "batch", "num_heads", "alpha")
    )
    assert any(min(c.M, c.N) >= 900 for c in gemms) and any(c.K > 2000 for c in gemms)
    assert any(c.c_head_group % c.b_head_group and c.b_head_group % c.c_head_group for c in gemms)
    assert (
        any(c.in_place for c in gemms)
        and any(c.injected for c in gemms)
        and any(c.beta for c in gemms)
    )
    assert {c.view for c in gemms} == {"strided", "host", "device"}
    assert all(any(getattr(c, n) == 0 for c in projections) for n in ("batch", "S", "hidden"))
    assert any(c.S == 1 and c.batch > 10 for c in projections) and any(
        c.batch * c.S > 600 for c in projections
    )
    assert any(c.packed for c in projections) and any(c.injected for c in projections)
    assert any(0 < c.rotated < c.head_dim for c in projections) and any(
        c.kv_heads < c.num_heads for c in projections
    )


SIDES = {
    "gemm_blocks": {"_SIDE": 40, "_BLOCK": 3 * 40 * 40},
    "merge": {"_ELEMENTS": 40},
    "attention": {"BLOCK": Block(columns=16, keys=24)},
    "attention_bwd": {"BLOCK": Block(columns=16, keys=24)},
}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks so small that most problems have several along each axis."""
    for module, sizes in SIDES.items():
        for name, size in sizes.items():
            monkeypatch.setattr(f"kernelseam.reference.{module}.{name}", size)
    planning.forget()
    yield
    planning.forget()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_computes_them(family: str) -> None:
    device = plugins().backend("numpy").runtime.devices()[0]
    drawn = SpecOption(0)
    for case in _drawn(family, 5, 60):
        run_case(case, Target(device, "numpy", case.operation, builtin=True)).require()
        if case.operation == "attention":
            drawn |= operands.problem_of(case, HostRuntime(), device).spec.options
    # test_user_scores.py, test_prefix_groups.py, test_attention_precision.py, test_scaled_rows.py
    elsewhere = SpecOption.expression | SpecOption.prefix_groups | SpecOption.precision
    elsewhere |= SpecOption.row_scale_block
    assert family == "products" or not SUPPORTED & ~(drawn | elsewhere)


def test_what_is_no_operand_of_a_product_is_nan() -> None:
    between = 0
    for case in _drawn("products", 1, 120):
        before = prepare(case)
        inputs = set(operands.values(case))
        blank = {
            n: np.full(p.shape, np.frombuffer(b"\xff" * p.dtype.itemsize, p.dtype.numpy))
            for n, p in before.layout.placements.items()
            if n in inputs
        }
        between += sum(
            p.bytes - p.dtype.itemsize * int(np.prod(p.shape)) > 0
            for p in before.layout.placements.values()
        )
        before.layout.write(before.buffers, blank)
        assert all((b == POISON).all() for b in before.buffers.values()), case
    assert between > 200, "operands with gaps"


def _whole(case: AttentionCase, name: str, placement: Placement) -> tuple[str, tuple[int, ...]]:
    """The view of q, k or v, and the shape of all the memory that it walks over."""
    sequences = case.q_sequences if name == "q" else case.k_sequences
    _, heads, most, width = placement.shape
    if sequences is not None:
        return "packed", (1, heads, sum(sequences) + 2 * case.margin, width)
    if case.page_size:
        return "paged", (attention_data.pages(case), heads, case.page_size, width)
    return "lengths", (case.batch, heads, most, width)


def test_what_belongs_to_no_sequence_is_nan() -> None:
    """Rows beyond a sequence, a length or the end of a page, and pages that no table names: a read
    there shows."""
    beyond = dict.fromkeys(("packed", "paged", "lengths"), 0)
    for case in _drawn("attention", 1, 200):
        forward = case.forward if isinstance(case, BackwardCase) else case
        if not isinstance(forward, AttentionCase):
            continue
        before = prepare(replace(case, injected=()))
        for name in "qkv":
            placement = before.layout.placements[name]
            if placement.row_spans is None:
                continue
            view, shape = _whole(forward, name, placement)
            whole = replace(placement, shape=shape, row_spans=None)
            rows = (
                Layout({**before.layout.placements, name: whole})
                .read(before.buffers, name)
                .astype(np.float32)
            )
            missing = np.isnan(rows)
            assert (missing.all(-1) == missing.any(-1)).all(), (case.name, name)
            used = placement.shape[1] * sum(p.rows for p in placement.row_spans)
            assert (~missing.any(-1)).sum() == used, (case.name, name)
            beyond[view] += missing.any(-1).sum()
    assert min(beyond.values()) > 1000, beyond


def test_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    whose = ["--family", "products", "--device", "numpy:0"]
    given = [*whose, "--problems", "15", "--specs", "12", "--seed", "3", "--json", str(file)]
    assert random_problems.main([*given, "--workers", "1"]) == 0
    piped, out = json.loads(file.read_text()), capsys.readouterr().out
    assert random_problems.main([*given, "--workers", "0"]) == 0
    alone = json.loads(file.read_text())
    assert out.startswith(
        "15 problems of 12 specs, seed 3, on numpy:0 (cpu), 1 workers\n0 binaries after "
    )
    assert "{'passed': 15} of 15 in " in out
    assert [r["number"] for r in piped["results"]] == list(range(15))
    for r in (*piped["results"], *alone["results"]):
        assert r.pop("seconds") > 0 and r["status"] == "passed"
    assert piped["results"] == alone["results"] and max(r["worst"] for r in alone["results"]) > 0.01
    assert random_problems.main([*whose, "--only", "7", "--seed", "3", "--workers", "0"]) == 0
    assert "name='random-3-7'" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        random_problems.main([*whose, "--implementation", "nobody"])
    assert "numpy:0 (cpu) has no implementation nobody" in capsys.readouterr().err


def test_the_script_names_what_fails(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """A wrong result costs its problem; a device that is lost ends the run."""
    compute, copy = run.compute, HostRuntime.from_host
    lost = [False]

    def wrong(case: Case, *arguments: Any) -> Computed:
        lost[0] |= case.name == "random-4-4"
        report = compute(case, *arguments)
        return report if case.name != "random-4-0" else replace(report, changed=7)

    def from_host(self: HostRuntime, *arguments: Any) -> Any:
        if lost[0]:
            raise DeviceError("the runtime says 700")
        return copy(self, *arguments)

    monkeypatch.setattr(run, "compute", wrong)
    monkeypatch.setattr(HostRuntime, "from_host", from_host)
    file = tmp_path / "results.json"
    given = [
        "--family",
        "attention",
        "--device",
        "numpy:0",
        "--problems",
        "9",
        "--seed",
        "4",
        "--workers",
        "0",
    ]
    given += ["--json", str(file)]
    assert random_problems.main(given) == 1
    out = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert [r["status"] for r in report["results"]] == [
        "failed",
        "passed",
        "passed",
        "passed",
        "error",
    ]
    assert report["lost"] == (
        "the device computes nothing any more since random-4-4 on numpy-numpy: DeviceError: the "
        "runtime says 700. Not run after it: 4."
    )
    assert report["lost"] in out and "error 4: Traceback" in out
    assert "failed 0: 7 bytes differ after a second launch" in out

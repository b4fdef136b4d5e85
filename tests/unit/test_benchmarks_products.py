"""The benchmarks' rows of products, projections, public definitions and whole programs, small, on
the host."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: the benchmarks' peer")
from benchmark_rows import host_session, judged, measured  # noqa: E402, F401

from benchmarks.comparing import (  # noqa: E402
    attention,
    attention_rows,
    compiling,
    definitions,
    epilogues,
    fp8,
    gemm,
    grouped,
    host,
    host_cpu,
    host_new,
    listed,
    models,
    projections,
    rows,
    running,
)

GEMMS: dict[str, tuple[Any, ...]] = {
    "f16 NT": (5, 33, 17, 40, "float16", True),
    "bf16": (5, 33, 17, 40, "bfloat16"),
    "f64": (2, 1, 17, 40, "float64"),
    "bias": (1, 33, 17, 40, "bfloat16", True, True),
    "residual": (1, 33, 17, 40, "float32", True, False, True),
    "both": (1, 33, 17, 40, "bfloat16", True, True, True),
    "lists in one": (6, 33, 17, 40, "float16", True, False, False, "in one allocation, shuffled"),
    "lists one by one": (
        6,
        33,
        17,
        40,
        "float16",
        True,
        False,
        False,
        "allocated one by one, shuffled",
    ),
}


@pytest.mark.parametrize("form", ["forward", "input gradient", "weight gradient"])
@pytest.mark.parametrize("sizes", ["skewed", "zipf"])
def test_grouped_rows(session: Any, sizes: str, form: str) -> None:
    row = grouped.GroupedRow("grouped", 4, 70, 24, 40, sizes, form, "float16")
    assert row.counts.sum() == 70 and len(row.counts) == 4
    assert row.operations == 2 * 70 * 24 * 40
    record = running.measured(row, session)
    assert not record.failure, record.failure
    (ours,) = record.of("ours")
    assert ours.worst <= 1 and [t.name for t in record.of("copy")] == ["copy"]
    prepared = row.prepare(session)
    contestant = prepared.contestants[0]
    contestant.run()
    c = contestant.result().clone()
    c.view(-1)[-1] += 1.0
    assert prepared.judge(contestant.result()).worst <= 1 < prepared.judge(c).worst


@pytest.mark.parametrize("block", [0, 128])
def test_fp8_rows(session: Any, block: int) -> None:
    row = fp8.Fp8Row("gemm-e4m3", 1, 40, 256, 384, "equal", block=block)
    assert row.name == "40×384×256 e4m3" + " by 128" * (block > 0)
    assert (row.operations, row.bytes) == (2 * 40 * 384 * 256, (40 + 384) * 256 + 2 * 40 * 384)
    record = judged(session, row, 40, 384)
    peers = {"cuBLASLt"} if block else {"cuBLASLt", "cuBLASLt, fast accumulation"}
    assert {*(t.name for t in record.of("peer")), *record.refused} == {*peers, "ours by nosuch"}


@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_lists(session: Any, turned: bool) -> None:
    sizes = ((16, 24, 40), (8, 8, 16), (72, 16, 8))
    row = listed.ListedRow("grouped", "some", sizes, turned)
    record = judged(session, row)
    assert record.operations == 2 * (16 * 24 * 40 + 8 * 8 * 16 + 72 * 16 * 8)
    assert [t.name for t in record.of("peer")] == ["torch.mm one by one"]
    assert all(list(x.planned(session)) for x in listed.listed_rows())


@pytest.mark.parametrize(
    ("epilogue", "more"),
    [
        ("relu", {"bias": True}),
        ("gelu_tanh", {"bias": True}),
        ("silu", {"preactivation": True}),
        ("swiglu", {"bias": True, "preactivation": True}),
        ("geglu", {"interleaved": True, "sums": "column_sums"}),
        ("silu", {"sums": "row_squares"}),
    ],
)
def test_epilogue_rows(session: Any, epilogue: str, more: dict[str, Any]) -> None:
    row = epilogues.EpilogueRow("gemm-epilogue", 33, 20, 40, epilogue, **more)
    record = judged(session, row)
    library = ["cuBLASLt"] * (epilogue in ("relu", "gelu_tanh"))
    assert [t.name for t in record.of("peer")] == [*library, "torch"]
    assert [t.name for t in record.of("without")] == ["ours, no epilogue"]


@pytest.mark.parametrize("name", GEMMS)
def test_gemm_rows(session: Any, name: str) -> None:
    row = gemm.GemmRow("gemm", *GEMMS[name])
    record = judged(session, row)
    assert [t.name for t in record.of("copy")] == ["copy"]
    if name.startswith("lists"):
        assert [t.name for t in record.of("without")] == ["ours by strides", "cuBLAS by strides"]
        assert not record.of("peer") and "cublas-batched" in record.refused["cuBLAS"]
    else:
        assert [t.name for t in record.of("peer")] == ["cuBLAS"]


def test_rows_of_public_definitions(session: Any) -> None:
    """Each says its definition's constant axes, and a row gives the record of what computes it."""
    drawn = running.chosen(["definitions"])
    names = {r.title for r in drawn}
    assert len(names) == 145 and not names & definitions.UNPUBLISHED
    for r in drawn:
        kind = r.title
        numbers = [int(n) for n in re.findall(r"_[a-z]+(\d+)(?=_|$)", kind)]
        inner = r.row
        if kind.startswith("gqa_ragged"):
            assert numbers == [inner.heads, inner.kv_heads, inner.D]
        elif kind.startswith("gqa_paged"):
            assert numbers == [inner.heads, inner.kv_heads, inner.D, inner.page]
        elif kind.startswith("mla_paged"):
            assert numbers == [inner.heads, inner.latent, inner.D - inner.latent, inner.page]
        elif kind.startswith("mla_ragged"):
            assert numbers == [inner.heads, inner.D, inner.D_v]
        elif kind.startswith("gemm"):
            assert numbers == [inner.N, inner.K] and inner.b_transposed
        else:
            experts, hidden, intermediate = numbers[-3:]
            assert experts == inner.experts
            of_products = {(hidden, 2 * intermediate), (intermediate, hidden)}
            assert (inner.hidden, inner.width) in of_products
    small = attention.AttentionRow("definitions", 1, 2, 16, 16, True)
    record = rows.NamedRow("gqa_of_a_kind", small, "definitions").measure(session)
    assert (record.suite, record.name) == ("definitions", f"gqa_of_a_kind: {small.name}")
    assert record.of("ours")[0].worst <= 1


def test_a_row_of_experts_in_blocks_of_8_bits(session: Any) -> None:
    row = grouped.GroupedRow("definitions", 3, 20, 200, 304, "drawn", block=128)
    assert row.name == "E3 20×200→304 e4m3 by 128 drawn forward"
    assert row.bytes == 20 * 200 + int((row.counts > 0).sum()) * 200 * 304 + 2 * 20 * 304
    record, prepared, contestant = measured(session, row)
    assert [t.name for t in record.of("peer")] == ["torch._grouped_mm in bfloat16"]
    wrong = contestant.result().clone()
    wrong[19] += 10 * wrong.abs().max()
    assert prepared.judge(wrong).worst > 1


@pytest.mark.parametrize("tokens", [20, 70])
@pytest.mark.parametrize(
    "kind",
    [
        "qkv",
        "qkv turned",
        "output head-major",
        "output token-major",
        "qkv backward",
        "output backward",
    ],
)
def test_projection_rows(session: Any, kind: str, tokens: int) -> None:
    """Each result is looked at, at its first element and, but for weights, at its last."""
    row = projections.ProjectionRow(kind, tokens, 64, 4, 2, 32)
    record, prepared, contestant = measured(session, row)
    assert [t.name for t in record.of("peer")] == ["torch linear"]
    assert record.operations == 2 * tokens * 64 * (256 if kind.startswith("qkv") else 128) * (
        1 + ("backward" in kind)
    )
    for name, part in row.split(contestant.result()).items():
        for at in (0, -1)[: 1 if name in ("d_weight", "d_bias") else 2]:
            before = part.view(-1)[at].clone()
            part.view(-1)[at] += 100
            judged = prepared.judge(contestant.result())
            assert judged.worst > 1 and judged.message.startswith(name), name
            part.view(-1)[at] = before


def test_the_requested_rows() -> None:
    """Names are unique; the tables of the peers' own figures are complete."""
    for suite in running.SUITES:
        names = [r.name for r in running.chosen([suite])]
        assert len(names) == len(set(names)) > 0, suite
        assert all(r.suite == suite for r in running.chosen([suite]))
    assert len(running.chosen(["attention"])) == 22
    assert len(running.chosen(["attention"], ["*D256*causal"])) == 3
    assert [r.name for r in running.chosen(["host", "gemm"], ["host/bmm(a, b)"])] == ["bmm(a, b)"]
    assert sum(attention_rows.VARIED) == 16384
    assert all(r.least == 0.9 for r in running.chosen(["attention-adversarial"]))
    products = running.chosen(["gemm"])
    one, many = ([replace(r, lists="") for r in products if r.lists == kind] for kind in gemm.LISTS)
    assert (
        one[:6] == products[:6]
        and many[:4] == products[:4]
        and one[6:] == many[4:] == [products[7]]
    )


def test_host_rows(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in (("ROUNDS", 2), ("GOES", 1), ("CALLS", 1)):
        monkeypatch.setattr(host, name, count)
    for name in ("ROUNDS", "NEW", "KNOWN"):
        monkeypatch.setattr(host_new, name, 2)
    rows = host.host_rows()
    few = [r for r in rows if not r.name.startswith(("new", "known")) or "bmm" in r.name]
    assert [r.name for r in few[-3:]] == [
        "new extents: bmm, rows",
        "sixteen in a row: a layer of a model, one query",
        "known among 2: bmm, rows",
    ]
    for row in few:
        record = running.measured(row, session)
        assert not record.failure, record.failure
        alone = row.name.startswith(("call", "its launch"))
        alone |= "of a model" in row.name and find_spec("transformers") is None
        assert [t.name for t in record.timed] == (["ours"] if alone else ["ours", "torch"])
        assert all(len(t.us["host"]) == 2 for t in record.timed)
        if row.limit == host.CALL_MICROSECONDS:
            assert record.beyond(record.timed[0])[0].startswith("host "), (
                "NumPy takes longer than 4 µs"
            )


def test_cpu_rows(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns, on all cores; torch's own number of threads comes back."""
    monkeypatch.setattr(host_cpu, "MOST", 1)
    threads = torch.get_num_threads()
    for row in running.chosen(["host-cpu"], ["*512*", "gradients B8*"]):
        record = running.measured(row, session)
        assert not record.failure, record.failure
        assert [(t.name, len(t.us["host"])) for t in record.timed] == [("ours", 1), ("torch", 1)]
        assert record.least == 0.5
    assert torch.get_num_threads() == threads


def test_rows_of_whole_programs(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of little; what ours computes is what torch computes."""
    pytest.importorskip("transformers", reason="Transformers is not installed")
    for name, n in {"ROUNDS": 1, "PROMPT": 5, "NEW_TOKENS": 3, "BATCHES": 2, "LAYERS": 1}.items():
        monkeypatch.setattr(models, name, n)
    monkeypatch.setattr(models, "HEADS", 2)
    monkeypatch.setattr(models, "_nested", models._ours)  # torch's are causal on a GPU alone
    rows = [models.ModelRow("generate", models._generate(1, 16, 32, 32)), *models.model_rows()[2:]]
    for row in rows:
        record = running.measured(row, session)
        assert not record.failure, record.failure
        assert [(t.name, len(t.us["elapsed"])) for t in record.timed] == [("ours", 1), ("torch", 1)]
    ours, theirs = rows[0].make(session)
    assert (ours() == theirs()).float().mean() > 0.8  # logits of random weights are close


def test_compile_rows(session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a cache of its own, which is gone afterwards."""
    pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
    from kernelseam.plugins import plugins

    toolchain = plugins().backend("cuda").toolchain
    if toolchain is None or "sm_90a" not in toolchain.archs:
        pytest.skip("nvrtc is missing")
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(tmp_path / "cache"))
    row = min(
        running.chosen(["compile"], ["sm_90a gemm_sm90*"]),
        key=lambda r: r.tile.bm * r.tile.bn,
    )
    record = running.measured(row, session)
    assert not record.failure, record.failure
    (ours,) = record.timed
    assert len(ours.us["cold, CPU"]) == len(ours.us["cold, wall"]) == 1
    assert len(ours.us["disk"]) == compiling.DISK_READS
    assert ours.us["cold, CPU"][0] > 20 * ours.median("disk")
    assert record.limits == {"cold, CPU": 2.5e6, "disk": 1e3}
    kept = [x for x in (tmp_path / "cache").rglob("*") if x.is_file()]
    assert not [x for x in kept if x.stat().st_size > 4096], kept  # but the compiler's version

"""The benchmarks' rows of attention, small, on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: the benchmarks' peer")
from benchmark_rows import attention_row, host_session, judged, measured  # noqa: E402, F401

from benchmarks.comparing import (  # noqa: E402
    attention,
    backward,
    decoding,
    gemm,
    paging,
    results,
    rows,
    running,
    tables,
    timing,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "grouped": {"kv_heads": 2, "dtype": "float16", "causal": True},
    "wide": {"D_v": 16},
    "window": {"window": (9, 0)},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "lengths": {"causal": True, "lengths": (70, 33)},
    "varlen": {"causal": True, "packed": (70, 1)},
    **{kind: {"scores": kind} for kind in ("sink", "falling", "rising", "jump")},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attention_rows(session: Any, name: str) -> None:
    """Each option's row gives right results, and finds a wrong one."""
    row = attention_row(2, 4, 70, 32, **OPTIONS[name])
    record, prepared, contestant = measured(session, row)
    (ours,) = record.of("ours")
    assert ours.implementation == "numpy"
    assert ours.error < 1e-2 and (ours.error > 1e-5 or name == "sink")
    assert len(ours.us["back to back"]) == 2 and len(ours.us["flushed"]) >= 2
    assert "nosuch" in record.refused["ours by nosuch"]
    plain = name in ("plain", "causal", "grouped", "wide")
    assert [t.name for t in record.of("peer")] == ["FA2"] * plain
    beside = name in ("window", "softcap", "sinks", "lengths")
    assert [t.name for t in record.of("without")] == ["ours without"] * beside
    contestant.result()[(0,) * contestant.result().ndim] += 1.0
    assert prepared.judge(contestant.result()).worst > 1, "the first element of all is looked at"


def test_a_row_that_fails(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is a record with its reason, and the run goes on."""
    row = attention_row(2, 4, 70, 32)
    judge = attention.Judge
    monkeypatch.setattr(
        attention,
        "Judge",
        lambda *x: lambda result: replace(judge(*x)(result), worst=1.5, message="out[0, 0] is off"),
    )
    record = running.measured(row, session)
    assert (
        record.failure.startswith("Wrong: ours [numpy]: relative error ")
        and "out[0, 0] is off" in record.failure
    )
    assert tables.line(record).startswith("FAILED attention/B2 H4 S70 D32: Wrong: ours [numpy]")
    assert tables.failures([record]) == 1

    def broken(self: Any, session: Any) -> None:
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(attention.AttentionRow, "prepare", broken)
    assert (
        "RuntimeError: the GPU is gone (test_benchmarks_attention.py:"
        in running.measured(row, session).failure
    )


def test_a_peer_that_computes_something_else(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.functional as functional

    right = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda *x, **y: 1.05 * right(*x, **y)
    )
    record = running.measured(attention_row(2, 4, 70, 32), session)
    assert record.failure.startswith("Wrong: FA2: relative error 4.98e-02. out[0, 0, ")


@pytest.mark.parametrize(
    ("causal", "heads", "kv_heads"), [(False, 3, 0), (True, 3, 0), (True, 6, 3)]
)
def test_backward_rows(session: Any, causal: bool, heads: int, kv_heads: int) -> None:
    """In order and in any order, each beside torch's; a wrong element of any gradient is found."""
    row = backward.BackwardRow(2, heads, 48, 32, causal, kv_heads=kv_heads)
    assert row.name == "B2 H" + ("6/3" if kv_heads else "3") + " S48 D32" + " causal" * causal
    record, prepared, contestant = measured(session, row)
    assert record.operations == 10 * 2 * heads * 48 * 48 * 32 * (0.5 if causal else 1)
    assert record.bytes == 8 * 2 * 48 * 32 * (heads + 3)
    assert [t.name for t in record.of("ours")] == ["ours", "ours, any order"]
    assert all(
        t.error < 4e-3 and t.worst == pytest.approx(t.error / 2e-2) for t in record.of("ours")
    )
    assert [t.name for t in record.of("peer")] == ["FA2"] and "backend" in record.refused["cuDNN"]
    assert [c.repeats for c in prepared.contestants[:2]] == [True, False]
    last = {"dq": heads - 1, "dk": 2, "dv": 2}
    for name, head in last.items():
        wrong = contestant.result().clone()
        row.parted(wrong)[name][1, head, 5, 7] += 10
        judged = prepared.judge(wrong)
        assert judged.worst > 1 and judged.message == f"{name}[1, {head}] is off"
    wrong[0] = float("nan")
    assert (
        not prepared.judge(wrong).worst <= 1 and prepared.judge(wrong).message == "dq[0, 0] is off"
    )


def test_other_bits_after_the_times(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What must repeat its bits and does not fails its row."""
    measure = rows.measure

    def disturbed(turns: Any, *others: Any) -> Any:
        prepared.contestants[at].result()[0] += 1
        return measure({}, *others)[0] | {n: timing.Samples([1.0], [1.0]) for n in turns}, False

    monkeypatch.setattr(rows, "measure", disturbed)
    row = backward.BackwardRow(1, 1, 16, 16)
    for at in (1, 0):
        prepared = row.prepare(session)
        record = results.Record(row.suite, row.name)
        if at:
            rows.compared(record, prepared, session)
            continue
        with pytest.raises(
            rows.Wrong, match="ours \\[numpy\\]: other bits after it was timed than before"
        ):
            rows.compared(record, prepared, session)


@pytest.mark.parametrize(("page", "mixed"), [(16, False), (40, False), (16, True)])
def test_decode_rows(session: Any, page: int, mixed: bool) -> None:
    row = decoding.DecodeRow(3, 100, 8, 2, 64, page, mixed=mixed)
    assert len(set(row.lengths)) == (3 if mixed else 1) and max(row.lengths) <= 100
    assert row.bytes == 2 * sum(row.lengths) * 2 * 64 * 2
    record = judged(session, row, 3, 1, 8, 64)
    assert [t.name for t in record.of("copy")] == ["copy"]


def test_paged_rows(session: Any) -> None:
    """Beside the same rows packed."""
    row = paging.PagedRow(((1, 20, 50), (2, 3, 0)), 4, 2, 64, 16)
    assert row.name == "1 × 20 of 50 + 2 × 3 of 1, 33, … H4/2 D64 page 16"
    assert (row.queries, row.lengths, row.pages) == ([20, 3, 3], [50, 1, 33], [4, 1, 3])
    pairs = sum(range(31, 51)) + 1 + (31 + 32 + 33)
    assert row.operations == 4 * pairs * 4 * 64
    assert row.bytes == 2 * 64 * (2 * 26 * 4 + 2 * 84 * 2)
    record = judged(session, row, 26, 4, 64)
    assert record.of("packed rows")[0].worst <= 1


def test_a_decode_row_whose_values_are_columns_of_the_keys(session: Any) -> None:
    row = decoding.DecodeRow(3, 100, 8, 1, 64, 16, latent=40)
    assert row.name == "B3 × 100 H8/1 D64/40 latent page 16"
    assert row.bytes == 2 * 300 * 64 and row.operations == 2 * 300 * 8 * 104
    record = judged(session, row, 3, 1, 8, 40)
    assert [t.name for t in record.of("copy")] == ["copy"]
    assert record.refused["FA3"] == "it has no head dims 576/512"


def test_a_decode_row_of_rows_that_have_their_scales(session: Any) -> None:
    row = decoding.DecodeRow(3, 100, 8, 1, 48, 16, latent=32, scale_block=16)
    assert row.name == "B3 × 100 H8/1 D48/32 latent scaled rows page 16"
    assert row.bytes == 300 * (32 + 2 * 4 + 16 * 2)
    judged(session, row, 3, 1, 8, 32)


def test_a_paged_row_whose_values_are_columns_of_the_keys(session: Any) -> None:
    row = paging.PagedRow(((1, 20, 50), (2, 3, 0)), 4, 1, 72, 16, latent=64)
    assert row.name == "1 × 20 of 50 + 2 × 3 of 1, 33, … H4/1 D72/64 latent page 16"
    pairs = sum(range(31, 51)) + 1 + (31 + 32 + 33)
    assert row.operations == 2 * pairs * 4 * (72 + 64)
    assert row.bytes == 2 * (26 * 4 * (72 + 64) + 84 * 72)
    record = judged(session, row, 26, 4, 64)
    assert [t.name for t in record.timed] == ["ours"]
    assert record.refused["FA3"] == "it has no head dims 576/512"


def test_what_a_row_counts() -> None:
    """Operations and bytes of the tables that peers are quoted with; pairs by brute force."""
    row = attention_row(4, 16, 4096, 128, causal=True)
    assert (
        row.operations == 4 * 4 * 16 * 4096 * 4096 * 128 / 2
        and row.bytes == 4 * 2 * 4 * 16 * 4096 * 128
    )
    assert (
        attention_row(4, 32, 4096, 128, kv_heads=8).bytes == (2 * 32 + 2 * 8) * 2 * 4 * 4096 * 128
    )
    for causal, window in (
        (False, (9, 0)),
        (False, (5, 7)),
        (True, (5, 7)),
        (False, (None, 3)),
        (True, None),
    ):
        for q, k in ((40, 40), (13, 40), (40, 13)):
            i, j = np.ogrid[:q, :k]
            d = j - i - (k - q)
            left, right = window or (None, None)
            seen = (d <= 0) if causal else np.ones((q, k), bool)
            seen &= (d >= -(10**6 if left is None else left)) & (
                d <= (10**6 if right is None else right)
            )
            if q == k and window is None:
                continue  # counted half, as everybody does
            pairs = attention.visible_pairs(q, k, causal, window)
            assert pairs == seen.sum(), (causal, window, q, k)
    product = gemm.GemmRow("gemm", 384, 512, 512, 64, "float16", True)
    assert product.operations == 2 * 384 * 512 * 512 * 64 and product.bytes == 2 * 384 * (
        2 * 512 * 64 + 512 * 512
    )
    assert product.moves and not gemm.GemmRow("gemm", 1, 8192, 8192, 8192, "bfloat16").moves


def test_hard_scores() -> None:
    """They are what their names say, to the rounding of bfloat16."""
    for kind in attention.ADVERSARIAL:
        q, k = (torch.zeros(1, 100, 1, 64, dtype=torch.bfloat16) for _ in range(2))
        attention.hardened(kind, q, k)
        scores = (q[0, 0, 0].double() @ k[0, :, 0].double().T / 8).numpy()
        along = np.linspace(0, 1, 100)
        wanted = {
            "sink": np.where(along == 0, 40.0, 0.0),
            "falling": 200 - 200 * along,
            "rising": 200 * along,
            "jump": np.where(along < 0.4, 300.0, 0.0),
        }[kind]
        assert np.abs(scores - wanted).max() <= 200 * 2**-8, kind

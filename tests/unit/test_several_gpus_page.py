"""The table of docs/several-gpus.md is what the model expects."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
from kernelseam.distributed import costs  # noqa: E402
from kernelseam.distributed.plan import Mask  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs/several-gpus.md"


def row(tokens: int, heads: int, kv_heads: int, ranks: int) -> str:
    each = tokens // ranks
    sizes = costs.Sizes(1, heads, kv_heads, each, each, 128, 128, 2)
    machine = costs.Machine(6e14)
    made = costs.explain(sizes, Mask(tokens, tokens, None, 0), ranks, True, machine)
    best = made.best
    ring = next(c for c in made.candidates if c.method == "ring")
    name = f"mesh:{best.heads}" if best.method == "mesh" else best.method
    return (
        f"| {tokens // 1024}k | {heads}/{kv_heads} | {ranks} | {name} | {best.seconds * 1e3:.2f} "
        f"| {best.waiting / best.seconds:.0%} | {best.sent / 1e6:.0f} | {best.held / 1e6:.0f} "
        f"| {ring.seconds * 1e3:.2f} | {ring.waiting / ring.seconds:.0%} |"
    )


def rows(*ranks: int) -> list[str]:
    return [
        row(tokens, heads, kv_heads, n)
        for tokens in (131072, 1048576)
        for heads, kv_heads in ((16, 16), (32, 8))
        for n in ranks
    ]


def test_rows_are_the_models() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert [x for x in rows(2, 8, 64) if x not in lines] == []


@pytest.mark.slow("the plans of a million pairs of ranks")
def test_rows_of_many_ranks_are_the_models() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert [x for x in rows(1024) if x not in lines] == []


def test_costs_follow_bytes_links_and_products() -> None:
    sizes = costs.Sizes(1, 8, 8, 1024, 1024, 64, 64, 2)
    mask = Mask(4096, 4096)
    fast, slow = (
        costs.explain(sizes, mask, 4, False, costs.Machine(1e12, within=w)) for w in (1e15, 1e6)
    )
    by = {c.method: c for c in fast.candidates}
    held = 8 * 1024 * 128 * 2
    assert by["ring"].sent == by["all_gather"].sent == 3 * held
    assert by["ulysses"].sent == 4 * held // 2 * 3 // 4
    assert by["ring"].products == pytest.approx(4 * 8 * 1024 * 4096 * 64 / 1e12)
    assert by["ring"].waiting == 0
    assert slow.best.method == "ulysses"  # the fewest bytes
    waits = {c.method: c.waiting for c in slow.candidates}
    products = by["ring"].products
    passing = held / 1e6 + 1e-5
    assert waits["ring"] == pytest.approx(3 * passing - products * 3 / 4)

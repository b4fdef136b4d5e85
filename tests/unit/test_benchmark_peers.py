"""The comparisons with peers, dry: their rows on the host with small problems, since their figures need a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: the benchmarks' peer")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """attention_vs_peers, each of whose runs takes half a millisecond."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import attention_vs_peers
    import peers

    def median_ms(run: Callable[[], object], repeat_ms: int) -> float:
        run()
        return 0.5

    monkeypatch.setattr(peers, "median_ms", median_ms)
    torch.manual_seed(0)
    yield attention_vs_peers
    sys.path.pop(0)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients(scripts: Any, monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    monkeypatch.setitem(scripts.PEERS, "FA2", scripts.SDPBackend.MATH)
    rows = list(scripts.gradient_rows((2, 3, 48, 64, causal), 1, device="cpu"))
    flops = 10 * 2 * 3 * 48 * 48 * 64 * (0.5 if causal else 1)
    name, rate = f"B2 H3 S48 D64{' causal' * causal}", f"{flops / 0.5e-3 / 1e12:.0f}"
    for row, way in zip(rows, ("in order", "any order"), strict=True):
        cells = row.strip("| ").split(" | ")
        assert cells[:6] == [name, way, "500", rate, "500", "1.00"]
        assert 1e-4 < float(cells[6]) < 2e-2, "bf16's roundings apart"
        assert cells[7:] == ["–", "–", "–"], "cuDNN has no kernel on the host"


def test_tiles_begin_with_the_tables(scripts: Any) -> None:
    """And every one has as many scores for each warp as it has warps."""
    tiles = pytest.importorskip("kernelseam_cuda.tiles", reason="kernelseam-cuda is not installed")
    import backward_tiles

    for dim, (first, *others) in backward_tiles.CANDIDATES.items():
        table = [t for t in tiles.tiles(True)["attention_bwd"] if t.query_rows and t.max_dim == dim]
        assert first == replace(table[0], plain=False, dtypes=first.dtypes)
        for tile in (first, *others):
            assert tile.own * tile.step % (tile.warps * tile.score_rows * 16) == 0, tile
            assert len({backward_tiles.named(t) for t in (first, *others)}) == 1 + len(others)


@pytest.mark.parametrize("page", [16, 40])
def test_paged_decoding(scripts: Any, page: int) -> None:
    cells = scripts.paged_row((3, 100, 8, 2, 64, page), 1, device="cpu").strip("| ").split(" | ")
    assert cells[0] == f"B3 × 100 H8/2 D64 page {page}" and cells[1] == "500.0"
    assert cells[2] == f"{2 * 3 * 100 * 2 * 64 * 2 / 0.5e-3 / 1e9:.0f}" and cells[3] == "1"
    assert 1e-4 < float(cells[4]) < 1e-2


def test_what_was_measured_is_kept(scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a later line fails, or the time is up."""
    import peers

    def lines() -> Iterator[str]:
        yield "first"
        assert page.read_text(encoding="utf-8") == "first\n"
        yield "second"
        raise RuntimeError("the GPU is gone")

    page = tmp_path / "page.md"
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        peers.write(lines(), page)
    assert capsys.readouterr().out == page.read_text(encoding="utf-8") == "first\nsecond\n"


def test_every_script_starts() -> None:
    """Their imports and options, as far as the host has what they import."""
    folder = Path(__file__).parents[2] / "benchmarks"
    names = ("attention_vs_peers", "shared_vs_peers", "parity_h200", "random_problems", "backward_tiles")
    for name in names:
        done = subprocess.run(
            [sys.executable, folder / f"{name}.py", "--help"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and done.stdout.startswith(f"usage: {name}.py"), done.stderr

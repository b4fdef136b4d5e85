"""``python -m benchmarks run`` with a torch for ROCm and a gfx942, both rehearsed
(``helpers/rocm_rehearsal.py``): what an owner's first run would meet in Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: the benchmarks' peer")
pytest.importorskip("kernelseam_rocm", reason="kernelseam-rocm is not installed")
pytest.importorskip("kernelseam_rocm_emulator", reason="its emulator is not installed")
pytest.importorskip("hip", reason="hip-python is missing")
ROOT = Path(__file__).parents[2]
OUR_MISTAKES = ("AttributeError", "NameError", "TypeError", "KeyError", "AssertionError")


def run(folder: Path) -> tuple[str, dict[str, Any]]:
    """What a run of every suite printed, and its JSON; its page is in the folder. In the PATH is a
    card of NVIDIA's, too."""
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 580.65.06, 700.00, 1980, 3201, 99.0, 44\n")
    smi.chmod(0o755)
    script = ROOT / "tests" / "unit" / "helpers" / "rocm_rehearsal.py"
    given = ["run", "--rounds", "1", "--warm", "0", "--burst", "0.05"]
    given += ["--json", folder / "amd.json", "--report", folder / "amd.md"]
    environment = {
        **{n: x for n, x in os.environ.items() if not n.startswith("KERNELSEAM_")},
        "KERNELSEAM_PLUGINS": "rocm",
        "KERNELSEAM_CACHE_DIR": str(folder / "cache"),
        "PATH": os.pathsep.join([str(folder), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *(p for p in sys.path if p)]),
    }
    done = subprocess.run(
        [sys.executable, str(script), *map(str, given)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "amd.json").read_text(encoding="utf-8"))


def test_every_suite_runs(tmp_path: Path) -> None:
    """One test, as one process runs them all."""
    out, content = run(tmp_path)
    every_row_has_times(out, content, tmp_path)
    times_are_those_of_the_clock(content)
    peers_are_refused_in_words(content)
    no_card_of_nvidias_is_described(content)


def every_row_has_times(out: str, content: dict[str, Any], folder: Path) -> None:
    from benchmarks.comparing.running import SUITES

    rows = content["rows"]
    assert {r["suite"] for r in rows} == SUITES.keys() - {"compile"}
    assert [r["name"] for r in rows if r["failure"] or r["unsupported"] or not r["timed"]] == []
    assert f"\n{len(rows)} rows, 0 failed\n" in out
    by_rules = {t["implementation"] for r in rows for t in r["timed"] if t["worst"] is not None}
    assert by_rules == {"shared"}
    assert [r["name"] for r in rows if "e4m3" in r["name"]], "of gfx942's own dtype of 8 bits"
    page = (folder / "amd.md").read_text(encoding="utf-8")
    assert page.startswith("AMD Instinct MI300X, ") and "hip 6.4" in page


def times_are_those_of_the_clock(content: dict[str, Any]) -> None:
    """0.05 ms between two events: of a launch alone, and of a graph of twenty."""
    for row in content["rows"]:
        if row["suite"].startswith(("host", "models")):
            continue
        assert row["captured"], row["name"]
        for timed in row["timed"]:
            assert set(timed["us"]["back to back"]) == {2.5}
            assert set(timed["us"]["flushed"]) == {50.0}


def peers_are_refused_in_words(content: dict[str, Any]) -> None:
    """Those that are NVIDIA's alone are refused in words, and no refusal hides a mistake of the
    benchmarks'."""
    refused = [(n, why) for r in content["rows"] for n, why in r["refused"].items()]
    assert [x for x in refused if x[1].startswith(OUR_MISTAKES)] == []
    assert {"FA3", "cuDNN", "FlashInfer", "read"} <= {n for n, _ in refused}
    peers = {t["name"] for r in content["rows"] for t in r["timed"] if t["role"] == "peer"}
    assert {"FA2", "cuBLAS", "torch", "torch linear", "torch._grouped_mm"} <= peers


def no_card_of_nvidias_is_described(content: dict[str, Any]) -> None:
    device = content["device"]
    assert device["name"] == "AMD Instinct MI300X" and device["multiprocessors"] == 304
    assert not {"driver", "power_limit_w"} & device.keys() and "cuda" not in device["versions"]
    assert all(not r["clocks"] for r in content["rows"])


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, where torch sees an AMD card."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.comparing import command

    monkeypatch.setattr(torch.version, "hip", "6.4.43484")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "AMD Instinct MI300X")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        yield command


def test_a_card_that_kernelseam_does_not_see(
    on_a_card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plugin or driver is missing: said in words, before anything is made on the device."""
    from kernelseam.errors import NoDevice

    from benchmarks.comparing import rows

    def find(name: str) -> None:
        raise NoDevice(f"{name} is not here")

    monkeypatch.setattr(rows, "find_device", find)
    with pytest.raises(
        SystemExit, match="torch sees AMD Instinct MI300X, kernelseam does not: rocm:0 is"
    ):
        on_a_card.main(["run", "gemm"])


def test_a_library_that_plots_need_is_asked_for_first(
    on_a_card: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(on_a_card, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="--plots needs matplotlib"):
        on_a_card.main(["run", "gemm", "--plots", str(tmp_path)])


def test_a_row_that_a_device_does_not_support(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no times and a reason, and is no failure of the run."""
    monkeypatch.syspath_prepend(str(ROOT))
    from kernelseam.errors import Refusal, Unsupported

    from benchmarks.comparing import clocks, grouped, rows, running, tables

    def plan(*given: Any, **options: Any) -> None:
        raise Unsupported(
            "the product", [Refusal("shared", "gfx90a multiplies no numbers of 8 bits")]
        )

    monkeypatch.setattr(rows.ks, "plan", plan)
    row = grouped.GroupedRow("grouped", 4, 70, 32, 48, "skewed", by_rows=True)
    record = running.measured(row, rows.Session("cpu", clocks.HostClock()))
    assert not record.failure and "gfx90a multiplies no numbers of 8 bits" in record.unsupported
    assert tables.line(record).startswith(
        f"UNSUPPORTED grouped/{row.name}: no implementation takes"
    )
    assert tables.table([record])[-1].startswith(f"| {row.name} | UNSUPPORTED: no implementation")
    assert tables.summary([record])[-1] == "1 rows, 0 failed, 1 unsupported"
    assert tables.failures([record]) == 0


def test_a_flush_empties_the_infinity_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight L2 caches of an MI300X are an eighth of it."""
    monkeypatch.syspath_prepend(str(ROOT))
    from types import SimpleNamespace

    from benchmarks.comparing import clocks

    sizes: list[int] = []
    properties = SimpleNamespace(L2_cache_size=4 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(clocks.torch, "empty", lambda size, **options: sizes.append(size))
    for hip in (None, "6.4.43484"):
        monkeypatch.setattr(torch.version, "hip", hip)
        clocks.GpuClock()
    assert sizes == [32 << 20, 512 << 20]

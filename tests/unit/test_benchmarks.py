"""``python -m benchmarks`` without a GPU: what is written and drawn, said and asked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: the benchmarks' peer")
from benchmarks.comparing import (  # noqa: E402
    clocks,
    command,
    idle_device,
    machine,
    plots,
    rows,
    running,
    tables,
)
from benchmarks.comparing.results import Record, Timed, means  # noqa: E402

ROOT = Path(__file__).parents[2]


def record(name: str, ours: float, peers: dict[str, tuple[float, float]], **options: Any) -> Any:
    timed = [
        Timed(
            "ours",
            "ours",
            "sm90",
            {"back to back": [ours] * 4, "flushed": [ours * 1.1] * 4},
            2e-3,
            0.4,
        )
    ]
    timed += [
        Timed(n, "peer", "", {"back to back": [x], "flushed": [y]}, 2e-3)
        for n, (x, y) in peers.items()
    ]
    return Record("attention", name, 1e12, 1e9, timed=timed, **options)


class TestResults:
    def test_the_less_of_both_ways_of_the_best_peer_counts(self) -> None:
        actual = record("x", 100, {"FA3": (120, 121), "cuDNN": (130, 115.5)})
        assert actual.counted(actual.timed[0]) == pytest.approx(1.05)
        assert actual.beyond(actual.timed[0]) == []
        slower = record("x", 100, {"FA3": (95, 150)}, limits={"flushed": 90.0})
        assert slower.beyond(slower.timed[0]) == [
            "0.950 of the best peer, wanted 1",
            "flushed 110 µs, at most 90",
        ]
        assert record("x", 100, {"FA3": (95, 150)}, least=0.9).beyond(slower.timed[0]) == []
        assert (
            actual.timed[0].spread("back to back") == 0
            and actual.timed[1].spread("flushed") is None
        )

    def test_geometric_means(self) -> None:
        rows = [record("x", 100, {"FA3": (x, 1000)}) for x in (80, 125, 100)]
        rows.append(record("failed", 100, {"FA3": (1, 1)}, failure="it is wrong"))
        assert means(rows) == {"attention": {"ours": pytest.approx(1.0)}}

    def test_lines_and_tables(self) -> None:
        rows = [
            record("x", 100, {"FA3": (120, 121)}),
            record("y", 2000, {"cuDNN": (1000, 4000)}),
        ]
        rows.append(record("z", 1, {}, failure="a | b"))
        assert tables.line(rows[0]) == (
            "attention/x: ours [sm90] 100.0 / 110.0 µs 10000 TFLOP/s, FA3 120.0 / 121.0 µs (1.20 / "
            "1.10 of ours), error 2.0e-03 (0.40)  [0.0 s]"
        )
        table = tables.table(rows)
        assert table[0] == (
            "| row | implementation | µs, back to back | µs, flushed | TFLOP/s | GB/s | FA3 / "
            "ours | cuDNN / ours | best peer / ours, the less | error | error / tolerance |"
        )
        assert (
            table[2]
            == "| x | sm90 | 100.0 | 110.0 | 10000 | 10000 | 1.20 / 1.10 | – | 1.10 | 2.0e-03 | "
            "0.40 |"
        )
        assert (
            table[3]
            == "| y | sm90 | 2000 | 2200 | 500 | 500 | – | 0.50 / 1.82 | **0.50** | 2.0e-03 | "
            "0.40 |"
        )
        assert (
            table[4].startswith("| z | FAILED: a / b |")
            and len({line.count("|") for line in table}) == 1
        )
        end = tables.summary(rows)
        assert end[0] == "attention: geometric mean ours 0.742; least 0.50 of 2 rows"
        assert end[1] == "BELOW attention/y ours: 0.500 of the best peer, wanted 1"
        page = tables.page({}, rows)
        assert page[-1] == f"- {end[1]}" and "**0.742**" in page[-3]
        assert end[-1] == "3 rows, 1 failed"

    def test_json_grows_and_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        head = {
            "device": {
                "name": "H200",
                "driver": "580.1",
                "power_limit_w": 700.0,
                "versions": {"torch": "2.11"},
            }
        }
        log = running.Log(path, head)
        assert json.loads(path.read_text(encoding="utf-8")) == {"schema": 1, **head, "rows": []}
        rows = [record(n, 100, {"FA3": (120, 121)}) for n in "xy"]
        for n, row in enumerate(rows, 1):
            log.add(row)
            assert len(json.loads(path.read_text(encoding="utf-8"))["rows"]) == n
        assert running.read(path) == (head, rows)
        assert list(tmp_path.iterdir()) == [path]
        page = "\n".join(tables.page(*running.read(path)))
        assert (
            page.startswith("H200, driver 580.1, 700 W, torch 2.11.\n")
            and "ours: **1.100**" in page
        )
        path.write_text(json.dumps({"schema": 0, "rows": []}), encoding="utf-8")
        with pytest.raises(ValueError, match="schema 0, not 1: measure again"):
            running.read(path)

    def test_plots(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib", reason="matplotlib is missing: the extra bench")
        rows = [
            record("good", 100, {"FA3": (120, 121)}),
            record("bad", 100, {"FA3": (80, 121)}),
        ]
        rows.append(record("failed", 1, {}, failure="wrong"))
        written = plots.draw(
            {"ceilings": {"copy_gbs": 4000.0, "cublas_tflops": 700.0}}, rows, tmp_path / "plots"
        )
        assert [p.name for p in written] == ["ratios-attention.svg", "roofline.svg"]
        assert all(p.read_text(encoding="utf-8").count("<path") > 10 for p in written)


def test_what_the_driver_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A line of nvidia-smi's, in a stub's words; nothing where there is none."""
    stub = tmp_path / "nvidia-smi"
    answer = {
        "driver_version": "580.65.06",
        "power.limit": "700.00",
        "clocks.sm": "1980",
        "clocks.mem": "3201",
    }
    stub.write_text(
        f"#!{sys.executable}\nimport sys\nanswer = {answer}\nasked = "
        "sys.argv[3].split('=')[1].split(',')\n"
        "print(', '.join(answer.get(x, '[N/A]') for x in asked))\n",
        encoding="utf-8",
    )
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "PATIENCE", 60.0)
    assert machine.asked() == {
        "driver": "580.65.06",
        "power_limit_w": 700.0,
        "sm_mhz": 1980.0,
        "memory_mhz": 3201.0,
    }
    with machine.sampling("cuda") as readings:
        pass
    assert readings == {"sm_mhz": 1980.0, "memory_mhz": 3201.0}
    monkeypatch.setattr(machine, "PATIENCE", 0.0)
    with machine.sampling("cuda") as late:
        pass
    assert late == {}, "nobody waits for a card that is slow to answer"
    stub.unlink()
    assert machine.asked() == {}
    with machine.sampling("cuda") as readings:
        pass
    assert readings == {}


@pytest.mark.slow("seconds of timing: test_new_extents_make_few_python_calls takes the same path")
def test_host_time_with_an_idle_driver(tmp_path: Path) -> None:
    """As it is typed, from the repository's root: host times of the path to a GPU, without one."""
    pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is missing")
    if shutil.which("cc") is None:
        pytest.skip("a C compiler is missing")
    given = ["host", "--device", "idle", "--only", "bmm(a, b)", "--json", tmp_path / "run.json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "run", *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["rows"]
    (ours,) = row["timed"]
    assert len(ours["us"]["host"]) == 5 and 1 < min(ours["us"]["host"]) < 1000


def test_new_extents_make_few_python_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the path to a GPU, without one: a count does not depend on the machine. Planning makes
    thousands, a call that comes again fewer than ten."""
    pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is missing")
    pytest.importorskip("cuda.bindings.nvrtc", reason="nvrtc is missing")
    if shutil.which("cc") is None:
        pytest.skip("a C compiler is missing")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    script = str(Path(__file__).parent / "helpers" / "idle_calls.py")
    done = idle_device.run_with_idle_driver([script], capture_output=True, timeout=280)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    new = {"decode": 21, "causal": 23, "varlen": 22, "matmul2d": 20, "qkv": 30, "gradients": 56}
    new["qkv into pages"] = 36
    new["lists"] = 148  # 64 products
    new |= {"reach": 104, "cap": 106}  # of a function that is traced, and of what it captured
    new |= {"layer": 7, "second layer": 17, "first layer": 22}  # of a model's step
    # the first call of a class, which chooses: half a microsecond each
    first = {"decode": 1030, "causal": 855, "varlen": 830, "paged": 1100, "matmul2d": 760}
    first |= {"gradients": 1535, "lists": 1760, "reach": 870, "qkv": 1430}
    new |= {f"{name}, a class": most for name, most in first.items()} | {"paged": 22}
    assert {n: counts[n] for n, most in new.items() if counts[n] > most} == {}
    again = {"attention again": 7, "bmm again": 8, "torch.attention again": 8}
    again["lists again"] = 16
    assert {n: counts[n] for n, most in again.items() if counts[n] > most} == {}
    # what a call that repeats reads on the device is copied once, and lives with it
    assert counts["lists' copies kept"] == 1
    assert counts["lists' copies again"] == counts["lists' copies"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run on the host, and its tables from the JSON; one whose time is up begins no row."""
    pytest.importorskip("matplotlib", reason="matplotlib is missing: the extra bench")
    actual, page, plots = (tmp_path / n for n in ("run.json", "page.md", "plots"))
    given = ["run", "gemm", "--device", "cpu", "--rounds", "1", "--warm", "0"]
    given += ["--only", "384 × 1×64×512 f16 NN"]
    written = ["--json", str(actual), "--report", str(page), "--plots", str(plots)]
    with torch.random.fork_rng(), torch.set_grad_enabled(False):
        assert command.main([*given, *written]) == 0
        out = capsys.readouterr().out
        assert command.main([*given, "--seconds", "0"]) == 0
        late = capsys.readouterr().out
    assert "\ngemm/384 × 1×64×512 f16 NN: ours [numpy] " in out and "\n1 rows, 0 failed\n" in out
    assert "the time is up: 1 rows are not measured\n" in late and "\n0 rows, 0 failed\n" in late
    head, rows = running.read(actual)
    device = head["device"]
    assert (device["name"], device["versions"]["torch"]) == ("cpu", torch.__version__)
    assert len(rows) == 1
    assert "ratios-gemm.svg" in [p.name for p in plots.iterdir()]
    assert command.main(["table", str(actual)]) == 0
    assert capsys.readouterr().out == page.read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", [["run", "gemm"], ["choices", "--count", "1"]])
def test_a_torch_that_sees_no_gpu_is_said(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = r"torch \S+ sees no GPU\. Install the torch that is"
    with torch.no_grad(), pytest.raises(SystemExit, match=said):
        command.main(arguments)


@pytest.mark.parametrize(("hip", "wanted"), [(None, "cuda:0"), ("6.4.43484", "rocm:0")])
def test_torch_says_whose_gpu_cuda_is(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, wanted: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(rows, "find_device", lambda name: name)
    session = rows.Session("cuda", clocks.HostClock())
    assert session.target() == wanted
    assert rows.Session("cpu", session.clock).target() == "numpy"
    versions = machine.versions()
    assert versions.get("hip") == hip and ("cuda" in versions) == (hip is None)

"""``kernelseam parity``: what it runs, prints and writes, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from kernelseam.cli import progress
from kernelseam.cli.main import main
from kernelseam.errors import DeviceError
from kernelseam.parity.matrix import matrix
from kernelseam.parity.report import summary
from kernelseam.parity.running import run
from kernelseam.parity.running.stages import Computed
from kernelseam.samples.case import Case
from kernelseam_thirdvendor.gemm import AcmeGemm
from kernelseam_thirdvendor.runtime import AcmeRuntime


@pytest.fixture
def parity(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    discovered: Callable[..., Any],
) -> Command:
    """``parity(*arguments)`` → (exit status, standard output, standard error); the reference and
    Acme are there."""
    discovered("kernelseam_thirdvendor")
    monkeypatch.delenv("KERNELSEAM_BACKEND", raising=False)
    monkeypatch.setattr(progress, "PATIENCE", 3600)  # a machine may be busy

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["parity", *map(str, arguments)])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acme forgets beta."""
    build = AcmeGemm.build

    def without_beta(self: AcmeGemm, problem: Any, device: Any) -> Any:
        from dataclasses import replace

        return build(self, replace(problem, beta=0.0), device)

    monkeypatch.setattr(AcmeGemm, "build", without_beta)


def test_every_backend_with_plain_lines(parity: Command) -> None:
    status, out, err = parity("--case", "gemm-f64-t?", "--case", "attention-f16-64-mqa")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "[1/5] refused         gemm-f64-tn on acme-acme-gemm: Acme has no float64"
    assert sorted(line.split()[1:5] for line in lines[1:5:2]) == [
        ["passed", "0", "gemm-f64-tn", "on"],
        ["passed", "0", "gemm-f64-tt", "on"],
    ]
    assert lines[4].startswith("[5/5] passed") and lines[4].endswith(
        "attention-f16-64-mqa on numpy-numpy"
    )
    assert [line.split()[:7] for line in lines[6:9]] == [
        ["gemm", "acme", "acme-gemm", "2", "0", "2", "0"],
        ["gemm", "numpy", "numpy", "2", "2", "0", "0"],
        ["attention", "numpy", "numpy", "1", "1", "0", "0"],
    ]
    assert "acme acme-gemm refused 2 case(s) of gemm: Acme has no float64" in lines
    assert lines[-1] == "acme has no implementation of attention: its 1 case(s) were not run."
    assert "\x1b" not in out


def test_a_backend_a_device_an_operation_an_implementation(parity: Command) -> None:
    _, out, _ = parity("--backend", "acme", "--case", "gemm-f16-n?", "--json")
    (row,) = json.loads(out)["implementations"]
    assert (row["implementation"], row["device"], row["cases"], row["passed"]) == (
        "acme-gemm",
        "acme:0 (acme1)",
        2,
        2,
    )
    _, out, _ = parity(
        "--device", "acme:1", "--implementation", "acme-gemm", "--case", "gemm-f16-nn", "--json"
    )
    assert json.loads(out)["implementations"][0]["device"] == "acme:1 (acme1)"
    _, out, _ = parity("--operation", "attention", "--case", "*-64-mqa", "--json")
    assert [c["case"] for c in json.loads(out)["cases"]] == ["attention-f16-64-mqa"]


def test_the_variable_names_a_backend_and_the_option_is_over_it(
    parity: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELSEAM_BACKEND", "numpy")
    for option, backend in (
        ((), "numpy"),
        (("--backend", "acme"), "acme"),
        (("--device", "acme"), "acme"),
    ):
        status, out, _ = parity(*option, "--case", "gemm-f16-nn", "--json")
        assert status == 0 and {c["backend"] for c in json.loads(out)["cases"]} == {backend}


def test_one_json_object_and_nothing_else(parity: Command) -> None:
    status, out, err = parity("--case", "gemm-f??-nn", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["passed"] is True and found["command"] == "kernelseam parity --case 'gemm-f??-nn'"
    assert (
        found["facts"]["device acme:0"]
        == f"acme1, Acme One, {found['implementations'][0]['evidence']}"
    )
    acme, numpy = found["implementations"]
    assert (acme["evidence"] in summary.EVIDENCE, numpy["evidence"]) == (True, "host")
    assert [(c["case"], c["status"]) for c in found["cases"] if c["backend"] == "acme"] == [
        ("gemm-f16-nn", "passed"),
        ("gemm-f32-nn", "passed"),
        ("gemm-f64-nn", "refused"),
    ]
    one = found["cases"][0]
    assert 0 < one["computing"] < one["seconds"]
    assert (
        one["group"] == "dtypes and shapes"
        and 0 < one["worst"] <= 1
        and "the oracle says" in one["detail"]
    )


def test_a_wrong_result_ends_with_1_and_is_named(
    parity: Command, wrong: None, tmp_path: Path
) -> None:
    page = tmp_path / "p.html"
    status, out, err = parity("--case", "gemm-f32-nn-k-0*", "--backend", "acme", "--report", page)
    assert (status, err) == (1, "")
    (line,) = [x for x in out.splitlines() if x.startswith("FAILED")]
    assert line.startswith("FAILED gemm-f32-nn-k-0-beta-half on acme-acme-gemm: C[")
    assert "1 failed" in page.read_text(encoding="utf-8"), "the report is written all the more"
    assert out.splitlines()[-1] == f"report: {page}"
    status, out, _ = parity("--case", "gemm-f32-nn-k-0*", "--backend", "acme", "--json")
    assert status == 1 and json.loads(out)["passed"] is False


def test_workers_change_nothing_but_the_time(parity: Command) -> None:
    chosen = (
        "--case",
        "gemm-f64-t?",
        "--case",
        "attention-f16-64-mqa",
        "--case",
        "merge-states-f32-f16",
    )
    alone, piped = (parity(*chosen, "--json", "--workers", n) for n in (0, 2))
    assert (alone[0], alone[2], piped[0], piped[2]) == (0, "", 0, "")
    first, second = json.loads(alone[1]), json.loads(piped[1])
    for one in (*first["cases"], *second["cases"]):
        assert one.pop("computing") < one.pop("seconds")
    assert [c["status"] for c in second["cases"]] == [
        "refused",
        "passed",
        "refused",
        "passed",
        "passed",
        "passed",
    ]
    assert second["cases"] == first["cases"] and second["command"] == first["command"]


def test_a_lost_device_is_in_the_report(
    parity: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compute, page = run.compute, tmp_path / "p.md"

    def fail(*_: object) -> object:
        raise DeviceError("the runtime says 700")

    def at_last(case: Case, *arguments: Any) -> Computed:
        if case.name == "gemm-f16-nt":
            monkeypatch.setattr(AcmeRuntime, "from_host", fail)
        return compute(case, *arguments)

    monkeypatch.setattr(run, "compute", at_last)
    status, out, err = parity("--backend", "acme", "--case", "gemm-f16-??", "--report", page)
    assert (status, err) == (1, "")
    lost = (
        "the device computes nothing any more since gemm-f16-nt on acme-acme-gemm: DeviceError: "
        "the runtime says 700. Not run after it: 2."
    )
    assert lost in out.splitlines() and lost in page.read_text(encoding="utf-8")
    assert [line.split()[1] for line in out.splitlines()[:2]] == ["passed", "error"]


def test_reports_of_both_kinds(parity: Command, tmp_path: Path) -> None:
    pages = [tmp_path / "p.html", tmp_path / "p.md"]
    arguments = [x for p in pages for x in ("--report", p)]
    status, out, _ = parity("--case", "gemm-f64-nn", *arguments)
    assert status == 0 and all(f"report: {p}" in out for p in pages)
    html, markdown = (p.read_text(encoding="utf-8") for p in pages)
    assert html.startswith("<!DOCTYPE html>") and "refused: Acme has no float64" in html
    assert markdown.startswith("# Parity report")
    assert "* gemm on acme acme-gemm, 1 case(s): Acme has no float64" in markdown
    command = "kernelseam parity --case gemm-f64-nn --report p.html --report p.md"
    assert command in html and f"`{command}`" in markdown
    parity("--case", "gemm-f64-nn", *arguments)
    assert (html, markdown) == tuple(p.read_text(encoding="utf-8") for p in pages), (
        "the same run, the same report"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "nope"), "--backend = nope: must be one of acme, numpy."),
        (("--device", "acme:7"), "--device = acme:7: backend acme has 2 device(s) here."),
        (
            ("--device", "acme", "--backend", "numpy"),
            "--backend = numpy: the device is acme:0 (acme1). Name one of the two.",
        ),
        (("--operation", "conv"), "--operation = conv: must be one of gemm, grouped_gemm"),
        (
            ("--case", "gemm-nn"),
            f"--case = gemm-nn: is the name of none of {len(matrix())} cases, such as gemm-f16-nn.",
        ),
        (
            ("--operation", "gemm", "--case", "attention*"),
            "--case = attention*: is the name of none of",
        ),
        (
            ("--implementation", "x"),
            (
                "--implementation = x: must be one of acme-gemm, numpy for gemm, grouped_gemm, "
                "grouped_gemm_pointers, attention, attention_bwd, merge_states, paged_cache, "
                "qkv_projection, output_projection, qkv_projection_bwd, output_projection_bwd here."
            ),
        ),
        (
            ("--backend", "acme", "--operation", "attention"),
            "implementation = any: must be one of none for attention here. See `kernelseam doctor`",
        ),
        (
            ("--limit", "0"),
            "--limit = 0.0: must be a positive number of seconds. Leave it out: it is 300.",
        ),
        (("--report", "p.pdf"), "--report = p.pdf: must end with .html or .md. Name such a file."),
        (
            ("--report", "no/such/p.md"),
            "--report = no/such/p.md: must be a file in a folder that exists.",
        ),
    ],
)
def test_bad_input_ends_with_2_before_anything_runs(
    parity: Command,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = parity(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}") and "Traceback" not in err


def test_a_report_that_cannot_be_written_ends_with_2(parity: Command, unprivileged: Path) -> None:
    folder = unprivileged / "locked"
    folder.mkdir(mode=0o500)
    status, out, err = parity("--case", "gemm-f64-nn", "--report", folder / "p.md")
    assert (status, out) == (
        2,
        "",
    ) and err == f"error: --report = {folder}/p.md: must be writable. Name another place.\n"


def test_a_backend_without_a_device_ends_with_2(
    parity: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernelseam_thirdvendor.runtime.AcmeRuntime.devices", lambda self: ())
    status, _, err = parity("--backend", "acme")
    assert status == 2
    assert err.startswith(
        "error: device = acme:0: backend acme has 0 device(s) here. See `kernelseam doctor`"
    )


def test_a_terminal_gets_a_bar(python_command: list[str], tmp_path: Path) -> None:
    master, slave = pty.openpty()
    environment = {
        **os.environ,
        "KERNELSEAM_PLUGINS": "",
        "TERM": "xterm",
        "COLUMNS": "100",
        "NO_COLOR": "",
    }
    done = subprocess.Popen(
        [
            *python_command,
            "-m",
            "kernelseam",
            "parity",
            "--backend",
            "numpy",
            "--case",
            "gemm-f64*",
        ],
        stdout=slave,
        stderr=slave,
        stdin=slave,
        env=environment,
        cwd=tmp_path,
    )
    os.close(slave)
    said = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        said += part
    os.close(master)
    assert done.wait(timeout=60) == 0
    text = said.decode()
    count = sum(c.name.startswith("gemm-f64") for c in matrix())
    assert f"{count}/{count}" in text and f"{count} passed" in text and "\x1b[" in text
    assert "passed       0  gemm" not in text, "no line a case"
    assert any(line.startswith("  numpy    numpy ") for line in text.splitlines())
    assert text.splitlines()[-1].startswith("plans, launches and copies: ")

"""benchmarks/parity_h200.py on the host: the matrix by processes, and alone for memory checkers."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernelseam.parity.matrix import matrix

from benchmarks import parity_h200


def test_the_matrix_by_processes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    cases = [c for c in matrix("f64-t") if c.operation == "gemm"]
    with pytest.raises(SystemExit) as ended:
        parity_h200.main(
            [
                "--device",
                "numpy:0",
                "--filter",
                "f64-t",
                "--operation",
                "gemm",
                "--workers",
                "1",
                "--report",
                str(page),
            ]
        )
    out = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert out[0].startswith(f"{len(cases)} cases, 0 binaries in ") and out[-1].startswith(
        "all in "
    )
    assert [line.partition("  gemm")[2] for line in out[1 : len(cases) + 1]] == [
        f"{c.name.removeprefix('gemm')} on numpy-numpy" for c in cases
    ]
    assert f"\n{len(cases)} passed, 0 refused with a reason, 0 failed.\n" in page.read_text(
        encoding="utf-8"
    )


def test_the_matrix_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """An allocation an operand; each case is named before it runs, so that a checker's finding has
    its case."""
    given = [
        "--device",
        "numpy:0",
        "--filter",
        "f64-t",
        "--operation",
        "gemm",
        "--separate",
        "--verbose",
    ]
    assert parity_h200.main(given) == 0
    names = [c.name for c in matrix("f64-t") if c.operation == "gemm"]
    out = capsys.readouterr().out.splitlines()
    assert out[1] == f"{len(names)} cases" and out[2 : 2 + len(names)] == names
    assert out[-1].startswith(f"{{'passed': {len(names)}}} in ")


def test_cases_of_many_tiles_are_for_checkers(capsys: pytest.CaptureFixture[str]) -> None:
    name = "attention-f16-64-causal-many-tiles-masked"
    given = ["--device", "numpy:0", "--filter", name, "--many-tiles"]
    assert parity_h200.main([*given, "--separate", "--verbose"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1:3] == ["1 cases", name] and out[-1].startswith("{'passed': 1} in ")
    with pytest.raises(SystemExit):
        parity_h200.main(given)
    assert "--many-tiles is for --separate" in capsys.readouterr().err

"""The pytest plugin as a vendor of one's own uses it: two files, and the matrix runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def test_a_conftest_and_three_lines_run_the_matrix(
    tmp_path: Path, python_command: list[str]
) -> None:
    (tmp_path / "conftest.py").write_text("from kernelseam.parity.pytest_plugin import *\n")
    (tmp_path / "test_mine.py").write_text(
        "def test_parity(parity_outcome):\n    parity_outcome.require()\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q -p no:cacheprovider\n")
    here = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}
    env = {**here, "KERNELSEAM_BACKEND": "numpy", "KERNELSEAM_PLUGINS": ""}
    chosen = ["-k", "f64-t or 64-mqa"]
    command = [
        *python_command,
        "-m",
        "pytest",
        "-c",
        str(tmp_path / "pytest.ini"),
        *chosen,
        str(tmp_path),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [
        line.split()
        for line in done.stdout.splitlines()
        if line.startswith(("gemm ", "attention "))
    ]
    assert [line[:6] for line in lines] == [
        ["gemm", "numpy", "numpy", "11", "11", "0"],
        ["attention", "numpy", "numpy", "2", "2", "0"],
    ]

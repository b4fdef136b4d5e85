"""docs/add-a-vendor.md from an empty folder to a green matrix: its files are written, its commands
run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from kernelseam.contract import CONTRACT_VERSION
from kernelseam.parity.matrix import matrix

Run = Callable[..., "subprocess.CompletedProcess[str]"]
GUIDE = (Path(__file__).parents[2] / "docs" / "add-a-vendor.md").read_text(encoding="utf-8")
FILES = re.findall(r"^`([\w./]+)`\. .*?^```\w+\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "part", ["gemm-f64", pytest.param("", marks=pytest.mark.slow("every GEMM, twice"))]
)
def test_from_an_empty_folder_to_a_green_matrix(
    run_installed: Run, tmp_path: Path, part: str
) -> None:
    """As it is typed; in every run with the cases of this part alone."""
    for name, text in FILES:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert [name for name, _ in FILES] == [
        "pyproject.toml",
        *(f"kernelseam_yours/{n}.py" for n in ("__init__", "runtime", "gemm")),
    ]
    assert f"contract_version={CONTRACT_VERSION}," in dict(FILES)["kernelseam_yours/__init__.py"]

    (commands,) = COMMANDS
    output = []
    try:
        chosen = {"kernelseam parity": f" --case '{part}*'", "python -m pytest": f" -k {part}"}
        for command in commands.splitlines():
            if part:
                command += next((c for start, c in chosen.items() if command.startswith(start)), "")
            done = run_installed(command, tmp_path)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            output.append(done.stdout)
    finally:
        # others use the environment
        run_installed("python -m pip uninstall --quiet --yes kernelseam-yours", tmp_path)
    _, doctor, explained, parity, tests = output
    assert "yours:0" in doctor and "No failures" in doctor and "gemm: simple" in doctor
    assert "refused: takes strided batches only" in explained

    cases = [c for c in matrix() if c.operation == "gemm" and c.name.startswith(part)]
    listed = sum(  # lists that are even are strided, or there are none
        c.view == "device"
        or c.scattered
        or bool(c.bias or c.residual or c.scales or c.epilogue or c.reductions)
        or c.lead != (c.batch, c.num_heads)
        for c in cases
    )
    (row,) = [line.split() for line in parity.splitlines() if line.startswith("gemm ")]
    name, count = row[:3], [int(x) for x in row[3:7]]
    assert name == ["gemm", "yours", "simple"]
    assert count[0] == len(cases) == count[1] + count[2] and count[3] == 0
    assert 0 < count[2] <= listed
    assert part or "yours has no implementation of attention" in parity
    page = (tmp_path / "parity.html").read_text(encoding="utf-8")
    assert (
        "None failed" in page
        and "Yours One" in page
        and "refused: takes strided batches only" in page
    )
    end = rf"{count[1]} passed, {count[2]} skipped(, \d+ deselected)? in"
    assert re.search(end, tests.splitlines()[-1])

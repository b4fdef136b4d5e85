"""NVIDIA's engine for float64 and TF32 on the host, but for its instruction: who takes what, from which banks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("wide_engine.cpp")
ROOT = Path(__file__).parents[2]
KERNELS, SHARED = ROOT / "cuda_kernels", ROOT / "core" / "kernelseam" / "kernels"
ENGINE = (KERNELS / "wide_engine.h").read_text(encoding="utf-8")


def _wrong(folder: Path, engine: str) -> set[str]:
    """What the check reports of an engine's text."""
    (folder / "wide_engine.h").write_text(engine, encoding="utf-8")
    platform = (KERNELS / "platform_nvidia.h").read_text(encoding="utf-8")
    (folder / "platform_nvidia.h").write_text(platform, encoding="utf-8")
    command = ["c++", "-std=c++17", "-O1", "-w", f"-I{folder}", f"-I{SHARED}", str(SOURCE), "-o", str(folder / "check")]
    subprocess.run(command, check=True)
    found = subprocess.run([folder / "check"], capture_output=True, text=True, check=False)
    assert found.returncode == bool(found.stdout)
    return set(found.stdout.splitlines())


def test_lanes_hand_over_what_the_instruction_wants(tmp_path: Path) -> None:
    assert _wrong(tmp_path, ENGINE) == set()


@pytest.mark.parametrize(
    ("find", "plant", "reported"),
    [
        ("(row & 2) * 2", "(row & 1) * 4", {"banks"}),
        ("row / V * 2)", "row * 2)", {"banks"}),
        ("2 * g + u, k0 - inner", "g + 8 * u, k0 - inner", {"double, B along n", "float, both along k"}),
        ("inner + KV * t + s, n0", "inner + t + 4 * s, n0", {"double, A along m", "float, B along n"}),
        ("+ 2 * (c & 1)", "+ 4 * (c & 1)", {"double, both along k", "float, neither along k"}),
    ],
)
def test_what_is_planted_in_it_is_found(tmp_path: Path, find: str, plant: str, reported: set[str]) -> None:
    assert ENGINE.count(find) == 1
    assert reported <= _wrong(tmp_path, ENGINE.replace(find, plant))

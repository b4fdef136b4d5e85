"""NVIDIA's engines for float32, float64 and TF32 on the host, without their instruction: who takes
what, from where."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvidia_engines.cpp")
ROOT = Path(__file__).parents[2]
FILES = {
    name: (folder / name).read_text(encoding="utf-8")
    for folder, name in (
        (ROOT / "cuda_kernels", "platform_nvidia.h"),
        (ROOT / "cuda_kernels", "copy.h"),
        (ROOT / "cuda_kernels", "engine.h"),
        (ROOT / "cuda_kernels", "wide_engine.h"),
        (ROOT / "cuda_kernels", "tf32_engine.h"),
        (ROOT / "core" / "kernelseam" / "kernels", "tile/base.h"),
        (ROOT / "core" / "kernelseam" / "kernels", "tile/simt.h"),
    )
}
WIDE, SIMT = "wide_engine.h", "tile/simt.h"


def _wrong(folder: Path, files: dict[str, str]) -> set[str]:
    """What the check reports of the device sources."""
    (folder / "tile").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    command = [
        "c++",
        "-std=c++17",
        "-O0",
        "-w",
        f"-I{folder}",
        str(SOURCE),
        "-o",
        str(folder / "check"),
    ]
    subprocess.run(command, check=True)
    result = subprocess.run([folder / "check"], capture_output=True, text=True, check=False)
    assert result.returncode == bool(result.stdout)
    return set(result.stdout.splitlines())


def test_lanes_take_what_is_theirs_from_banks_of_their_own(tmp_path: Path) -> None:
    assert _wrong(tmp_path, FILES) == set()


PLANTED: list[tuple[str, str, str, set[str]]] = [
    (WIDE, "(row & 2) * 2", "(row & 1) * 4", {"banks"}),
    (WIDE, "row / V * 2)", "row * 2)", {"banks"}),
    (WIDE, "(row ^ row >> 1) & 2", "row & 2", {"banks"}),
    (WIDE, "(row & 8) / 4", "(row & 4) / 2", {"banks"}),
    (
        WIDE,
        "2 * g + u, k0 - inner",
        "g + 8 * u, k0 - inner",
        {"double, B along n", "float, both along k"},
    ),
    (
        WIDE,
        "inner + KV * t + s, n0",
        "inner + t + 4 * s, n0",
        {"double, A along m", "float, B along n"},
    ),
    (
        WIDE,
        "+ 2 * (c & 1)",
        "+ 4 * (c & 1)",
        {"double, both along k", "float, neither along k"},
    ),
    (SIMT, "(row ^ row >> 2) & (P - 1)", "row & (P - 1)", {"banks"}),
    (SIMT, "(row ^ row >> 2) & (P - 1)", "row >> 2 & (P - 1)", {"banks"}),
    (SIMT, "return lane() / NEAR % Q;", "return lane() % Q;", {"banks", "SIMT, both along k"}),
    (SIMT, "rights.after(step)", "rights.after(0)", {"SIMT, both along k"}),
    (SIMT, "chunks[Layout::mask(k)]", "chunks[0]", {"SIMT, B along n", "SIMT, A along m"}),
    (SIMT, "i % N, chunk = k / KV", "i % N * 2, chunk = k / KV", {"SIMT, both along k"}),
]
OFTEN = (0, 4, 5, 6, 9, 11)
"""Of each kind of report one."""


@pytest.mark.parametrize(
    ("place", "find", "plant", "reported"),
    [
        pytest.param(*x, marks=[pytest.mark.slow("a compilation each")] * (i not in OFTEN))
        for i, x in enumerate(PLANTED)
    ],
)
def test_what_is_planted_is_found(
    tmp_path: Path, place: str, find: str, plant: str, reported: set[str]
) -> None:
    assert FILES[place].count(find) == 1
    assert reported <= _wrong(tmp_path, {**FILES, place: FILES[place].replace(find, plant)})

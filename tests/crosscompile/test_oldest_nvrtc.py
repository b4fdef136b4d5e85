"""The lowest nvrtc of each range that kernelseam-cuda admits compiles every device source: it lacks
what the newest has.

KERNELSEAM_OLDEST_NVRTC names a folder with the libraries, anywhere below it (``.ci/environment``
installs them).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("kernelseam_cuda", reason="nvrtc is missing: kernelseam-cuda is not installed")
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "helpers" / "oldest_nvrtc.py"
RANGES = [
    requirement
    for extra in tomllib.loads((ROOT / "plugins" / "cuda" / "pyproject.toml").read_text("utf-8"))[
        "project"
    ]["optional-dependencies"].values()
    for requirement in extra
    if requirement.startswith("nvidia-cuda-nvrtc")
]


def lowest(requirement: str) -> tuple[int, int]:
    """The version that a range begins with."""
    at = re.search(r">=(\d+)(?:\.(\d+))?", requirement)
    assert at, requirement
    return int(at[1]), int(at[2] or 0)


OLDEST = min(map(lowest, RANGES))
WHOLE = pytest.mark.slow("assembled, too, and by the lowest of a range that lacks less")


@pytest.mark.parametrize(
    ("requirement", "way"),
    [
        *((r, "") for r in RANGES if lowest(r) == OLDEST),
        *(pytest.param(r, "--whole", marks=WHOLE) for r in RANGES),
    ],
)
def test_it_compiles_every_device_source(
    requirement: str, way: str, python_command: list[str]
) -> None:
    """Every run asks the front end of the oldest one."""
    version, folder = lowest(requirement), os.environ.get("KERNELSEAM_OLDEST_NVRTC", "")
    found = sorted(Path(folder).rglob(f"libnvrtc.so.{version[0]}")) if folder else []
    if not found:
        where = folder or "the folder that KERNELSEAM_OLDEST_NVRTC names, which is not set"
        pytest.skip(f"oldest-nvrtc is missing: no libnvrtc.so.{version[0]} in {where}")
    command = [*python_command, str(SCRIPT), str(found[0]), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    actual, compiled, failures = json.loads(done.stdout)
    assert failures == {}
    assert tuple(actual) == version, f"{found[0]} is not the lowest of {requirement}"
    folders = (ROOT / "core" / "kernelseam" / "kernels", ROOT / "cuda_kernels")
    sources = {p.relative_to(f).as_posix() for f in folders for p in f.rglob("*.h")}
    assert sources - set(compiled) == {"platform_nvidia.h"}, "as platform.h"


def test_each_range_has_a_lowest() -> None:
    assert {lowest(r) for r in RANGES} == {(12, 6), (13, 0)}

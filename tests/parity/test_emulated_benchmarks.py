"""``python -m benchmarks run`` with kernels that are emulated, where KERNELSEAM_TINYGRAD names the
emulator: results are judged as on a card, times are made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is missing: the benchmarks' peer")
plugin = pytest.importorskip(
    "kernelseam_rocm.plugin", reason="hiprtc is missing: kernelseam-rocm is not installed"
)
from kernelseam.errors import CompileError  # noqa: E402
from kernelseam_rocm_emulator import checkout  # noqa: E402

FOUND = checkout.find()
if not isinstance(FOUND, checkout.Checkout):
    pytest.skip(f"no emulator: {FOUND}", allow_module_level=True)
try:
    plugin.backend().toolchain.compiler()
except CompileError as e:
    pytest.skip(f"hiprtc is missing: {e.log}", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SUITES = ("attention", "attention-paged", "backward", "decode", "gemm", "grouped")


@pytest.mark.slow("minutes of emulation: test_benchmarks_on_rocm takes the same path")
@pytest.mark.timeout(1800)
def test_rows_of_emulated_kernels(tmp_path: Path) -> None:
    helpers = ROOT / "tests" / "unit" / "helpers"
    given = ["run", *SUITES, "--rounds", "1", "--warm", "0", "--burst", "0.05"]
    path = [str(ROOT), str(helpers), *(p for p in sys.path if p)]
    environment = {**os.environ, "KERNELSEAM_PLUGINS": "rocm", "PYTHONPATH": os.pathsep.join(path)}
    script = str(helpers / "rocm_rehearsal_emulated.py")
    done = subprocess.run(
        [sys.executable, script, *given, "--json", str(tmp_path / "amd.json")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "amd.json").read_text(encoding="utf-8"))["rows"]
    assert {r["suite"] for r in rows} == set(SUITES)
    assert all(t["worst"] <= 1 for r in rows for t in r["timed"] if t["role"] == "ours")

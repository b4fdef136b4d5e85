"""The parity matrix on the host platform: shared kernels, compiled by the system's compiler, against the oracle.

Every case on the arch whose copies write shared memory by themselves; on the arch whose copies go through registers,
the first case of every kernel, and the others as slow tests. So are those that take seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import kernelseam
from kernelseam.parity.cases import Case, matrix
from kernelseam.parity.run import Target, run_case
from kernelseam.plugins import Plugins
from kernelseam_hostcpp.executable import prepared
from kernelseam_hostcpp.runtime import DEVICES

TIMELY = 2000
"""Blocks a launch."""


def _parameters() -> Iterator[object]:
    for device in DEVICES:
        seen = set()
        for case in matrix():
            spec = prepared(case, device).problem.spec
            matrices = case.batch * case.num_heads
            slow = matrices > TIMELY or (case.name.endswith("-large"))
            slow |= device.arch == "host-registers" and spec in seen
            seen.add(spec)
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(case, device.index, id=f"{case.name}-on-{device.arch}", marks=marks)


@pytest.mark.parametrize(("case", "index"), list(_parameters()))
def test_parity(hostcpp: Plugins, case: Case, index: int) -> None:
    outcome = run_case(case, Target(DEVICES[index], "shared", case.operation, own=True))
    outcome.require()
    if outcome.refusal is not None:
        assert "shared" in case.may_refuse
        pytest.skip(f"shared kernels refuse it, as they may: {outcome.refusal}")
    assert outcome.verdict is not None and outcome.verdict.worst <= 1


SCRIPT = """
import json
import numpy as np
import kernelseam
from kernelseam.plugins import plugins
from kernelseam_hostcpp import HostArray
a, b = np.arange(600, dtype="f2").reshape(2, 15, 20) % 7, np.ones((2, 20, 9), "f2")
found = plugins()
with kernelseam.trace() as launches:
    c = kernelseam.bmm(HostArray(a), HostArray(b, 0))
out = kernelseam.attention(HostArray(a[None]), HostArray(a[None]), HostArray(a[None]), layout="bhsd")
print(json.dumps({
    "loaded": sorted(found.loaded), "failures": [f.message for f in found.failures], "kind": type(c).__name__,
    "same": np.array_equal(c.host, a @ b), "shape": out.host.shape,
    "launches": [(r.kernel, r.arch) for r in launches], "default": str(kernelseam.devices()[0]),
}))
"""


def test_installed(tmp_path: Path, python_command: list[str]) -> None:
    """As a distribution of its own, found by its entry point, its headers with it."""
    for tool in ("hatchling", "pip"):
        pytest.importorskip(tool, reason=f"{tool} is missing: it builds or installs the distribution of this test")
    distribution = Path(__file__).parents[1] / "plugins" / "hostcpp"
    command = [
        *python_command, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
        "--disable-pip-version-check", "--target", str(tmp_path), str(distribution),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    core = Path(kernelseam.__file__).parents[1]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(core)]), "KERNELSEAM_PLUGINS": "hostcpp",
    }
    done = subprocess.run(
        [*python_command, "-c", SCRIPT], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "loaded": ["hostcpp", "reference"], "failures": [], "kind": "HostArray", "same": True,
        "shape": [1, 2, 15, 20], "launches": [["gemm", "host"]], "default": "numpy:0 (cpu)",
    }

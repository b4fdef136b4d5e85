"""A bundle from a trace to its use without a compiler, on the host platform: traced on NumPy,
compiled, installed by pip, run in a process that can reach no compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kernelseam
import kernelseam_hostcpp
import numpy as np
import pytest
from kernelseam.cli.main import main
from kernelseam.plugins import Plugins

ARCH = "host"
CHILD = """
import json, os, sys, warnings
from importlib.metadata import EntryPoint
import numpy as np
import kernelseam
from kernelseam import plugins
from kernelseam.compilation import installed_bundles
from kernelseam.errors import CompileError, KernelSeamError

plugins._plugins = plugins.discover([EntryPoint("hostcpp", "kernelseam_hostcpp", plugins.GROUP)])
backend = plugins.plugins().backend("hostcpp")
try:
    backend.toolchain.compiler()
    raise SystemExit("there is a compiler")
except CompileError:
    pass
device = next(d for d in backend.runtime.devices() if d.arch == sys.argv[1])
given = np.load(sys.argv[2])
here = {n: backend.runtime.from_host(x, device) for n, x in given.items()}
found = {"bundles": [str(b) for b in installed_bundles()]}
calls = {
    "attention": lambda: kernelseam.attention(here["q"], here["k"], here["v"], causal=True),
    "longer": lambda: kernelseam.attention(here["q"], here["k2"], here["v2"], causal=True),
    "other": lambda: kernelseam.attention(here["q"], here["k"], here["v"]),
    "merged": lambda: kernelseam.bmm(here["q"], here["q"], b_transposed=True),
}
results = {}
for name, call in calls.items():
    try:
        results[name] = backend.runtime.to_host(call())
    except KernelSeamError as e:
        found[name] = f"{type(e).__name__}: {e}"
np.savez(sys.argv[3], **results)
found["cache"] = os.path.exists(os.environ["KERNELSEAM_CACHE_DIR"])
print(json.dumps(found))
"""


@pytest.fixture
def given() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"q": (1, 2, 20, 16), "k": (1, 2, 20, 16), "v": (1, 2, 20, 16)}
    shapes |= {"k2": (1, 2, 50, 16), "v2": (1, 2, 50, 16)}
    return {n: rng.standard_normal(s).astype(np.float16) for n, s in shapes.items()}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundle") / "site"


@pytest.fixture
def installed(first: Path, tmp_path: Path, given: dict[str, Any], hostcpp: Plugins) -> Path:
    """A folder with the bundle that was made of an attention, by the first test that asks."""
    if not first.exists():
        _install(first, tmp_path, given)
    return Path(shutil.copytree(first, tmp_path / "site"))


def _install(place: Path, tmp_path: Path, given: dict[str, Any]) -> None:
    trace, wheel = tmp_path / "traced.json", tmp_path / "app-1.2.whl"
    with kernelseam.trace(trace):
        kernelseam.attention(given["q"], given["k"], given["v"], causal=True)
    with pytest.raises(SystemExit) as ended:
        main(["compile", "--from", str(trace), "--arch", ARCH, "--bundle", str(wheel)])
    assert not ended.value.code
    written = tmp_path / "app-1.2-py3-none-any.whl"
    install = ["install", "--quiet", "--no-compile", "--no-deps", "--no-index", "--target"]
    subprocess.run([sys.executable, "-m", "pip", *install, str(place), str(written)], check=True)


def run(tmp_path: Path, installed: Path, given: dict[str, Any], **variables: str) -> Any:
    """What a process without a compiler computed, and what it was told."""
    np.savez(tmp_path / "given.npz", **given)
    path = [installed, Path(kernelseam_hostcpp.__file__).parents[1]]
    path += [p for p in sys.path if p]
    environment = {
        **os.environ,
        "CXX": "/nowhere/c++",
        "KERNELSEAM_CACHE_DIR": str(tmp_path / "empty"),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        **variables,
    }
    arguments = [ARCH, str(tmp_path / "given.npz"), str(tmp_path / "results.npz")]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), np.load(tmp_path / "results.npz")


def test_a_bundle_is_all_that_is_needed(
    tmp_path: Path, installed: Path, given: dict[str, Any]
) -> None:
    found, results = run(tmp_path, installed, given, KERNELSEAM_NO_JIT="1")
    assert found["bundles"] == [f"app 1.2 (1 binaries for {ARCH}, of kernelseam 0.1.0)"]
    for name, (k, v) in {"attention": ("k", "v"), "longer": ("k2", "v2")}.items():
        expected = kernelseam.attention(given["q"], given[k], given[v], causal=True)
        np.testing.assert_allclose(results[name], expected, rtol=2e-3, atol=2e-3)
    assert sorted(results) == ["attention", "longer"] and not found["cache"]
    assert found["other"].startswith(
        "Unsupported: no implementation takes attention float16 batch=1 heads=2 S_q=20 S_k=20 "
        "dim=16. shared: KERNELSEAM_NO_JIT is set, and no installed bundle has attention_forward "
        f"for {ARCH}, attention float16 dim=16, in a tile that takes this problem; "
    )
    assert f"no installed bundle has gemm for {ARCH}" in found["merged"]


def test_without_the_variable_what_is_missing_is_compiled(
    tmp_path: Path, installed: Path, given: dict[str, Any]
) -> None:
    """Which fails here, where there is no compiler; what the bundle has needs none."""
    found, results = run(tmp_path, installed, given)
    assert sorted(results) == ["attention", "longer"]
    assert found["other"].startswith("CompileError: compiler did not compile for any arch.")
    assert "/nowhere/c++ cannot be used" in found["other"]


def test_a_damaged_binary_is_passed_over(
    tmp_path: Path, installed: Path, given: dict[str, Any]
) -> None:
    (binary,) = installed.glob("kernelseam_bundle_app/*.bin")
    content = bytearray(binary.read_bytes())
    content[100] ^= 1
    binary.write_bytes(content)
    found, results = run(
        tmp_path, installed, given, KERNELSEAM_NO_JIT="1", PYTHONWARNINGS="ignore::UserWarning"
    )
    assert not results.files and "no installed bundle has attention_forward" in found["attention"]

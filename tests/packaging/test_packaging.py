"""The four distributions, from a wheel, from an sdist and editable: each in an environment of its
own.

Nothing is downloaded: the fresh environments see the libraries of this one, but none of its
kernelseam distributions.
"""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from own_process import environment, installing, printed

ROOT = Path(__file__).parents[2]
MadeOnce = Callable[[str, Callable[[Path], None]], Path]
PROJECTS = {
    "kernelseam": ROOT,
    "kernelseam_cuda": ROOT / "plugins" / "cuda",
    "kernelseam_rocm": ROOT / "plugins" / "rocm",
    "kernelseam_rocm_emulator": ROOT / "plugins" / "rocm_emulator",
}
PACKAGES = {n: (p / "core" if p == ROOT else p) / n for n, p in PROJECTS.items()}
LOOK = """
import importlib, importlib.resources, json, pathlib, sys

def texts(folder, prefix=""):
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from texts(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith((".h", ".cuh", ".typed")):
            yield prefix + entry.name, entry.read_text(encoding="utf-8")

found = {}
for package in ("kernelseam", "kernelseam_cuda", "kernelseam_rocm", "kernelseam_rocm_emulator"):
    module = importlib.import_module(package)
    found[package] = {
        "place": str(pathlib.Path(module.__file__).parent),
        "texts": dict(texts(importlib.resources.files(package))),
    }
from kernelseam.plugins import plugins
backends = plugins().registry.backends
found["platforms"] = {
    f"{b.name} {arch}": sorted(b.toolchain.platform_files(arch))
    for b in backends.values() if b.toolchain for arch in b.toolchain.archs
}
from kernelseam.kernels.sources import shared_sources
found["shared"] = sorted(shared_sources())
print(json.dumps(found))
"""


def _device_sources(package: Path) -> dict[str, str]:
    """What the checkout has: include name from the package → text, links followed."""
    names = [
        Path(folder) / n for folder, _, files in os.walk(package, followlinks=True) for n in files
    ]
    return {
        str(n.relative_to(package)): n.read_text(encoding="utf-8")
        for n in names
        if n.suffix in (".h", ".cuh") or n.name == "py.typed"
    }


def _one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


AGAIN = pytest.mark.slow("builds each wheel again")


@pytest.fixture(scope="session", params=["wheel", pytest.param("sdist", marks=AGAIN), "editable"])
def installed(
    request: pytest.FixtureRequest, made_once: MadeOnce, built: Path, libraries: Path
) -> tuple[str, Path]:
    """How it was installed, and the environment's folder of programs."""
    mode: str = request.param

    def install(folder: Path) -> None:
        python = environment(folder, libraries)
        targets: list[object] = []
        for name, project in PROJECTS.items():
            if mode == "editable":
                targets += ["-e", project]
            else:
                suffix = "-*.whl" if mode == "wheel" else "-*.tar.gz"
                targets.append(_one(built, f"{name}{suffix}"))
        options = ["--no-deps", "--no-index", "--no-build-isolation"]
        printed(*installing(python, *options, *targets), cwd=folder)

    return mode, made_once(mode, install) / "bin"


def test_device_sources_are_found(installed: tuple[str, Path], tmp_path: Path) -> None:
    mode, programs = installed
    found: dict[str, Any] = json.loads(printed(programs / "python", "-c", LOOK, cwd=tmp_path))
    for package, checkout in PACKAGES.items():
        if mode == "editable":
            assert Path(found[package]["place"]).samefile(checkout)
        else:
            assert Path(found[package]["place"]).is_relative_to(programs.parent)
        expected = _device_sources(checkout)
        assert found[package]["texts"] == expected
        assert "py.typed" in expected
        # the emulator brings no device sources
        assert any(n.endswith(".h") for n in expected) is not package.endswith("emulator")
    assert {"gemm/gemm.h", "attention/forward.h", "tile/tile.h"} <= set(found["shared"])
    archs = set(found["platforms"])
    assert {
        "cuda sm_80",
        "cuda sm_90a",
        "rocm gfx90a",
        "rocm gfx942",
        "rocm gfx1100",
        "rocm gfx1201",
    } <= archs
    assert all(found["platforms"].values())


def test_the_command_works(installed: tuple[str, Path], tmp_path: Path) -> None:
    _, programs = installed
    cache = tmp_path / "cache"
    said = printed(
        programs / "kernelseam", "doctor", "--json", cwd=tmp_path, KERNELSEAM_CACHE_DIR=str(cache)
    )
    found = json.loads(said)
    assert found["failures"] == []
    assert "off (KERNELSEAM_TINYGRAD is not set)" in said  # the ROCm plugin sees the emulator
    assert {p["plugin"] for p in found["plugins"]} == {"reference", "cuda", "rocm"}
    assert set(found["backends"]) == {"numpy", "cuda", "rocm"}
    assert not cache.exists()
    said = printed(
        programs / "kernelseam", "doctor", "--json", cwd=tmp_path, KERNELSEAM_TINYGRAD=str(tmp_path)
    )
    assert "must be a checkout of tinygrad's repository" in said  # by the emulator's package
    answer = json.loads(
        printed(
            programs / "python",
            "-m",
            "kernelseam",
            "attention",
            "--batch",
            2,
            "--seq-len",
            65,
            "--backend",
            "numpy",
            "--verify",
            "--json",
            cwd=tmp_path,
        )
    )
    assert answer["passed"] is True


def test_wheels_and_sdists_are_complete(built: Path) -> None:
    for name in PROJECTS:
        with zipfile.ZipFile(_one(built, f"{name}-*.whl")) as wheel:
            in_wheel = set(wheel.namelist())
        with tarfile.open(_one(built, f"{name}-*.tar.gz")) as sdist:
            in_sdist = {m.name.partition("/")[2] for m in sdist.getmembers() if m.isfile()}
        inside = "core/" if name == "kernelseam" else ""
        for source in _device_sources(PACKAGES[name]):
            assert f"{name}/{source}" in in_wheel
            assert f"{inside}{name}/{source}" in in_sdist
        assert any(
            n.startswith(f"{name}-0.1.0.dist-info/") and n.endswith("LICENSE") for n in in_wheel
        ), in_wheel
        assert {"pyproject.toml", "PKG-INFO", "LICENSE", "README.md"} <= in_sdist
        assert not [n for n in in_wheel | in_sdist if "__pycache__" in n or n.startswith("tests")]


def test_extras_name_the_vendors_distributions(built: Path) -> None:
    metadata = {}
    for name in PROJECTS:
        with zipfile.ZipFile(_one(built, f"{name}-*.whl")) as wheel:
            text = wheel.read(f"{name}-0.1.0.dist-info/METADATA").decode()
        metadata[name] = email.message_from_string(text)
    core, cuda, rocm, emulator = metadata.values()
    requires = core.get_all("Requires-Dist", [])
    assert {"cuda", "rocm", "test"} <= set(core.get_all("Provides-Extra", []))
    assert (
        "kernelseam-cuda[cu13]<0.2,>=0.1; extra == 'cuda'" in requires
        and "kernelseam-rocm<0.2,>=0.1; extra == 'rocm'" in requires
    )
    assert {"binaries", "cu12", "cu13", "blas", "blas-cu12"} == set(
        cuda.get_all("Provides-Extra", [])
    )
    assert "nvidia-cublas<14,>=13; extra == 'blas'" in cuda.get_all("Requires-Dist", [])
    assert {"binaries", "blas", "emulator"} == set(rocm.get_all("Provides-Extra", []))
    for plugin in (cuda, rocm, emulator):
        assert "kernelseam<0.2,>=0.1" in plugin.get_all("Requires-Dist", [])
    assert "kernelseam-rocm<0.2,>=0.1" in emulator.get_all("Requires-Dist", [])
    assert "kernelseam-rocm-emulator<0.2,>=0.1; extra == 'emulator'" in rocm.get_all(
        "Requires-Dist", []
    )
    for found in metadata.values():
        assert found["Requires-Python"] == ">=3.11" and found["License-Expression"] == "Apache-2.0"
        urls = dict(u.split(", ") for u in found.get_all("Project-URL", []))
        assert set(urls) == {"Repository", "Documentation", "Changelog", "Issues"}
        assert all(u.startswith(urls["Repository"]) for u in urls.values())
        links = re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", found.get_payload())
        relative = [x for pair in links for x in pair if x and "://" not in x]
        assert links and (found is core or not relative)
        # the core's page is the repository's README
        assert [x for x in relative if not (ROOT / x.partition("#")[0]).exists()] == []


INSTALLED = """
import importlib, json, sys
from importlib import metadata
from kernelseam.plugins import plugins
names = ("kernelseam", "kernelseam-cuda", "kernelseam-rocm", "kernelseam-rocm-emulator")
here = {d.metadata["Name"] for d in metadata.distributions()}
for name in here & set(names):
    importlib.import_module(name.replace("-", "_"))
assert not plugins().failures, plugins().failures
print(json.dumps([sorted(here & set(names)), sorted(plugins().registry.backends)]))
"""
ALONE = {
    "kernelseam": (["kernelseam"], ["numpy"]),
    "kernelseam[cuda]": (["kernelseam", "kernelseam-cuda"], ["cuda", "numpy"]),
    "kernelseam-cuda": (["kernelseam", "kernelseam-cuda"], ["cuda", "numpy"]),
    "kernelseam[rocm]": (["kernelseam", "kernelseam-rocm"], ["numpy", "rocm"]),
    "kernelseam-rocm-emulator": (
        ["kernelseam", "kernelseam-rocm", "kernelseam-rocm-emulator"],
        ["numpy", "rocm"],
    ),
}
BROUGHT = ("kernelseam-cuda", "kernelseam[rocm]")
"""By the extra of the one, by the emulator of the other; extras' words are held to, above."""


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(x, marks=[pytest.mark.slow("another brings it, too")] * (x in BROUGHT))
        for x in ALONE
    ],
)
def test_each_wheel_brings_what_it_needs(
    built: Path, libraries: Path, tmp_path: Path, wanted: str
) -> None:
    """Into an environment without kernelseam, from a folder of wheels and nothing else."""
    if wanted == "kernelseam[cuda]" and find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    python = environment(tmp_path, libraries)
    printed(*installing(python, "--no-index", "--find-links", built, wanted), cwd=tmp_path)
    found = json.loads(printed(python, "-c", INSTALLED, cwd=tmp_path))
    assert found == [*map(list, ALONE[wanted])]


@pytest.mark.slow("downloads what the wheels need")
@pytest.mark.parametrize("wanted", ALONE)
def test_each_wheel_in_an_empty_environment(built: Path, tmp_path: Path, wanted: str) -> None:
    """As a user has it: all else comes from the registry."""
    python = environment(tmp_path)
    printed(*installing(python, "--find-links", built, wanted), cwd=tmp_path)
    found = json.loads(printed(python, "-c", INSTALLED, cwd=tmp_path))
    assert found == [*map(list, ALONE[wanted])]
    said = printed(
        *(tmp_path / "bin" / "kernelseam", "attention", "--backend", "numpy", "--verify", "--json"),
        cwd=tmp_path,
        KERNELSEAM_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert json.loads(said)["passed"] is True


def test_a_plugin_refuses_another_core(built: Path, libraries: Path, tmp_path: Path) -> None:
    """By its pin: a core of the next series does not go with it."""
    later = tmp_path / "later"
    later.mkdir()
    with (
        zipfile.ZipFile(_one(built, "kernelseam-0.1.0*.whl")) as old,
        zipfile.ZipFile(later / "kernelseam-0.2.0-py3-none-any.whl", "w") as new,
    ):
        for name in old.namelist():
            if ".dist-info/" in name and not name.endswith("RECORD"):
                text = old.read(name).replace(b"\nVersion: 0.1.0", b"\nVersion: 0.2.0")
                new.writestr(name.replace("kernelseam-0.1.0", "kernelseam-0.2.0"), text)
        new.writestr("kernelseam-0.2.0.dist-info/RECORD", "")
    shutil.copy(_one(built, "kernelseam_cuda-*.whl"), later)
    python = environment(tmp_path / "new", libraries)
    command = installing(python, "--no-index", "--find-links", later, "kernelseam-cuda")
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "kernelseam<0.2,>=0.1 (from kernelseam-cuda)" in done.stderr and "0.2.0" in done.stderr


@pytest.mark.parametrize(("plugin", "sources"), [("cuda", "cuda_kernels"), ("rocm", "hip_kernels")])
def test_a_link_that_did_not_survive(tmp_path: Path, plugin: str, sources: str) -> None:
    """The build says so, and its remedy works."""
    shutil.copytree(ROOT / sources, tmp_path / sources)
    package = tmp_path / "plugins" / plugin
    shutil.copytree(
        ROOT / "plugins" / plugin,
        package,
        symlinks=True,
        ignore=shutil.ignore_patterns("__pycache__", "dist", "build"),
    )
    link = package / f"kernelseam_{plugin}" / "kernels"
    text = os.readlink(link)
    link.unlink()
    link.write_text(text)  # as a zip, or Git on Windows, leaves it
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and not list(tmp_path.glob("*.whl"))
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith(
        f"kernelseam_{plugin}/kernels must be the folder of device sources, and is a file: it is a "
        f"symbolic link to ../../../{sources}, which a zip of the sources and Git on Windows "
    )
    (remedy,) = re.findall(r"`(rm [^`]+)`", said)
    subprocess.run(remedy, shell=True, cwd=package, check=True)
    printed(*command, cwd=package)
    with zipfile.ZipFile(_one(tmp_path, "*.whl")) as wheel:
        assert any(n.startswith(f"kernelseam_{plugin}/kernels/") for n in wheel.namelist())

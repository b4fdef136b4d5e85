"""The four distributions, from a wheel, from an sdist and editable: each in an environment of its
own.

Nothing is downloaded: the fresh environments see the libraries of this one, but none of its
kernelseam distributions.
"""

from __future__ import annotations

import email
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


def _run(*command: object, cwd: Path = ROOT, **variables: str) -> str:
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KERNELSEAM_"))
    }
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


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


@pytest.fixture(scope="session")
def built(made_once: MadeOnce) -> Path:
    """A folder with the wheel and the sdist of each."""

    def build(folder: Path) -> None:
        for project in PROJECTS.values():
            _run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=project)

    return made_once("distributions", build)


def _one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="session", params=["wheel", "sdist", "editable"])
def installed(
    request: pytest.FixtureRequest, made_once: MadeOnce, built: Path, libraries: Path
) -> tuple[str, Path]:
    """How it was installed, and the environment's folder of programs."""
    mode: str = request.param

    def install(folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "zzz_libraries.pth").write_text(f"{libraries}\n")
        targets: list[object] = []
        for name, project in PROJECTS.items():
            if mode == "editable":
                targets += ["-e", project]
            else:
                suffix = "-*.whl" if mode == "wheel" else "-*.tar.gz"
                targets.append(_one(built, f"{name}{suffix}"))
        pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install"]
        options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
        _run(*pip, *options, "--disable-pip-version-check", *targets, cwd=folder)

    return mode, made_once(mode, install) / "bin"


def test_device_sources_are_found(installed: tuple[str, Path], tmp_path: Path) -> None:
    mode, programs = installed
    found: dict[str, Any] = json.loads(_run(programs / "python", "-c", LOOK, cwd=tmp_path))
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
    said = _run(
        programs / "kernelseam", "doctor", "--json", cwd=tmp_path, KERNELSEAM_CACHE_DIR=str(cache)
    )
    found = json.loads(said)
    assert found["failures"] == []
    assert "off (KERNELSEAM_TINYGRAD is not set)" in said  # the ROCm plugin sees the emulator
    assert {p["plugin"] for p in found["plugins"]} == {"reference", "cuda", "rocm"}
    assert set(found["backends"]) == {"numpy", "cuda", "rocm"}
    assert not cache.exists()
    said = _run(
        programs / "kernelseam", "doctor", "--json", cwd=tmp_path, KERNELSEAM_TINYGRAD=str(tmp_path)
    )
    assert "must be a checkout of tinygrad's repository" in said  # by the emulator's package
    answer = json.loads(
        _run(
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
        "kernelseam-cuda[cu13]; extra == 'cuda'" in requires
        and "kernelseam-rocm; extra == 'rocm'" in requires
    )
    assert {"cu12", "cu13"} <= set(cuda.get_all("Provides-Extra", []))
    for plugin in (cuda, rocm, emulator):
        assert any(
            r.split(";")[0].strip().startswith("kernelseam")
            for r in plugin.get_all("Requires-Dist", [])
        )
    assert "kernelseam-rocm<0.2,>=0.1" in emulator.get_all("Requires-Dist", [])
    assert "kernelseam-rocm-emulator<0.2,>=0.1; extra == 'emulator'" in rocm.get_all(
        "Requires-Dist", []
    )
    for found in metadata.values():
        assert found["Requires-Python"] == ">=3.11" and found["License-Expression"] == "Apache-2.0"

"""Environments to install into. Nothing is downloaded: they see the libraries of this one, but no
kernelseam of it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
MadeOnce = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def libraries(made_once: MadeOnce) -> Path:
    """A folder of links to what is installed here, our own distributions and start-up files left
    out."""
    return made_once("libraries", _link)


def _link(folder: Path) -> None:
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(site).iterdir():
            left_out = (
                "kernelseam" in entry.name or entry.suffix == ".pth" or entry.name == "__pycache__"
            )
            if not left_out and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)


@pytest.fixture(scope="session")
def core_wheel(made_once: MadeOnce) -> Path:
    """The wheel of the core."""

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=200)

    (wheel,) = made_once("core-wheel", build).glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def run_installed(
    core_wheel: Path, libraries: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """``run_installed("command line", cwd)``: in a shell, in an environment with the core's wheel
    and no plugin.

    ``python``, ``kernelseam`` and what is installed there are found first; pip neither downloads
    nor isolates.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "zzz_libraries.pth").write_text(f"{libraries}\n")
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PYTHON", "PYTEST_", "KERNELSEAM_", "COV_"))
    }
    environment = {
        **kept,
        "PATH": os.pathsep.join([str(folder / "bin"), kept.get("PATH", "")]),
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "KERNELSEAM_CACHE_DIR": str(folder / "cache"),
    }

    def run(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            shell=True,
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
        )

    done = run(f"python -m pip install --quiet {core_wheel}", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return run

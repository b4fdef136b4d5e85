"""Environments to install into. Nothing is downloaded: they see the libraries of this one, but no
kernelseam of it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from own_process import environment, installing, printed

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
def built(made_once: MadeOnce) -> Path:
    """A folder with the wheel and the sdist of each distribution."""

    def build(folder: Path) -> None:
        for project in (ROOT, *(ROOT / "plugins" / n for n in ("cuda", "rocm", "rocm_emulator"))):
            printed(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=project)

    return made_once("distributions", build)


@pytest.fixture(scope="session")
def run_installed(built: Path, libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run_installed("command line", cwd)``: in a shell, in an environment with the core's wheel
    and no plugin.

    ``python``, ``kernelseam`` and what is installed there are found first; pip neither downloads
    nor isolates.
    """
    folder = tmp_path_factory.mktemp("environment")
    python = environment(folder, libraries)
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PYTHON", "PYTEST_", "KERNELSEAM_", "COV_"))
    }
    variables = {
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
            env=variables,
            capture_output=True,
            text=True,
            timeout=250,
        )

    (wheel,) = built.glob("kernelseam-*.whl")
    printed(*installing(python, "--no-deps", "--no-index", wheel), cwd=folder)
    return run

"""Commands in processes that inherit nothing of Python's or of ours, and environments of Python's
to run them in."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path


def printed(*command: object, cwd: Path, **variables: str) -> str:
    """What a command prints that must succeed; ``variables``: of its environment."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KERNELSEAM_"))}
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(folder: Path, libraries: Path | None = None) -> Path:
    """The interpreter of a new environment, with the libraries of that folder and no pip."""
    venv.create(folder, with_pip=False, symlinks=True)
    if libraries is not None:
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "zzz_libraries.pth").write_text(f"{libraries}\n")
    return folder / "bin" / "python"


def installing(python: Path, *arguments: object) -> list[object]:
    """The command that installs into an environment, by this one's pip. Modules are compiled where
    they are imported: of most distributions few are."""
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    return [*pip, "install", "--quiet", "--no-compile", *arguments]

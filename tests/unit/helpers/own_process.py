"""A command in a process that inherits nothing of Python's or of ours."""

from __future__ import annotations

import os
import subprocess
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

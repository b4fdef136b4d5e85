"""A fresh interpreter that sees the ROCm plugin and the reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

DEVICES = (
    "import json, kernelseam; from kernelseam.plugins import plugins; p = plugins(); "
    "print(json.dumps([[str(d) for d in p.devices()], p.doctor()['rocm']['emulation'], "
    "[str(f) for f in p.failures]]))"
)
"""Prints the devices, what the ROCm plugin says of emulation, and the failures of discovery."""


def python(code: str, *folders: object, **environment: str) -> Any:
    """What the code prints as JSON. ``folders`` come first where modules are looked up."""
    env = {
        **{k: v for k, v in os.environ.items() if k != "KERNELSEAM_TINYGRAD"},
        "KERNELSEAM_PLUGINS": "rocm",
        "PYTHONPATH": os.pathsep.join([*map(str, folders), *(p for p in sys.path if p)]),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

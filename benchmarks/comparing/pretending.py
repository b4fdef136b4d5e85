"""Host times without a GPU: beside a driver that does nothing (``idle_driver.c``, compiled here),
with torch's CPU tensors taken for those of a device.

Launches and allocations of a real driver are not in these times; what Python does is. torch's own
calls are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VARIABLE = "KERNELSEAM_IDLE_DRIVER"
"""Set in the process that runs beside that driver."""


def beside_idle_driver(arguments: Sequence[str]) -> int:
    """``python -m benchmarks`` with these arguments, in a process that finds that driver: its exit
    status."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(__file__).with_name("idle_driver.c"), Path(folder, "libcuda.so.1")
        subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source],
            check=True,
        )
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": folder,
            "KERNELSEAM_PLUGINS": "cuda",
            VARIABLE: folder,
        }
        return subprocess.run(
            [sys.executable, "-m", "benchmarks", *arguments], env=environment
        ).returncode


def pretending() -> bool:
    """Whether this process runs beside that driver."""
    return VARIABLE in os.environ


def pretend() -> None:
    """Take torch's CPU tensors for those of the device cuda:0."""
    from kernelseam.arrays import torch as torch_arrays
    from kernelseam_cuda import arrays

    api: Any = torch._C
    api._cuda_getCurrentRawStream = (0).__mul__
    arrays._readers[torch.Tensor] = lambda array, devices: torch_arrays.describe(array, devices[0])
    empty = torch_arrays.empty
    torch_arrays.empty = lambda shape, dtype, device: empty(shape, dtype, "cpu")

"""Host times without a GPU: a stub driver whose functions return at once (``idle_driver.c``,
compiled here), with torch's CPU tensors in the place of CUDA tensors.

These times have the Python of a call, but not the driver's part of launches and allocations.
torch's own calls are not measured.
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
"""Set in the process that has loaded the stub driver."""


def run_with_idle_driver(arguments: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in a process that loads the stub driver; ``how``: as
    ``subprocess.run`` takes it."""
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
            [sys.executable, *arguments], env=environment, text=True, check=False, **how
        )


def active() -> bool:
    """Whether this process has loaded the stub driver."""
    return VARIABLE in os.environ


def install() -> None:
    """Treat torch's CPU tensors as tensors of cuda:0."""
    from kernelseam.arrays import torch as torch_arrays
    from kernelseam_cuda import arrays

    api: Any = torch._C
    api._cuda_getCurrentRawStream = (0).__mul__
    arrays._readers[torch.Tensor] = lambda array, devices: torch_arrays.describe(array, devices[0])
    empty, of_kind = torch_arrays.empty, arrays.empty
    torch_arrays.empty = lambda shape, dtype, device: empty(shape, dtype, "cpu")
    arrays.empty = lambda shape, dtype, device, kind: of_kind(shape, dtype, device, "torch")

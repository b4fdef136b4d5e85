"""What was measured on: device, driver, versions; and what the card says of itself while it
works."""

from __future__ import annotations

import importlib.metadata
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparing.timing import Clock

QUERY = {
    "driver": "driver_version",
    "power_limit_w": "power.limit",
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "celsius": "temperature.gpu",
}
"""Our names → nvidia-smi's."""
PATIENCE = 0.5
"""Seconds after a row within which the card must have answered."""
DISTRIBUTIONS = (
    "kernelseam-cuda",
    "kernelseam-rocm",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "cuda-core",
    "cuda-bindings",
    "hip-python",
    "numpy",
    "triton",
)


def smi(fields: dict[str, str]) -> list[str] | None:
    """The command that asks the driver's tool; None where there is none, and where torch's GPUs are
    AMD's: a card of NVIDIA's beside them is not what is measured."""
    place = None if torch.version.hip else shutil.which("nvidia-smi")
    if place is None:
        return None
    return [
        place,
        "-i",
        "0",
        f"--query-gpu={','.join(fields.values())}",
        "--format=csv,noheader,nounits",
    ]


def read(line: str, fields: dict[str, str]) -> dict[str, Any]:
    """A line of its answer: numbers where it has numbers."""
    readings: dict[str, Any] = {}
    for name, text in zip(fields, (x.strip() for x in line.split(",")), strict=False):
        try:
            readings[name] = text if name == "driver" else float(text)
        except ValueError:
            continue
    return readings


def asked() -> dict[str, Any]:
    """The driver's version, power limit and clocks; nothing where they cannot be asked."""
    command = smi(QUERY)
    if command is None:
        return {}
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return read(done.stdout, QUERY)
    return {}


@contextmanager
def sampling(device: str) -> Iterator[dict[str, float]]:
    """Clocks, power and heat about a quarter of a second into what is done within: the answer is
    there at the end."""
    fields = {n: q for n, q in QUERY.items() if n not in ("driver", "power_limit_w")}
    summary: dict[str, float] = {}
    command, process = smi(fields) if device != "cpu" else None, None
    if command is not None:
        with suppress(OSError):
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
    try:
        yield summary
    finally:
        if process is not None:
            try:
                summary.update(read(process.communicate(timeout=PATIENCE)[0], fields))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def versions() -> dict[str, str]:
    """Of what is installed, and the commit where the working tree knows one."""
    import kernelseam

    by_package = {"kernelseam": kernelseam.__version__}
    for name in DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            by_package.setdefault(name, importlib.metadata.version(name))
    by_package["torch"] = torch.__version__
    if torch.version.hip:
        by_package["hip"] = torch.version.hip
    else:
        by_package["cuda"] = str(torch.version.cuda)
        by_package["cudnn"] = str(torch.backends.cudnn.version())
    with suppress(OSError, subprocess.SubprocessError):
        root = Path(__file__).parents[2]
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        by_package["commit"] = done.stdout.strip()
    return by_package


def described(device: str) -> dict[str, Any]:
    """The device and everything that has a version."""
    if device == "cpu":
        return {"name": "cpu", "versions": versions()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability(device)),
        **asked(),
        "versions": versions(),
    }


def ceilings(device: str, clock: Clock, size: int = 1 << 32, n: int = 8192) -> dict[str, float]:
    """What the roofline is drawn with: a copy's GB/s (read and written) and cuBLAS's TFLOP/s on n³
    in bf16."""

    def usual(run: Any) -> float:
        once = max(clock.burst(run, 2) / 2, 1e-7)
        clock.burst(run, max(int(0.3 / once), 1))  # warm, as rows are
        return statistics.median(clock.burst(run, n) / n for n in [max(int(0.02 / once), 1)] * 5)

    x = torch.randint(0, 255, (size // 2,), dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    copy = usual(lambda: y.copy_(x))
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    product = usual(lambda: torch.mm(a, b, out=c))
    return {
        "copy_gbs": round(size / copy / 1e9, 1),
        "cublas_tflops": round(2 * n**3 / product / 1e12, 1),
    }

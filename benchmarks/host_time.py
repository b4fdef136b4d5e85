"""Host time: what calls cost the caller's thread, beside torch's own, in turns.

    python benchmarks/host_time.py [--rounds 3] [--fake]

Ways take turns: each is called two hundred times at a go, which its queue has room for, and waited for before the next
go; of a round the least time of a hundred goes counts, in µs a call. "its launch alone" is what the driver takes.

``--fake``: on a machine without a GPU, against a driver that does nothing (``host_driver.c``, compiled here), with
torch's CPU tensors taken for those of a device. Launches and allocations of a real driver are not in these times; what
Python does is. torch's own ways are left out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional

import kernelseam as ks

GOES, CALLS = 100, 200
FAKE = "KERNELSEAM_FAKE_DRIVER"
"""Set in the process that runs beside that driver."""


def ways(device: str, peers: bool) -> dict[str, Callable[[], object]]:
    """What is measured, by name: ours and, with ``peers``, torch's."""
    half = {"dtype": torch.float16, "device": device}
    q, k, v = (torch.randn(1, 4, 128, 64, **half) for _ in range(3))
    a, b = torch.randn(4, 128, 64, **half), torch.randn(4, 64, 128, **half)
    out, c = torch.empty_like(q), torch.empty(4, 128, 128, **half)
    call = ks.plan(ks.Attention.from_arrays(q, k, v, out)).bind()
    launch = call.launcher()
    found: dict[str, Callable[[], object]] = {
        "call(stream)": lambda: call(0),
        "call()": call,
        "its launch alone": lambda: launch(0),
        "attention(q, k, v)": lambda: ks.attention(q, k, v),
        "attention(q, k, v, out=out)": lambda: ks.attention(q, k, v, out=out),
        "bmm(a, b)": lambda: ks.bmm(a, b),
        "bmm(a, b, out=out)": lambda: ks.bmm(a, b, out=c),
    }
    if peers:
        found |= {
            "torch SDPA": lambda: functional.scaled_dot_product_attention(q, k, v),
            "torch.bmm(a, b)": lambda: torch.bmm(a, b),
            "torch.bmm(a, b, out=out)": lambda: torch.bmm(a, b, out=c),
        }
    return found


def measure(rounds: int = 3, fake: bool = False) -> list[tuple[str, list[float]]]:
    """(way, µs a call in each round)."""
    device = pretend() if fake else "cuda"
    wait: Callable[[], object] = (lambda: None) if fake else torch.cuda.synchronize
    found = ways(device, not fake)
    for run in found.values():
        for _ in range(50):
            run()
    rows: list[tuple[str, list[float]]] = [(name, []) for name in found]
    for _ in range(rounds):
        least = dict.fromkeys(found, float("inf"))
        for _ in range(GOES):
            for name, run in found.items():
                wait()
                start = time.perf_counter()
                for _ in range(CALLS):
                    run()
                least[name] = min(least[name], (time.perf_counter() - start) / CALLS * 1e6)
        for name, times in rows:
            times.append(least[name])
    wait()
    return rows


def pretend() -> str:
    """Take torch's CPU tensors for those of the device cuda:0, whose driver is the one that does nothing."""
    from kernelseam_cuda import arrays

    from kernelseam.interop import torch as torch_arrays

    api: Any = torch._C
    api._cuda_getCurrentRawStream = (0).__mul__
    arrays._readers[torch.Tensor] = lambda array, devices: torch_arrays.describe(array, devices[0])
    made = torch_arrays.empty
    torch_arrays.empty = lambda shape, dtype, device: made(shape, dtype, "cpu")
    return "cpu"


def beside_a_driver_that_does_nothing(arguments: list[str]) -> int:
    """This script, in a process that finds that driver."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(__file__).with_name("host_driver.c"), Path(folder, "libcuda.so.1")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", f"-Wl,-soname,{made.name}", "-o", made, source], check=True)
        environment = {**os.environ, "LD_LIBRARY_PATH": folder, "KERNELSEAM_PLUGINS": "cuda", FAKE: folder}
        return subprocess.run([sys.executable, __file__, *arguments], env=environment).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fake", action="store_true", help="no GPU: a driver that does nothing")
    chosen = parser.parse_args()
    if chosen.fake and FAKE not in os.environ:
        sys.exit(beside_a_driver_that_does_nothing(sys.argv[1:]))
    for way, times in measure(chosen.rounds, chosen.fake):
        print(f"{way:30}", *(f"{x:7.2f}" for x in times))

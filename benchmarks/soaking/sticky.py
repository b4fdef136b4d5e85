"""An error that a device never recovers from, provoked in a process of its own: everything
afterwards must say so.

    python -m benchmarks.soaking.sticky --device cuda:0

A product is launched over an unallocated address. From then on the process's context is lost.
Prints what each of our calls says about it, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import kernelseam as ks
import numpy as np
from kernelseam.contract import Device
from kernelseam.dispatch import find_device
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError
from kernelseam.plugins import plugins

NOWHERE = 1 << 20
"""An address that no allocation has."""
SECONDS = 60.0


def provoke(device: Device, implementation: str) -> dict[str, Any]:
    """Lose the device's context; what our calls say, by what was called: the error's class, whether
    it is a DeviceError and its message, or no error."""
    runtime = plugins().backend(device.backend).runtime
    x = np.random.default_rng(0).standard_normal((1, 64, 64)).astype(np.float32)
    a, c = runtime.from_host(x, device), runtime.from_host(x * 0, device)
    plan = ks.plan(
        ks.BatchedGemmStrided(A=a, B=a, C=c, M=64, N=64, K=64),
        device=device,
        implementation=implementation,
    )
    right = plan.bind()
    right()
    runtime.synchronize(device)
    before = bool(np.allclose(runtime.to_host(c), x @ x, atol=1e-3))
    plan.bind(A=NOWHERE)()
    calls: dict[str, Callable[[], object]] = {
        "synchronize": lambda: runtime.synchronize(device),
        "the bound call": right,
        "its results": lambda: runtime.to_host(c),
        "an operation": lambda: ks.bmm(a, a, implementation=implementation),
        "new memory": lambda: runtime.empty((1 << 26,), DType.float32, device),
        "a copy": lambda: runtime.from_host(x, device),
    }
    return {"right before": before, "said": {name: _said(call) for name, call in calls.items()}}


def _said(call: Callable[[], object]) -> dict[str, Any]:
    try:
        call()
    except Exception as e:
        return {"raised": type(e).__name__, "ours": isinstance(e, DeviceError), "message": str(e)}
    return {"raised": "", "ours": False, "message": "nothing was said"}


def faults(answer: dict[str, Any]) -> list[str]:
    """What is wrong with what the calls said."""
    wrong = [] if answer["right before"] else ["the product was wrong before the error"]
    return wrong + [
        f"{name} after the error: {said['raised'] or 'no error'}: {said['message']}"
        for name, said in answer["said"].items()
        if not said["ours"]
    ]


def ask(device: Device, implementation: str) -> dict[str, Any]:
    """``provoke`` in a child process. Raises RuntimeError where it ends otherwise."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.soaking.sticky",
            "--device",
            f"{device.backend}:{device.index}",
            "--implementation",
            implementation,
        ],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"the child ended with {done.returncode}: {done.stdout}{done.stderr}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", metavar="BACKEND:INDEX")
    parser.add_argument("--implementation", default="shared")
    arguments = parser.parse_args()
    print(json.dumps(provoke(find_device(arguments.device), arguments.implementation)), flush=True)
    os._exit(0)  # what cleans up at the end would fail in its turn


if __name__ == "__main__":
    main()

"""Where the time of a first call goes, in fresh processes: imports, discovery, compilation by its
phases, loading, and the rest.

    python -m benchmarks.first_call                    on this machine's NVIDIA GPU
    python -m benchmarks.first_call --arch H200        up to the binary; no GPU needed
    python -m benchmarks.first_call --peers            torch's SDPA beside it

Each row is a process of its own: first with an empty cache of binaries, then with that cache full.
The problem is attention B4 H16 S2048 D128 bfloat16 causal, with gradients or without. Torch's own
first product, and its first gradients where there are any, come before and are a stage of their
own: they start libraries and threads that any later call uses.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

BATCH, HEADS, LENGTH, DIM = 4, 16, 2048, 128
BEFORE = ("import torch", "context", "torch's own")
"""Stages that are torch's, not of the call."""
STAGES = (
    *BEFORE,
    "import",
    "discovery",
    "front end",
    "optimizer",
    "ptxas",
    "inspection",
    "loading",
    "rest",
)
"""Columns of the table, in the order of a call. ``rest`` is what a call takes beyond the others:
description, choice, plan, the cache of binaries, launches and the kernels themselves. Kernels that
are compiled at once each count in the compiler's phases, so that ``rest`` may be less than 0."""
PEER = "torch's SDPA"
STATES = ("cache empty", "cache full", PEER)
PHASES = {
    "CUDA C++ Frontend": "front end",
    "NVVM Optimizer": "optimizer",
    "PTX Translation": "ptxas",
    "PTX Assembly": "ptxas",
}
"""nvrtc's own names, as ``--time`` writes them."""


class Laps:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """All time since the last lap is the stage's."""
        now = time.perf_counter()
        self.seconds[stage] = now - self._last
        self._last = now

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is the stage's."""

        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                own = time.perf_counter() - start
                self.seconds[stage] = self.seconds.get(stage, 0.0) + own

        return call


def observe(toolchain: Any, laps: Laps, folder: Path) -> None:
    """Add the stages of a toolchain's work to the laps; compilations write their phases."""
    kind = type(toolchain)
    compile_plainly = kind.compile_with_ptx

    def compile_timed(self: Any, bundle: Any, arch: str) -> Any:
        phases = folder / f"{len(list(folder.iterdir()))}.csv"
        options = (*bundle.options, f"--time={phases}")
        result = compile_plainly(self, replace(bundle, options=options), arch)
        for row in csv.reader(phases.read_text().splitlines()[1:], skipinitialspace=True):
            _, phase, milliseconds, _ = row
            stage = PHASES[phase]
            laps.seconds[stage] = laps.seconds.get(stage, 0.0) + float(milliseconds) / 1e3
        return result

    kind.compile_with_ptx = compile_timed
    kind.inspect = laps.timed("inspection", kind.inspect)
    kind.load = laps.timed("loading", kind.load)


def on_gpu(gradients: bool, folder: Path) -> dict[str, float]:
    """A first call through torch on the GPU that is here."""
    laps = Laps()
    q, k, v = _torch_began(gradients, laps)
    import torch
    from kernelseam.interop.torch import attention

    laps.lap("import")
    from kernelseam.plugins import plugins

    toolchain = plugins().backend("cuda").toolchain
    laps.lap("discovery")
    observe(toolchain, laps, folder)
    out = attention(q, k, v, causal=True)
    if gradients:
        out.backward(q)
    torch.cuda.synchronize()
    laps.lap("call")
    return laps.seconds


def peer(gradients: bool) -> dict[str, float]:
    """The same by torch's own attention."""
    laps = Laps()
    q, k, v = _torch_began(gradients, laps)
    import torch

    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    if gradients:
        out.backward(q)
    torch.cuda.synchronize()
    laps.lap("call")
    return laps.seconds


def _torch_began(gradients: bool, laps: Laps) -> list[Any]:
    """The operands, once torch has multiplied, and differentiated where gradients are asked for."""
    import torch

    laps.lap("import torch")
    shape = (BATCH, HEADS, LENGTH, DIM)
    operands = [
        torch.zeros(shape, dtype=torch.bfloat16, device="cuda", requires_grad=gradients)
        for _ in range(3)
    ]
    torch.cuda.synchronize()
    laps.lap("context")
    square = torch.zeros(DIM, DIM, dtype=torch.bfloat16, device="cuda", requires_grad=gradients)
    product = square @ square
    if gradients:
        product.backward(square)
    torch.cuda.synchronize()
    laps.lap("torch's own")
    return operands


def up_to_the_binary(gradients: bool, arch: str, folder: Path) -> dict[str, float]:
    """What an arch's product would launch, compiled and inspected."""
    laps = Laps()
    from kernelseam.absent import product
    from kernelseam.dispatch import ask
    from kernelseam.kernels import KernelImplementation
    from kernelseam.kernels.kernel import build
    from kernelseam.samples import attention_bwd_case, attention_case
    from kernelseam.samples.case import Case
    from kernelseam.samples.operations.operands import problem_of

    laps.lap("import")
    from kernelseam.plugins import plugins

    device = product(arch)
    toolchain = plugins().backend(device.backend).toolchain
    laps.lap("discovery")
    assert toolchain is not None
    observe(toolchain, laps, folder)
    given: dict[str, Any] = {"batch": BATCH, "num_heads": HEADS, "kv_heads": HEADS}
    given |= {"S_q": LENGTH, "S_k": LENGTH, "lse": gradients}
    cases: list[Case] = [attention_case.case(f"bf16-{DIM}-c", **given)]
    if gradients:
        cases.append(attention_bwd_case.case(f"bf16-{DIM}-c", **given))
    numpy = plugins().backend("numpy").runtime
    for case in cases:
        problem = problem_of(case, numpy, numpy.devices()[0])
        answers = [
            (answer.rank, i.name, i)
            for i in plugins().registry.implementations_of(problem.operation, device.backend)
            if isinstance(i, KernelImplementation)
            and (answer := ask(i, problem, device)).refusal is None
        ]
        _, _, chosen = min(answers)
        for x in chosen.launches(problem, device).kernels:
            build(x.kernel, x.problem.spec, x.tile, toolchain, device.arch)
    laps.lap("call")
    return laps.seconds


def child(options: argparse.Namespace) -> None:
    """One row, as JSON on standard output."""
    with tempfile.TemporaryDirectory() as folder:
        if options.child == "torch":
            seconds = peer(options.gradients)
        elif options.arch:
            seconds = up_to_the_binary(options.gradients, options.arch, Path(folder))
        else:
            seconds = on_gpu(options.gradients, Path(folder))
    call = seconds.pop("call")
    inside = sum(seconds.get(s, 0.0) for s in STAGES[STAGES.index("front end") :])
    seconds["rest"] = call - inside
    print(json.dumps(seconds))


def rows(options: argparse.Namespace) -> Sequence[tuple[str, dict[str, float]]]:
    """Each row's name, and its seconds by stage. A process that is not measured writes the bytecode
    of all that is imported, which an image may lack."""
    result = []
    with tempfile.TemporaryDirectory() as bytecode:
        variables = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
        for gradients, states in ((True, [""]), (False, STATES), (True, STATES)):
            what = "with gradients" if gradients else "forward"
            with tempfile.TemporaryDirectory() as cache:
                variables["KERNELSEAM_CACHE_DIR"] = cache
                for state in states:
                    if state == PEER and not options.peers:
                        continue
                    who = "torch" if state == PEER else "ours"
                    command = [sys.executable, "-m", "benchmarks.first_call", "--child", who]
                    command += ["--gradients"] * gradients + ["--arch", options.arch or ""]
                    done = subprocess.run(
                        command, env=variables, check=True, stdout=subprocess.PIPE
                    )
                    if state:
                        result.append((f"{what}, {state}", json.loads(done.stdout)))
    return result


def table(measured: Sequence[tuple[str, dict[str, float]]]) -> str:
    """Markdown: seconds by stage; ``after torch`` is all but ``BEFORE``."""
    used = [s for s in STAGES if any(s in seconds for _, seconds in measured)]
    lines = [
        f"| seconds | {' | '.join(used)} | after torch |",
        "|---|" + "---|" * (len(used) + 1),
    ]
    for name, seconds in measured:
        cells = [f"{seconds[s]:.2f}" if s in seconds else "" for s in used]
        own = sum(x for s, x in seconds.items() if s not in BEFORE)
        lines.append(f"| {name} | {' | '.join(cells)} | {own:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_call",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", help="up to the binary, for a product; no GPU is needed")
    parser.add_argument("--peers", action="store_true", help="torch's SDPA beside ours")
    parser.add_argument("--gradients", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=("ours", "torch"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options)
    else:
        print(table(rows(options)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""``kernelseam gemm``: on random inputs, strided or over pointer arrays."""

from __future__ import annotations

from typing import Annotated

import typer

from kernelseam.cli import shapes
from kernelseam.cli.asked import Asked
from kernelseam.cli.problems import with_product_options
from kernelseam.cli.progress import working
from kernelseam.cli.running import Run, device_for, execute, measure, report, verdict_of
from kernelseam.planning import plan


@with_product_options
def run(
    asked: Asked,
    backend: shapes.Backend = None,
    implementation: shapes.Implementation = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with the float64 oracle.")
    ] = False,
    time: Annotated[bool, typer.Option("--time", help="Time it, after a warm-up.")] = False,
    json: shapes.Json = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")] = 0,
) -> None:
    """C = op(A)·op(B) + bias + residual, and its epilogue, for a batch of matrices, or groups."""
    device = device_for(asked.descriptor().problem(), backend)
    with working("making random inputs"):
        memory = asked.memory(device, seed)
    with working(f"computing the products on {device}"):
        descriptor = memory.descriptor(asked.case)
        planned = plan(descriptor, device=device, implementation=implementation)
        call = planned.bind()
        launches = execute(call)
    verdicts = {}
    if verify:
        with working("comparing with the float64 oracle"):
            verdicts["oracle"] = verdict_of(planned, asked.epilogue)
    timing = measure(call) if time else None
    report(
        asked.case.operation,
        device,
        [Run("", planned, launches, asked.elements, verdicts, timing)],
        verify=verify,
        as_json=json,
    )

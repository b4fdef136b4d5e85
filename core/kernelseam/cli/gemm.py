"""``kernelseam gemm``: on random inputs, strided or over pointer arrays."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import typer

from kernelseam.cli import grouped, shapes
from kernelseam.cli.progress import working
from kernelseam.cli.running import (
    Run,
    device_for,
    epilogue_on,
    execute,
    measure,
    normal,
    report,
)
from kernelseam.cli.with_options import with_options
from kernelseam.oracle import check
from kernelseam.oracle.epilogues import Epilogue
from kernelseam.oracle.sampling import sampled
from kernelseam.planning import plan
from kernelseam.plugins import plugins


@with_options(shapes.GemmShape.of, grouped.GroupOptions.of)
def run(
    shape: shapes.GemmShape,
    groups: grouped.GroupOptions,
    backend: shapes.Backend = None,
    implementation: shapes.Implementation = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with the float64 oracle.")
    ] = False,
    time: Annotated[bool, typer.Option("--time", help="Time it, after a warm-up.")] = False,
    json: shapes.Json = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the random inputs.")] = 0,
) -> None:
    """C = op(A)·op(B) + bias + residual, and its epilogue, for a batch of matrices, or groups."""
    if (of_groups := groups.over(shape)) is not None:
        options = {"verify": verify, "time": time, "json": json, "seed": seed}
        grouped.run(of_groups, backend, implementation, options)
        return
    device = device_for(shape.descriptor().problem(), backend)
    runtime = plugins().backend(device.backend).runtime
    rng, shapes_of, dtypes = np.random.default_rng(seed), shape.shapes(), shape.dtypes()
    with working("making random inputs"):
        host = {
            name: normal(rng, shapes_of[name], dtypes[name]) for name in shapes_of if name != "C"
        }
        arrays = {name: runtime.from_host(x, device) for name, x in host.items()}
    arrays["C"] = runtime.empty(shapes_of["C"], dtypes["C"], device)
    operands: dict[str, object] = dict(arrays)
    function = shape.function()
    if function is not None:
        operands["epilogue"] = epilogue_on(device, function)
    if shape.layout == "pointers":
        operands = {
            name: info.pointer for name, x in arrays.items() if (info := runtime.describe(x))
        }
    with working(f"computing the products on {device}"):
        planned = plan(shape.descriptor(**operands), device=device, implementation=implementation)
        call = planned.bind()
        launches = execute(call)
    host["C"] = runtime.to_host(arrays["C"])
    verdicts = {}
    if verify:
        matrices = host
        if shape.layout == "pointers":  # in the order of the pointer arrays
            matrices = {
                name: host[name].reshape(-1, *shapes_of[name][2:])[order].reshape(shapes_of[name])
                for name, order in shape.orders().items()
            }
        with working("comparing with the float64 oracle"):
            verdicts["oracle"] = check.gemm(
                matrices["A"],
                matrices["B"],
                matrices["C"],
                a_transposed=shape.a_transposed,
                b_transposed=shape.b_transposed,
                bias=matrices.get("bias"),
                residual=matrices.get("residual"),
                rows=sampled(4 * shape.N * shape.K),
                precision=shape.precision,
                epilogue=None if function is None else Epilogue(function.function, function.pairs),
            )
    timing = measure(call) if time else None
    report(
        "gemm",
        device,
        [Run("", planned, launches, host["C"].size, verdicts, timing)],
        verify=verify,
        as_json=json,
    )

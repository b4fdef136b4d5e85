"""``kernelseam gemm``: on random data, over strides or over lists of addresses."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import typer

from kernelseam.cli import shapes
from kernelseam.cli.running import Run, device_for, execute, measure, normal, report
from kernelseam.parity import check
from kernelseam.planning import plan
from kernelseam.plugins import plugins
from kernelseam.verification import sampled


def run(
    batch: shapes.Batch = None, heads: shapes.Heads = None, m: shapes.Rows = None, n: shapes.Columns = None,
    k: shapes.Inner = None, a_transposed: shapes.ATransposed = False, b_transposed: shapes.BTransposed = False,
    dtype: shapes.Dtype = None, layout: shapes.GemmLayout = "strided", spacing: shapes.Spacing = "scattered",
    backend: shapes.Backend = None, implementation: shapes.Implementation = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare with the float64 oracle.")] = False,
    time: Annotated[bool, typer.Option("--time", help="Measure, after a warm-up.")] = False,
    json: shapes.Json = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random data.")] = 0,
) -> None:
    """C = op(A)·op(B) for every matrix of a batch."""
    shape = shapes.GemmShape.of(
        batch=batch, heads=heads, m=m, n=n, k=k, a_transposed=a_transposed, b_transposed=b_transposed, dtype=dtype,
        layout=layout, spacing=spacing,
    )
    device = device_for(shape.descriptor().problem(), backend)
    runtime = plugins().backend(device.backend).runtime
    rng, lie = np.random.default_rng(seed), shape.shapes()
    host = {name: normal(rng, lie[name], shape.dtype) for name in "AB"}
    arrays = {name: runtime.from_host(x, device) for name, x in host.items()}
    arrays["C"] = runtime.empty(lie["C"], shape.dtype, device)
    operands: dict[str, object] = dict(arrays)
    if layout == "pointers":
        operands = {name: info.pointer for name, x in arrays.items() if (info := runtime.describe(x))}
    made = plan(shape.descriptor(**operands), device=device, implementation=implementation)
    call = made.bind()
    launches = execute(call)
    a, b, c = host["A"], host["B"], runtime.to_host(arrays["C"])
    verdicts = {}
    if verify:
        if layout == "pointers":  # back into the lists' order
            a, b, c = (
                x.reshape(-1, *x.shape[2:])[order].reshape(x.shape)
                for x, order in zip((a, b, c), shape.orders().values(), strict=True)
            )
        rows = sampled(4 * shape.N * shape.K)
        verdicts["oracle"] = check.gemm(a, b, c, a_transposed=a_transposed, b_transposed=b_transposed, rows=rows)
    timing = measure(call) if time else None
    report("gemm", device, [Run("", made, launches, c.size, verdicts, timing)], verify=verify, as_json=json)

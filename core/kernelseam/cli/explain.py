"""``kernelseam explain``: which implementation a problem gets, and why."""

from __future__ import annotations

from typing import Any

import typer

from kernelseam.cli import shapes
from kernelseam.cli.attention_options import Asked, asking
from kernelseam.cli.output import duration, emit_json, facts, heading, scaled, table
from kernelseam.contract import Cost
from kernelseam.dispatch import consider, find_device, select
from kernelseam.errors import Unsupported
from kernelseam.planning import Descriptor
from kernelseam.plugins import plugins

app = typer.Typer(no_args_is_help=True, help="Which implementation takes a problem, and why not the others.")


@app.command("attention")
@asking
def attention(
    asked: Asked, backend: shapes.Backend = None, implementation: shapes.Implementation = None,
    json: shapes.Json = False,
) -> None:
    """Explain an attention."""
    _explain(asked.descriptor(), backend, implementation, json)


@app.command("gemm")
def gemm(
    batch: shapes.Batch = None, heads: shapes.Heads = None, m: shapes.Rows = None, n: shapes.Columns = None,
    k: shapes.Inner = None, a_transposed: shapes.ATransposed = False, b_transposed: shapes.BTransposed = False,
    dtype: shapes.Dtype = None, out_dtype: shapes.OutDtype = None, bias: shapes.Bias = None,
    residual: shapes.Residual = None, layout: shapes.GemmLayout = "strided", spacing: shapes.Spacing = "scattered",
    backend: shapes.Backend = None, implementation: shapes.Implementation = None, json: shapes.Json = False,
) -> None:
    """Explain a batched GEMM."""
    shape = shapes.GemmShape.of(
        batch=batch, heads=heads, m=m, n=n, k=k, a_transposed=a_transposed, b_transposed=b_transposed, dtype=dtype,
        layout=layout, spacing=spacing, out_dtype=out_dtype, bias=bias, residual=residual,
    )
    _explain(shape.descriptor(), backend, implementation, json)


def _explain(descriptor: Descriptor, backend: str | None, implementation: str | None, as_json: bool) -> None:
    device = find_device(backend)
    simple, note = descriptor.simplified()
    problem = simple.problem()
    candidates: list[dict[str, Any]] = []
    chosen = None
    try:
        chosen = select(problem, device, implementation).implementation
    except Unsupported:
        note = "; ".join(filter(None, (note, "no implementation takes it")))
    for c in consider(problem, device):
        verdict = "chosen" if c.implementation is chosen else "takes it" if c.refusal is None else "refused"
        candidates.append(_row(c.implementation.name, device.backend, verdict, c.refusal or "", c.cost))
    for i in plugins().registry.implementations:
        if i.operation == problem.operation and i.backend != device.backend:
            elsewhere = f"it runs on {i.backend}, the device is {device}"
            candidates.append(_row(i.name, i.backend, "refused", elsewhere, None))
    if as_json:
        emit_json({
            "problem": str(problem), "device": str(device), "note": note,
            "chosen": None if chosen is None else chosen.name, "implementations": candidates,
        })
        return
    heading(str(problem))
    facts([("  device", f"{device} {device.name}".rstrip()), *([("  note", note)] if note else [])])
    print()
    table(("implementation", "backend", "bytes", "operations", "time", "verdict"), [_cells(c) for c in candidates])


def _row(name: str, backend: str, verdict: str, reason: str, cost: Cost | None) -> dict[str, Any]:
    return {
        "implementation": name, "backend": backend, "verdict": verdict, "reason": reason,
        "bytes": cost and cost.bytes, "operations": cost and cost.operations, "seconds": cost and cost.seconds,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    predicted = ("-", "-", "-") if row["seconds"] is None else (
        scaled(row["bytes"], "B"), scaled(row["operations"], "FLOP"), duration(row["seconds"])
    )
    verdict = f"{row['verdict']}: {row['reason']}" if row["reason"] else row["verdict"]
    return row["implementation"], row["backend"], *predicted, verdict

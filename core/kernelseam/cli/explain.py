"""``kernelseam explain``: which implementation dispatch chooses for a problem, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from kernelseam.absent import product
from kernelseam.cli import shapes
from kernelseam.cli.output import duration, emit_json, facts, heading, scaled, table
from kernelseam.cli.problems import PROBLEMS
from kernelseam.cli.progress import working
from kernelseam.contract import ABSENT, Cost, Device, LaunchRecord, Problem
from kernelseam.dispatch import Choice, consider, find_device, select
from kernelseam.errors import InvalidValue, Unsupported
from kernelseam.plugins import plugins
from kernelseam.tuned.store import Tuned, tuned_choice
from kernelseam.variants import SEPARATOR

Arch = Annotated[
    str | None,
    typer.Option(
        help="Explain for a GPU that need not be here, from its data sheet: its arch, or words of "
        "a product's name."
    ),
]
All = Annotated[bool, typer.Option("--all", help="Show implementations of other backends too.")]
app = typer.Typer(
    no_args_is_help=True,
    help="Which implementation is chosen for a problem, and why not the others.",
)


def _device(backend: str | None, arch: str | None) -> Device:
    """The available device, or one of an arch from its data sheet."""
    if arch is None:
        return find_device(backend)
    if backend is not None:
        raise InvalidValue(
            "--arch", arch, f"names a device, as --backend {backend} does", "Give one of the two"
        )
    return product(arch)


def _explain(
    request: Any,
    backend: shapes.Backend = None,
    arch: Arch = None,
    implementation: shapes.Implementation = None,
    all_backends: All = False,
    json: shapes.Json = False,
) -> None:
    descriptor = request.descriptor()
    with working("looking for devices"):
        device = _device(backend, arch)
    simple, note = descriptor.simplified()
    problem = simple.problem()
    if device.evidence == ABSENT:
        assumed = (
            f"predicted for {device.name} by its data sheet; vendors' libraries as if installed"
        )
        note = "; ".join(filter(None, (note, assumed)))
    candidates: list[dict[str, Any]] = []
    choice = None
    try:
        choice = select(problem, device, implementation)
    except Unsupported:
        note = "; ".join(filter(None, (note, "no implementation takes it")))
    measured = tuned_choice(problem, device)
    for c in consider(problem, device):
        verdict = "takes it" if c.refusal is None else "refused"
        if choice and c.implementation is choice.implementation:
            verdict = "chosen"
        elif c.foreign and c.refusal is None:
            verdict = "takes it: of another plugin, after the others until it is tuned"
        name = c.implementation.name
        candidates.append(_row(name, device.backend, verdict, c.refusal or "", c.cost, measured))
    for i in plugins().registry.implementations_of(problem.operation):
        if all_backends and i.backend != device.backend:
            elsewhere = f"it runs on {i.backend}, the device is {device}"
            candidates.append(_row(i.name, i.backend, "refused", elsewhere, None, None))
    launches = _launches(choice, problem, device) if choice else ()
    if json:
        emit_json(
            {
                "problem": str(problem),
                "device": str(device),
                "note": note,
                "chosen": choice and choice.implementation.name,
                "variant": choice.variant if choice else "",
                "by": choice and choice.by,
                "implementations": candidates,
                "launches": [asdict(x) for x in launches],
            }
        )
        return
    heading(str(problem))
    shown: list[tuple[str, object]] = [("  device", f"{device} {device.name}".rstrip())]
    if choice:
        name = choice.implementation.name + (SEPARATOR + choice.variant if choice.variant else "")
        shown.append(("  chosen", f"{name}, {_BY[choice.by]}"))
    facts([*shown, *([("  note", note)] if note else [])])
    print()
    columns = (
        "implementation",
        "backend",
        "bytes",
        "operations",
        "predicted",
        "measured",
        "verdict",
    )
    table(columns, [_cells(c) for c in candidates])
    if launches:
        print()
        table(
            ("launches of the chosen", "kind", "grid", "block", "cluster", "shared"),
            [
                (x.kernel, x.kind, *(_UNKNOWN if x.kind == "library" else _sizes(x)))
                for x in launches
            ],
        )


for _name, (_options, _words) in PROBLEMS.items():
    app.command(_name, help=f"Explain {_words}.")(_options(_explain))

_UNKNOWN = ("-", "-", "-", "-")


def _sizes(record: LaunchRecord) -> tuple[str, ...]:
    grid, block, cluster = (
        "×".join(map(str, x)) for x in (record.grid, record.block, record.cluster)
    )
    return grid, block, cluster, scaled(record.shared_bytes, "B")


def _launches(choice: Choice, problem: Problem, device: Device) -> tuple[LaunchRecord, ...]:
    """The launches of the choice, where they are known without compiling."""
    records = getattr(choice.implementation, "records", None)
    return tuple(records(problem, device, choice.variant)) if records else ()


_BY = {
    "named": "as requested",
    "tuned": "the fastest measured on a problem of its class",
    "model": "predicted to be the fastest",
}


def _row(
    name: str, backend: str, verdict: str, reason: str, cost: Cost | None, measured: Tuned | None
) -> dict[str, Any]:
    return {
        "implementation": name,
        "backend": backend,
        "verdict": verdict,
        "reason": reason,
        "bytes": cost and cost.bytes,
        "operations": cost and cost.operations,
        "seconds": cost and cost.seconds,
        "measured_seconds": measured and measured.seconds_of(name),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    predicted = (
        ("-", "-", "-")
        if row["seconds"] is None
        else (
            scaled(row["bytes"], "B"),
            scaled(row["operations"], "FLOP"),
            duration(row["seconds"]),
        )
    )
    measured = "-" if row["measured_seconds"] is None else duration(row["measured_seconds"])
    verdict = f"{row['verdict']}: {row['reason']}" if row["reason"] else row["verdict"]
    return row["implementation"], row["backend"], *predicted, measured, verdict

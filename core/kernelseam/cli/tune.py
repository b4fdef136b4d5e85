"""``kernelseam tune``: time every implementation and tile on a problem and save the fastest for its
class."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kernelseam.cli import shapes
from kernelseam.cli.asked import Memory
from kernelseam.cli.attention import random_values
from kernelseam.cli.attention_options import AttentionOptions
from kernelseam.cli.output import duration, emit_json, facts, heading, table
from kernelseam.cli.problems import PROBLEMS
from kernelseam.cli.progress import working
from kernelseam.cli.running import device_for, execute
from kernelseam.compilation import cache_folder
from kernelseam.contract import Device
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass
from kernelseam.json_schema import parsed
from kernelseam.planning import plan
from kernelseam.tuned import store
from kernelseam.tuned.classes import problem_class
from kernelseam.tuning import Configuration, Tuning, tune

app = typer.Typer(
    no_args_is_help=True,
    invoke_without_command=True,
    help="Time every configuration for a problem, and save the fastest for problems like it.",
)


@dataclass(frozen=True)
class Target:
    """A problem to tune: its descriptor over placeholder addresses, and a function that allocates
    random inputs on a device."""

    descriptor: Descriptor
    prepare: Callable[[Device], tuple[Descriptor, object]]
    """Returns a descriptor, and the arrays to keep alive."""


@app.callback()
def every(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Option(help='A JSON list of problems: {"operation": "gemm", "m": 64, ...}.'),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove every saved choice.")] = False,
    backend: shapes.Backend = None,
    json: shapes.Json = False,
) -> None:
    """Tune the problems of a file, or clear the saved choices."""
    if context.invoked_subcommand is not None:
        given = {"--file": file, "--clear": clear, "--backend": backend, "--json": json}
        for option, value in given.items():
            if value:
                raise InvalidValue(
                    option,
                    "given",
                    f"stands before {context.invoked_subcommand}",
                    "Give --backend and --json behind the operation, --file and --clear without "
                    "one",
                )
        return
    if clear == (file is not None):
        raise InvalidValue(
            "--file", file, "takes one of --file and --clear, or an operation", "See --help"
        )
    if file is not None:
        _run(_read(file), backend, json)
        return
    removed = store.clear()
    if json:
        emit_json({"folder": cache_folder() / store.FOLDER, "choices": removed})
    else:
        heading(f"{cache_folder() / store.FOLDER}: removed {removed} choices")


# ---------------------------------------------------------------- problems with memory


def _attention(request: AttentionOptions) -> Target:
    def prepare(device: Device) -> tuple[Descriptor, object]:
        case = request.case()
        full_case = request.backward_case(case) if request.backward else case
        memory = Memory(full_case, random_values(request, full_case, None, 0), device)
        if request.backward:  # gradients read its results
            execute(plan(memory.descriptor(case), device=device).bind())
        return memory.descriptor(full_case), memory

    return Target(request.descriptor(), prepare)


def _target(asked: Any) -> Target:
    if isinstance(asked, AttentionOptions):
        return _attention(asked)

    def prepare(device: Device) -> tuple[Descriptor, object]:
        memory = asked.memory(device)
        return memory.descriptor(asked.case), memory

    return Target(asked.descriptor(), prepare)


def _command(name: str) -> None:
    options, words = PROBLEMS[name]

    @app.command(name, help=f"Tune {words}.")
    @options
    def tune_one(request: Any, backend: shapes.Backend = None, json: shapes.Json = False) -> None:
        _run([_target(request)], backend, json)


for _name in PROBLEMS:
    _command(_name)


# ---------------------------------------------------------------- a file of problems


_OF_ALL = ("backend", "json", "help")
"""Options of a run, not of a problem."""


def _read(path: Path) -> list[Target]:
    """The problems of a file, each read as the command line with its options would be. Raises
    InvalidValue."""
    remedy = 'Give a list of objects: [{"operation": "gemm", "m": 64, "b-transposed": true}, ...]'
    try:
        cases = parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise InvalidValue("--file", path, f"cannot be read: {e}", remedy) from e
    if not isinstance(cases, list) or not cases or not all(isinstance(c, dict) for c in cases):
        raise InvalidValue(
            "--file", path, "must hold a list of objects, and one of them at least", remedy
        )
    commands: Any = typer.main.get_command(app)
    targets = []
    for i, case in enumerate(cases):
        where, operation = f"case {i + 1} of {path}", case.get("operation")
        if not isinstance(operation, str) or operation not in commands.commands:
            known = ", ".join(commands.commands)
            raise InvalidValue(
                f"{where}: operation", operation, f"must be one of {known}", "Name one of these"
            )
        arguments = list(_arguments(case, where))
        try:
            options = commands.commands[operation].make_context(operation, list(arguments)).params
        except Exception as e:
            if not hasattr(e, "format_message"):
                raise
            raise InvalidValue(
                where, " ".join(arguments), e.format_message(), "See `kernelseam tune --help`"
            ) from e
        targets.append(_target(PROBLEMS[operation][0].made(options)))
    return targets


def _arguments(case: Mapping[str, object], where: str) -> Iterator[str]:
    """The command line of a case. Raises InvalidValue for what no option takes."""
    for name, value in case.items():
        if name == "operation":
            continue
        if name in _OF_ALL:
            raise InvalidValue(
                f"{where}: {name}",
                value,
                "is no option of a problem",
                f"Give --{name} beside --file",
            )
        if not isinstance(value, str | int | float | None):
            rule = "must be a number, a string, true, false or null"
            raise InvalidValue(f"{where}: {name}", value, rule, "See `kernelseam tune --help`")
        if value is None or value is False:
            continue
        yield f"--{name.replace('_', '-')}"
        if value is not True:
            yield str(value)


# ---------------------------------------------------------------- running and output


def _run(targets: list[Target], backend: str | None, as_json: bool) -> None:
    tunings = []
    for target in targets:
        device = device_for(target.descriptor.problem(), backend)
        with _progress() as show:
            show("random inputs", 0, 1)
            descriptor, owners = target.prepare(device)
            tunings.append(tune(descriptor, device, progress=show))
            del owners
        if not as_json:
            _show(tunings[-1])
    if as_json:
        emit_json({"tunings": [_data(t) for t in tunings]})


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """On a terminal the configuration being timed; elsewhere the elapsed time."""
    if not sys.stderr.isatty():
        with working("timing every configuration"):
            yield lambda configuration, done, all: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda configuration, done, all: bar.update(
            task, description=configuration, completed=done, total=all
        )


def _show(t: Tuning) -> None:
    heading(str(t.problem))
    other = "" if t.chosen is t.model else f", where the model takes {t.model.name}"
    facts(
        [
            ("  device", f"{t.device} {t.device.name}".rstrip()),
            ("  chosen", t.chosen.name + other),
            ("  kept", t.path or "no"),
            *([("  note", t.note)] if t.note else []),
        ]
    )
    print()
    best = t.configurations[0].seconds
    table(
        ("configuration", "predicted", "measured", "of the best", "runs", ""),
        [_cells(t, w, best) for w in t.configurations],
    )
    for refusal in t.refused:
        heading(f"{refusal.implementation}  refused: {refusal.reason}")


def _cells(t: Tuning, configuration: Configuration, best: float | None) -> tuple[str, ...]:
    predicted = duration(configuration.predicted.seconds) if configuration.predicted else "-"
    if configuration.seconds is None or not best:
        return configuration.name, predicted, "-", "-", "-", configuration.failure
    verdict = "chosen" if configuration is t.chosen else ""
    return (
        configuration.name,
        predicted,
        duration(configuration.seconds),
        f"{best / configuration.seconds:.3f}",
        str(len(configuration.samples)),
        verdict,
    )


def _data(t: Tuning) -> dict[str, Any]:
    return {
        "problem": str(t.problem),
        "class": problem_class(t.problem),
        "device": str(t.device),
        "chosen": t.chosen.name,
        "model": t.model.name,
        "kept": t.path,
        "note": t.note,
        "configurations": [
            {
                "configuration": w.name,
                "implementation": w.implementation,
                "variant": w.variant,
                "failure": w.failure,
                "predicted_seconds": w.predicted and w.predicted.seconds,
                "seconds": w.seconds,
                "runs": len(w.samples),
            }
            for w in t.configurations
        ],
        "refused": [{"implementation": r.implementation, "reason": r.reason} for r in t.refused],
    }

"""``kernelseam compile --from``: compile a trace's problems into an installable wheel of
binaries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kernelseam.absent import arch_of, compiler_for
from kernelseam.bundling import Collected, LeftOut, WheelName, collect, read_trace, write_wheel
from kernelseam.bundling.collecting import Progress
from kernelseam.cli import shapes
from kernelseam.cli.output import emit_json, heading, scaled, table
from kernelseam.compilation import no_jit
from kernelseam.containment import Contained
from kernelseam.errors import InvalidValue


def run(
    context: typer.Context,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Compile every problem of a file written by kernelseam.trace(path)."
        ),
    ] = None,
    arch: Annotated[
        list[str] | None, typer.Option("--arch", help="With --from; may be given again.")
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", help="With --from: the wheel of binaries to write, FILE.whl."),
    ] = None,
    all_choices: Annotated[
        bool,
        typer.Option(
            "--all-choices",
            help="With --from: every implementation and tile, not only the likely ones.",
        ),
    ] = False,
    json: shapes.Json = False,
) -> None:
    """Compile an operation's kernels, or those of a trace, for any arch; no device is needed."""
    if context.invoked_subcommand is not None:
        given = {"--from": trace, "--arch": arch, "--bundle": bundle, "--all-choices": all_choices}
        for option in (name for name, value in given.items() if value):
            raise InvalidValue(
                option,
                context.invoked_subcommand,
                "stands before an operation, which a trace takes the place of",
                "Give options of the operation behind it",
            )
        return
    if trace is None or not arch or bundle is None:
        missing = "--from" if trace is None else "--arch" if not arch else "--bundle"
        raise InvalidValue(
            missing,
            None,
            "--from, --arch and --bundle are needed together",
            "Give all three, or an operation: see `kernelseam compile --help`",
        )
    if no_jit():
        raise InvalidValue(
            "KERNELSEAM_NO_JIT", 1, "forbids to compile", "Unset it where bundles are made"
        )
    name, problems = WheelName.of(bundle), read_trace(trace)
    archs = list(dict.fromkeys(map(arch_of, arch)))
    toolchains = [compiler_for(a)[1] for a in archs]
    with Contained("a toolchain"):
        compilers = {t.backend: t.compiler() for t in toolchains}
        with _progress() as progress:
            collected, left_out = collect(
                problems, archs, all_choices=all_choices, progress=progress
            )
    path = write_wheel(name, collected, compilers)
    _report(path, len(problems), collected, left_out, as_json=json)
    if left_out:
        raise typer.Exit(1)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Report compilations on standard error: all in one line on a terminal, else every tenth."""
    terminal = sys.stderr.isatty()

    def show(number: int, total: int, name: str) -> None:
        text = f"compiling {name} ({number} of {total})"
        if terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif number % 10 == 1:
            print(text, file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _report(
    path: Path, problems: int, collected: list[Collected], left_out: list[LeftOut], *, as_json: bool
) -> None:
    counts: dict[tuple[str, str], list[int]] = {}
    for c in collected:
        counts.setdefault((c.arch, c.source.name), []).append(len(c.binary.data))
    if as_json:
        data: dict[str, Any] = {
            "bundle": str(path),
            "bytes": path.stat().st_size,
            "problems": problems,
            "binaries": [
                {
                    "arch": c.arch,
                    "backend": c.backend,
                    "kernel": c.source.name,
                    "binary_bytes": len(c.binary.data),
                    "key": c.binary.key,
                }
                for c in collected
            ],
            "left_out": [
                {"problem": x.problem, "arch": x.arch, "reason": x.reason} for x in left_out
            ],
        }
        emit_json(data)
        return
    heading(f"{problems} problems, {len(collected)} binaries")
    table(
        ("  arch", "kernel", "binaries", "size"),
        [
            (f"  {arch}", kernel, str(len(sizes)), scaled(sum(sizes), "B"))
            for (arch, kernel), sizes in counts.items()
        ],
    )
    for x in left_out:
        print(f"left out: no kernel for {x.arch} takes {x.problem}. {x.reason}.", file=sys.stderr)
    print(f"\n{path}, {scaled(path.stat().st_size, 'B')}")
    print(f"  pip install {path}")

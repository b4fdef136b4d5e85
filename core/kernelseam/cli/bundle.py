"""``kernelseam compile --from`` and ``--common``: compile a trace's problems, or those that models
launch most, into installable wheels of binaries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelseam._version import __version__
from kernelseam.absent import arch_of, compiler_for
from kernelseam.cli import shapes
from kernelseam.cli.output import emit_json, heading, scaled, table
from kernelseam.compilation import no_jit
from kernelseam.containment import Contained
from kernelseam.errors import InvalidValue
from kernelseam.launch_trace import TracedProblem

if TYPE_CHECKING:
    from kernelseam.bundling import Collected, LeftOut
    from kernelseam.bundling.collecting import Progress


def run(
    context: typer.Context,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Compile every problem of a file written by kernelseam.trace(path)."
        ),
    ] = None,
    common: Annotated[
        bool,
        typer.Option(
            "--common", help="Compile what models launch most: a wheel of binaries for each arch."
        ),
    ] = False,
    arch: Annotated[
        list[str] | None, typer.Option(help="With --from or --common; may be given again.")
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(help="With --from or --common: the wheel of binaries to write, FILE.whl."),
    ] = None,
    all_choices: Annotated[
        bool,
        typer.Option(
            "--all-choices",
            help="With --from or --common: every implementation and tile, not only the likely "
            "ones.",
        ),
    ] = False,
    json: shapes.Json = False,
) -> None:
    """Compile an operation's kernels, or those of a trace, for any arch; no device is needed."""
    if context.invoked_subcommand is not None:
        given = {
            "--from": trace,
            "--common": common,
            "--arch": arch,
            "--bundle": bundle,
            "--all-choices": all_choices,
        }
        for option in (name for name, value in given.items() if value):
            raise InvalidValue(
                option,
                context.invoked_subcommand,
                "stands before an operation, which a trace takes the place of",
                "Give options of the operation behind it",
            )
        return
    from kernelseam.bundling import WheelName, collect, read_trace, write_wheel

    if trace is not None and common:
        raise InvalidValue("--common", True, "stands beside --from", "Give one of them")
    if (trace is None and not common) or not arch or (bundle is None and not common):
        nothing = trace is None and not common
        missing = "--from" if nothing else "--arch" if not arch else "--bundle"
        raise InvalidValue(
            missing,
            None,
            "--from, --arch and --bundle are needed together, or --common and --arch",
            "Give them, or an operation: see `kernelseam compile --help`",
        )
    if no_jit():
        raise InvalidValue(
            "KERNELSEAM_NO_JIT", 1, "forbids to compile", "Unset it where bundles are made"
        )
    archs = list(dict.fromkeys(map(arch_of, arch)))
    problems = common_problems() if trace is None else read_trace(trace)
    wheels = (
        [(WheelName.of(bundle), archs)]
        if bundle is not None
        else [(WheelName.of(Path(_name_of(a))), [a]) for a in archs]
    )
    left_out: list[LeftOut] = []
    written: list[dict[str, Any]] = []
    for name, its in wheels:
        toolchains = [compiler_for(a)[1] for a in its]
        with Contained("a toolchain"):
            compilers = {t.backend: t.compiler() for t in toolchains}
            with _progress() as progress:
                collected, lacking = collect(
                    problems, its, all_choices=all_choices, progress=progress
                )
        path = write_wheel(name, collected, compilers, [str(p.problem) for p in problems])
        left_out += lacking
        if json:
            written.append(_described(path, len(problems), collected, lacking))
        else:
            _show(path, len(problems), collected, lacking)
    if json:
        emit_json(written[0] if bundle is not None else {"bundles": written})
    if left_out:
        raise typer.Exit(1)


def common_problems() -> tuple[TracedProblem, ...]:
    """What wheels of ``--common`` are made of."""
    from kernelseam.plugins import plugins
    from kernelseam.samples.common_problems import common_cases
    from kernelseam.samples.operations.operands import problem_of

    runtime = plugins().backend("numpy").runtime
    host = runtime.devices()[0]
    return tuple(TracedProblem(problem_of(case, runtime, host), host) for case in common_cases())


def _name_of(arch: str) -> str:
    """The wheel of an arch, as plugins' extras name its distribution."""
    backend, toolchain = compiler_for(arch)
    family = toolchain.arch_row(arch).family or arch
    return f"kernelseam_{backend.name}_binaries_{family}-{__version__}.whl"


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


def _described(
    path: Path, problems: int, collected: list[Collected], left_out: list[LeftOut]
) -> dict[str, Any]:
    return {
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
        "left_out": [{"problem": x.problem, "arch": x.arch, "reason": x.reason} for x in left_out],
    }


def _show(path: Path, problems: int, collected: list[Collected], left_out: list[LeftOut]) -> None:
    counts: dict[tuple[str, str], list[int]] = {}
    for c in collected:
        counts.setdefault((c.arch, c.source.name), []).append(len(c.binary.data))
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

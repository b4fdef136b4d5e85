"""The command ``kernelseam``: its subcommands, and errors as messages with an exit status.

0: done. 1: a verification, a compilation or a device failed. 2: bad input.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from io import TextIOWrapper
from typing import Annotated, NoReturn, cast

import typer

from kernelseam._version import __version__
from kernelseam.cli import attention, cache, compile, doctor, explain, gemm, parity, tune
from kernelseam.errors import InvalidValue, KernelSeamError, Unsupported

app = typer.Typer(
    name="kernelseam",
    help="Attention and batched GEMM through one seam, on whatever device is here.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("attention")(attention.run)
app.command("gemm")(gemm.run)
app.command("parity")(parity.run)
app.command("doctor")(doctor.run)
app.add_typer(explain.app, name="explain")
app.add_typer(tune.app, name="tune")
app.add_typer(compile.app, name="compile")
app.add_typer(cache.app, name="cache")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command; ends by SystemExit. ``arguments`` default to the process's own."""
    # What --json begins ends with the command: typer leaves open the context of a command line that
    # it refuses.
    with ExitStack() as ends, warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        with suppress(AttributeError, ValueError):  # it may be closed, or no file
            # A name of a file, or a plugin, may have what it cannot say.
            cast(TextIOWrapper, sys.stdout).reconfigure(errors="backslashreplace")
        try:
            app(args=None if arguments is None else list(arguments), obj=ends)
        except (InvalidValue, Unsupported) as e:
            _end(e, 2)
        except (KernelSeamError, MemoryError) as e:
            _end(e, 1)
    raise SystemExit(0)


def _end(error: Exception, status: int) -> NoReturn:
    print(f"error: {str(error) or type(error).__name__}", file=sys.stderr)
    raise SystemExit(status)

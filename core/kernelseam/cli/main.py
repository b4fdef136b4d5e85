"""The command ``kernelseam``: its subcommands, and errors as messages with an exit status.

Under ``--json`` an error is a JSON object on standard output: {"error": {"kind", "message", …},
"status"}.

0: done. 1: a verification, a compilation or a device failed. 2: bad input.
"""

from __future__ import annotations

import gc
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn, cast

import typer

from kernelseam._version import __version__
from kernelseam.cli.commands import Commands
from kernelseam.cli.output import described, emit_json, message_of
from kernelseam.errors import InvalidValue, KernelSeamError, Unsupported

app = typer.Typer(
    name="kernelseam",
    cls=Commands,
    help="Attention and batched GEMM through one seam, on whatever device is here.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
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


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command; ends by SystemExit. ``arguments`` default to the process's own."""
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    # Ends --json's redirection with the command: typer does not close the context of a command line
    # that it rejects.
    with ExitStack() as ends, warnings.catch_warnings():
        # What is imported lives to the end: looking for cycles in it takes a tenth of the time.
        ends.callback(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(100_000)
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        with suppress(AttributeError, ValueError):  # it may be closed, or no file
            # Names of files and plugins may have characters that it cannot encode.
            cast(TextIOWrapper, sys.stdout).reconfigure(errors="backslashreplace")
        for argument in command_line:
            if "\0" in argument:  # of a program, not of a shell; some versions of click fail by it
                rule = "must be without an embedded null byte"
                _end(InvalidValue("argument", argument, rule, "Leave it out"), 2, command_line)
        try:
            status = app(args=command_line, obj=ends, standalone_mode=False)
        except typer.Abort:
            print("Aborted!", file=sys.stderr)
            raise SystemExit(1) from None
        except (InvalidValue, Unsupported) as e:
            _end(e, 2, command_line)
        except (KernelSeamError, MemoryError, OSError) as e:  # what the file system refuses, too
            _end(e, 1, command_line)
        except Exception as e:
            if not hasattr(e, "format_message"):  # no usage error
                raise
            _end(e, 2, command_line)
    raise SystemExit(status if isinstance(status, int) else 0)


_NAME = re.compile(r"""(?<![-\w./\\'"])[A-Za-z]+_\w+(?![\w(/\\]|\.\w)""")
"""A field's name: no part of a path, and no function."""
_FLAGS = {"num_heads": "--heads", "S_q": "--seq-len", "S_k": "--kv-seq-len"}
"""Options whose names are not those of the fields that they set."""


def _by_flag(error: Exception, command_line: Sequence[str]) -> Exception:
    """The error with the names of the command's options for those of the fields that they set."""
    if not isinstance(error, InvalidValue):
        return error
    given = {word.partition("=")[0] for word in command_line}
    options = _options(command_line)

    def flag(field: str) -> str:
        name = _FLAGS.get(field, "--" + field.lower().replace("_", "-"))
        # a word such as "device" may be meant as a word, unless the option is given
        return name if name in (options if "_" in field else given) else field

    def reworded(text: str) -> str:
        return _NAME.sub(lambda found: flag(found[0]), text)

    rule, remedy = reworded(error.rule), reworded(error.remedy)
    return type(error)(flag(error.field), error.value, rule, remedy)


def _options(command_line: Sequence[str]) -> set[str]:
    """Those of the command that a command line names."""
    command = typer.main.get_command(app)
    for word in command_line:
        find: Any = getattr(command, "get_command", None)
        if find is None:
            break
        command = find(None, word) or command
    return {name for parameter in command.params for name in parameter.opts}


def _end(error: Exception, status: int, command_line: Sequence[str]) -> NoReturn:
    """Report an error on standard error, with --json on standard output too, and exit."""
    show = getattr(error, "show", None)
    if show is not None:
        show()
    else:
        print(f"error: {message_of(_by_flag(error, command_line))}", file=sys.stderr)
    if "--json" in command_line:
        emit_json({"error": described(error), "status": status})
    raise SystemExit(status)

"""Output of the commands: tables no wider than the terminal, or one JSON object."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from typing import Any, TextIO

from kernelseam.errors import CompileError, InvalidValue, Unsupported, format_value

_json: TextIO | None = None


@contextmanager
def json_alone() -> Iterator[None]:
    """Within the block only ``emit_json`` writes to standard output: all other output goes to
    standard error.

    Where standard output is file descriptor 1, that includes C libraries and child processes, and
    lasts until the process ends.
    """
    global _json
    out, apart = sys.stdout, None
    with suppress(AttributeError, OSError, ValueError):  # it may be closed, or no file
        if out.fileno() == 1:
            out.flush()
            apart = open(os.dup(1), "w", encoding=out.encoding, errors="backslashreplace")  # noqa: SIM115
            os.dup2(2, 1)
    _json = apart or out
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _json = None
        if apart is not None:
            apart.close()


def emit_json(value: dict[str, Any]) -> None:
    """Print a JSON object on standard output; inf and NaN become strings."""
    print(
        json.dumps(_plain(value), indent=2, ensure_ascii=False),
        file=_json or sys.stdout,
        flush=True,
    )


def described(error: Exception) -> dict[str, Any]:
    """An error as JSON data: its kind, its message and its fields."""
    data: dict[str, Any] = {"kind": type(error).__name__, "message": message_of(error)}
    if isinstance(error, InvalidValue):
        data |= {
            "field": error.field,
            "value": format_value(error.value),
            "rule": error.rule,
            "remedy": error.remedy,
        }
    elif isinstance(error, Unsupported):
        data["refusals"] = [asdict(r) for r in error.refusals]
    elif isinstance(error, CompileError):
        data |= {"kernel": error.kernel, "arch": error.arch, "source": error.source}
        data["log"] = error.log
    return data


def message_of(error: Exception) -> str:
    """An error's message, of typer's usage errors too."""
    format_message = getattr(error, "format_message", None)
    return str(format_message() if format_message else error) or type(error).__name__


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def heading(text: str) -> None:
    """Print a title or a sentence; on a terminal wrapped between words."""
    print(*_wrapped(text, _width(), "", "    "), sep="\n")


def facts(rows: Sequence[tuple[str, object]]) -> None:
    """Print names with their values, one per line."""
    table(None, [(name, str(value)) for name, value in rows])


def table(
    columns: Sequence[str] | None, rows: Sequence[Sequence[str]], *, whole: bool = False
) -> None:
    """Print a table, with a header unless ``columns`` is None, no wider than the terminal.

    Outside a terminal a row is a line. ``whole``: never wrap the last column, which has paths to
    copy.
    """
    print(*lines_of(columns, rows, _width(), whole=whole), sep="\n")


def _width() -> int | None:
    """Columns of the terminal, or None where standard output is none."""
    return max(shutil.get_terminal_size().columns, 40) if sys.stdout.isatty() else None


_NARROWEST = 24
"""The narrowest last column; where less is left, its text goes below the row."""


def lines_of(
    columns: Sequence[str] | None,
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    whole: bool = False,
) -> list[str]:
    """The lines of a table.

    Where it is wider than ``width`` the last column is wrapped between words, or goes beneath its
    row; where the others alone are wider every cell has a line. A word longer than a line stays in
    one piece. A cell's own lines become one.
    """
    rows = [[" ".join(cell.splitlines()) for cell in row] for row in rows]
    lines = [*([columns] if columns is not None else []), *rows]
    if not lines:
        return []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = sum(widths[:-1]) + 2 * (len(widths) - 1)
    if width is not None and left > width:
        return [x for row in rows for x in _record(columns, row, width, whole)]
    if width is None or left + widths[-1] <= width:
        return [_row(line, widths).rstrip() for line in lines]
    output_lines = []
    for *cells, last in lines:
        start = _row(cells, widths)
        if left + len(last) <= width:
            output_lines.append(f"{start}  {last}".rstrip() if cells else last)
        elif not whole and width - left >= _NARROWEST:
            first, *more = _wrapped(last, width - left, "", "")
            output_lines += [
                f"{start}  {first}" if cells else first,
                *(" " * left + x for x in more),
            ]
        else:
            below = " " * (len(start) - len(start.lstrip()) + 2)
            output_lines.append(start.rstrip())
            output_lines += [below + last] if whole else _wrapped(last, width, below, below)
    return output_lines


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False))


def _record(
    columns: Sequence[str] | None, row: Sequence[str], width: int, whole: bool
) -> Iterator[str]:
    first, *others = row
    below = " " * (len(first) - len(first.lstrip()) + 2)
    yield first
    for i, cell in enumerate(others, 1):
        name = f"{columns[i]}: " if columns is not None and columns[i] else ""
        if whole and i == len(others):
            yield f"{below}{name}{cell}"
        else:
            yield from _wrapped(name + cell, width, below, below + "  ")


def _wrapped(text: str, width: int | None, first: str, others: str) -> list[str]:
    """Wrap each line of a text between words."""
    if width is None:
        return [first + text]
    return [
        line
        for part in text.splitlines() or [""]
        for line in textwrap.wrap(
            part,
            width,
            initial_indent=first,
            subsequent_indent=others,
            break_long_words=False,
            break_on_hyphens=False,
        )
        or [""]
    ]


def scaled(value: float, unit: str, base: int = 1000) -> str:
    """A number with a prefix: 1.5 GB, 12.3 GFLOP; ``base`` 1024 gives 1.5 GiB."""
    prefixes = ("", "k", "M", "G", "T", "P") if base == 1000 else ("", "Ki", "Mi", "Gi", "Ti", "Pi")
    step = 0
    while abs(value) >= base and step < len(prefixes) - 1:
        value, step = value / base, step + 1
    return f"{value:.4g} {prefixes[step]}{unit}"


def duration(seconds: float) -> str:
    """Seconds with a prefix: 12.3 µs."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor:
            return f"{seconds / factor:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"


def age(seconds: float) -> str:
    """How long ago, in its largest unit."""
    for factor, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= factor:
            return f"{seconds / factor:.0f} {unit}"
    return f"{seconds:.0f} s"

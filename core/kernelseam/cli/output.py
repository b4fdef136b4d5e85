"""What a person sees and what a program reads: tables on a terminal, aligned text elsewhere, or one
JSON object."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO

_json: TextIO | None = None


@contextmanager
def json_alone() -> Iterator[None]:
    """Within the block standard output is for ``emit_json`` alone: what anybody else prints goes to
    standard error.

    Where standard output is the process's own, that holds of C libraries and child processes, too,
    and until the process ends, for what they print at its end.
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
    """One JSON object on standard output; what JSON has no word for (inf, NaN) becomes a string."""
    print(
        json.dumps(_plain(value), indent=2, ensure_ascii=False),
        file=_json or sys.stdout,
        flush=True,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def heading(text: str) -> None:
    """A title above what follows."""
    print(text)


def facts(rows: Sequence[tuple[str, object]]) -> None:
    """Names with their values, one a line."""
    table(None, [(name, str(value)) for name, value in rows])


def table(columns: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> None:
    """Rows under columns (or under nothing). Outside a terminal no line is wrapped, coloured or
    framed."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        shown = Table(
            *(columns or ()),
            box=None,
            show_header=columns is not None,
            pad_edge=False,
            padding=(0, 2, 0, 0),
        )
        for row in rows:
            shown.add_row(*(Text(cell) for cell in row))
        Console(highlight=False).print(shown)
        return
    lines = [*([columns] if columns is not None else []), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


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

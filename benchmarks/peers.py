"""A page that is printed as it grows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def write(lines: Iterable[str], report: Path | None) -> None:
    """Print each line when it is there, and keep what there is in the file: a run that is cut off
    has not lost it."""
    entries = []
    for line in lines:
        print(line, flush=True)
        entries.append(line)
        if report:
            report.write_text("\n".join(entries) + "\n", encoding="utf-8")

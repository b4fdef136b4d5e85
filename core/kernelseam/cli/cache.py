"""``kernelseam cache``: list and clear the cached binaries."""

from __future__ import annotations

from dataclasses import asdict

import typer

from kernelseam import compilation
from kernelseam.cli import shapes
from kernelseam.cli.output import age, emit_json, heading, scaled, table

app = typer.Typer(no_args_is_help=True, help="The cache of compiled binaries.")


@app.command("ls")
def ls(json: shapes.Json = False) -> None:
    """List the binaries, newest first."""
    folder, entries = compilation.cache_folder(), compilation.entries()
    if json:
        emit_json(
            {"folder": folder, "entries": [{**asdict(e), "path": str(e.path)} for e in entries]}
        )
        return
    total = scaled(sum(e.size for e in entries), "B", 1024)
    heading(f"{folder}: {len(entries)} binaries, {total}")
    if entries:
        table(
            ("name", "arch", "backend", "size", "age", "place"),
            [
                (
                    e.name,
                    e.arch,
                    e.backend,
                    scaled(e.size, "B", 1024),
                    age(e.age),
                    e.path.name + (f" (not loaded: {e.damage})" if e.damage else ""),
                )
                for e in entries
            ],
            whole=True,
        )


@app.command("clear")
def clear(json: shapes.Json = False) -> None:
    """Remove every binary, saved sources of failed compilations and kept compiler versions."""
    folder, removed = compilation.cache_folder(), compilation.clear()
    if json:
        emit_json({"folder": folder, **asdict(removed)})
    else:
        heading(
            f"{folder}: removed {removed.binaries} binaries, {scaled(removed.bytes, 'B', 1024)}"
        )

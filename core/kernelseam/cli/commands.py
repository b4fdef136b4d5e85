"""The subcommands: each one's module is imported when the command is used, so that ``--help`` and
the completion of a command's name import none of them."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup

HELP = {
    "attention": "softmax(q·kᵀ/√D)·v, or its gradients.",
    "gemm": "C = op(A)·op(B) + bias + residual for every matrix of a batch.",
    "parity": "Check every implementation on every case against a float64 oracle.",
    "doctor": "What runs here, what compiles, what is missing, and why.",
    "explain": "Which implementation is chosen for a problem, and why not the others.",
    "tune": "Time all implementations and tiles of a problem, and keep the fastest.",
    "compile": "Compile for any arch; no device is needed. Make wheels of binaries.",
    "cache": "The cache of compiled binaries.",
}
"""By subcommand, its line in the list of all. The subcommand is ``run`` or ``app`` of the module of
this package that has its name."""


class Commands(TyperGroup):
    # click's types are Any here: some versions of typer have a click of their own
    def list_commands(self, ctx: Any) -> list[str]:
        return list(HELP)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in HELP and cmd_name not in self.commands:
            self.commands[cmd_name] = _load(cmd_name)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(HELP.items()))


def _load(name: str) -> Any:
    module = importlib.import_module(f"kernelseam.cli.{name}")
    root = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    root.callback()(lambda: None)
    if app := getattr(module, "app", None):
        root.add_typer(app, name=name)
    else:
        root.command(name)(module.run)
    group = typer.main.get_command(root)
    assert isinstance(group, TyperGroup)
    return group.commands[name]

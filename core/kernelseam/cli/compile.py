"""``kernelseam compile``: compile an operation's kernels for any arch and show their registers,
spills and shared memory. Needs no device."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kernelseam.absent import arch_of, compiler_for
from kernelseam.cli import bundle, shapes
from kernelseam.cli.asked import Asked
from kernelseam.cli.attention_options import AttentionOptions, with_attention_options
from kernelseam.cli.output import described, emit_json, heading, table
from kernelseam.cli.progress import working
from kernelseam.cli.with_options import WithOptions
from kernelseam.compilation import compiled_together
from kernelseam.containment import Contained
from kernelseam.contract import Backend, Toolchain
from kernelseam.errors import CompileError, InvalidValue
from kernelseam.kernels import KERNELS, build_binary, launches_by_implementation
from kernelseam.kernels.kernel import bundle as source_bundle
from kernelseam.plugins import plugins


def names_of_archs() -> list[str]:
    """For the shell's completion."""
    known = plugins()
    return [a for b in known.registry.backends.values() for a in known.archs_of(b)]


app = typer.Typer(
    no_args_is_help=True,
    help="Compile an operation's kernels for any arch; no device is needed.",
)
app.callback(invoke_without_command=True)(bundle.run)

Archs = Annotated[
    list[str],
    typer.Option(
        autocompletion=names_of_archs, help="As `kernelseam doctor` lists them; may be given again."
    ),
]


@app.command("attention")
@with_attention_options
def attention(request: AttentionOptions, arch: Archs, json: shapes.Json = False) -> None:
    """Compile an attention; binaries do not depend on batch, heads and lengths, which may be left
    out."""
    _compile(request.descriptor().problem(), arch, json)


@app.command("gemm")
@WithOptions(shapes.product, without=("spacing",))
def gemm(asked: Asked, arch: Archs, json: shapes.Json = False) -> None:
    """Compile a batched GEMM; binaries depend on extents only through the alignment of rows to 16
    bytes."""
    _compile(asked.descriptor().problem(), arch, json)


def _compile(problem: Any, archs: list[str], as_json: bool) -> None:
    """Compile for each arch and show binaries and failures; exit status 1 if there is a failure."""
    rows: list[dict[str, Any]] = []
    failures: dict[str, CompileError | InvalidValue] = {}
    compilers = {arch: compiler_for(arch) for arch in map(arch_of, archs)}
    for i, (arch, (backend, toolchain)) in enumerate(compilers.items(), 1):
        with working(f"compiling for {arch} ({i} of {len(compilers)})"):
            try:
                rows += _built(problem, arch, backend, toolchain)
            except (CompileError, InvalidValue) as e:
                failures[arch] = e
    refused = [e for e in failures.values() if isinstance(e, InvalidValue)]
    if len(refused) == len(compilers):
        raise refused[0]
    if as_json:
        failed = [{**described(e), "arch": arch} for arch, e in failures.items()]
        spec = asdict(problem.spec)
        emit_json(
            {"operation": problem.operation, "spec": spec, "binaries": rows, "failures": failed}
        )
    else:
        if rows:
            heading(str(problem.spec))
            _show(rows)
        alike: dict[str, list[str]] = {}
        for arch, failure in failures.items():
            alike.setdefault(str(failure), []).append(arch)
        for text, those in alike.items():
            named = "" if all(arch in text for arch in those) else f"{', '.join(those)}: "
            print(f"error: {named}{text}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)


def _built(problem: Any, arch: str, backend: Backend, toolchain: Toolchain) -> list[dict[str, Any]]:
    """Facts of each kernel compiled for one arch. Raises CompileError."""
    with Contained(f"the toolchain of backend {toolchain.backend}"):
        launches = [
            (name, x)
            for name, steps in launches_by_implementation(toolchain, problem, arch, backend.kernels)
            for x in steps
        ]
        sources = [
            source_bundle(x.kernel, x.problem.spec, x.tile, toolchain, arch) for _, x in launches
        ]
        compiled_together(toolchain, sources, arch)
        built = [
            (name, x, *build_binary(toolchain, x.problem.spec, arch, x.tile, x.kernel))
            for name, x in launches
        ]
    return [
        {
            "arch": arch,
            "backend": toolchain.backend,
            "implementation": implementation,
            "kernel": name,
            "role": launch.tile.role if launch.kernel is KERNELS["attention_bwd"] else None,
            "registers": f.registers,
            "spills": f.spills,
            "scratch_bytes": f.scratch_bytes,
            "shared_bytes": f.shared_bytes,
            "matrix_instructions": f.matrix_instructions,
            **f.extra,
            "binary_bytes": len(binary.data),
            "binary": None if binary.path is None else str(binary.path),
        }
        for implementation, launch, binary, facts in built
        for name, f in facts.items()
    ]


def _show(rows: list[dict[str, Any]]) -> None:
    for r in rows:
        r["of"] = r["kernel"] if r["role"] is None else f"{r['kernel']}: {r['role']}"
    columns = {
        "arch": "arch",
        "kernel": "of",
        "regs": "registers",
        "spills": "spills",
        "scratch": "scratch_bytes",
        "shared": "shared_bytes",
        "matrix": "matrix_instructions",
        "binary": "binary",
    }
    table(
        [*columns],
        [[str(r[c] if r[c] is not None else "not kept") for c in columns.values()] for r in rows],
        whole=True,
    )

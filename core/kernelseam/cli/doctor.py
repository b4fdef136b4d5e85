"""``kernelseam doctor``: devices, plugins and implementations that are available, and why others
are not."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import typer

from kernelseam import compilation
from kernelseam._version import __version__
from kernelseam.absent import missing_plugins
from kernelseam.cli import shapes
from kernelseam.cli.examination import Finding, examine
from kernelseam.cli.output import emit_json, facts, heading, scaled, table
from kernelseam.cli.progress import working
from kernelseam.contract import CONTRACT_VERSION, Backend, Device
from kernelseam.plugins import Failure, failure, plugins

MISSING = "missing"
"""The item of a plugin's report that says what is missing: a mapping of names to remedies."""
VARIABLES = {
    "KERNELSEAM_BACKEND": "the default backend",
    "KERNELSEAM_CACHE_DIR": "the folder of compiled binaries",
    "KERNELSEAM_NO_JIT": "1: compile nothing, use only the binaries of installed bundles",
    "KERNELSEAM_PLUGINS": "the plugins to load, separated by commas; all where it is unset",
    "KERNELSEAM_PROBE_SECONDS": "how long a plugin's import, a hook or the first listing of "
    "devices may take; 30",
}


def run(
    json: shapes.Json = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Run every implementation on small problems and check the results.",
        ),
    ] = True,
) -> None:
    """Devices, plugins, implementations, failures, the cache's folder, environment variables."""
    data = collect(check)
    if json:
        emit_json(data)
    else:
        show(data)


def collect(check: bool = True) -> dict[str, Any]:
    """The report as data; with ``check`` every implementation runs small problems."""
    with working("asking every plugin"):
        known = plugins()
        reports, failures = known.doctor(), list(known.failures)
    for name, report in list(reports.items()):
        if isinstance(report, Failure):
            failures.append(report)
            del reports[name]
    devices: list[tuple[Backend, Device]] = []
    for backend in sorted(known.registry.backends.values(), key=lambda b: -b.priority):
        try:
            devices += [(backend, d) for d in known.devices_of(backend)]
        except Exception as e:  # the doctor must report a broken runtime
            failures.append(failure(known.registry.owners[backend.name,], "devices", e))
    findings: list[Finding] = []
    if check:
        with working("trying every implementation on small problems"):
            findings, broken = examine(known, devices)
        failures += broken
    return {
        "version": __version__,
        "contract_version": CONTRACT_VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": [
            {
                "device": f"{d.backend}:{d.index}",
                "arch": d.arch,
                "name": d.name,
                "evidence": d.evidence,
                **asdict(d.limits),
            }
            for _, d in devices
        ],
        "backends": {
            b.name: {
                "archs": _asked("archs", lambda b: list(known.archs_of(b)), [], b, failures),
                "compiler": _asked("compiler", known.compiler_of, "", b, failures),
                "implementations": [
                    f"{i.operation}: {i.name}"
                    for i in known.registry.implementations
                    if i.backend == b.name
                ],
            }
            for b in known.registry.backends.values()
        },
        "plugins": [
            {"plugin": name, **asdict(info), "report": reports.get(name, {})}
            for name, info in known.loaded.items()
        ],
        "examined": [asdict(f) for f in findings],
        "failures": [asdict(f) for f in failures],
        "cache": _cache(),
        "bundles": [asdict(b) for b in compilation.installed_bundles()],
        "environment": _environment(
            dict(v for info in known.loaded.values() for v in info.variables)
        ),
    }


T = TypeVar("T")


def _asked(
    stage: str, ask: Callable[[Backend], T], otherwise: T, b: Backend, failures: list[Failure]
) -> T:
    """What a backend answers; ``otherwise`` where it raises, which is a failure."""
    try:
        return ask(b)
    except Exception as e:
        failures.append(failure(plugins().registry.owners[b.name,], stage, e))
        return otherwise


def _cache() -> dict[str, Any]:
    folder = str(compilation.cache_folder())
    try:
        entries = compilation.entries()
    except (compilation.Untrusted, OSError) as e:
        return {"folder": folder, "problem": str(e), "binaries": 0, "bytes": 0}
    return {
        "folder": folder,
        "problem": "",
        "binaries": len(entries),
        "bytes": sum(e.size for e in entries),
    }


def _environment(plugins: dict[str, str]) -> dict[str, Any]:
    """Environment variables with values and meanings; ``plugins``: meanings of the plugins' own."""
    others = {n: "" for n in sorted(os.environ) if n.startswith("KERNELSEAM_")}
    return {
        name: {"value": os.environ.get(name), "meaning": meaning}
        for name, meaning in {**others, **VARIABLES, **plugins}.items()
    }


def show(data: dict[str, Any]) -> None:
    """Print the report."""
    facts(_summary(data))
    print()
    heading(
        f"kernelseam {data['version']}, contract {data['contract_version']}, Python "
        f"{data['python']}, "
        f"{data['platform']}"
    )
    heading("\nDevices")
    table(
        ("  device", "arch", "name", "evidence", "memory", "units"),
        [
            (
                f"  {d['device']}",
                d["arch"],
                d["name"],
                d["evidence"],
                scaled(d["memory_bytes"], "B", 1024),
                str(d["compute_units"]),
            )
            for d in data["devices"]
        ],
    )
    heading("\nPlugins")
    for p in data["plugins"]:
        facts([(f"  {p['plugin']} {p['version']}", p["summary"])])
        report = {n: x for n, x in p["report"].items() if n != MISSING}
        if report:
            facts([(f"    {name}", _line(value)) for name, value in report.items()])
    for name, backend in data["backends"].items():
        facts([(f"  backend {name}", ", ".join(backend["implementations"]) or "no implementation")])
    if data["examined"]:
        heading("\nTried out")
        table(
            ("  implementation", "device", "finding"),
            [
                (
                    f"  {f['operation']}: {f['implementation']}",
                    f["device"],
                    f"{f['state']}: {f['detail']}",
                )
                for f in data["examined"]
            ],
        )
    heading("\nFailures" if data["failures"] else "\nNo failures")
    for f in data["failures"]:
        heading(f"  {f['plugin']} failed at {f['stage']}: {f['message']}")
        print("".join(f"    {line}\n" for line in f["traceback"].splitlines()), end="")
    cache = data["cache"]
    heading("\nCache")
    facts(
        [
            ("  folder", cache["folder"]),
            ("  binaries", f"{cache['binaries']}, {scaled(cache['bytes'], 'B', 1024)}"),
        ]
    )
    if cache["problem"]:
        heading(f"  {cache['problem']}")
    if data["bundles"]:
        heading("\nBundles")
        facts(
            [
                (
                    f"  {b['name']} {b['version']}",
                    b["problem"] or f"{b['binaries']} binaries for {', '.join(b['archs'])}",
                )
                for b in data["bundles"]
            ]
        )
    heading("\nEnvironment")
    table(
        None,
        [
            (f"  {name}", "(unset)" if v["value"] is None else v["value"], v["meaning"])
            for name, v in data["environment"].items()
        ],
    )


def _summary(data: dict[str, Any]) -> list[tuple[str, object]]:
    """What runs here, what is compiled for, and what is missing, with the remedy."""
    runs = [f"{d['device']} {d['name']}".rstrip() for d in data["devices"]]
    compiles = [
        f"{', '.join(b['archs'])} ({n})"
        for n, b in data["backends"].items()
        if b["archs"] and b["compiler"]
    ]
    missing = [f"{n}: {command}" for n, command in missing_plugins().items()]
    for p in data["plugins"]:
        wanted = p["report"].get(MISSING, {})
        missing += [f"{n}: {remedy}" for n, remedy in wanted.items()]
    missing += [f"{f['plugin']}: failed, see Failures" for f in data["failures"]]
    return [
        ("runs on", "; ".join(runs)),
        ("compiles for", "; ".join(compiles) or "nothing"),
        ("missing", "; ".join(missing) or "nothing"),
    ]


def _line(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_line(v)}" for k, v in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_line, value)) or "none"
    return str(value)

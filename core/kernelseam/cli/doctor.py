"""``kernelseam doctor``: what is here, what is not, and why."""

from __future__ import annotations

import os
import platform
import traceback
from dataclasses import asdict
from typing import Any

from kernelseam import __version__, compilation
from kernelseam.cli import shapes
from kernelseam.cli.output import emit_json, facts, heading, scaled, table
from kernelseam.contract import CONTRACT_VERSION
from kernelseam.plugins import Failure, plugins

VARIABLES = {
    "KERNELSEAM_BACKEND": "the backend where a call names none",
    "KERNELSEAM_CACHE_DIR": "the folder of compiled binaries",
    "KERNELSEAM_PLUGINS": "the plugins to load, separated by commas; all where it is unset",
}


def run(json: shapes.Json = False) -> None:
    """Devices, plugins, failures, the cache's folder, environment variables."""
    found = collect()
    if json:
        emit_json(found)
    else:
        show(found)


def collect() -> dict[str, Any]:
    """All of it, for programs."""
    known = plugins()
    reports, failures = known.doctor(), list(known.failures)
    for name, report in list(reports.items()):
        if isinstance(report, Failure):
            failures.append(report)
            del reports[name]
    devices: list[dict[str, Any]] = []
    for backend in sorted(known.registry.backends.values(), key=lambda b: -b.priority):
        try:
            devices += [
                {"device": f"{d.backend}:{d.index}", "arch": d.arch, "name": d.name, **asdict(d.limits)}
                for d in backend.runtime.devices()
            ]
        except Exception as e:  # a broken runtime is what one calls the doctor for
            text = "".join(traceback.format_exception(e))
            failures.append(Failure(backend.name, "devices", f"{type(e).__name__}: {e}", text))
    return {
        "version": __version__, "contract_version": CONTRACT_VERSION, "python": platform.python_version(),
        "platform": platform.platform(), "devices": devices,
        "backends": {
            b.name: {
                "archs": list(b.toolchain.archs) if b.toolchain else [],
                "implementations": [
                    f"{i.operation}: {i.name}" for i in known.registry.implementations if i.backend == b.name
                ],
            }
            for b in known.registry.backends.values()
        },
        "plugins": [
            {"plugin": name, **asdict(info), "report": reports.get(name, {})} for name, info in known.loaded.items()
        ],
        "failures": [asdict(f) for f in failures], "cache": _cache(), "environment": _environment(),
    }


def _cache() -> dict[str, Any]:
    folder = str(compilation.cache_folder())
    try:
        entries = compilation.entries()
    except (compilation.Untrusted, OSError) as e:
        return {"folder": folder, "problem": str(e), "binaries": 0, "bytes": 0}
    return {"folder": folder, "problem": "", "binaries": len(entries), "bytes": sum(e.size for e in entries)}


def _environment() -> dict[str, Any]:
    others = {n: "" for n in sorted(os.environ) if n.startswith("KERNELSEAM_")}
    return {
        name: {"value": os.environ.get(name), "meaning": meaning} for name, meaning in {**others, **VARIABLES}.items()
    }


def show(found: dict[str, Any]) -> None:
    """All of it, for people."""
    heading(
        f"kernelseam {found['version']}, contract {found['contract_version']}, Python {found['python']}, "
        f"{found['platform']}"
    )
    heading("\nDevices")
    table(("  device", "arch", "name", "memory", "units"), [
        (f"  {d['device']}", d["arch"], d["name"], scaled(d["memory_bytes"], "B", 1024), str(d["compute_units"]))
        for d in found["devices"]
    ])
    heading("\nPlugins")
    for p in found["plugins"]:
        facts([(f"  {p['plugin']} {p['version']}", p["summary"])])
        if p["report"]:
            facts([(f"    {name}", _line(value)) for name, value in p["report"].items()])
    for name, backend in found["backends"].items():
        facts([(f"  backend {name}", ", ".join(backend["implementations"]) or "no implementation")])
    heading("\nFailures" if found["failures"] else "\nNo failures")
    for f in found["failures"]:
        print(f"  {f['plugin']} failed at {f['stage']}: {f['message']}")
        print("".join(f"    {line}\n" for line in f["traceback"].splitlines()), end="")
    cache = found["cache"]
    heading("\nCache")
    facts([("  folder", cache["folder"]), ("  binaries", f"{cache['binaries']}, {scaled(cache['bytes'], 'B', 1024)}")])
    if cache["problem"]:
        print(f"  {cache['problem']}")
    heading("\nEnvironment")
    table(None, [
        (f"  {name}", "(unset)" if v["value"] is None else v["value"], v["meaning"])
        for name, v in found["environment"].items()
    ])


def _line(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_line(v)}" for k, v in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_line, value)) or "none"
    return str(value)

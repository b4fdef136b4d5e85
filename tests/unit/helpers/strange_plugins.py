"""Plugins written for one test each: a sound one in which single lines are exchanged."""

from __future__ import annotations

import threading
from importlib.metadata import EntryPoint
from pathlib import Path

SOUND = """
import os, sys, time
from kernelseam.contract import (
    CONTRACT_VERSION, Backend, Cost, Device, DeviceLimits, LaunchRecord, PlanParts, PluginInfo,
)
from kernelseam.errors import InvalidValue
from kernelseam.hookspecs import hookimpl
from kernelseam.reference.gemm import NumpyGemm
from kernelseam.reference.runtime import HostRuntime

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("not a word")

DEVICE = Device("strange", 0, "strange1")

class Runtime(HostRuntime):
    listed = 0
    def devices(self):
        Runtime.listed += 1
        DEVICES
    def describe(self, array):
        DESCRIBE

class Toolchain:
    backend = "strange"
    @property
    def archs(self):
        ARCHS
    def arch_row(self, arch): ...
    def compiler(self):
        COMPILER
    platform_files = compile = inspect = load = arch_row

class Step:
    record = LaunchRecord("strange_step", (1, 1, 1), (1, 1, 1), 0, "cpu")
    def bind(self, pointers, workspace):
        BIND

class Gemm(NumpyGemm):
    name = "strange"
    def supports(self, problem, device):
        SUPPORTS
    def cost(self, problem, device):
        COST
    def build(self, problem, device):
        BUILD

IMPORT

@hookimpl
def kernelseam_info():
    INFO

@hookimpl
def kernelseam_register(registry):
    REGISTER
    registry.add_implementation(Gemm())
    registry.add_backend(Backend("strange", Runtime(), Toolchain(), priority=1000))

@hookimpl
def kernelseam_doctor():
    DOCTOR

END
"""
SOUND_LINES = {
    "DEVICES": "return (DEVICE,)",
    "DESCRIBE": "return None",
    "ARCHS": 'return ("strange1",)',
    "COMPILER": "return 'strangecc 1'",
    "SUPPORTS": "return None",
    "COST": "return Cost(0, 0, 0.0)",
    "BUILD": "return super().build(problem, device)",
    "BIND": "return lambda stream: None",
    "IMPORT": "pass",
    "INFO": 'return PluginInfo("strange", "1", CONTRACT_VERSION)',
    "REGISTER": "pass",
    "DOCTOR": "return {}",
    "END": "",
}
HANG = "from strange_plugins import hang; hang()"
LET_GO = threading.Event()
"""Ends every hang, so that tests leave no thread behind."""


def hang() -> None:
    """As a driver that does not answer."""
    LET_GO.wait(600)


def write(folder: Path, name: str, **lines: str) -> EntryPoint:
    """A plugin of that name in the folder, installed there, too, for a Python of its own.
    ``lines``: statements by the name of their place in SOUND. It adds the cheapest GEMM to the
    reference, and a backend."""
    source = SOUND
    for place, line in {**SOUND_LINES, **lines}.items():
        assert f" {place}\n" in source or f"\n{place}\n" in source, place
        source = source.replace(f" {place}\n", f" {line}\n").replace(f"\n{place}\n", f"\n{line}\n")
    module = f"strange_{name.replace('-', '_')}"
    (folder / f"{module}.py").write_text(source)
    metadata = folder / f"{module}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[kernelseam]\n{name} = {module}\n")
    return EntryPoint(name, module, "kernelseam")

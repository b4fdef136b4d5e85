"""The ROCm plugin without its emulator, and with a broken one: it works as ever, and says why no
device is emulated."""

from __future__ import annotations

from pathlib import Path

import pytest
from rocm_process import DEVICES, python

pytest.importorskip("kernelseam_rocm", reason="kernelseam-rocm is not installed")

ABSENT = "import sys; sys.modules['kernelseam_rocm_emulator'] = None; "
COMPLETE = """
class Emulation:
    source = "nowhere"
    def runtime(self, first):
        return Runtime(first)
    def kernel(self, *arguments):
        raise NotImplementedError

class Runtime:
    def __init__(self, first):
        self.first = first
    def devices(self):
        from kernelseam.contract import EMULATED, Device
        return (Device("rocm", self.first, "gfx942", evidence=EMULATED),)

def start():
    return Emulation()
"""


def package(folder: Path, text: str) -> Path:
    """A folder with a package of the emulator's name."""
    place = folder / "kernelseam_rocm_emulator"
    place.mkdir()
    (place / "__init__.py").write_text(text)
    return folder


def test_one_that_is_not_installed() -> None:
    devices, reason, failures = python(ABSENT + DEVICES)
    assert reason == "off (kernelseam-rocm-emulator is not installed)" and failures == []
    assert not any("emulated" in d for d in devices)
    devices, reason, failures = python(ABSENT + DEVICES, KERNELSEAM_TINYGRAD="/tmp")
    assert failures == [] and not any("emulated" in d for d in devices)
    assert reason == "KERNELSEAM_TINYGRAD is set, but kernelseam-rocm-emulator is not installed"


def test_without_the_variable_it_is_not_imported(tmp_path: Path) -> None:
    folder = package(tmp_path, "raise RuntimeError('imported')")
    _, reason, failures = python(DEVICES, folder)
    assert reason == "off (KERNELSEAM_TINYGRAD is not set)" and failures == []


def test_its_devices_are_the_backends(tmp_path: Path) -> None:
    devices, reason, failures = python(
        DEVICES, package(tmp_path, COMPLETE), KERNELSEAM_TINYGRAD="/tmp"
    )
    (emulated,) = (d for d in devices if "emulated" in d)
    assert reason == f"{emulated}, by nowhere" and failures == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such", "ModuleNotFoundError: No module named 'no_such'"),
        ("raise SystemExit(3)", "the package kernelseam_rocm_emulator raised SystemExit: 3"),
        ("", "AttributeError: module 'kernelseam_rocm_emulator' has no attribute 'start'"),
        (
            "def start(): raise OSError(12, 'Cannot allocate memory')",
            "OSError: [Errno 12] Cannot allocate memory",
        ),
        (
            COMPLETE.replace("return (Device", "return ({}['gfx942'], Device"),
            "KeyError: 'gfx942'",
        ),
    ],
    ids=["import", "exit", "no start", "start", "devices"],
)
def test_a_broken_one_is_left_out(tmp_path: Path, text: str, reason: str) -> None:
    devices, output, failures = python(DEVICES, package(tmp_path, text), KERNELSEAM_TINYGRAD="/tmp")
    assert output == f"kernelseam-rocm-emulator is broken: {reason}" and failures == []
    assert "numpy:0 (cpu)" in devices and not any("emulated" in d for d in devices)


def test_a_kernel_for_an_emulated_device_needs_it() -> None:
    code = (
        "import json; from kernelseam_rocm import emulator\ntry: emulator.required()\nexcept "
        "Exception as e: print(json.dumps(f'{type(e).__name__}: {e}'))"
    )
    assert python(ABSENT.replace("; ", "\n") + code) == (
        "NoDevice: no emulated device: off (kernelseam-rocm-emulator is not installed)"
    )

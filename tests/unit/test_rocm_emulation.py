"""Emulated devices as a user meets them: who gets one, what is said where something is missing, and
real results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernelseam.contract import EMULATED, Device, Runtime, SourceBundle
from kernelseam.dispatch import find_device
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, InvalidValue, UnknownName

pytest.importorskip("kernelseam_rocm_emulator", reason="kernelseam-rocm-emulator is not installed")
import amdelf  # noqa: E402
import fake_emulator as fake  # noqa: E402
from kernelseam_rocm import archs, emulator, plugin  # noqa: E402
from kernelseam_rocm.blas import HipBlasGemm  # noqa: E402
from kernelseam_rocm.joined import JoinedRuntime  # noqa: E402
from kernelseam_rocm.runtime import HipRuntime  # noqa: E402
from kernelseam_rocm_emulator import checkout, start  # noqa: E402
from kernelseam_rocm_emulator.devices import EmulatedArray, EmulatedRuntime  # noqa: E402
from kernelseam_rocm_emulator.memory import Arena  # noqa: E402
from kernelseam_rocm_emulator.selftest import required  # noqa: E402
from rocm_process import DEVICES, python  # noqa: E402

ARCHS = ["gfx942", "gfx950", "gfx1100", "gfx1201", "gfx1151", "gfx1200"]


@pytest.fixture
def runtime() -> EmulatedRuntime:
    return EmulatedRuntime(Arena(1 << 20), 0)


def test_no_variable_no_devices() -> None:
    devices, output, _ = python(DEVICES)
    assert not any("emulated" in d for d in devices)
    assert output == "off (KERNELSEAM_TINYGRAD is not set)"


def test_a_path_that_is_no_checkout(tmp_path: Path) -> None:
    devices, output, _ = python(DEVICES, KERNELSEAM_TINYGRAD=str(tmp_path))
    assert not any("emulated" in d for d in devices)
    assert output == (
        f"KERNELSEAM_TINYGRAD = {tmp_path}: must be a checkout of tinygrad's repository, and "
        "there is no test/mockgpu/amd/emu.py in it. Clone the repository (its packages do not "
        "hold the emulator), or unset the variable"
    )


def test_a_path_in_the_home_of_an_unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(emulator.VARIABLE, "~nosuchuser/tinygrad")
    actual = checkout.find()
    assert isinstance(actual, str) and actual.startswith(
        "KERNELSEAM_TINYGRAD = ~nosuchuser/tinygrad: means no folder ("
    )
    assert actual.endswith("). Name it by its whole path, or unset the variable")


def test_a_checkout_without_clang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(emulator.VARIABLE, str(fake.write(tmp_path / "checkout")))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert checkout.find() == (
        "KERNELSEAM_TINYGRAD is set, but the emulator needs clang, and there is none on PATH. "
        "Install clang, or the package ziglang, which brings one"
    )
    assert start() == checkout.find()


def test_clang_may_be_zigs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "zig").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv(emulator.VARIABLE, str(fake.write(tmp_path / "checkout")))
    actual = checkout.find()
    assert isinstance(actual, checkout.Checkout) and actual.compiler == (
        str(package / "zig"),
        "clang",
    )


def test_emulated_devices_are_used_where_they_are_named(tmp_path: Path) -> None:
    clang = tmp_path / "clang"
    clang.touch(mode=0o755)
    code = (
        "import json; from kernelseam.dispatch import find_device, use_backend\nfrom "
        "kernelseam.parity.running.run import targets\nfrom kernelseam.plugins import "
        "plugins\nfound = [str(d) for d in plugins().backend('rocm').runtime.devices() if "
        "d.evidence == 'emulated']\ndefault, named = str(find_device()), [str(find_device(n)) for "
        "n in ('rocm', found[-1].split()[0])]\nmatrix = sorted({t.device.backend for t in "
        "targets()})\nwith use_backend('rocm'): print(json.dumps([found, default, named, "
        "str(find_device()), matrix]))"
    )
    actual, default, named, preferred, matrix = python(
        code,
        KERNELSEAM_TINYGRAD=str(fake.write(tmp_path / "checkout")),
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    )
    if HipRuntime().devices():
        pytest.skip("a GPU is here")
    assert actual == [f"rocm:{i} ({a}, emulated)" for i, a in enumerate(ARCHS)]
    assert default == "numpy:0 (cpu)" and matrix == ["numpy"]
    assert named == [actual[0], actual[-1]] and preferred == actual[0]


class Emulated:
    """kernelseam_rocm.emulator.Emulator with a small arena and no emulator behind it."""

    source = ""

    def __init__(self) -> None:
        self.arena = Arena(1 << 20)

    def runtime(self, first: int) -> EmulatedRuntime:
        return EmulatedRuntime(self.arena, first)

    def kernel(self, *arguments: Any) -> Any:
        raise NotImplementedError


def test_real_devices_come_first() -> None:
    class Two(HipRuntime):
        def devices(self) -> tuple[Device, ...]:
            return (Device("rocm", 0, "gfx942"), Device("rocm", 1, "gfx942"))

    joined = JoinedRuntime(Two(), Emulated())
    assert isinstance(joined, Runtime)
    assert [(d.index, d.evidence) for d in joined.devices()] == [
        (0, "measured"),
        (1, "measured"),
        *((i, EMULATED) for i in range(2, 8)),
    ]
    array = joined.from_host(np.arange(6, dtype=np.float32).reshape(2, 3), joined.devices()[3])
    assert isinstance(array, EmulatedArray)
    assert joined.to_host(array).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert str(joined.describe(array).device) == "rocm:3 (gfx950, emulated)"  # type: ignore[union-attr]


def test_arrays(runtime: EmulatedRuntime) -> None:
    device = runtime.devices()[2]
    x = np.arange(12, dtype=DType.bfloat16.numpy).reshape(3, 4)
    array = runtime.from_host(x.T, device)
    info = runtime.describe(array)
    assert info is not None
    assert (info.shape, info.strides, info.kind, info.device) == (
        (4, 3),
        (3, 1),
        "emulated",
        device,
    )
    assert (runtime.to_host(array) == x.T).all()
    assert runtime.read(info.pointer, 6, device).tobytes() == np.ascontiguousarray(x.T)[0].tobytes()
    with pytest.raises(DeviceError, match="are not memory of rocm:2"):
        runtime.read(info.pointer, 1 << 16, device)
    assert runtime.describe(x) is None
    with pytest.raises(InvalidValue, match="must lie on an emulated device"):
        runtime.to_host(x)


def test_memory_is_set_at_the_launch(runtime: EmulatedRuntime) -> None:
    device = runtime.devices()[0]
    array = runtime.from_host(np.ones(4, np.float32), device)
    launch = runtime.prepare_memset(array.pointer + 4, 0, 8, device)  # type: ignore[attr-defined]
    assert runtime.to_host(array).tolist() == [1, 1, 1, 1]
    launch(0)
    assert runtime.to_host(array).tolist() == [1, 0, 0, 1]
    with pytest.raises(DeviceError, match="8192 bytes from .* on are not memory of rocm:0"):
        runtime.prepare_memset(array.pointer, 0, 8192, device)  # type: ignore[attr-defined]


def test_their_limits_are_those_of_the_arch(runtime: EmulatedRuntime) -> None:
    for device in runtime.devices():
        row = archs.row(device.arch)
        assert device.limits.shared_bytes_per_block == row.shared_bytes_per_block + archs.RESERVED
        assert device.limits.memory_bytes == 1 << 20 and device.name == f"{device.arch} (emulated)"


def test_hipblas_leaves_them_alone(runtime: EmulatedRuntime) -> None:
    from kernelseam.descriptors import BatchedGemmStrided

    problem: Any = BatchedGemmStrided(M=4, N=4, K=4, dtype=DType.float32).problem()
    assert HipBlasGemm().supports(problem, runtime.devices()[0]) == "runs on real devices only"


def test_the_variable_is_documented() -> None:
    assert dict(plugin.kernelseam_info().variables)[emulator.VARIABLE].startswith(
        "a checkout of tinygrad"
    )


class Toolchain:
    """As much of one as the self-test asks for."""

    backend = "rocm"

    def compiler(self) -> str:
        return "none"

    def arch_row(self, arch: str) -> Any:
        return archs.row(arch)

    def compile(self, bundle: SourceBundle, arch: str) -> bytes:
        return amdelf.elf(bundle.text().encode())


class Emulator:
    """An emulator whose self-test has a result that is known."""

    def __init__(self, folder: Path, failures: list[str]) -> None:
        self.checkout = checkout.Checkout(folder, ("clang",))
        self.folder, self.failures, self.runs = (lambda: folder), failures, 0

    def test(self, elf: bytes, arch: str) -> list[str]:
        self.runs += 1
        return self.failures


def test_a_failed_selftest_is_reported_and_a_pass_is_cached(tmp_path: Path) -> None:
    toolchain: Any = Toolchain()
    bad: Any = Emulator(tmp_path, [f"v_test_{i}: 1 lanes differ" for i in range(10)])
    with pytest.raises(DeviceError) as caught:
        required.require(bad, "gfx942", toolchain)
    assert str(caught.value) == (
        f"the emulator in {tmp_path} fails 10 self-tests for gfx942, so its results mean nothing: "
        + "; ".join(f"v_test_{i}: 1 lanes differ" for i in range(8))
        + "; and 2 more. Take the commit of tinygrad that the documentation names, or unset the "
        "variable"
    )
    good: Any = Emulator(tmp_path, [])
    for _ in range(2):
        required.require(good, "gfx942", toolchain)
    assert (bad.runs, good.runs) == (1, 1)
    required.require(good, "gfx950", toolchain)
    assert good.runs == 2


def test_a_third_vendors_emulated_device(
    acme: Any, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str, str]]
) -> None:
    """What the core does with any emulated device: it is no default, and its times are said to mean
    nothing."""
    emulated = tuple(
        Device("acme", i, "acme1", "Acme One (emulated)", evidence=EMULATED) for i in range(2)
    )
    monkeypatch.setattr(type(acme), "devices", lambda self: emulated)
    monkeypatch.delenv("KERNELSEAM_BACKEND", raising=False)
    assert find_device().backend == "numpy"
    assert str(find_device("acme")) == "acme:0 (acme1, emulated)"
    with pytest.raises(UnknownName):
        find_device("acme:2")
    status, out, err = command(
        "gemm",
        "--backend",
        "acme:1",
        "--dtype",
        "float32",
        "--m",
        4,
        "--n",
        4,
        "--k",
        4,
        "--time",
        "--verify",
    )
    assert (status, err) == (0, "")
    assert "acme:1 (acme1, emulated)" in out
    assert "TFLOP/s" not in out
    assert (
        "the device is emulated: the time is that of a program on the host and says nothing of "
        "the hardware" in out
    )
    status, out, _ = command("doctor", "--json")
    assert {d["device"]: d["evidence"] for d in json.loads(out)["devices"]} == {
        "acme:0": "emulated",
        "acme:1": "emulated",
        "numpy:0": "host",
    }

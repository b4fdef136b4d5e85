"""Emulated devices as a user meets them: who gets one, what is said where something is missing, and
real results."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernelseam.contract import EMULATED, Device, Runtime, SourceBundle
from kernelseam.dispatch import find_device
from kernelseam.dtypes import E4M3, DType
from kernelseam.errors import DeviceError, InvalidValue, UnknownName

pytest.importorskip("kernelseam_rocm_emulator", reason="kernelseam-rocm-emulator is not installed")
import amdelf  # noqa: E402
import emulated_parity as page  # noqa: E402
import fake_emulator as fake  # noqa: E402
from kernelseam_rocm import archs, emulator, plugin  # noqa: E402
from kernelseam_rocm.blas import HipBlasGemm  # noqa: E402
from kernelseam_rocm.joined import JoinedRuntime  # noqa: E402
from kernelseam_rocm.runtime import HipRuntime  # noqa: E402
from kernelseam_rocm_emulator import checkout, start  # noqa: E402
from kernelseam_rocm_emulator.devices import EmulatedArray, EmulatedRuntime, devices  # noqa: E402
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


# ---------------------------------------------------------------- with the emulator


def emulated(arch: str) -> Device:
    """The arch's device; skips the test where there is none."""
    result = checkout.find()
    if isinstance(result, str):
        pytest.skip(f"tinygrad is missing: {result}")
    try:
        plugin.backend().toolchain.compiler()  # type: ignore[union-attr]
    except Exception as e:
        pytest.skip(f"hiprtc is missing: {e}")
    return next(
        d for d in plugin.backend().runtime.devices() if d.arch == arch and d.evidence == EMULATED
    )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "name",
    [
        "gemm-f16-nt",
        "attention-f16-64-causal-7x129-ramp",
        "attention-f16-64-pages-16",
        "attention-f16-64-causal-bias-f32-gqa",
        "attention-bwd-f16-64-causal-33x129",
    ],
)
def test_parity(name: str, arch: str) -> None:
    from kernelseam.launch_trace import trace
    from kernelseam.parity.matrix import named
    from kernelseam.parity.running.run import run_case, targets

    device, case = emulated(arch), named(name)
    (target,) = (
        t
        for t in targets(device=device)
        if t.implementation == "shared" and t.operation == case.operation
    )
    with trace() as records:
        run_case(case, target).require()
    assert {(r.arch, r.evidence) for r in records} == {(arch, "emulated")}


@pytest.mark.parametrize("name", ["nn", "tt-integers", "nt-added"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1201"])
def test_parity_of_factors_of_8_bits(name: str, arch: str) -> None:
    from kernelseam.parity.matrix import named
    from kernelseam.parity.running.run import Target, run_case

    kind = "e4m3fnuz" if arch == "gfx942" else "e4m3fn"
    outcome = run_case(
        named(f"gemm-{kind}-{name}"), Target(emulated(arch), "shared", "gemm", False)
    )
    outcome.require()
    assert outcome.refusal is None


def test_the_cases_of_the_page_exist() -> None:
    chosen = [(name, group.implementation) for group in page.GROUPS for name in group.cases]
    assert {name for name, _ in chosen} <= set(page.cases()) and len(set(chosen)) == len(chosen)
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.LIMITS in text and page.INTRODUCTION in text
    assert "\n".join(page.covered(page.GROUPS)) in text
    operations = list(page.by_operation(page.GROUPS))
    assert operations == [
        "gemm",
        "attention",
        "attention as gemm-softmax-gemm",
        "attention_bwd",
        "merge_states",
        "qkv_projection",
        "output_projection",
        "qkv_projection_bwd",
        "output_projection_bwd",
    ]
    assert set(page.ARCHS) < set(ARCHS)
    assert not any(f"| {arch} |" in text for arch in set(ARCHS) - set(page.ARCHS))
    for arch in page.ARCHS:
        groups_of = page.taken(page.GROUPS, archs.row(arch))
        for what, groups in page.by_operation(groups_of).items():
            n = sum(len(g.cases) for g in groups)
            assert f"| {arch} | {what} | {n} | {n} |" in text, "every case passed"


def test_what_the_page_covers_of_attention() -> None:
    """Every view, every option, every dtype and both roles of few queries, forward and backward."""
    from kernelseam.samples.attention_bwd_case import BackwardCase
    from kernelseam.samples.attention_case import AttentionCase

    cases = [
        page.cases()[name]
        for group in page.GROUPS
        for name in group.cases
        if group.implementation == "shared"
    ]
    forward = [c for c in cases if isinstance(c, AttentionCase)]
    backward = [c.forward for c in cases if isinstance(c, BackwardCase)]
    for actual, halves in ((forward, ("page_size", "prefix", "mask")), (backward, ())):
        assert {c.dtype for c in actual} == {DType.float16, DType.bfloat16, DType.float32}
        for option in (
            "causal",
            "window",
            "alibi",
            "softcap",
            "bias",
            "sinks",
            "kv_lengths",
            *halves,
        ):
            assert any(getattr(c, option) for c in actual), option
        assert any(0 in (c.q_sequences or ()) for c in actual) and any(
            0 in (c.k_sequences or ()) for c in actual
        )
        assert any(c.num_heads > c.kv_heads for c in actual)
    paged = [c for c in forward if c.page_size]
    assert {c.page_size for c in paged} == {1, 16, 48, 256} and {c.S_q == 1 for c in paged} == {
        True,
        False,
    }
    assert any(n % c.page_size for c in paged for n in c.kv_lengths or ())
    assert any(c.view == "device" for c in forward) and any(c.bias_data == "holes" for c in forward)
    stored = [c for c in forward if c.dtype_kv]
    assert {c.dtype_kv for c in stored} == set(E4M3)
    assert any(c.page_size for c in stored) and any(c.k_sequences for c in stored)
    gradients = [c for c in cases if isinstance(c, BackwardCase)]
    assert any(c.bias_gradient for c in gradients) and any(c.sink_gradient for c in gradients)
    assert {c.deterministic for c in gradients} == {True, False}


def test_what_the_page_covers_of_products() -> None:
    """What a GEMM adds and sums, and both projections both ways."""
    from kernelseam.samples.gemm_case import GemmCase
    from kernelseam.samples.projection_case import ProjectionCase

    cases = [page.cases()[name] for group in page.GROUPS for name in group.cases]
    gemms = [c for c in cases if isinstance(c, GemmCase)]
    summed = [c for c in gemms if c.c_batch_group > 1 or c.c_head_group > 1]
    assert {c.dtype for c in gemms if c.bias and c.residual} == {
        DType.float16,
        DType.bfloat16,
        DType.float32,
    }
    assert {c.view for c in summed if c.bias and c.residual} == {"strided", "host"}
    assert any(c.c_batch_group > 1 and c.c_head_group > 1 for c in summed) and any(
        c.dtype_c for c in summed
    )
    assert any(c.in_place for c in gemms) and any(c.dtype_c for c in gemms if c.bias)
    projections = [c for c in cases if isinstance(c, ProjectionCase)]
    forward = [c for c in projections if c.operation == "qkv_projection"]
    assert {c.rotary for c in forward} == {"", "halves", "pairs"} and any(
        0 < c.rotated < c.head_dim for c in forward
    )
    assert {c.operand_layout("q").order for c in forward} == {"bhr", "brh"}
    assert {bool(c.page_size) for c in forward} == {True, False}
    for operation, rows in (
        ("output_projection", "attn_out"),
        ("output_projection_bwd", "attn_out"),
        ("qkv_projection_bwd", "dq"),
    ):
        actual = [c for c in projections if c.operation == operation]
        assert {c.operand_layout(rows).order for c in actual} == {"bhr", "brh"} and any(
            c.bias for c in actual
        )
        assert {c.dtype for c in actual} >= {DType.float16, DType.float32}
        assert not operation.endswith("bwd") or any(
            len(c.gradients) == 2 and c.bias for c in actual
        )
    assert any(c.residual and c.operand_layout("attn_out").order == "bhr" for c in projections)


@pytest.mark.parametrize("device", devices(0, 2**30), ids=str)
def test_the_page_covers_blocks_of_several_tiles(device: Device) -> None:
    from kernelseam.kernels import COMPOSITIONS
    from kernelseam.samples.operations.operands import describe, layout

    host, row = page.plugins().backend("numpy").runtime, archs.row(device.arch)
    actual = set()
    for case in (page.cases()[name] for group in page.GROUPS for name in group.cases):
        if case.operation in ("gemm", "qkv_projection_bwd"):
            lay = layout(case)
            at = {
                n: 2**20 + lay.blocks()[p.block][1] + p.offset * p.dtype.itemsize
                for n, p in lay.placements.items()
            }
            created, _ = describe(case, lay, at, host, host.devices()[0]).simplified()
            problem, composition = created.problem(), COMPOSITIONS[case.operation]
            for launch in composition.launches(
                problem, composition.tile(problem, row, device), device
            ).steps:
                spec = launch.problem.spec
                if launch.tile.teams > 1:
                    actual.add(
                        (
                            spec.dtype,
                            spec.summed,
                            bool(spec.bias and spec.residual),
                            bool(spec.row_sums),
                        )
                    )
    half = DType.float16
    if row.warp_size == 64:
        # There blocks are shared by thousands of matrices alone, more than an emulator runs.
        assert not actual
        return
    assert actual == {
        (half, False, True, False),
        (half, True, False, False),
        (DType.float32, True, False, False),
        (half, True, False, True),
    }


def test_a_part_of_the_page_is_run_by_name(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert page.chosen(()) is page.GROUPS
    actual = page.chosen(("*pages-48*", "attention-bwd-f16-80v64"))
    assert [(g.about, g.cases) for g in actual] == [
        ("pages of 1, 16, 48 and 256 keys, one query", ("attention-f16-64-pages-48",)),
        (
            "pages, several queries",
            (
                "attention-bf16-128-causal-pages-48-gqa",
                "attention-f16-64-causal-pages-48-window-sinks",
            ),
        ),
        ("dense", ("attention-bwd-f16-80v64",)),
    ]
    device = Device("rocm", 0, "gfx942", evidence=EMULATED)
    monkeypatch.setattr(page.plugins().backend("rocm").runtime, "devices", lambda: (device,))
    for arguments, message in (
        (["--write", "--case", "*pages*"], "--write goes with neither --arch nor --case"),
        (["--case", "no-such-case"], "no case here has such a name: no-such-case"),
        (["--arch", "gfx90a"], "invalid choice: 'gfx90a'"),
    ):
        monkeypatch.setattr(sys, "argv", ["emulated_parity.py", *arguments])
        with pytest.raises(SystemExit):
            page.main()
        assert message in capsys.readouterr().err

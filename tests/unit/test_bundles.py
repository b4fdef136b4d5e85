"""Bundles of binaries: what an arch needs for a trace, the wheel, and vendors' compilers
removed."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import kernelseam
import numpy as np
import pytest
from command_line import Command
from kernelseam import compilation
from kernelseam.bundling import WheelName, collect, read_trace, write_wheel
from kernelseam.cli.main import main
from kernelseam.compilation import CacheWarning, bundled, compiled, entry
from kernelseam.contract import Device, DeviceLimits, Toolchain
from kernelseam.errors import CompileError, KernelSeamError, MissingBinary
from kernelseam.kernels import KernelImplementation
from kernelseam.launch_trace import TracedProblem
from kernelseam.plugins import discover, plugins
from refusals import Refused


def vendor(backend: str, compiler: str) -> Toolchain:
    """The toolchain; the test is skipped where its compiler is missing."""
    try:
        toolchain = plugins().backend(backend).toolchain
        assert toolchain is not None
        toolchain.compiler()
    except KernelSeamError as e:
        pytest.skip(f"{compiler} is missing: {e}")
    return toolchain


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """The trace of an attention of bfloat16 and of a product, on NumPy."""
    rng, path = np.random.default_rng(0), tmp_path / "traced.json"
    q, k, v = (rng.standard_normal((1, 4, 64, 64)).astype(np.float16) for _ in range(3))
    with kernelseam.trace(path):
        kernelseam.attention(q, k, v, causal=True)
        kernelseam.bmm(q, k, b_transposed=True)
    return path


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Path]]:
    """``install(wheel)``: from then on this process finds the bundle, until the test ends."""

    def to_path(wheel: Path) -> Path:
        place = tmp_path / "site"
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(place)
        monkeypatch.syspath_prepend(place)
        compilation.forget()
        return place

    yield to_path
    monkeypatch.undo()
    for name in [n for n in sys.modules if n.startswith("kernelseam_bundle_")]:
        del sys.modules[name]
    compilation.forget()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    """``run(*arguments)`` → (exit status, standard output, standard error)."""

    def command(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        return int(ended.value.code or 0), *capsys.readouterr()

    return command


@pytest.fixture
def acme_compiles(discovered: Callable[..., Any]) -> None:
    """A third vendor with a compiler, and a kernel of products."""
    assert discovered("kernelseam_thirdvendor.compiled").failures == ()


@pytest.mark.parametrize(
    ("backend", "compiler", "arch"), [("cuda", "nvrtc", "sm_90a"), ("rocm", "hiprtc", "gfx942")]
)
def test_binaries_are_found_without_the_compiler(
    backend: str,
    compiler: str,
    arch: str,
    traced: Path,
    tmp_path: Path,
    run: Command,
    install: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toolchain = vendor(backend, compiler)
    wheel = tmp_path / "app-1-py3-none-any.whl"
    found, left_out = collect(read_trace(traced), [arch])
    assert left_out == [] and len(found) == 2
    status, out, err = run(
        "compile", "--from", traced, "--arch", arch, "--bundle", tmp_path / "app-1.whl"
    )
    assert status == 0, err
    of_hopper = "_sm90" * (arch == "sm_90a")
    assert [r.split()[:3] for r in out.splitlines()[2:4]] == [
        [arch, "attention_forward" + of_hopper, "1"],
        [arch, "gemm" + of_hopper, "1"],
    ]
    assert out.splitlines()[-1] == f"  pip install {wheel}"
    install(wheel)

    def removed(*arguments: object) -> str:
        raise CompileError("compiler", "any arch", f"{compiler} was removed")

    monkeypatch.setattr(type(toolchain), "compiler", removed)
    monkeypatch.setattr(type(toolchain), "compile", removed)
    monkeypatch.setenv("KERNELSEAM_NO_JIT", "1")
    for c in found:
        binary = compiled(toolchain, c.source, arch)
        assert (binary.data, binary.path, binary.key) == (c.binary.data, None, c.binary.key)
        (facts,) = toolchain.inspect(binary.data, arch).values()
        assert facts.name == c.source.name and facts.spills == 0
    problem = read_trace(traced)[0].problem
    implementation = next(
        i
        for i in plugins().registry.implementations
        if (i.backend, i.operation, i.name) == (backend, "attention", "shared")
    )
    device = Device(backend, 0, arch, limits=DeviceLimits(compute_units=132))
    other = "sm_80" if backend == "cuda" else "gfx1100"
    reasons = [implementation.supports(problem, Device(backend, 0, a)) for a in (other,)]
    assert reasons == [
        (
            "KERNELSEAM_NO_JIT is set, and no installed bundle has attention_forward for "
            f"{other}, {problem.spec}, in a tile that takes this problem"
        )
    ]
    (line,) = [str(b) for b in compilation.installed_bundles()]
    assert line == f"app 1 (2 binaries for {arch}, of kernelseam {kernelseam.__version__})"
    if backend == "rocm":
        assert implementation.supports(problem, device) is None
    with pytest.raises(MissingBinary) as caught:
        compiled(toolchain, found[0].source, other)
    assert str(caught.value) == (
        f"{found[0].source.name} for {other} is in no installed bundle with these constants, and "
        f"KERNELSEAM_NO_JIT forbids to compile it. Installed: {line}. Trace a run that launches "
        f"it, and install the bundle of `kernelseam compile --from TRACE --arch {other} --bundle "
        "FILE.whl`."
    )


def test_the_traced_devices_tiles_and_all_choices(traced: Path) -> None:
    """A trace of an H200 has what the H200 launched; --all-choices has every tile."""
    vendor("cuda", "nvrtc")
    on_numpy, _ = read_trace(traced)
    limits = DeviceLimits(
        compute_units=1,
        shared_bytes_per_block=227 * 1024,
        memory_bytes=1 << 30,
        bytes_per_second=1e12,
        operations_per_second={"float16": 1e12},
    )
    small = Device("cuda", 0, "sm_90a", "one unit", limits)
    traced_there = TracedProblem(on_numpy.problem, small, "gemm-softmax-gemm")
    plain, _ = collect([on_numpy], ["sm_90a"])
    there, _ = collect([traced_there], ["sm_90a"])
    assert {c.source.name for c in plain} < {c.source.name for c in there}
    assert {"gemm", "softmax"} <= {c.source.name for c in there}


def test_what_no_kernel_takes_is_left_out_by_name(
    run: Command, traced: Path, tmp_path: Path, acme_compiles: None
) -> None:
    """Acme has a kernel for products in float32, and none for attentions."""
    wheel = tmp_path / "app.whl"
    status, out, err = run(
        "compile", "--from", traced, "--arch", "acme1", "--bundle", wheel, "--json"
    )
    found = json.loads(out)
    assert status == 1 and found["problems"] == 2 and found["binaries"] == []
    assert [x["arch"] for x in found["left_out"]] == ["acme1", "acme1"]
    assert found["left_out"][0]["problem"].startswith("attention float16 causal batch=1 heads=4")
    assert all(x["reason"] for x in found["left_out"])
    assert Path(found["bundle"]) == tmp_path / "app-0-py3-none-any.whl"
    assert err == ""


@pytest.mark.parametrize(
    ("name", "written", "package"),
    [
        ("out.whl", "out-0-py3-none-any.whl", "kernelseam_bundle_out"),
        ("My.App-2.1.whl", "My_App-2.1-py3-none-any.whl", "kernelseam_bundle_my_app"),
        ("a-b.whl", "a_b-0-py3-none-any.whl", "kernelseam_bundle_a_b"),
        ("app-1-py3-none-any.whl", "app-1-py3-none-any.whl", "kernelseam_bundle_app"),
    ],
)
def test_names_of_wheels(tmp_path: Path, name: str, written: str, package: str) -> None:
    found = WheelName.of(tmp_path / name)
    assert (found.path, found.package) == (tmp_path / written, package)


def test_names_that_are_none(refused: Refused, tmp_path: Path) -> None:
    remedy = "Name it NAME.whl or NAME-VERSION-py3-none-any.whl."
    path = tmp_path / "out.zip"
    refused(f"--bundle = {path}: must end in .whl. {remedy}", lambda: WheelName.of(path))
    path = tmp_path / "nowhere" / "out.whl"
    message = f"--bundle = {path}: must be a file in a folder that there is. {remedy}"
    refused(message, lambda: WheelName.of(path))
    path = tmp_path / "ä.whl"
    message = f"--bundle = {path}: has no name and version that pip takes. {remedy}"
    refused(message, lambda: WheelName.of(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--from", "x.json"),
            (
                "--arch = None: --from, --arch and --bundle are needed together, or --common and "
                "--arch. Give them, or an operation: see `kernelseam compile --help`."
            ),
        ),
        (
            ("--from", "x.json", "--common", "--arch", "acme1"),
            "--common = True: stands beside --from. Give one of them.",
        ),
        (
            ("--arch", "acme1", "gemm", "--arch", "acme1"),
            (
                "--arch = gemm: stands before an operation, which a trace takes the place of. Give "
                "options of the operation behind it."
            ),
        ),
        (
            ("--from", "nowhere.json", "--arch", "acme1", "--bundle", "out.whl"),
            (
                "--from = nowhere.json: cannot be read as JSON: No such file or directory. Write "
                "the file again by kernelseam.trace(path)."
            ),
        ),
    ],
    ids=("alone", "with --from", "with an operation", "no file"),
)
def test_refused_command_lines(
    run: Command,
    acme_compiles: None,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("compile", *arguments) == (2, "", f"error: {message}\n")


def test_the_variable_is_0_or_1_and_forbids_to_bundle(
    run: Command, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setenv("KERNELSEAM_NO_JIT", "yes")
    message = "KERNELSEAM_NO_JIT = yes: must be 0 or 1. Set it to 1 to use installed bundles alone."
    refused(message, compilation.no_jit)
    monkeypatch.setenv("KERNELSEAM_NO_JIT", "1")
    assert run("compile", "--from", "x", "--arch", "acme1", "--bundle", "x.whl") == (
        2,
        "",
        "error: KERNELSEAM_NO_JIT = 1: forbids to compile. Unset it where bundles are made.\n",
    )


def changed(place: Path, change: Callable[[bytes], bytes]) -> None:
    """Another payload in every entry of an installed bundle, its header and digest right."""
    for path in place.glob("*.bin"):
        header, payload = entry.unpack(path.read_bytes())
        path.write_bytes(entry.pack(header, change(payload)))


@pytest.fixture
def acme_bundles(
    install: Callable[[Path], Path], tmp_path: Path, acme_compiles: None
) -> Callable[..., list[tuple[Path, Any]]]:
    """``acme_bundles(name, …)``: installed bundles of one product, each with what it was made
    from."""

    def make(*names: str) -> list[tuple[Path, Any]]:
        path, a = tmp_path / "product.json", np.zeros((1, 8, 8), np.float32)
        with kernelseam.trace(path):
            kernelseam.bmm(a, a)
        found, left_out = collect(read_trace(path), ["acme1"])
        assert found and not left_out
        result = []
        for name in names:
            wheel = write_wheel(WheelName.of(tmp_path / f"{name}.whl"), found, {})
            result.append((install(wheel) / f"kernelseam_bundle_{name}", found))
        compilation.forget()
        return result

    return make


def test_a_bundles_binary_must_carry_its_key(
    acme_bundles: Callable[..., list[tuple[Path, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ((place, found),) = acme_bundles("app")
    monkeypatch.setenv("KERNELSEAM_NO_JIT", "1")
    toolchain = plugins().backend("acme").toolchain
    assert toolchain is not None
    one = found[0]
    assert compiled(toolchain, one.source, "acme1").data == one.binary.data
    changed(place, lambda payload: payload.replace(one.binary.key.encode(), b"0" * 64))
    compilation.forget()
    with (
        pytest.warns(CacheWarning, match="binary is not used, .* belongs to another key"),
        pytest.raises(MissingBinary),
    ):
        compiled(toolchain, one.source, "acme1")


def test_of_two_bundles_the_first_by_name_counts(
    acme_bundles: Callable[..., list[tuple[Path, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, found), (second, _) = acme_bundles("early", "late")
    for place, mark in ((first, b"of early"), (second, b"of late")):
        changed(place, lambda payload, mark=mark: payload + mark)
    compilation.forget()
    monkeypatch.setenv("KERNELSEAM_NO_JIT", "1")
    toolchain = plugins().backend("acme").toolchain
    assert toolchain is not None
    assert compiled(toolchain, found[0].source, "acme1").data == found[0].binary.data + b"of early"


def test_a_broken_bundle_is_left_out_by_name(
    install: Callable[[Path], Path], tmp_path: Path, traced: Path, run: Command, acme_compiles: None
) -> None:
    run("compile", "--from", traced, "--arch", "acme1", "--bundle", tmp_path / "app.whl")
    place = install(tmp_path / "app-0-py3-none-any.whl")
    (place / "kernelseam_bundle_app" / "index.json").write_text('{"format": 9}')
    compilation.forget()
    said = "app 0 (not used: ValueError: its format is 9, this version reads 2)"
    with pytest.warns(CacheWarning, match="the bundle app 0 .not used: ValueError"):
        assert [str(b) for b in compilation.installed_bundles()] == [said]
    _, out, _ = run("doctor", "--no-check")
    assert "Bundles\n  app 0  not used: ValueError: its format is 9, this version reads 2" in out


@pytest.mark.parametrize(
    ("arch", "name"), [("gfx942", "AMD Instinct MI300X"), ("sm_90a", "NVIDIA H200")]
)
def test_explain_for_a_gpu_that_is_not_here(run: Command, arch: str, name: str) -> None:
    backend = "rocm" if arch.startswith("gfx") else "cuda"
    if backend not in plugins().registry.backends:
        pytest.skip(f"kernelseam-{backend} is not installed")
    size = ["--batch", "64", "--m", "4096", "--n", "4096", "--k", "1024", "--arch", arch]
    status, out, _ = run("explain", "gemm", *size, "--json")
    found = json.loads(out)
    assert status == 0 and found["device"] == f"{backend} ({arch}, not here)"
    assert found["note"] == (
        f"predicted for {name} by its data sheet; vendors' libraries as if installed"
    )
    own = {i["implementation"]: i for i in found["implementations"] if i["backend"] == backend}
    library = "hipblas" if backend == "rocm" else "cublas"
    flops = 2 * 64 * 4096 * 4096 * 1024
    for known in ("shared", library):
        assert own[known]["verdict"] in ("takes it", "chosen") and own[known]["operations"] == flops
        # between a tenth of what the product's data sheet promises and all of it
        assert 2e14 < flops / own[known]["seconds"] < 1.4e15
    assert all(i["measured_seconds"] is None for i in found["implementations"])
    assert run("explain", "gemm", "--arch", arch, "--backend", "numpy") == (
        2,
        "",
        f"error: --arch = {arch}: names a device, as --backend numpy does. Give one of the two.\n",
    )


def test_explain_for_an_arch_without_a_data_sheet(run: Command, acme_compiles: None) -> None:
    assert run("explain", "gemm", "--arch", "acme1") == (
        2,
        "",
        (
            "error: --arch = acme1: the plugin of backend acme has no data sheet of such a device. "
            "Ask on a machine that has one, without --arch.\n"
        ),
    )


def test_every_arch_has_a_data_sheet() -> None:
    for backend in plugins().registry.backends.values():
        if backend.name not in ("cuda", "rocm"):
            continue
        assert backend.toolchain is not None
        for arch in backend.toolchain.archs:
            product = backend.toolchain.arch_row(arch).product
            assert product is not None and product.arch == arch and product.name
            row = backend.toolchain.arch_row(arch)
            assert product.limits.shared_bytes_per_block >= row.shared_bytes_per_block
            assert set(product.limits.operations_per_second) >= {"float16", "float32", "float64"}


def test_a_kernel_whose_sources_raise_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object) -> None:
        raise KeyError("no such tile")

    path = tmp_path / "traced.json"
    with kernelseam.trace(path):
        kernelseam.bmm(np.zeros((1, 8, 8), np.float32), np.zeros((1, 8, 8), np.float32))
    for method in ("source_bundles", "cost"):
        with monkeypatch.context() as patched:
            patched.setattr(KernelImplementation, method, raises)
            found, left_out = collect(read_trace(path), ["sm_90a"])
        assert not found
        said = "its sources" if method == "source_bundles" else "its check"
        assert f"shared: {said} raised KeyError: 'no such tile'" in left_out[0].reason


def test_metadata_of_distributions_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For plugins and for bundles, of hundreds of files; again where bundles are forgotten."""
    read, read_them = list[None](), metadata.entry_points

    def counted(**given: Any) -> Any:
        read.append(None)
        return read_them(**given)

    monkeypatch.setattr(metadata, "entry_points", counted)
    compilation.forget()
    discover(only="")
    assert bundled.installed_bundles() == () and len(read) == 1
    compilation.forget()
    assert bundled.installed_bundles() == () and len(read) == 2

"""``kernelseam compile`` with a real compiler and no device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kernelseam.cli import progress
from kernelseam.cli.main import main
from kernelseam.errors import CompileError, KernelSeamError
from kernelseam.plugins import plugins

CASES = {"cuda": ("nvrtc", "sm_80", "sm_90a"), "rocm": ("hiprtc", "gfx942", "gfx1100")}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said of progress: a machine may be busy."""
    monkeypatch.setattr(progress, "PATIENCE", 3600)


@pytest.fixture(params=CASES)
def archs(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Two archs of a vendor whose compiler is here."""
    compiler, first, second = CASES[request.param]
    try:
        toolchain = plugins().backend(request.param).toolchain
        assert toolchain is not None
        toolchain.compiler()
    except KernelSeamError as e:
        pytest.skip(f"{compiler} is missing: {e}")
    return first, second


def old_nvrtc(arch: str) -> bool:
    """Whether the arch is compiled for by nvrtc 13.0 or an older one, which spills where later ones
    do not."""
    if not arch.startswith("sm_"):
        return False
    toolchain = plugins().backend("cuda").toolchain
    assert toolchain is not None
    version = toolchain.compiler().split()[1]
    return tuple(int(n) for n in version.split(".")[:2]) <= (13, 0)


def compiled(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["compile", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(
            ("attention", "--paged", "--window", "7,0"),
            marks=pytest.mark.slow("compilations of more of the same"),
            id="paged",
        ),
        pytest.param(("gemm",), id="gemm"),
    ],
)
def test_compile(
    capsys: pytest.CaptureFixture[str],
    archs: tuple[str, str],
    cache: Path,
    operation: tuple[str, ...],
) -> None:
    common = (*operation, "--dtype", "float16", "--arch", archs[0], "--arch", archs[1])
    status, out, err = compiled(capsys, *common, "--json")
    assert status == 0, err
    found: dict[str, Any] = json.loads(out)
    shared = [b["arch"] for b in found["binaries"] if b["implementation"] == "shared"]
    assert shared == list(archs), "beside them there may be those of the plugin's own kernels"
    for b in found["binaries"]:
        assert type(b["spills"]) is int and b["spills"] == 0 and b["scratch_bytes"] == 0
        assert b["registers"] > 16 and b["matrix_instructions"] > 0 and b["shared_bytes"] >= 0
        place = Path(b["binary"])
        assert place.is_relative_to(cache) and place.stat().st_size >= b["binary_bytes"] > 1000
        assert place.read_bytes()[:4] == b"\x7fELF"  # as it is for the vendors' tools
        for key, value in b.items():
            assert "spill" not in key or type(value) is int
    status, out, err = compiled(capsys, *common)
    assert (status, err) == (0, "")
    assert out.splitlines()[0].startswith(f"{operation[0]} float16") and "=None" not in out
    rows = out.splitlines()[2:]
    assert [r.split()[0] for r in rows] == [
        b["arch"] for b in found["binaries"]
    ] and "spills" in out.splitlines()[1]
    assert str(found["binaries"][0]["binary"]) in rows[0]


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        ((), ["row_delta", "attention_backward: keys", "attention_backward: queries"]),
        pytest.param(
            ("--any-order",),
            ["row_delta", "attention_backward: keys", "query_gradient"],
            marks=pytest.mark.slow("with-more is in any order, too"),
        ),
        (
            ("--any-order", "--bias", "float16", "--sinks"),
            ["row_delta", "attention_backward: keys"],
        ),
    ],
    ids=["in-order", "any-order", "with-more"],
)
def test_what_gradients_launch(
    capsys: pytest.CaptureFixture[str],
    archs: tuple[str, str],
    options: tuple[str, ...],
    kernels: list[str],
) -> None:
    common = ("attention", "--backward", *options, "--dtype", "float16", "--arch", archs[0])
    status, out, err = compiled(capsys, *common, "--json")
    assert status == 0, err
    made = json.loads(out)["binaries"]
    names = [b["kernel"] if b["role"] is None else f"{b['kernel']}: {b['role']}" for b in made]
    reduced = ["sum_axes", "sink_gradient"] if "--sinks" in options else []
    assert names[:2] == kernels[:2] and names[3:] == reduced
    # Where no row with atomics fits, queries have a launch of their own.
    assert (
        names[2] == kernels[2]
        if len(kernels) > 2
        else names[2] in ("query_gradient", "attention_backward: queries")
    )
    for b in made:
        spilled = (
            32 if b["role"] == "keys" and "--any-order" in options and old_nvrtc(archs[0]) else 0
        )
        assert b["spills"] <= spilled and b["scratch_bytes"] <= spilled
        assert (b["matrix_instructions"] > 0) == (b["kernel"] == "attention_backward")
    status, out, err = compiled(capsys, *common)
    assert (status, err) == (0, "")
    assert [r.split("  ")[1].strip() for r in out.splitlines()[2:]] == names


def test_an_unknown_arch_is_refused_before_anything_is_compiled(
    capsys: pytest.CaptureFixture[str],
    archs: tuple[str, str],
    cache: Path,
) -> None:
    status, out, err = compiled(capsys, "gemm", "--arch", archs[0], "--arch", "sm_1")
    assert (status, out) == (2, "")
    assert err.startswith("error: --arch = sm_1: must be one of ") and archs[0] in err
    assert not cache.exists()


def test_a_failed_compilation_ends_with_1_and_the_source(
    capsys: pytest.CaptureFixture[str],
    archs: tuple[str, str],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kernelseam.kernels import definition, kernel

    broken = kernel.shared_sources().copy()
    broken["gemm/gemm.h"] += "\n#error broken on purpose\n"
    for module in (definition, kernel):
        monkeypatch.setattr(module, "shared_sources", lambda: broken)
    status, out, err = compiled(capsys, "gemm", "--arch", archs[0])
    assert (status, out) == (1, "")
    assert f"gemm did not compile for {archs[0]}. Source saved at {cache.parent}" in err
    assert "broken on purpose" in err and "Traceback" not in err


def test_what_compiled_is_shown_beside_what_did_not(
    capsys: pytest.CaptureFixture[str],
    archs: tuple[str, str],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toolchain = plugins().backend("cuda" if archs[0].startswith("sm") else "rocm").toolchain
    assert toolchain is not None
    kind, compile = type(toolchain), type(toolchain).compile

    def failing(self: Any, bundle: Any, arch: str) -> bytes:
        if arch == archs[0]:
            raise CompileError(bundle.name, arch, "failed on purpose")
        return compile(self, bundle, arch)

    monkeypatch.setattr(kind, "compile", failing)
    common = ("gemm", "--arch", archs[0], "--arch", archs[1])
    status, out, err = compiled(capsys, *common)
    assert status == 1
    assert {line.split()[0] for line in out.splitlines()[2:]} == {archs[1]}
    assert err.startswith("error: gemm") and f"did not compile for {archs[0]}." in err
    assert "failed on purpose" in err
    status, out, _ = compiled(capsys, *common, "--json")
    found = json.loads(out)
    assert status == 1 and {b["arch"] for b in found["binaries"]} == {archs[1]}
    (failure,) = found["failures"]
    assert failure["arch"] == archs[0] and failure["log"] == "failed on purpose"
    assert failure["kind"] == "CompileError"


def test_a_compiler_that_is_missing_is_said_once_for_all_archs(
    capsys: pytest.CaptureFixture[str],
    archs: tuple[str, str],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toolchain = plugins().backend("cuda" if archs[0].startswith("sm") else "rocm").toolchain

    def missing(self: Any) -> str:
        raise CompileError("the compiler", "any arch", "it is missing")

    monkeypatch.setattr(type(toolchain), "compiler", missing)
    status, out, err = compiled(capsys, "gemm", "--arch", archs[0], "--arch", archs[1])
    assert (status, out) == (1, "")
    assert err.startswith(f"error: {archs[0]}, {archs[1]}: the compiler did not compile for any")
    assert err.count("it is missing") == 1


def test_hiprtc_of_a_folder_is_found_without_its_wrapper(tmp_path: Path) -> None:
    """By KERNELSEAM_HIP, in a process under the host's C library."""
    run = os.environ.get("KERNELSEAM_HIP_RUN")
    if not run:
        pytest.skip("hiprtc is missing: no folder of tools/get-hiprtc.sh is here")
    environment = {
        **{n: x for n, x in os.environ.items() if n not in ("KERNELSEAM_HIP_RUN", "ROCM_PATH")},
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KERNELSEAM_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-m", "kernelseam", "compile", "gemm", "--arch", "gfx942", "--json"]

    done = subprocess.run(
        command,
        env={**environment, "KERNELSEAM_HIP": str(Path(run).parent)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    (binary,) = json.loads(done.stdout)["binaries"]
    assert binary["arch"] == "gfx942" and binary["spills"] == 0


def test_a_spec_without_a_tile_is_refused_in_words(
    capsys: pytest.CaptureFixture[str], archs: tuple[str, str]
) -> None:
    status, out, err = compiled(
        capsys, "attention", "--head-dim", "4096", "--value-dim", "8", "--arch", archs[0]
    )
    assert (status, out) == (2, "")
    assert err == (
        f"error: spec = attention float16 dim=4096/8: no tile of {archs[0]} takes float16 with "
        "head dims 4096 and 8. Choose another dtype or smaller head dims.\n"
    )

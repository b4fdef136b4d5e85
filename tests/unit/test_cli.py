"""The command line: bad input, explain, doctor and the cache, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from command_line import Command, parsed
from kernelseam import compilation
from kernelseam.cli import output
from kernelseam.contract import SourceBundle
from kernelseam.errors import CompileError
from kernelseam.plugins import plugins

MINILM = Path(__file__).parents[2] / "examples" / "data" / "minilm_attention.npz"
SMALL = ("--batch", "2", "--heads", "4", "--seq-len", "33", "--head-dim", "16")


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("attention", "--batch", "1.5"), "'--batch'"),
        (("attention", "--batch", "-1"), "'--batch'"),
        (("attention", "--seq-len", "abc"), "'--seq-len'"),
        (("gemm", "--m", "-3"), "'--m'"),
        (("gemm", "--k", "1e3"), "'--k'"),
        (
            ("attention", "--dtype", "float8"),
            "dtype = float8: must be one of float16, bfloat16, float32, float64. Name one of these",
        ),
        (
            ("attention", "--dtype", "e4m3"),
            "short: bf16, f16, f32, f64; of 8 bits: --q-dtype, or --kv-dtype for keys and values",
        ),
        (("gemm", "--dtype", "int8"), "dtype = int8"),
        (("gemm", "--bias", "int8"), "--bias = int8"),
        (("gemm", "--groups", "2", "--batch", "3"), "--groups = 2: has no --batch beside it"),
        (("gemm", "--groups", "2", "--bias", "f32"), "--groups = 2: has no --bias beside it"),
        (("gemm", "--epilogue", "gelo"), "epilogue = gelo: must be one of relu, gelu"),
        (("gemm", "--epilogue", "none.py:f"), "--epilogue = none.py:f: the file does not run"),
        (
            ("gemm", "--epilogue", "gelu", "--layout", "pointers"),
            "--epilogue = gelu: is of strided memory",
        ),
        (("gemm", "--sizes", "4x5x6", "--epilogue", "relu"), "--sizes = given: has no --epilogue"),
        (
            ("gemm", "--groups", "2", "--along", "k", "--epilogue", "relu"),
            "epilogue = given: is of rows of groups along 'm', and these are along 'k'",
        ),
        (("gemm", "--skewed"), "--skewed = True: describes groups. Give --groups too"),
        (("gemm", "--groups", "2", "--along", "x"), "along = x: must be one of m, n, k"),
        (("gemm", "--a-indices"), "--a-indices = True: describes groups. Give --groups too"),
        (
            ("gemm", "--groups", "2", "--along", "k", "--c-factors"),
            "factors = given: is of rows of groups along 'm'",
        ),
        (("gemm", "--sizes", "4x5"), "--sizes = 4x5: must be M, N and K of each product"),
        (("gemm", "--sizes", "4x5x6", "--m", "3"), "--sizes = given: has no --m beside it"),
        (("gemm", "--sizes", "4x5x6", "--groups", "3"), "--sizes = 4x5x6: are of products that"),
        (("gemm", "--sizes", "4x5x6", "--skewed"), "--skewed = True: describes groups"),
        (
            ("explain", "gemm", "--residual", "float64"),
            "dtype_residual = float64: must be no wider than float32",
        ),
        (("gemm", "--dtype", ""), "dtype = '': must be one of float16, bfloat16, float32, float64"),
        (("attention", "--dtype", ""), "dtype = '': must be one of float16"),
        (("gemm", "--backend", ""), "device = '': must be a Device, BACKEND or BACKEND:INDEX"),
        (("attention", "--layout", "sbhd"), "layout = sbhd: must be one of bhsd, bshd"),
        (("gemm", "--layout", "bhsd"), "layout = bhsd: must be one of strided, pointers"),
        (
            ("gemm", "--layout", "pointers", "--spacing", "odd"),
            "spacing = odd: must be one of scattered, even",
        ),
        (
            ("gemm", "--spacing", "even"),
            "--spacing = even: describes lists of addresses. Give --layout pointers too.",
        ),
        (("attention", "--backend", "abacus"), "backend = abacus: must be one of"),
        (("gemm", "--backend", "abacus"), "backend = abacus: must be one of"),
        (("explain", "gemm", "--backend", "abacus"), "backend = abacus: must be one of"),
        (
            ("attention", "--implementation", "magic"),
            "implementation = magic: must be one of numpy",
        ),
        (
            ("explain", "attention", "--implementation", "magic"),
            "implementation = magic: must be one of numpy",
        ),
        (("attention", "--heads", "8", "--kv-heads", "3"), "heads = 8: must be a multiple of "),
        (("attention", "--score-mod", "/tmp/no/kv_heads.py:f"), "/tmp/no/kv_heads.py"),
        (("attention", "--batch", "4000000000"), "batch = 4000000000"),
        (("attention", "--batch", "1000000", "--seq-len", "10000"), "Make it smaller."),
        (("attention", "--head-dim", "100000000"), "takes 13.11 TB, and numpy:0 (cpu) has"),
        (("attention", "--input", "/nowhere.npz"), "--input = /nowhere.npz: cannot be read"),
        (
            ("attention", "--input", str(MINILM), "--batch", "4"),
            "--batch = 4: the extents are the file's.",
        ),
        (("attention", "--output", "out.txt"), "--output = out.txt: must end in .npy or .npz"),
        (("attention", "--output", "/nowhere/out.npy"), "there is no folder /nowhere"),
        (("compile", "gemm", "--arch", "sm_1"), "arch = sm_1: "),
        (("compile", "attention"), "'--arch'"),
        (("compile", "attention", "--arch", "sm_1", "--dtype", "float8"), "dtype = float8"),
        (("frobnicate",), "frobnicate"),
        (("attention", "--frobnicate"), "--frobnicate"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_bad_input_ends_with_2_and_a_message(
    command: Command, arguments: tuple[str, ...], message: str, more: tuple[str, ...]
) -> None:
    status, out, err = command(*arguments, *(more if arguments != ("frobnicate",) else ()))
    assert status == 2
    if more and arguments != ("frobnicate",):
        assert message in parsed((0, out, ""))["error"]["message"]
    else:
        assert out == ""
    assert message in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"q": 1, "k": 2}, "lacks v. Give q, k and v together."),
        ({"x": 1}, "has no q, k, v or NAME_q, NAME_k, NAME_v among x."),
        ({}, "among nothing."),
    ],
)
def test_files_without_an_attention(
    command: Command, tmp_path: Path, arrays: dict[str, int], message: str
) -> None:
    np.savez(
        tmp_path / "in.npz", **{n: np.zeros((1, 1, 1, x), np.float32) for n, x in arrays.items()}
    )  # type: ignore[arg-type]
    status, _, err = command("attention", "--input", tmp_path / "in.npz")
    assert status == 2 and message in err


def test_files_of_another_kind(command: Command, tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.zeros(3))
    status, _, err = command("attention", "--input", tmp_path / "in.npy")
    assert status == 2 and err.endswith("in.npy: must be an .npz. Save it with numpy.savez.\n")
    (tmp_path / "in.npz").write_bytes(b"PK\x03\x04rubbish")
    status, _, err = command("attention", "--input", tmp_path / "in.npz")
    assert status == 2 and "cannot be read: " in err
    np.savez(tmp_path / "in.npz", q=np.zeros((2, 3)), k=np.zeros((2, 3)), v=np.zeros((2, 3)))
    status, _, err = command("attention", "--input", tmp_path / "in.npz")
    assert status == 2 and "axes of q, k, v = (2, 2, 2): must be 4, bhsd" in err
    np.savez(tmp_path / "in.npz", q=np.zeros((1, 2, 3, 4), np.int32), k=np.zeros(1), v=np.zeros(1))
    status, _, err = command("attention", "--input", tmp_path / "in.npz")
    assert status == 2 and "q = int32: must be one of float16" in err


def test_a_device_failure_ends_with_1(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelseam.errors import OutOfDeviceMemory
    from kernelseam.reference.runtime import HostRuntime

    def full(*_: object, **__: object) -> object:
        raise OutOfDeviceMemory("3 GB wanted, 1 GB free")

    monkeypatch.setattr(HostRuntime, "empty", full)
    assert command("attention", *SMALL) == (1, "", "error: 3 GB wanted, 1 GB free\n")


# ---------------------------------------------------------------- explain, doctor, cache


def test_explain_names_every_implementation(command: Command) -> None:
    found = parsed(command("explain", "attention", *SMALL, "--causal", "--json"))
    assert found["chosen"] == "numpy" and found["device"] == "numpy:0 (cpu)" and found["note"] == ""
    first = found["implementations"][0]
    assert (first["implementation"], first["verdict"]) == ("numpy", "chosen")
    assert first["operations"] == 2 * 2 * 4 * (33 * 34 // 2) * 32 and first["seconds"] > 0
    assert first["bytes"] == 2 * 4 * 33 * 16 * 4 * 2
    (_,) = parsed(command("explain", "gemm", "--json"))["implementations"]
    (_, other) = parsed(command("explain", "gemm", "--all", "--json"))["implementations"]
    assert (other["implementation"], other["backend"], other["verdict"]) == (
        "acme-gemm",
        "acme",
        "refused",
    )
    assert other["reason"] == "it runs on acme, the device is numpy:0 (cpu)"
    there = parsed(command("explain", "gemm", "--backend", "acme", "--dtype", "float64", "--json"))
    refused = there["implementations"][0]
    assert there["chosen"] is None and refused["reason"] == "Acme has no float64"
    # what it would take
    assert (refused["operations"], refused["bytes"]) == (2 * 512**3, 3 * 8 * 512**2)
    assert refused["seconds"] > 0
    status, out, err = command("explain", "attention", *SMALL)
    assert (status, err) == (0, "") and "chosen" in out and "implementation" in out


def test_explain_says_when_pointer_lists_go_the_strided_way(command: Command) -> None:
    common = ("explain", "gemm", "--layout", "pointers", "--batch", 5, "--json")
    scattered, even = parsed(command(*common)), parsed(command(*common, "--spacing", "even"))
    assert scattered["note"] == "" and " pointers " in scattered["problem"]
    assert (
        even["note"] == "addresses are evenly spaced: the strided way is taken"
        and " strided " in even["problem"]
    )
    assert even["note"] in command(*common[:-1], "--spacing", "even")[1]


def test_explain_without_any_taker(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelseam.reference.gemm import NumpyGemm

    monkeypatch.setattr(NumpyGemm, "supports", lambda *_: "it is tired")
    found = parsed(command("explain", "gemm", "--json"))
    assert found["chosen"] is None and found["note"] == "no implementation takes it"
    assert found["implementations"][0]["reason"] == "it is tired"
    status, _, err = command("gemm")
    assert status == 2 and "numpy: it is tired" in err


def test_doctor(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELSEAM_SOMETHING", "else")
    found = parsed(command("doctor", "--json"))
    assert [(d["device"], d["arch"]) for d in found["devices"]] == [
        ("numpy:0", "cpu"),
        ("acme:0", "acme1"),
        ("acme:1", "acme1"),
    ]
    assert [p["plugin"] for p in found["plugins"]] == ["reference", "kernelseam-thirdvendor"]
    assert found["plugins"][1]["report"] == {"devices": ["acme:0 (acme1)", "acme:1 (acme1)"]}
    assert found["failures"] == []
    assert {"gemm: numpy", "attention: numpy"} <= set(found["backends"]["numpy"]["implementations"])
    assert (
        found["cache"]["folder"] == os.environ["KERNELSEAM_CACHE_DIR"]
        and found["cache"]["problem"] == ""
    )
    assert found["environment"]["KERNELSEAM_BACKEND"]["value"] == "numpy"
    assert found["environment"]["KERNELSEAM_SOMETHING"] == {"value": "else", "meaning": ""}
    status, out, err = command("doctor")
    assert (status, err) == (0, "")
    summary = out.splitlines()[:3]
    assert [line.split("  ")[0] for line in summary] == ["runs on", "compiles for", "missing"]
    assert "numpy:0" in summary[0] and "acme:0" in summary[0]
    for word in (
        "Devices",
        "Plugins",
        "No failures",
        "Cache",
        "Environment",
        "KERNELSEAM_PLUGINS",
        "numpy:0",
    ):
        assert word in out


def test_doctor_names_archs_only_with_their_compiler(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A toolchain whose compiler is missing lists archs all the same."""

    class Toolchain:
        archs = ("acme1", "acme2")
        missing = False

        def compiler(self) -> str:
            if self.missing:
                raise CompileError("", "", "acmecc is missing\nInstall it")
            return "acmecc 1"

    backend, toolchain = plugins().backend("acme"), Toolchain()
    monkeypatch.setitem(
        plugins().registry.backends, "acme", replace(backend, toolchain=cast(Any, toolchain))
    )
    compiles = "compiles for  acme1, acme2 (acme)"
    for missing, line in ((False, compiles), (True, "compiles for  nothing")):
        toolchain.missing = missing
        _, out, _ = command("doctor", "--no-check")
        assert out.splitlines()[1] == line
        found = parsed(command("doctor", "--no-check", "--json"))
        assert found["backends"]["acme"]["compiler"] == ("" if missing else "acmecc 1")


def test_doctor_names_a_broken_plugin_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken_plugin.py").write_text("import no_such_module_anywhere\n")
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kernelseam]\nbroken = broken_plugin\n")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "KERNELSEAM_PLUGINS": "broken"}
    doctor = [sys.executable, "-m", "kernelseam", "doctor", "--no-check", "--json"]
    done = subprocess.run(doctor, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (failure,) = json.loads(done.stdout)["failures"]
    assert (failure["plugin"], failure["stage"]) == ("broken", "import")
    assert failure["message"] == "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    assert failure["traceback"].startswith("Traceback (most recent call last)")
    assert "broken_plugin.py" in failure["traceback"]


def test_cache_commands(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Toolchain:
        backend = "fake"

        def compiler(self) -> str:
            return "fakecc"

        def compile(self, bundle: SourceBundle, arch: str) -> bytes:
            return bundle.text().encode()

    folder = tmp_path / "cache"
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(folder))
    assert parsed(command("cache", "ls", "--json")) == {"folder": str(folder), "entries": []}
    assert command("cache", "ls") == (0, f"{folder}: 0 binaries, 0 B\n", "")
    compilation.forget()
    compilation.compiled(Toolchain(), SourceBundle("twice", "m", (), ()), "arch1")  # type: ignore[arg-type]
    (entry,) = parsed(command("cache", "ls", "--json"))["entries"]
    assert (entry["name"], entry["arch"], entry["backend"], entry["damage"]) == (
        "twice",
        "arch1",
        "fake",
        "",
    )
    assert entry["size"] > 4 and 0 <= entry["age"] < 60 and entry["path"].startswith(str(folder))
    out = command("cache", "ls")[1].splitlines()
    assert out[0].startswith(f"{folder}: 1 binaries, ")
    assert out[1].split() == ["name", "arch", "backend", "size", "age", "place"]
    assert out[2].split()[:3] == ["twice", "arch1", "fake"]
    assert parsed(command("cache", "clear", "--json"))["binaries"] == 1
    assert command("cache", "clear")[1] == f"{folder}: removed 0 binaries, 0 B\n"
    folder.chmod(0o777)
    for arguments in (("cache", "ls"), ("cache", "clear")):
        status, _, err = command(*arguments)
        assert status == 2 and "can be written by others (mode 0777)" in err
    report = parsed(command("doctor", "--json", "--no-check"))
    assert "can be written by others" in report["cache"]["problem"]
    folder.chmod(0o700)


@pytest.mark.parametrize(
    "arguments",
    [
        ("cache", "ls"),
        ("cache", "clear"),
        ("tune", "--clear"),
        ("tune", "gemm", "--m", "8", "--n", "8", "--k", "8", "--backend", "numpy"),
    ],
    ids=" ".join,
)
def test_a_file_in_the_place_of_the_caches_folder(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    place = tmp_path / "cache"
    place.write_text("")
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(place))
    status, out, err = command(*arguments)
    assert (status, out, err.splitlines()[-1]) == (1, "", f"error: {place} is not a folder")


def test_a_table_on_a_terminal_and_version(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    status, out, _ = command("explain", "gemm")
    assert status == 0 and "chosen" in out
    assert command("--version")[1] == "0.1.0\n"


def test_a_refused_command_line_leaves_standard_output_as_it_was(command: Command) -> None:
    """At once, not when the refusal, and what typer keeps with it, is collected."""
    before = sys.stdout
    status, out, err = command("gemm", "--json", "--m", "x")
    assert status == json.loads(out)["status"] == 2 and "'--m'" in err
    assert sys.stdout is before and output._json is None


def test_module_and_quiet_import() -> None:
    """``python -m kernelseam`` is the command; its numbers need no rich where there is no
    terminal."""
    code = (
        "import sys\nfrom kernelseam.cli.main import main\ntry:\n    main(['gemm', '--m', '5', "
        "'--backend', 'numpy'])\nexcept SystemExit as e:\n    assert not e.code, "
        "e.code\nprint(sorted(m for m in ('rich', 'torch', 'cupy', 'cuda', 'hip') if m in "
        "sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KERNELSEAM_PLUGINS": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    help_ = subprocess.run(
        [sys.executable, "-m", "kernelseam", "--help"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert help_.returncode == 0
    for name in ("attention", "gemm", "doctor", "explain", "tune", "compile", "cache"):
        assert f"\n  {name}" in help_.stdout


def test_bfloat16_survives_saving() -> None:
    """float32 holds every bfloat16: saving by way of it loses nothing."""
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    finite = every[np.isfinite(every.astype(np.float32))]
    assert np.array_equal(
        finite.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16), finite.view(np.uint16)
    )


def test_help_imports_no_subcommand() -> None:
    code = (
        "import sys\nfrom kernelseam.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'numpy', 'kernelseam.contract', 'kernelseam.cli.gemm'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr

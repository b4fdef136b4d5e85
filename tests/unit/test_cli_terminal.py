"""What a person sees: on a terminal of 80 columns, while waiting, by the shell's completion."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
from command_line import Command
from kernelseam.cli import progress
from kernelseam.cli.main import main
from kernelseam.cli.output import lines_of

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(*arguments: str, columns: int = 80) -> tuple[int, list[str]]:
    """The exit status and the lines that stay on a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        status = 3
        try:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
            main(arguments)
        except SystemExit as e:
            status = int(e.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(status)
    said = b""
    while True:
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        said += chunk
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    lines = said.decode().replace("\r\n", "\n").split("\n")
    return os.waitstatus_to_exitcode(status), [
        CONTROL.sub("", line.rpartition("\r")[2]) for line in lines
    ]


@pytest.mark.parametrize(
    ("arguments", "header"),
    [
        (("explain", "attention"), "implementation  backend  bytes     operations   predicted"),
        (
            ("parity", "--backend", "numpy", "--case", "gemm-f64-n*"),
            "  backend  implementation  cases  passed  refused  failed  worst  s    in",
        ),
        (("doctor",), "  implementation                device         finding"),
        (("tune", "gemm", "--m", "16"), "configuration  predicted  measured  of the best  runs"),
        (("attention", "--verify", "--time", "--seq-len", "64"), "  device          numpy:0 (cpu)"),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else "",
)
def test_eighty_columns(
    arguments: tuple[str, ...], header: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KERNELSEAM_BACKEND", "numpy")
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(tmp_path))
    status, lines = on_a_terminal(*arguments)
    assert status == 0, lines
    assert [line for line in lines if line.startswith(header)], lines
    long = [line for line in lines if len(line) > 80 and "━" not in line]
    assert [line for line in long if "/" not in line.split()[-1]] == []  # a path is not broken


def test_the_place_of_a_binary_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In one piece, on a line of its own; the columns beside it fit 80."""
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(tmp_path))
    status, lines = on_a_terminal("compile", "gemm", "--arch", "sm_90a")
    if status == 2 or any("did not compile for any arch" in line for line in lines):
        pytest.skip(f"nvrtc is missing: {lines}")
    assert status == 0, lines
    (header,) = (i for i, line in enumerate(lines) if line.startswith("arch "))
    assert lines[header].split()[:7] == [
        *("arch", "kernel", "regs", "spills", "scratch", "shared", "matrix")
    ]
    paths = [line.strip() for line in lines[header:] if line.strip().endswith(".bin")]
    assert len(paths) == 2 and all(Path(p).exists() for p in paths)
    assert all(len(line) <= 80 for line in lines if line.strip() not in paths)
    status, lines = on_a_terminal("cache", "ls")
    assert status == 0 and {line.strip() for line in lines} >= {Path(p).name for p in paths}


def test_a_wide_table_is_wrapped_between_words() -> None:
    columns = ("name", "verdict")
    rows = [("first", "refused: " + "it says why in words " * 4), ("second", "chosen")]
    assert lines_of(columns, rows, None)[1] == f"first   {rows[0][1]}".rstrip()
    assert lines_of(None, [("a", "one\ntwo"), ("b", "c")], None) == ["a  one two", "b  c"]
    assert lines_of(columns, rows, 40) == [
        "name    verdict",
        "first   refused: it says why in words it",
        "        says why in words it says why in",
        "        words it says why in words",
        "second  chosen",
    ]


def test_a_path_stays_in_one_piece() -> None:
    path = "/a folder/" + "x" * 60
    (head, name, first, below) = lines_of(
        ("arch", "binary"), [("sm_90a", path)], 30, whole=True
    ) + [""]
    assert (head, name, first, below) == ("arch    binary", "sm_90a", f"  {path}", "")


def test_columns_that_do_not_fit_have_a_line_each() -> None:
    found = lines_of(("name", "value", "what"), [("a" * 20, "b" * 30, "some words of text")], 40)
    assert found == ["a" * 20, "  value: " + "b" * 30, "  what: some words of text"]


def test_silence_lasts_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert progress.PATIENCE == 2.0
    with progress.working("short"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    with progress.working("computing"):
        time.sleep(0.4)
    said = capsys.readouterr().err.splitlines()
    assert 2 <= len(said) <= 4  # each time that the time has doubled
    assert set(said) == {"computing, 0 s"}


def test_a_line_on_a_terminal_goes_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.working("computing"):
        time.sleep(0.2)
    assert capsys.readouterr().err == "\r\x1b[Kcomputing, 0 s\r\x1b[K"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("attention", "--seq-len", "32", "--verify", "--time"),
            {"making random inputs", "computing the", "comparing with the", "timing on numpy:0"},
        ),
        (
            ("gemm", "--m", "32", "--verify", "--time"),
            {"making random inputs", "computing the", "comparing with the", "timing on numpy:0"},
        ),
        (("doctor",), {"trying every implementation on small problems"}),
        (("parity", "--case", "gemm-f64-nn", "--json"), {"running the matrix: 1 outcomes"}),
        (("tune", "gemm", "--m", "8"), {"timing every configuration"}),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else "",
)
def test_what_takes_long_says_so(
    arguments: tuple[str, ...],
    said: set[str],
    command: Command,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = []

    def tell(what: str) -> object:
        begun.append(what)
        return progress.working(what)

    for name in ("attention", "gemm", "doctor", "parity", "tune", "running"):
        monkeypatch.setattr(f"kernelseam.cli.{name}.working", tell)
    status, _, err = command(*arguments)
    assert status == 0, err
    for start in said:
        assert any(what.startswith(start) for what in begun), begun


def test_a_slow_call_is_timed_five_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not warmed up once more: it ran before."""
    import kernelseam
    from kernelseam.cli import running

    counts = []
    a = np.ones((4, 4), np.float32)
    call = kernelseam.plan(
        kernelseam.BatchedGemmStrided.for_scores(a[None, None], a[None, None], a[None, None].copy())
    ).bind()
    from kernelseam.plugins import plugins

    def slow(self: object, launch: object, device: object, repeats: int) -> list[float]:
        counts.append(repeats)
        return [0.75] * repeats

    monkeypatch.setattr(type(plugins().backend("numpy").runtime), "time", slow)
    assert running.measure(call) == running.Timing(0.75, 0.75, 0.75, 5)
    assert counts == [1] * 5


COMPLETIONS = {
    "kernelseam expl": "explain",
    "kernelseam gemm --dtype bf": "bfloat16",
    "kernelseam gemm --backend num": "numpy",
    "kernelseam explain attention --caus": "--causal",
}


@pytest.mark.parametrize(("words", "whole"), COMPLETIONS.items())
def test_the_shell_completes(
    words: str, whole: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    monkeypatch.setenv("_KERNELSEAM_COMPLETE", "complete_bash")
    monkeypatch.setattr(sys, "argv", ["kernelseam"])  # the program's name, but for `python -m`
    monkeypatch.setattr(sys.modules["__main__"], "__package__", "", raising=False)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code and capsys.readouterr().out.split() == [whole]


@pytest.mark.parametrize("path", [(), ("attention",), ("compile", "gemm"), ("cache", "ls")])
def test_h_is_help(command: Command, path: tuple[str, ...]) -> None:
    status, out, err = command(*path, "-h")
    assert (status, err) == (0, "") and out.startswith("Usage: ")
    assert out == command(*path, "--help")[1]


def test_completion_can_be_installed(command: Command) -> None:
    _, out, _ = command("-h")
    assert "--install-completion" in out and "--show-completion" in out


# ---------------------------------------------------------------- errors for programs


@pytest.mark.parametrize(
    ("arguments", "status", "kind", "fields"),
    [
        (
            ("gemm", "--dtype", "nope"),
            2,
            "UnknownName",
            {
                "field": "dtype",
                "value": "nope",
                "rule": "must be one of float16, bfloat16, float32, float64, float8_e4m3fn, "
                "float8_e4m3fnuz",
                "remedy": "Name one of these; short: bf16, f16, f32, f64, e4m3, e4m3fnuz",
            },
        ),
        (("gemm", "--bogus"), 2, "NoSuchOption", {}),
        (("attention", "--head-dim", "0"), 2, "BadParameter", {}),
        (
            ("attention", "--backend", "nope"),
            2,
            "UnknownName",
            {"field": "backend", "rule": "must be one of acme, numpy"},
        ),
    ],
)
def test_errors_as_json(
    command: Command, arguments: tuple[str, ...], status: int, kind: str, fields: dict[str, str]
) -> None:
    found, out, err = command(*arguments, "--json")
    said = json.loads(out)
    assert found == said["status"] == status
    assert said["error"]["kind"] == kind and said["error"]["message"] in err
    assert fields.items() <= said["error"].items()
    assert command(*arguments)[1] == ""  # without --json all of it goes to standard error


def test_refusals_as_json(command: Command) -> None:
    status, out, _ = command(
        "gemm", "--backend", "acme", "--dtype", "float64", "--a-transposed", "--json"
    )
    said = json.loads(out)
    assert said["status"] == status == 2 and said["error"]["kind"] == "Unsupported"
    assert [set(r) for r in said["error"]["refusals"]] == [{"implementation", "reason"}]


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("f16", "float16"),
        ("f32", "float32"),
        ("fp32", "float32"),
        ("f64", "float64"),
    ],
)
def test_short_names_of_dtypes(command: Command, short: str, name: str) -> None:
    small = ("--m", 8, "--n", 8, "--k", 8)
    _, out, err = command("explain", "gemm", "--dtype", short, *small)
    assert out.startswith(f"gemm {name}→{name} "), err
    _, out, err = command("explain", "attention", "--dtype", short, "--head-dim", 16)
    assert out.startswith(f"attention {name} "), err


def test_a_head_without_columns_is_refused(command: Command, tmp_path: Path) -> None:
    for words in (("attention",), ("explain", "attention"), ("explain", "projection")):
        status, out, err = command(*words, "--head-dim", 0)
        assert (status, out) == (2, "") and "'--head-dim'" in err
    empty = np.zeros((1, 2, 3, 0), np.float32)
    np.savez(tmp_path / "empty.npz", q=empty, k=empty, v=np.zeros((1, 2, 3, 4), np.float32))
    status, out, err = command("attention", "--input", tmp_path / "empty.npz")
    assert (status, out) == (2, "")
    assert err == "error: file: columns of q = 0: must be 1 at least. Give such a q.\n"


@pytest.mark.parametrize("whole", [False, True], ids=["one array", "the file"])
def test_what_would_need_pickle_is_refused(command: Command, tmp_path: Path, whole: bool) -> None:
    """And nobody is told to allow it."""
    path, numbers = tmp_path / "objects.npz", np.ones((1, 1, 2, 4), np.float32)
    objects = np.array([{}], dtype=object)
    if whole:
        path.write_bytes(objects.dumps())
    else:
        np.savez(path, q=objects, k=numbers, v=numbers)
    status, out, err = command("attention", "--input", path)
    assert (status, out) == (2, "")
    assert err == (
        f"error: --input = {path}: is neither an .npz nor an .npy. Save arrays of numbers.\n"
        if whole
        else f"error: --input = {path}: holds Python objects, and reading such (pickle) runs what "
        "the file says. Save arrays of numbers.\n"
    )

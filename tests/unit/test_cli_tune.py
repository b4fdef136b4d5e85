"""``kernelseam tune`` on the host, where there is one way: what it says, what it keeps, and what it
refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Command, parsed
from kernelseam import BatchedGemmStrided
from kernelseam.tuning import tune

SMALL = ("--m", 16, "--n", 16, "--k", 16)


@pytest.fixture(autouse=True)
def _own_cache(cache: Path) -> None:
    """Choices are this test's own."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelseam import tuning

    monkeypatch.setattr(tuning, "ROUND_SECONDS", 1e-5)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("gemm", *SMALL), "gemm float16→float16 NN strided batch=1 heads=1 16×16×16"),
        (
            ("gemm", *SMALL, "--batch", 3, "--layout", "pointers"),
            "gemm float16→float16 NN pointers batch=3 heads=1 16×16×16",
        ),
        (
            ("gemm", *SMALL, "--bias", "float32"),
            "gemm float16→float16 NN strided bias batch=1 heads=1 16×16×16",
        ),
        (("attention", "--seq-len", 9), "attention float16 batch=1 heads=8 S_q=9 S_k=9 dim=64"),
        (
            ("attention", "--seq-len", 9, "--paged", "--kv-lengths"),
            "attention float16 lengths strided/paged batch=1 heads=8 S_q=9 S_k=9 dim=64",
        ),
        (
            ("attention", "--seq-len", 9, "--backward"),
            "attention_bwd float16 batch=1 heads=8 S_q=9 S_k=9 dim=64",
        ),
        (
            ("projection", "--seq-len", 9, "--heads", 2, "--rotary", "halves", "--bias"),
            (
                "qkv_projection float16→float16 bias rotary=halves batch=1 S=9 hidden=128 "
                "heads=2/2 dim=64"
            ),
        ),
        (
            ("projection", "--seq-len", 9, "--batch", 3, "--heads", 2, "--rotary", "halves")
            + ("--paged", "--varlen", "--kv-dtype", "e4m3"),
            (
                "qkv_projection float16→float16 then paged_cache append float16→float8_e4m3fn "
                "rotary=halves scaled=heads packed q batch=1 S=19 hidden=128 heads=2/2 dim=64"
            ),
        ),
        (
            ("projection", "--seq-len", 9, "--batch", 2, "--heads", 2, "--paged", "--page-size", 4),
            "qkv_projection float16→float16 paged batch=2 S=9 hidden=128 heads=2/2 dim=64",
        ),
        (
            ("projection", "--kind", "output", "--seq-len", 9, "--heads", 2, "--residual"),
            (
                "output_projection float16→float16 residual heads apart batch=1 S=9 heads=2 dim=64 "
                "hidden=128"
            ),
        ),
    ],
)
def test_what_is_tuned_is_what_explain_then_shows(
    command: Command, cache: Path, arguments: tuple[Any, ...], problem: str
) -> None:
    backward = "--backward" in arguments
    (found,) = parsed(command("tune", *arguments, "--json"))["tunings"]
    assert (found["problem"], found["chosen"], found["model"]) == (problem, "numpy", "numpy")
    assert (found["device"], found["note"], found["refused"]) == ("numpy:0 (cpu)", "", [])
    (configuration,) = found["configurations"]
    assert (configuration["configuration"], configuration["variant"], configuration["failure"]) == (
        "numpy",
        "",
        "",
    ) and configuration["runs"] >= 6
    assert configuration["seconds"] > 0 and configuration["predicted_seconds"] > 0
    assert Path(found["kept"]).parent == cache / "tuned"
    told = parsed(command("explain", *arguments, "--json"))
    assert (told["chosen"], told["variant"], told["by"]) == ("numpy", "", "tuned")
    assert told["implementations"][0]["measured_seconds"] == configuration["seconds"]
    _, shown, _ = command("explain", *arguments)
    assert "  chosen  numpy, the fastest measured on a problem of its class\n" in shown
    assert "predicted" in shown and "measured" in shown
    assert parsed(command("tune", "--clear", "--json")) == {
        "folder": str(cache / "tuned"),
        "choices": 1,
    }
    again = parsed(command("explain", *arguments, "--json"))
    assert again["by"] == "model" and again["implementations"][0]["measured_seconds"] is None
    assert (
        backward
        or command("explain", *arguments, "--implementation", "numpy")[1].count(
            "numpy, as requested"
        )
        == 1
    )


def test_a_table_for_people(command: Command, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, err = command("tune", "gemm", *SMALL)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "gemm float16→float16 NN strided batch=1 heads=1 16×16×16"
    assert lines[2] == "  chosen  numpy" and lines[3].startswith(f"  kept    {cache / 'tuned'}")
    assert (
        lines[5].split("  ")[0] == "configuration"
        and lines[6].startswith("numpy")
        and lines[6].endswith("chosen")
    )
    assert "1.000" in lines[6]
    assert command("tune", "--clear")[1] == f"{cache / 'tuned'}: removed 1 choices\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    status, _, err = command("tune", "gemm", *SMALL)
    assert status == 0


def test_a_file_of_problems(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    path.write_text(
        json.dumps(
            [
                {
                    "operation": "gemm",
                    "m": 8,
                    "n": 8,
                    "k": 8,
                    "b-transposed": True,
                    "dtype": "float32",
                    "a_transposed": False,
                },
                {"operation": "attention", "seq_len": 5, "causal": True},
                {"operation": "projection", "seq-len": 5, "heads": 2},
            ]
        )
    )
    found = parsed(command("tune", "--file", path, "--json"))["tunings"]
    assert [t["problem"] for t in found] == [
        "gemm float32→float32 NT strided batch=1 heads=1 8×8×8",
        "attention float16 causal batch=1 heads=8 S_q=5 S_k=5 dim=64",
        "qkv_projection float16→float16 batch=1 S=5 hidden=128 heads=2/2 dim=64",
    ]
    _, out, _ = command("tune", "--file", path, "--backend", "numpy")
    assert out.count("  chosen  numpy") == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("rubbish", "cannot be read: Expecting value"),
        ("[]", "must hold a list of objects, and one of them at least"),
        ("{}", "must hold a list of objects"),
        ("[3]", "must hold a list of objects"),
        (
            '[{"operation": "matmul"}]',
            "operation = matmul: must be one of attention, gemm, projection",
        ),
        ('[{"operation": "gemm", "m": 8}, {"operation": "gemm", "mm": 8}]', "case 2 of"),
        ('[{"operation": "gemm", "m": "many"}]', "= --m many: Invalid value for '--m'"),
        ('[{"operation": "gemm", "m": -1}]', "= --m -1: Invalid value for '--m'"),
        ('[{"operation": "gemm", "dtype": "float8"}]', "dtype = float8"),
        ("[" * 100_000, "cannot be read: it is nested too deep"),
        ("[" + "9" * 5000 + "]", "cannot be read: Exceeds the limit"),
        ('[{"operation": ["gemm"]}]', "must be one of attention, gemm, projection"),
        ('[{"operation": "gemm", "m": [8]}]', "must be a number, a string, true, false or null"),
        ('[{"operation": "gemm", "m": 1' + "0" * 400 + "}]", "an integer of 1329 bits"),
        ('[{"operation": "gemm", "backend": "numpy"}]', "is no option of a problem"),
        ('[{"operation": "gemm", "help": true}]', "help = True: is no option of a problem"),
    ],
)
def test_a_file_that_is_refused(
    command: Command, tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "cases.json"
    path.write_text(content)
    status, out, err = command("tune", "--file", path)
    assert (status, out) == (2, "") and message in err, err


def test_operands_that_are_none(refused: Callable[..., None]) -> None:
    product = BatchedGemmStrided(M=2, N=2, K=2, dtype="float32")
    refused(
        "operands = 7: must map names to arrays or addresses. Give a dict, or nothing.",
        lambda: tune(product, "numpy", 7),  # type: ignore[arg-type]
    )
    refused(
        "progress = 7: must be a function. Give progress(configuration, done, all).",
        lambda: tune(product, "numpy", None, 7),  # type: ignore[arg-type]
    )
    refused(
        "x = given: is no operand of this plan. Its operands are A, B, C.",
        lambda: tune(product, "numpy", {"x": np.zeros(3)}),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--file", "none.json"), "--file = none.json: cannot be read"),
        (("--file", "none.json", "--clear"), "takes one of --file and --clear, or an operation"),
        (("--clear", "gemm"), "--clear = given: stands before gemm"),
        (
            ("projection", "--kind", "output", "--rotary", "pairs"),
            "--rotary = pairs: is for --kind qkv. Leave it out.",
        ),
        (("projection", "--residual"), "--residual = True: is for --kind output. Leave it out."),
        (
            ("projection", "--kind", "output", "--kv-heads", "0"),
            "--kv-heads = 0: is for --kind qkv. Leave it out.",
        ),
        (("projection", "--varlen"), "--varlen = True: is of pages. Give --paged too."),
        (
            ("projection", "--kind", "output", "--paged"),
            "--paged = True: is for --kind qkv. Leave it out.",
        ),
        (("projection", "--paged", "--kv-dtype", "f16"), "--kv-dtype = f16: must be one of"),
        (("projection", "--kind", "input"), "kind = input: must be one of qkv, output"),
        (("gemm", "--backend", "abacus"), "backend = abacus: must be one of"),
    ],
)
def test_what_is_refused(command: Command, arguments: tuple[Any, ...], message: str) -> None:
    status, out, err = command("tune", *arguments)
    assert (status, out) == (2, "") and message in err


def test_what_cannot_be_kept_is_said(command: Command, cache: Path) -> None:
    cache.mkdir(mode=0o700)
    (cache / "tuned").mkdir(mode=0o777)
    (cache / "tuned").chmod(0o777)
    status, _, err = command("tune", "gemm", *SMALL)
    assert status == 2 and "tuned: can be written by others (mode 0777)" in err

"""The command line: what it computes of attentions and products, and what it prints of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Command, parsed

MINILM = Path(__file__).parents[2] / "examples" / "data" / "minilm_attention.npz"
SMALL = ("--batch", "2", "--heads", "4", "--seq-len", "33", "--head-dim", "16")
GEMM = ("gemm", "--batch", 3, "--heads", 2, "--m", 17, "--n", 9, "--k", 21)


# ---------------------------------------------------------------- attention


def test_attention_for_people(command: Command) -> None:
    status, out, err = command("attention", *SMALL, "--causal", "--verify", "--time")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "attention float16 causal batch=2 heads=4 S_q=33 S_k=33 dim=16"
    names = [line[2:17].strip() for line in lines[1:]]
    assert names == ["device", "implementation", "launches", "against oracle", "time", "rate"]
    assert "passed: all 4224 elements, worst error/tolerance 0." in lines[4]
    assert (
        "median" in lines[5]
        and "spread" in lines[5]
        and "TFLOP/s" in lines[6]
        and "GB/s" in lines[6]
    )
    assert "\x1b" not in out


def test_attention_for_programs(command: Command) -> None:
    found = parsed(
        command(
            "attention",
            *SMALL,
            "--kv-seq-len",
            40,
            "--kv-heads",
            2,
            "--value-dim",
            24,
            "--dtype",
            "float32",
            "--layout",
            "bshd",
            "--verify",
            "--time",
            "--json",
        )
    )
    assert (found["operation"], found["backend"], found["passed"]) == ("attention", "numpy", True)
    (run,) = found["runs"]
    assert run["problem"] == "attention float32 batch=2 heads=4/2 S_q=33 S_k=40 dim=16/24"
    assert (run["implementation"], run["launches"]) == ("numpy", 1)
    assert run["operations"] == 2 * 2 * 4 * 33 * 40 * (16 + 24)
    verify, time = run["verify"]["oracle"], run["time"]
    assert (
        verify["passed"] is True
        and 0 < verify["worst"] < 1
        and verify["checked"] == 2 * 4 * 33 * 24
    )
    assert (
        0 < time["p10_seconds"] <= time["median_seconds"] <= time["p90_seconds"]
        and time["runs"] >= 5
    )
    assert time["tflops"] == pytest.approx(run["operations"] / time["median_seconds"] / 1e12)
    assert time["gbytes_per_second"] == pytest.approx(run["bytes"] / time["median_seconds"] / 1e9)


def test_without_verify_nothing_is_claimed(command: Command) -> None:
    found = parsed(command("attention", *SMALL, "--json"))
    assert (
        found["passed"] is None
        and "verify" not in found["runs"][0]
        and "time" not in found["runs"][0]
    )


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_attention_saves_its_result(
    command: Command, tmp_path: Path, dtype: str, layout: str
) -> None:
    saved = tmp_path / "out.npy"
    common = ("attention", *SMALL, "--dtype", dtype, "--layout", layout, "--output", saved)
    assert command(*common, "--seed", 3)[0] == 0
    first = np.load(saved)
    assert first.dtype == ("float32" if dtype == "bfloat16" else dtype)
    assert first.shape == ((2, 4, 33, 16) if layout == "bhsd" else (2, 33, 4, 16))
    command(*common, "--seed", 3)
    assert np.array_equal(np.load(saved), first)
    command(*common, "--seed", 4)
    assert not np.array_equal(np.load(saved), first)


def test_real_input_agrees_with_its_stored_result(command: Command, tmp_path: Path) -> None:
    saved = tmp_path / "out.npz"
    found = parsed(command("attention", "--input", MINILM, "--verify", "--json", "--output", saved))
    assert [r["name"] for r in found["runs"]] == ["layer0", "layer5"]
    for run in found["runs"]:
        assert run["verify"]["oracle"]["passed"] and run["verify"]["stored result"]["passed"]
        assert run["verify"]["stored result"]["checked"] == 4 * 12 * 48 * 32
    with np.load(saved) as results, np.load(MINILM) as stored:
        for layer in ("layer0", "layer5"):
            assert np.abs(results[layer] - stored[f"{layer}_out"]).max() < 2e-3


def test_a_wrong_stored_result_is_found(command: Command, tmp_path: Path) -> None:
    with np.load(MINILM) as stored:
        arrays = {
            n.removeprefix("layer0_"): stored[n] for n in stored.files if n.startswith("layer0")
        }
    arrays["out"][3, 11, 47, 31] += 0.05
    np.savez(tmp_path / "wrong.npz", **arrays)
    status, out, err = command("attention", "--input", tmp_path / "wrong.npz", "--verify")
    assert status == 1
    assert "against oracle" in out and "against stored result  FAILED: out[3, 11, 47, 31] is" in out
    found = parsed(
        command("attention", "--input", tmp_path / "wrong.npz", "--verify", "--json"), status=1
    )
    assert found["passed"] is False and found["runs"][0]["verify"]["stored result"]["where"] == [
        3,
        11,
        47,
        31,
    ]


@pytest.mark.parametrize(
    ("options", "note"),
    [
        (("--causal",), "layer0_out is not compared: it is of every key"),
        (
            ("--mask-density", "0"),
            "layer0_out is not compared: it was made without mask-density",
        ),
        (
            ("--dtype", "bfloat16"),
            "layer0_out is not compared: the inputs were rounded to bfloat16",
        ),
    ],
)
def test_a_stored_result_of_another_problem_is_not_compared(
    command: Command, options: tuple[str, ...], note: str
) -> None:
    found = parsed(command("attention", "--input", MINILM, "--verify", "--json", *options))
    run = found["runs"][0]
    assert (
        list(run["verify"]) == ["oracle"]
        and run["verify"]["oracle"]["passed"]
        and note in run["notes"]
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wider_input_still_meets_the_stored_result(command: Command, dtype: str) -> None:
    found = parsed(command("attention", "--input", MINILM, "--verify", "--json", "--dtype", dtype))
    assert found["runs"][1]["verify"]["stored result"]["passed"]


def test_a_failed_verification_ends_with_1(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelseam.reference.runtime import HostRuntime

    right, read = HostRuntime.to_host, HostRuntime.read

    def wrong(self: HostRuntime, array: object) -> Any:
        host = right(self, array)
        # attention's memory is flat
        seen = host if host.ndim == 4 else host.view(np.float16).reshape(2, 4, 33, 16)
        seen[1, 2, 30, 5] += 1
        return host

    def wrongly_read(self: HostRuntime, *place: Any) -> Any:
        content = read(self, *place).copy()
        content[-1] ^= 1
        return content

    monkeypatch.setattr(HostRuntime, "to_host", wrong)
    monkeypatch.setattr(HostRuntime, "read", wrongly_read)
    status, out, _ = command("attention", *SMALL, "--verify")
    assert status == 1 and "against oracle  FAILED: out[1, 2, 30, 5] is" in out
    assert (
        parsed(command("gemm", "--batch", 2, "--heads", 3, "--m", 31, "--json", "--verify"), 1)[
            "passed"
        ]
        is False
    )
    assert command("attention", *SMALL)[0] == 0


def test_large_problems_are_sampled(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelseam.oracle.sampling.ORACLE_OPERATIONS", 1e6)
    run = parsed(command("attention", *SMALL, "--verify", "--json"))["runs"][0]
    assert (
        run["verify"]["oracle"]["checked"]
        == int(1e6 / (4 * 33 * 32)) * 16
        < run["elements"]
        == 2 * 4 * 33 * 16
    )


# ---------------------------------------------------------------- gemm


@pytest.mark.parametrize("layout", [("strided",), ("pointers",), ("pointers", "--spacing", "even")])
@pytest.mark.parametrize("transposes", [(), ("--a-transposed",), ("--b-transposed",)])
def test_gemm(command: Command, layout: tuple[str, ...], transposes: tuple[str, ...]) -> None:
    more = ("--dtype", "float32", *transposes, "--layout", *layout, "--time")
    found = parsed(command(*GEMM, *more, "--verify", "--json"))
    assert found["passed"] is True
    (run,) = found["runs"]
    assert run["verify"]["oracle"]["checked"] == 3 * 2 * 17 * 9
    assert run["operations"] == 2 * 6 * 17 * 9 * 21 and run["launches"] == 1
    way = "pointers" if layout == ("pointers",) else "strided"
    assert f" {way} " in run["problem"]
    assert run["notes"] == (
        ["addresses are evenly spaced: the strided way is taken"] if "even" in layout else []
    )


@pytest.mark.parametrize("skewed", [(), ("--skewed",)])
@pytest.mark.parametrize("along", ["m", "n", "k"])
def test_gemm_of_groups(command: Command, along: str, skewed: tuple[str, ...]) -> None:
    sizes = ("--m", 31, "--n", 24, "--k", 20, "--dtype", "bf16")
    asked = ("gemm", "--groups", 3, "--along", along, *skewed, *sizes)
    found = parsed(command(*asked, "--verify", "--time", "--json"))
    assert found["passed"] is True and found["operation"] == "grouped_gemm"
    (run,) = found["runs"]
    assert run["verify"]["oracle"]["checked"] == 31 * 24 * (3 if along == "k" else 1)
    assert run["operations"] == 2 * 31 * 24 * 20 and run["launches"] == 1
    assert run["problem"].endswith(f"grouped along {along} groups=3 31×24×20")
    explained = parsed(command("explain", *asked, "--json"))
    assert explained["chosen"] == "numpy" and explained["problem"] == run["problem"]


def test_gemm_of_many_rows_with_an_epilogue_is_sampled(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows, each with its own group's part of what was captured."""
    sampled = "kernelseam.oracle.verification_grouped.ORACLE_OPERATIONS"
    monkeypatch.setattr(sampled, 7 * 2 * 24 * 20)
    sizes = ("--m", 31, "--n", 24, "--k", 20, "--a-indices", "--epilogue", "column_bias")
    asked = ("gemm", "--groups", 3, "--skewed", *sizes, "--verify", "--json")
    (run,) = parsed(command(*asked))["runs"]
    assert run["verify"]["oracle"]["passed"] is True
    assert run["verify"]["oracle"]["checked"] == 7 * 24


def test_gemm_of_sizes_of_their_own(command: Command) -> None:
    asked = ("gemm", "--sizes", "5x7x9,0x3x3,40x21x4", "--dtype", "bf16", "--b-transposed")
    found = parsed(command(*asked, "--verify", "--time", "--json"))
    assert found["passed"] is True and found["operation"] == "grouped_gemm_pointers"
    (run,) = found["runs"]
    assert run["verify"]["oracle"]["checked"] == 5 * 7 + 40 * 21 == run["elements"]
    assert run["operations"] == 2 * (5 * 7 * 9 + 40 * 21 * 4) and run["launches"] == 1
    explained = parsed(command("explain", *asked, "--json"))
    assert explained["chosen"] == "numpy" and explained["problem"] == run["problem"]


@pytest.mark.parametrize("epilogue", ["", "gelu", "swiglu", "column_bias", "checkerboard"])
@pytest.mark.parametrize("rows", [(), ("--a-indices", "--c-indices", "--c-factors")])
def test_gemm_of_groups_with_indices_and_an_epilogue(
    command: Command, rows: tuple[str, ...], epilogue: str
) -> None:
    sizes = ("--m", 31, "--n", 24, "--k", 20, "--dtype", "bf16", "--skewed")
    sizes += ("--epilogue", epilogue) if epilogue else ()
    (run,) = parsed(command("gemm", "--groups", 3, *rows, *sizes, "--verify", "--json"))["runs"]
    assert run["verify"]["oracle"]["passed"] is True
    checked = run["verify"]["oracle"]["checked"]
    assert checked == run["elements"] == 31 * (12 if epilogue == "swiglu" else 24)
    assert run["problem"].endswith(
        f"{' with a_indices with c_indices with c_factors' if rows else ''} groups=3 31×24×20"
    )
    explained = parsed(command("explain", "gemm", "--groups", 3, *rows, *sizes, "--json"))
    assert explained["problem"] == run["problem"]


@pytest.mark.parametrize(
    ("epilogue", "columns"), [("gelu", 24), ("swiglu", 12), ("residual", 24), ("{file}:mine", 24)]
)
def test_gemm_with_an_epilogue(
    command: Command, epilogue: str, columns: int, tmp_path: Path
) -> None:
    """By name and of a file, arrays and numbers that it captures among them."""
    file = tmp_path / "epilogues.py"
    text = "cap = 1.5\ndef mine(acc, m, n, batch):\n    return abs(acc - m) * cap + n + batch\n"
    file.write_text(text)
    sizes = ("--m", 10, "--n", 24, "--k", 8, "--batch", 2, "--dtype", "f32")
    asked = ("--epilogue", epilogue.format(file=file), *sizes)
    (run,) = parsed(command("gemm", *asked, "--verify", "--json"))["runs"]
    assert run["verify"]["oracle"]["passed"] is True
    assert run["verify"]["oracle"]["checked"] == 2 * 10 * columns


@pytest.mark.parametrize("layout", ["strided", "pointers"])
def test_gemm_on_a_vendors_device(command: Command, layout: str) -> None:
    more = ("--layout", layout, "--backend", "acme", "--time")
    found = parsed(command(*GEMM, *more, "--verify", "--json"))
    assert (found["device"], found["passed"]) == ("acme:0 (acme1)", True)
    assert (
        found["runs"][0]["implementation"] == "acme-gemm"
        and found["runs"][0]["workspace_bytes"] == 64
    )


@pytest.mark.parametrize("layout", [("strided",), ("pointers",), ("pointers", "--spacing", "even")])
def test_gemm_with_a_bias_and_a_residual(command: Command, layout: tuple[str, ...]) -> None:
    added = ("--bias", "float32", "--residual", "bfloat16", "--out-dtype", "float32")
    found = parsed(command(*GEMM, *added, "--layout", *layout, "--verify", "--json"))
    (run,) = found["runs"]
    assert found["passed"] is True and run["launches"] == 1
    way = "pointers" if layout == ("pointers",) else "strided"
    assert run["problem"].startswith(f"gemm float16→float32 NN {way} bias residual ")
    assert run["verify"]["oracle"]["checked"] == 3 * 2 * 17 * 9


def test_empty_problems(command: Command) -> None:
    assert parsed(command("gemm", "--batch", 0, "--verify", "--time", "--json"))["passed"] is True
    (run,) = parsed(command("gemm", "--k", 0, "--m", 3, "--verify", "--json"))["runs"]
    assert run["verify"]["oracle"]["checked"] == 3 * 512
    assert (
        parsed(command("attention", *SMALL, "--kv-seq-len", 0, "--verify", "--json"))["passed"]
        is True
    )
    for none in ("--batch", "--heads"):
        assert parsed(command("attention", none, 0, "--verify", "--json"))["passed"] is True

"""``kernelseam attention`` and its options: what is computed, verified, explained and refused, on
the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Command, parsed
from refusals import entries

MINILM = Path(__file__).parents[2] / "examples" / "data" / "minilm_attention.npz"
SMALL = (
    "--batch",
    "3",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--seq-len",
    "20",
    "--kv-seq-len",
    "33",
    "--head-dim",
    "16",
)
NAME = "batch=3 heads=4/2 S_q=20 S_k=33 dim=16"
OPTIONS: dict[str, tuple[str, ...]] = {
    "window": ("--window", "7,2"),
    "causal window": ("--window", "7,", "--causal"),
    "softcap": ("--softcap", "2.5"),
    "alibi": ("--alibi",),
    "bias": ("--bias", "float32"),
    "bias of q's": ("--bias", "float16"),
    "mask": ("--mask-density", "0.6"),
    "sinks": ("--sinks",),
    "causal prefix": ("--causal", "--prefix", "9"),
    "lengths": ("--kv-lengths",),
    "lengths strided/paged": ("--paged",),
    "packed/packed": ("--varlen",),
    "causal lengths strided/paged": ("--paged", "--page-size", "5", "--causal", "--kv-lengths"),
    "lengths packed/paged": ("--varlen", "--paged"),
    "batch_invariant": ("--batch-invariant",),
    "lengths prefix_groups strided/paged": ("--paged", "--page-size", "8", "--shared-pages", "3"),
    "alibi bias mask prefix sinks softcap window": (
        "--window",
        "-,2",
        "--softcap",
        "2",
        "--alibi",
        "--bias",
        "float32",
        "--mask-density",
        "0.8",
        "--sinks",
        "--prefix",
        "3",
    ),
}
CALLED = {"causal window": "window", "bias of q's": "bias"}
"""What the problem is called where that is not the name above."""


@pytest.mark.parametrize("name", OPTIONS)
def test_options(command: Command, name: str) -> None:
    """Verified against the oracle, the LSE too."""
    found = parsed(
        command("attention", *SMALL, *OPTIONS[name], "--return-lse", "--verify", "--json")
    )
    (run,) = found["runs"]
    assert (found["operation"], found["passed"]) == ("attention", True)
    assert run["problem"] == f"attention float16 {CALLED.get(name, name)} {NAME}"
    assert run["verify"]["oracle"]["checked"] == run["elements"] == 3 * 4 * 20 * (16 + 1)
    assert 0 < run["verify"]["oracle"]["worst"] < 1


@pytest.mark.parametrize("more", [(), ("--paged",), ("--kv-dtype", "e4m3", "--paged")])
def test_values_that_are_columns_of_the_keys(command: Command, more: tuple[str, ...]) -> None:
    options = ("--latent", "--value-dim", "8", "--verify", "--json")
    (run,) = parsed(command("attention", *SMALL, *options, *more))["runs"]
    assert " latent" in run["problem"] and "dim=16/8" in run["problem"]
    assert 0 < run["verify"]["oracle"]["worst"] < 1


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_a_precision(command: Command, precision: str) -> None:
    options = ("--dtype", "float32", "--precision", precision, "--verify", "--json")
    for more in ((), ("--backward",)):
        (run,) = parsed(command("attention", *SMALL, *options, *more))["runs"]
        shown = f" precision={precision}" * (precision != "ieee")
        assert f" float32{shown} {NAME}" in run["problem"]
        assert 0 < run["verify"]["oracle"]["worst"] < 1
    status, _, error = command("attention", *SMALL, "--precision", precision)
    assert (status, "multiply float32" in error) == ((0, False) if not shown else (2, True))


@pytest.mark.parametrize(
    ("options", "called"),
    [
        (("--kv-dtype", "e4m3", "--kv-scales", "heads"), "float16/float8_e4m3fn kv_scales"),
        (("--q-dtype", "e4m3", "--dtype", "bf16"), "float8_e4m3fn to bfloat16"),
        (
            ("--q-dtype", "e4m3fnuz", "--kv-scales", "blocks", "--scale-block", "8", "--varlen"),
            "float8_e4m3fnuz to float16 kv_scales q_scales packed/packed",
        ),
    ],
)
def test_of_8_bits(command: Command, options: tuple[str, ...], called: str) -> None:
    found = parsed(command("attention", *SMALL, *options, "--verify", "--json"))
    (run,) = found["runs"]
    assert found["passed"] and run["problem"] == f"attention {called} {NAME}"
    assert 0 < run["verify"]["oracle"]["worst"] < 1


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--causal", "--layout", "bshd", "--any-order"),
        ("--varlen",),
        ("--kv-lengths", "--softcap", "2"),
        ("--bias", "float32", "--sinks", "--alibi", "--window", "9,9", "--mask-density", "0.7"),
    ],
    ids=" ".join,
)
def test_gradients(command: Command, options: tuple[str, ...]) -> None:
    found = parsed(
        command(
            "attention",
            *SMALL,
            "--dtype",
            "float32",
            *options,
            "--backward",
            "--verify",
            "--time",
            "--json",
        )
    )
    (run,) = found["runs"]
    assert (found["operation"], found["passed"]) == ("attention_bwd", True)
    assert (
        run["problem"].startswith("attention_bwd float32")
        and 0 < run["verify"]["oracle"]["worst"] < 1
    )
    more = 4 * 20 * 33 + 4 if "--bias" in options else 0
    assert run["verify"]["oracle"]["checked"] == 3 * 20 * 4 * 16 + 2 * 3 * 33 * 2 * 16 + more
    assert run["time"]["median_seconds"] > 0


def test_rates_of_different_lengths_say_what_they_count(command: Command) -> None:
    note = "the rate counts every entry of the batch at its full length"
    notes = [
        parsed(command("attention", *SMALL, *options, "--time", "--json"))["runs"][0]["notes"]
        for options in ((), ("--varlen",), ("--kv-lengths",))
    ]
    assert notes == [[], [note], [note]]


def test_lengths_differ_and_follow_the_seed(command: Command, tmp_path: Path) -> None:
    """Rows behind a sequence's end are 0 in what is saved; one sequence is the longest."""
    ends = []
    for seed in (0, 0, 1):
        saved = tmp_path / "out.npy"
        assert command("attention", *SMALL, "--varlen", "--seed", seed, "--output", saved)[0] == 0
        rows = np.load(saved).any(axis=(1, 3))
        ends.append([int(r.sum()) for r in rows])
        assert all(r[:n].all() for r, n in zip(rows, ends[-1], strict=True))
    assert ends[0] == ends[1] != ends[2]
    assert max(ends[0]) == 20 and min(ends[0]) < 20


def test_options_change_the_result(command: Command, tmp_path: Path) -> None:
    """Each of them, on the same data."""
    saved, seen = tmp_path / "out.npy", {}
    same = ("--head-dim", "16", "--heads", "4", "--seq-len", "20", "--output", saved)
    for options in (
        (),
        ("--causal",),
        ("--window", "3,3"),
        ("--window", "3,2"),
        ("--softcap", "1"),
        ("--alibi",),
        ("--sinks",),
        ("--bias", "float32"),
        ("--mask-density", "0.5"),
        ("--mask-density", "0.25"),
        ("--causal", "--prefix", "5"),
        ("--mask-density", "0"),
    ):
        assert command("attention", *same, *options)[0] == 0
        seen[" ".join(options)] = np.load(saved).tobytes()
    assert len(set(seen.values())) == len(seen)
    assert not np.frombuffer(seen["--mask-density 0"], np.float16).any()
    assert command("attention", *same, "--mask-density", "1")[0] == 0
    assert np.load(saved).tobytes() == seen[""]


def test_gradients_are_saved_by_name(command: Command, tmp_path: Path) -> None:
    saved = tmp_path / "gradients.npz"
    common = (
        "attention",
        *SMALL,
        "--layout",
        "bshd",
        "--backward",
        "--bias",
        "float32",
        "--sinks",
        "--output",
        saved,
    )
    assert command(*common)[0] == 0
    with np.load(saved) as found:
        shapes = {n: (x.shape, x.dtype.name) for n, x in found.items()}
    assert shapes == {
        "dq": ((3, 20, 4, 16), "float16"),
        "dk": ((3, 33, 2, 16), "float16"),
        "dv": ((3, 33, 2, 16), "float16"),
        "dbias": ((1, 4, 20, 33), "float32"),
        "dsinks": ((4,), "float32"),
    }


def test_a_file_with_options(command: Command) -> None:
    found = parsed(
        command("attention", "--input", MINILM, "--softcap", "5", "--sinks", "--verify", "--json")
    )
    for run, layer in zip(found["runs"], ("layer0", "layer5"), strict=True):
        assert (
            run["problem"]
            == "attention float16 sinks softcap batch=4 heads=12 S_q=48 S_k=48 dim=32"
        )
        assert list(run["verify"]) == ["oracle"] and run["verify"]["oracle"]["passed"]
        assert run["notes"] == [f"{layer}_out is not compared: it was made without softcap, sinks"]
    assert (
        parsed(command("attention", "--input", MINILM, "--backward", "--verify", "--json"))[
            "passed"
        ]
        is True
    )


def test_a_wrong_gradient_ends_with_1(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelseam.reference.runtime import HostRuntime

    right, calls = HostRuntime.to_host, []

    def wrong(self: HostRuntime, array: object) -> Any:
        host = right(self, array)
        calls.append(host.size)
        if len(calls) == 2:  # dq, dk, dv
            host[7] += 1
        return host

    monkeypatch.setattr(HostRuntime, "to_host", wrong)
    status, out, _ = command("attention", *SMALL, "--dtype", "float32", "--backward", "--verify")
    assert status == 1 and "against oracle  FAILED: dk[0, 0, 0, 7] is" in out


@pytest.mark.parametrize(
    ("options", "message"),
    entries("cli_attention", "nonsense"),
)
def test_what_makes_no_sense(command: Command, options: str, message: str) -> None:
    given = options.format(MINILM=MINILM).split()
    assert command("attention", *given) == (2, "", f"error: {message}\n")


def test_explain(command: Command) -> None:
    for options, problem in (
        (
            ("--paged", "--window", "5,0", "--sinks"),
            f"attention float16 lengths sinks window strided/paged {NAME}",
        ),
        (("--varlen", "--softcap", "3"), f"attention float16 softcap packed/packed {NAME}"),
        (("--backward", "--bias", "float32"), f"attention_bwd float16 bias {NAME}"),
    ):
        found = parsed(command("explain", "attention", *SMALL, *options, "--json"))
        assert (found["problem"], found["chosen"]) == (problem, "numpy")
    status, _, err = command("explain", "attention", "--backward", "--paged")
    assert (status, err) == (
        2,
        "error: --backward = given: pages have no gradients. Leave --paged out.\n",
    )


def test_every_command_has_the_same_options(command: Command) -> None:
    """And says so."""
    commands = (("attention",), ("explain", "attention"), ("compile", "attention"))
    texts = [command(*name, "--help")[1] for name in commands]
    for option in (
        "--batch",
        "--causal",
        "--layout",
        "--window",
        "--softcap",
        "--alibi",
        "--bias",
        "--mask-density",
        "--sinks",
        "--prefix",
        "--kv-lengths",
        "--paged",
        "--page-size",
        "--varlen",
        "--backward",
        "--any-order",
        "--return-lse",
        "--batch-invariant",
    ):
        assert all(f"\n  {option} " in text for text in texts), option


MODS = """import numpy as np

slopes = np.linspace(0.1, 0.4, 4).astype(np.float32)


def alibi(score, b, h, q_idx, kv_idx):
    return score - slopes[h] * abs(q_idx - kv_idx)


def near(b, h, q_idx, kv_idx):
    return abs(q_idx - kv_idx) < 9
"""


@pytest.mark.parametrize("more", [(), ("--backward",), ("--paged",), ("--causal", "--kv-lengths")])
def test_functions_in_a_file(command: Command, tmp_path: Path, more: tuple[str, ...]) -> None:
    file = tmp_path / "mods.py"
    file.write_text(MODS)
    own = ("--score-mod", f"{file}:alibi", "--mask-mod", f"{file}:near")
    code, out, err = command("attention", *SMALL, "--backend", "numpy", "--verify", *own, *more)
    assert (code, err) == (0, "")
    assert "expression" in out and "passed: all" in out


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("mods.py", "must be FILE:NAME. For example mods.py:alibi."),
        (
            "{0}:near",
            "mods.py:10: it is called with 5 arguments, and too many positional arguments.",
        ),
        ("{0}:far", "the file has no function of that name, but alibi, near. Name one of these."),
        ("{0}.txt:near", "the file does not run: FileNotFoundError"),
    ],
)
def test_functions_that_are_refused(
    command: Command, tmp_path: Path, place: str, message: str
) -> None:
    file = tmp_path / "mods.py"
    file.write_text(MODS)
    code, _, err = command("attention", *SMALL, "--score-mod", place.format(file))
    assert code == 2
    assert message in err

"""Scripts that measure beside the peers, dry, since their figures need a GPU."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: the benchmarks' peer")


@pytest.mark.parametrize("name", ["parity_h200", "random_problems"])
def test_every_script_starts(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its imports and options, as far as the host has what it imports."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}.py")


def test_serving_is_measured_dry(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import serving

    serving.main(["--device", "cpu", "--small"])
    rows = [x.split(" | ") for x in capsys.readouterr().out.splitlines() if x.startswith("| ")]
    assert [len(x) for x in rows] == [6] * 6 + [9] * 2 + [5] * 2
    assert float(rows[7][-1].strip(" |")) == 0, "groups change nothing on the host"


def test_the_serving_loop_is_measured_dry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours on the host, whose attention is held against float64; FlashInfer's refusals are rows."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from benchmarks import serving_loop
    from benchmarks.comparing import flashinfer_peer

    def none() -> None:
        raise ModuleNotFoundError("no flashinfer here\nat all")

    monkeypatch.setattr(flashinfer_peer, "flashinfer", none)
    monkeypatch.setattr(serving_loop, "ROUNDS", 1)
    serving_loop.main(["--device", "cpu", "--small"])
    head, _, *rows = (x.strip("| ").split(" | ") for x in capsys.readouterr().out.splitlines())
    refused, measured = rows[:4], rows[4:]
    assert {x[2] for x in refused} == {"ModuleNotFoundError: no flashinfer here"}
    assert [x[1] for x in measured] == ["ours, captured", "ours"]
    for row in measured:
        found = dict(zip(head, row, strict=True))
        assert found["same"] == "6 of 6" and found["steps × rows"].startswith("16 × ")
        assert 0 < float(found["error"]) < 1e-6 and float(found["tokens a second"]) > 0

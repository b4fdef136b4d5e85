"""docs/your-kernel.md: its two files beside the host platform's backend, and compiled for a
GPU."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam import planning, plugins
from kernelseam.cli.main import main
from kernelseam.contract import CONTRACT_VERSION, Cost
from kernelseam.errors import KernelSeamError
from kernelseam.kernels import KernelImplementation

GUIDE = (Path(__file__).parents[2] / "docs" / "your-kernel.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w./]+)`\. .*?^```\w+\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE))
PACKAGE = "kernelseam_naive"


@pytest.fixture
def discovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``discovered(backend, name=module, …)``: those plugins, in that order, the page's among them
    for this backend."""
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def use(backend: str, **modules: str) -> Any:
        sys.modules.pop(PACKAGE, None)
        __import__(PACKAGE)
        sys.modules[PACKAGE].BACKEND = backend
        entries = [EntryPoint(name, module, plugins.GROUP) for name, module in modules.items()]
        loaded = plugins.discover(entries)
        monkeypatch.setattr(plugins, "_plugins", loaded)
        planning.forget()
        return loaded

    yield use
    sys.modules.pop(PACKAGE, None)
    planning.forget()


def test_the_files_are_the_pages() -> None:
    assert list(FILES) == [f"{PACKAGE}/naive.h", f"{PACKAGE}/__init__.py", "pyproject.toml"]
    assert f"contract_version={CONTRACT_VERSION}," in FILES[f"{PACKAGE}/__init__.py"]


def test_it_computes_where_it_is_named(discovered: Callable[..., Any]) -> None:
    loaded = discovered("hostcpp", hostcpp="kernelseam_hostcpp", naive=PACKAGE)
    assert loaded.failures == ()
    backend = loaded.backend("hostcpp")
    device = next(d for d in backend.runtime.devices() if d.arch == "host")
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((1, 33, 20), (1, 20, 17)))
    there = [backend.runtime.from_host(x, device) for x in (a, b)]
    with kernelseam.trace() as launches:
        out = kernelseam.bmm(*there, implementation="naive:128-threads")
    assert [(x.kernel, x.grid, x.block) for x in launches] == [("naive", (5, 1, 1), (128, 1, 1))]
    np.testing.assert_allclose(backend.runtime.to_host(out), a @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", ["naive", "cuda"])
@pytest.mark.parametrize("source", ["measured on H100", "estimated"])
def test_its_prediction_waits_behind_measured_ones(
    discovered: Callable[..., Any],
    first: str,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whichever plugin is loaded first, and whatever it predicts."""
    pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
    modules = {"cuda": "kernelseam_cuda.plugin", "naive": PACKAGE}
    loaded = discovered("cuda", **{n: modules[n] for n in sorted(modules, key=first.__ne__)})
    assert loaded.failures == ()
    plainly = KernelImplementation.cost

    def cost(self: KernelImplementation, problem: Any, device: Any) -> Cost:
        return Cost(1, 1, 1e-9) if self.name == "naive" else plainly(self, problem, device)

    monkeypatch.setattr(KernelImplementation, "cost", cost)
    row = loaded.backend("cuda").toolchain.arch_row("sm_90a")
    fitted = dataclasses.replace(row, costs=dataclasses.replace(row.costs, source=source))
    toolchain = type(loaded.backend("cuda").toolchain)
    monkeypatch.setattr(toolchain, "arch_row", lambda self, arch: fitted)
    size = "--batch 1 --heads 1 --m 64 --n 64 --k 64 --dtype float32 --arch H100"
    with pytest.raises(SystemExit) as ended:
        main(["explain", "gemm", *size.split(), "--json"])
    assert not ended.value.code
    said = json.loads(capsys.readouterr().out)
    rows = {r["implementation"]: r for r in said["implementations"]}
    assert rows["naive"]["seconds"] == 1e-9 < rows["shared"]["seconds"]
    if source == "estimated":
        assert said["chosen"] == "naive"
        return
    assert said["chosen"] != "naive" and rows["shared"]["verdict"] in ("chosen", "takes it")
    assert rows["naive"]["verdict"] == (
        "takes it: of another plugin, after the others until it is tuned"
    )


def test_without_the_backend_doctor_says_so(discovered: Callable[..., Any]) -> None:
    (failure,) = discovered("cuda", naive=PACKAGE).failures
    assert (failure.plugin, failure.stage) == ("naive", "kernelseam_register")
    assert "it adds kernels to backend 'cuda', which is not installed" in failure.message


def test_it_is_compiled_for_a_gpu(
    discovered: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
    loaded = discovered("cuda", cuda="kernelseam_cuda.plugin", naive=PACKAGE)
    assert loaded.failures == ()
    try:
        loaded.backend("cuda").toolchain.compiler()
    except KernelSeamError as e:
        pytest.skip(f"nvrtc is missing: {e}")
    command = "compile gemm --batch 1 --heads 1 --m 64 --n 64 --k 64 --dtype float32 --arch H100"
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--json"])
    assert not ended.value.code
    rows = {r["implementation"]: r for r in json.loads(capsys.readouterr().out)["binaries"]}
    assert rows["naive"]["kernel"] == "naive" and rows["naive"]["spills"] == 0

"""Discovery: what is broken is kept out by name, with its traceback, and harms nobody."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import kernelseam
import numpy as np
import pytest
import strange_plugins
from kernelseam import BatchedGemmStrided, plan, plugins
from kernelseam.contract import CONTRACT_VERSION, PluginInfo
from kernelseam.hookspecs import hookimpl
from kernelseam.plugins import Plugins, discover

MadeOnce = Callable[[str, Callable[[Path], None]], Path]
THIRD_VENDOR = Path(__file__).parents[1] / "plugins" / "thirdvendor"
GOOD = EntryPoint("thirdvendor", "kernelseam_thirdvendor", plugins.GROUP)


ABSENT = EntryPoint("absent", "strange_absent", plugins.GROUP)
KEPT_OUT = {
    "absent": ({}, "import", "ModuleNotFoundError: No module named 'strange_absent'"),
    "raises-on-import": (
        {"IMPORT": "raise RuntimeError('no library')"},
        "import",
        "RuntimeError: no library",
    ),
    "no-info": (
        {"END": "del kernelseam_info"},
        "kernelseam_info",
        "PluginError: kernelseam_info of 'no-info' must return one PluginInfo, got []",
    ),
    "other-contract": (
        {"INFO": "return PluginInfo('strange', '1', 99)"},
        "contract",
        (
            "PluginError: plugin 'other-contract' has contract version 99, this core 2: install "
            "matching versions of both"
        ),
    ),
    "unknown-hook": (
        {"END": "@hookimpl\ndef kernelseam_teleport(): ..."},
        "kernelseam_info",
        "PluginValidationError: unknown hook 'kernelseam_teleport' in plugin",
    ),
    "wrong-arguments": (
        {"END": "@hookimpl\ndef kernelseam_register(registry, moon): ..."},
        "kernelseam_info",
        "PluginValidationError: Plugin 'wrong-arguments' for hook 'kernelseam_register'",
    ),
    "takes-a-taken-name": (
        {"REGISTER": "registry.add_backend(Backend('numpy', Runtime()))"},
        "kernelseam_register",
        "PluginError: backend 'numpy' is already registered by plugin 'reference'",
    ),
    "registers-twice": (
        {"REGISTER": "registry.add_implementation(Gemm())"},
        "kernelseam_register",
        (
            "PluginError: implementation 'strange' of gemm on numpy is already registered by "
            "plugin 'registers-twice'"
        ),
    ),
}
"""Of a strange plugin, the lines that break it, the stage at which it is kept out, and why."""


def broken(folder: Path) -> list[EntryPoint]:
    """All of these, written into a folder."""
    entries = [strange_plugins.write(folder, n, **lines) for n, (lines, *_) in KEPT_OUT.items()]
    (folder / "strange_absent.py").unlink()
    return entries


def multiply(backend: str | None = None) -> None:
    rng = np.random.default_rng(0)
    a, b, c = rng.standard_normal((3, 4)), rng.standard_normal((4, 5)), np.zeros((3, 5))
    plan(BatchedGemmStrided(A=a, B=b, C=c, M=3, N=5, K=4), backend=backend).bind()()
    assert abs(c - a @ b).max() < 1e-12


@pytest.mark.parametrize("name", KEPT_OUT)
def test_a_broken_plugin_is_kept_out(
    written: Callable[..., EntryPoint], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two good ones: the core's own, and one that is found all the same."""
    lines, stage, message = KEPT_OUT[name]
    loaded = discover([ABSENT if name == "absent" else written(name, **lines), GOOD])
    assert set(loaded.loaded) == {"reference", "thirdvendor"}
    assert set(loaded.registry.backends) == {"numpy", "acme"}
    assert [i.name for i in loaded.registry.implementations if i.backend == "acme"] == ["acme-gemm"]
    assert "strange" not in {i.name for i in loaded.registry.implementations}
    (failure,) = loaded.failures
    assert (failure.plugin, failure.stage) == (name, stage)
    assert failure.message.startswith(message)
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    assert failure.message.splitlines()[0] in failure.traceback
    monkeypatch.setattr(plugins, "_plugins", loaded)
    multiply()


@pytest.mark.usefixtures("written")
def test_all_at_once(tmp_path: Path) -> None:
    loaded = discover([*broken(tmp_path), GOOD])
    assert [f.plugin for f in loaded.failures] == list(KEPT_OUT)
    assert set(loaded.loaded) == {"reference", "thirdvendor"}
    report = loaded.doctor()
    assert report["thirdvendor"] == {"devices": ["acme:0 (acme1)", "acme:1 (acme1)"]}
    assert report["reference"]["numpy"] == np.__version__


def test_two_plugins_of_one_name() -> None:
    other = EntryPoint("thirdvendor", "strange_other", plugins.GROUP)
    loaded = discover([GOOD, other, GOOD])
    assert set(loaded.registry.backends) == {"numpy", "acme"}
    assert [(f.plugin, f.stage, f.message) for f in loaded.failures] == [
        (
            "thirdvendor",
            "import",
            (
                "PluginError: two plugins are named 'thirdvendor': kernelseam_thirdvendor is "
                f"loaded, {place} is kept out"
            ),
        )
        for place in ("strange_other", "kernelseam_thirdvendor")
    ]
    (own,) = discover([EntryPoint("reference", "kernelseam_thirdvendor", plugins.GROUP)]).failures
    assert own.message == (
        "PluginError: two plugins are named 'reference': the core's own is loaded, "
        "kernelseam_thirdvendor is kept out"
    )


def test_a_plugin_need_not_be_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plugin:
        @hookimpl
        def kernelseam_info(self) -> PluginInfo:
            return PluginInfo("object", "1", CONTRACT_VERSION)

    module: Any = ModuleType("kernelseam_object_plugin")
    module.plugin = Plugin()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    loaded = discover([EntryPoint("object", "kernelseam_object_plugin:plugin", plugins.GROUP)])
    assert loaded.failures == ()
    assert loaded.loaded["object"].version == "1"


def test_plugins_restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [ABSENT, GOOD]
    monkeypatch.setenv("KERNELSEAM_PLUGINS", " thirdvendor ,, ")
    loaded = discover(entries)
    assert (set(loaded.loaded), loaded.failures) == ({"reference", "thirdvendor"}, ())
    monkeypatch.setenv("KERNELSEAM_PLUGINS", "")
    assert set(discover(entries).loaded) == {"reference"}
    monkeypatch.setenv("KERNELSEAM_PLUGINS", "reference,thirdvendor,thirdvender")
    loaded = discover(entries)
    assert set(loaded.loaded) == {"reference", "thirdvendor"}
    assert [(f.plugin, f.stage, f.message) for f in loaded.failures] == [
        (
            "thirdvender",
            "import",
            (
                "PluginError: KERNELSEAM_PLUGINS names 'thirdvender', but no entry point of that "
                "name is installed"
            ),
        )
    ]
    # over the variable
    assert set(discover(entries, only="thirdvendor").loaded) == {"reference", "thirdvendor"}


def test_discovery_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    created = discover([])

    def counted() -> Plugins:
        calls.append(1)
        return created

    monkeypatch.setattr(plugins, "_plugins", None)
    monkeypatch.setattr(plugins, "discover", counted)
    assert plugins.plugins() is plugins.plugins() is created
    plugins.reset()
    assert plugins.plugins() is created and len(calls) == 2


# ---------------------------------------------------------------- installed for real

SCRIPT = """
import json
import numpy as np
import kernelseam
from kernelseam.plugins import plugins
found = plugins()
from kernelseam_thirdvendor import AcmeArray
a, b = np.arange(12, dtype="f4").reshape(1, 3, 4), np.ones((1, 4, 5), "f4")
with kernelseam.trace() as launches:
    c = kernelseam.bmm(AcmeArray(a), AcmeArray(b))
d = np.zeros((1, 3, 5), "f4")
kernelseam.bmm(a, b, out=d)
print(json.dumps({
    "loaded": sorted(found.loaded), "failures": {f.plugin: [f.stage, f.message, f.traceback] for f in found.failures},
    "kind": type(c).__name__, "same": np.array_equal(c.host, a @ b) and np.array_equal(d, a @ b),
    "launches": [r.kernel for r in launches], "devices": [str(d) for d in kernelseam.devices()],
    "home": kernelseam.__file__,
}))
"""  # noqa: E501


@pytest.fixture(scope="session")
def installed(made_once: MadeOnce, install: Callable[[Path, Path], None]) -> Path:
    """A folder with the third vendor and the broken plugins installed."""

    def both(target: Path) -> None:
        install(THIRD_VENDOR, target)
        broken(target)
        strange_plugins.write(
            target, "raises-in-build", BUILD="raise RuntimeError('no')", DEVICES="return ()"
        )

    return made_once("plugins", both)


@pytest.fixture
def run(installed: Path, reported: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Run the script in a Python of its own that sees what is installed and this core."""

    def call(**variables: str) -> dict[str, Any]:
        core = Path(kernelseam.__file__).parents[1]
        path = os.pathsep.join([str(installed), str(core)])
        return reported(SCRIPT, installed, {**os.environ, "PYTHONPATH": path, **variables})

    return call


def test_an_installed_third_vendor(run: Callable[..., dict[str, Any]]) -> None:
    result = run(KERNELSEAM_PLUGINS="thirdvendor")
    assert result["home"] == kernelseam.__file__
    assert (result["loaded"], result["failures"]) == (["reference", "thirdvendor"], {})
    assert result["kind"] == "AcmeArray" and result["same"]
    assert result["launches"] == ["acme_gemm"]
    assert result["devices"] == ["numpy:0 (cpu)", "acme:0 (acme1)", "acme:1 (acme1)"]


def test_installed_broken_plugins_affect_no_other(run: Callable[..., dict[str, Any]]) -> None:
    names = [*KEPT_OUT, "raises-in-build"]
    result = run(KERNELSEAM_PLUGINS=",".join(["thirdvendor", *names]))
    assert result["same"] and result["launches"] == ["acme_gemm"]
    assert result["loaded"] == ["raises-in-build", "reference", "thirdvendor"]
    assert {n: f[0] for n, f in result["failures"].items()} == {
        n: stage for n, (_, stage, _) in KEPT_OUT.items()
    }
    for name, (_, _, message) in KEPT_OUT.items():
        assert result["failures"][name][1].startswith(message)
        assert "Traceback" in result["failures"][name][2]

"""What unit tests share: refusals compared word for word, and a vendor that is always there."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import strange_plugins
from command_line import Answer, Command
from fakecc import Toolchain
from gloo_ranks import Ranks, ranks_of
from kernelseam import compilation, planning, plugins
from kernelseam.cli import progress
from kernelseam.cli.main import main
from kernelseam.errors import InvalidValue
from refusals import Refused


@pytest.fixture
def refused() -> Refused:
    """``refused(message, call)``: the call raises InvalidValue with exactly this message."""

    def check(message: str, call: Callable[[], object]) -> None:
        with pytest.raises(InvalidValue) as caught:
            call()
        assert str(caught.value) == message

    return check


@pytest.fixture
def discovered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., plugins.Plugins]]:
    """``discovered(module, …)``: the reference and the plugins of these modules are all that the
    test sees."""

    def use(*modules: str) -> plugins.Plugins:
        entries = [
            EntryPoint(m.rpartition(".")[2].replace("_", "-"), m, plugins.GROUP) for m in modules
        ]
        loaded = plugins.discover(entries)
        monkeypatch.setattr(plugins, "_plugins", loaded)
        planning.forget()
        return loaded

    yield use
    planning.forget()


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EntryPoint]]:
    """``written(name, PLACE=line)``: the entry point of a plugin as strange_plugins.py says."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield partial(strange_plugins.write, tmp_path)
    for name in set(sys.modules) - before:
        if name.startswith("strange_"):
            del sys.modules[name]


@pytest.fixture
def strange(
    written: Callable[..., EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., plugins.Plugins]]:
    """``strange(PLACE=line)``: the reference, the strange plugin and the third vendor's are all
    that the test sees."""

    def use(**lines: str) -> plugins.Plugins:
        third = EntryPoint("thirdvendor", "kernelseam_thirdvendor", plugins.GROUP)
        loaded = plugins.discover([written("strange", **lines), third])
        monkeypatch.setattr(plugins, "_plugins", loaded)
        planning.forget()
        return loaded

    yield use
    planning.forget()


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads that take turns far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def acme(discovered: Callable[..., plugins.Plugins]) -> Any:
    """The runtime of the third vendor, whose devices are acme:0 and acme:1."""
    loaded = discovered("kernelseam_thirdvendor")
    assert loaded.failures == ()
    return loaded.backend("acme").runtime


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    discovered: Callable[..., Any],
) -> Command:
    """``command(*arguments)`` → (exit status, standard output, standard error), on the host; Acme
    is there, too."""
    discovered("kernelseam_thirdvendor")
    monkeypatch.setenv("KERNELSEAM_BACKEND", "numpy")
    monkeypatch.setattr(progress, "PATIENCE", 3600)  # a machine may be busy

    def run(*arguments: object) -> Answer:
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty binary cache, not made yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(folder))
    compilation.forget()
    return folder


@pytest.fixture
def toolchain(tmp_path: Path) -> Toolchain:
    """A compiler that has not run."""
    return Toolchain(tmp_path / "notes")


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder of the user that the test runs as, who is not root: root may write anywhere."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if os.geteuid() == 0:
            os.chown(folder, 65534, -1)
            os.seteuid(65534)
            try:
                yield folder
            finally:
                os.seteuid(0)
        else:
            yield folder


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes of torch.distributed, which import once for all tests of this one."""
    with ranks_of(4) as found:
        yield found

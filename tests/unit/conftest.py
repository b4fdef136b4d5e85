"""What unit tests share: refusals compared word for word, and a vendor that is always there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from kernelseam import planning, plugins
from kernelseam.errors import InvalidValue

PLUGINS = Path(__file__).parents[1] / "plugins"
sys.path[:0] = [str(PLUGINS / "thirdvendor"), str(PLUGINS / "broken"), str(Path(__file__).parent)]


@pytest.fixture
def refused() -> Callable[[str, Callable[[], object]], None]:
    """``refused(message, call)``: the call raises InvalidValue with exactly this message."""

    def check(message: str, call: Callable[[], object]) -> None:
        with pytest.raises(InvalidValue) as caught:
            call()
        assert str(caught.value) == message

    return check


@pytest.fixture
def discovered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., plugins.Plugins]]:
    """``discovered(module, …)``: the reference and the plugins of these modules are all that the test sees."""

    def use(*modules: str) -> plugins.Plugins:
        entries = [EntryPoint(m.rpartition(".")[2].replace("_", "-"), m, plugins.GROUP) for m in modules]
        found = plugins.discover(entries)
        monkeypatch.setattr(plugins, "_plugins", found)
        planning.forget()
        return found

    yield use
    planning.forget()


@pytest.fixture
def acme(discovered: Callable[..., plugins.Plugins]) -> Any:
    """The runtime of the third vendor, whose devices are acme:0 and acme:1."""
    found = discovered("kernelseam_thirdvendor")
    assert found.failures == ()
    return found.backend("acme").runtime

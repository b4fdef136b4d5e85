"""Plugins that do not come back: given up after a while, named with the place where they hang,
harming nobody."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam import BatchedGemmStrided, deadline, plan
from kernelseam.containment import Escaped
from kernelseam.deadline import PluginTimeout, probe_seconds, run_with_timeout
from kernelseam.errors import InvalidValue
from kernelseam.plugins import Failure, Plugins, discover
from strange_plugins import HANG, LET_GO

SECONDS = 0.3
DISCOVERY = {
    "import": {"IMPORT": HANG},
    "kernelseam_info": {"INFO": HANG},
    "kernelseam_register": {"REGISTER": f"registry.add_backend(Backend('a', Runtime())); {HANG}"},
}
"""By the stage at which a plugin hangs and is kept out, the line that hangs."""
DEAF = {
    "DEVICES": HANG,
    "DESCRIBE": "return self.devices()",
    "REGISTER": "registry.add_backend(Backend('strange', Runtime(), priority=1000)); return",
}
"""A driver that answers neither about devices nor about arrays."""
Strange = Callable[..., Plugins]


@pytest.fixture(autouse=True)
def impatient(strange: Strange, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A short limit; and whatever hangs comes back when the test is over."""
    before = set(threading.enumerate())
    monkeypatch.setenv("KERNELSEAM_PROBE_SECONDS", str(SECONDS))
    yield
    LET_GO.set()
    for thread in set(threading.enumerate()) - before:
        if not thread.name.startswith("kernelseam-numpy"):  # these wait for work, not for a plugin
            thread.join(60)
    LET_GO.clear()


@pytest.mark.parametrize("stage", DISCOVERY)
def test_a_plugin_that_hangs_is_kept_out(strange: Strange, stage: str) -> None:
    start = time.monotonic()
    loaded = strange(**DISCOVERY[stage])
    assert SECONDS <= time.monotonic() - start < SECONDS + 5
    assert set(loaded.loaded) == {"reference", "thirdvendor"}
    assert set(loaded.registry.backends) == {"numpy", "acme"}
    (failure,) = loaded.failures
    assert (failure.plugin, failure.stage) == ("strange", stage)
    what = "its import" if stage == "import" else stage
    assert failure.message.startswith(
        f"PluginTimeout: {what} did not come back within 0.3 s (KERNELSEAM_PROBE_SECONDS). It "
        "hangs in wait, "
    )
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    assert "Its thread still runs here:\n" in failure.traceback
    assert "strange_strange.py" in failure.traceback and "hang()" in failure.traceback


def test_a_probe_that_hangs(strange: Strange, caplog: pytest.LogCaptureFixture) -> None:
    loaded = strange(**DEAF)
    assert loaded.failures == ()  # nobody has asked for devices yet
    start = time.monotonic()
    assert [str(d) for d in loaded.devices()] == [
        "numpy:0 (cpu)",
        "acme:0 (acme1)",
        "acme:1 (acme1)",
    ]
    assert time.monotonic() - start < SECONDS + 5
    assert "backend strange does not list its devices" in caplog.text
    a = np.ones((2, 3, 4), np.float32)
    kernelseam.bmm(a, a.swapaxes(1, 2))  # a first call imports
    start, times = time.monotonic(), 10  # from now on nobody waits for it
    for _ in range(times):
        assert np.array_equal(kernelseam.bmm(a, a.swapaxes(1, 2)), a @ a.swapaxes(1, 2))
        assert (
            str(plan(BatchedGemmStrided(M=3, N=5, K=4, dtype="float32")).device) == "numpy:0 (cpu)"
        )
        with pytest.raises(
            PluginTimeout,
            match="listing the devices of backend strange did not come back within 0.3 s",
        ) as caught:
            plan(BatchedGemmStrided(M=3, N=5, K=4, dtype="float32"), backend="strange")
        assert "strange_strange.py" in caught.value.stack
    assert time.monotonic() - start < times * SECONDS


def test_a_probe_that_hangs_does_not_hide_an_array(strange: Strange) -> None:
    """The backend of the highest priority is asked first, and is given up."""
    strange(**DEAF)
    from kernelseam_thirdvendor import AcmeArray

    a, b = np.ones((2, 3, 4), np.float32), np.ones((2, 4, 5), np.float32)
    start = time.monotonic()
    assert np.array_equal(kernelseam.bmm(AcmeArray(a), AcmeArray(b)).host, a @ b)
    assert SECONDS <= time.monotonic() - start < SECONDS + 5
    with pytest.raises(
        InvalidValue,
        match="strange could not be asked: PluginTimeout: listing the devices of backend strange",
    ):
        kernelseam.bmm(object(), object())


def test_a_report_that_hangs(strange: Strange) -> None:
    report = strange(DOCTOR=HANG, REGISTER="return").doctor()
    assert report["thirdvendor"] == {"devices": ["acme:0 (acme1)", "acme:1 (acme1)"]}
    failure = report["strange"]
    assert isinstance(failure, Failure) and failure.stage == "kernelseam_doctor"
    assert failure.message.startswith(
        "PluginTimeout: kernelseam_doctor did not come back within 0.3 s"
    )


@pytest.mark.parametrize(
    ("stage", "lines"),
    [
        *DISCOVERY.items(),
        ("devices", DEAF),
        ("kernelseam_doctor", {"DOCTOR": HANG, "REGISTER": "return"}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_doctor_names_what_hangs(
    command: Callable[..., Any], strange: Strange, stage: str, lines: dict[str, str]
) -> None:
    strange(**lines)
    status, out, err = command("doctor", "--json")
    assert (status, err) == (0, "")
    (failure,) = json.loads(out)["failures"]
    assert (failure["plugin"], failure["stage"]) == ("strange", stage)
    assert failure["message"].startswith("PluginTimeout: ")
    assert "strange_strange.py" in failure["traceback"]
    shown = command("doctor", "--no-check")[1]
    assert f"strange failed at {stage}: PluginTimeout: " in shown


def test_what_is_raised_under_the_limit_is_raised() -> None:
    assert run_with_timeout(5, "adding", lambda x, y: x + y, 1, y=2) == 3
    with pytest.raises(ZeroDivisionError):
        run_with_timeout(5, "dividing", lambda: 1 // 0)
    with pytest.raises(Escaped, match="^leaving raised SystemExit: 3$"):
        run_with_timeout(5, "leaving", lambda: (_ for _ in ()).throw(SystemExit(3)))
    assert run_with_timeout(float("inf"), "waiting for ever", lambda: "back") == "back"


def test_the_thread_sees_its_callers_context(discovered: Callable[..., Any]) -> None:
    discovered("kernelseam_thirdvendor")
    from kernelseam.dispatch import preferred_backend

    with kernelseam.use_backend("acme"):
        assert run_with_timeout(5, "asking", preferred_backend) == "acme"


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan"])
def test_a_limit_that_is_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELSEAM_PROBE_SECONDS", value)
    message = (
        f"KERNELSEAM_PROBE_SECONDS = {value}: must be a positive number of seconds. Leave "
        "it unset, or set it to 30."
    )
    with pytest.raises(InvalidValue) as caught:
        discover([])
    assert str(caught.value) == message


def test_the_limit_where_none_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELSEAM_PROBE_SECONDS", "")
    assert probe_seconds() == deadline.DEFAULT == 30
    monkeypatch.setenv("KERNELSEAM_PROBE_SECONDS", "2.5")
    assert probe_seconds() == 2.5

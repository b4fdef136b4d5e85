"""Whatever a plugin raises, returns or prints: it is kept out or passed over by name, and the
program goes on."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernelseam
import numpy as np
import pytest
import strange_plugins
from kernelseam import BatchedGemmStrided, plan, plugins
from kernelseam.containment import Escaped
from kernelseam.errors import BrokenImplementation, InvalidValue, PluginError
from kernelseam.parity.report import summary
from kernelseam.parity.running.run import targets
from kernelseam.plugins import Failure, Plugins, discover
from refusals import cases

RAISED = {
    "SystemExit(0)": "SystemExit: 0",
    "SystemExit(Mute())": "SystemExit, whose message is not available: __str__ raised RuntimeError",
    "Mute()": "Mute, whose message is not available: __str__ raised RuntimeError",
    r"OSError('/tmp/\udcff')": r"OSError: /tmp/\udcff",
}
every_kind = pytest.mark.parametrize(
    ("raised", "said"),
    RAISED.items(),
    ids=["exits", "exits mutely", "is mute", "cannot be encoded"],
)
Strange = Callable[..., Plugins]
HOST = kernelseam.devices()[-1]
MEMORY = HOST.limits.memory_bytes
PARTS = "build() of 'strange': PlanParts"
GEMM = BatchedGemmStrided(M=3, N=5, K=4, dtype="float64")


def multiply() -> str:
    """By descriptor and on arrays, on the default device; the implementation's name."""
    rng = np.random.default_rng(0)
    a, b, c = rng.standard_normal((3, 4)), rng.standard_normal((4, 5)), np.zeros((3, 5))
    planned = plan(BatchedGemmStrided(A=a, B=b, C=c, M=3, N=5, K=4))
    planned.bind()()
    assert abs(c - a @ b).max() < 1e-12
    assert abs(kernelseam.bmm(a[None], b[None])[0] - a @ b).max() < 1e-12
    return planned.implementation


def only_failure(loaded: Plugins) -> Failure:
    (failure,) = loaded.failures
    assert failure.plugin == "strange"
    assert "Traceback (most recent call last):\n" in failure.traceback
    assert set(loaded.loaded) == {"reference", "thirdvendor"} and set(loaded.registry.backends) == {
        "numpy",
        "acme",
    }
    assert "strange" not in {i.name for i in loaded.registry.implementations}
    return failure


def doctor(
    command: Callable[..., Any], actual: Plugins, monkeypatch: pytest.MonkeyPatch, *more: str
) -> dict[str, Any]:
    monkeypatch.setattr(plugins, "_plugins", actual)  # ``command`` has put others there
    status, out, err = command("doctor", "--json", *more)
    assert (status, err) == (0, "")
    reported: dict[str, Any] = json.loads(out)
    return reported


# ---------------------------------------------------------------- what it raises


@every_kind
@pytest.mark.parametrize(
    ("place", "stage"),
    [("IMPORT", "import"), ("INFO", "kernelseam_info"), ("REGISTER", "kernelseam_register")],
)
def test_it_is_kept_out(strange: Strange, place: str, stage: str, raised: str, said: str) -> None:
    failure = only_failure(strange(**{place: f"raise {raised}"}))
    assert (failure.stage, failure.message) == (stage, said)
    assert (
        "strange_strange.py" in failure.traceback
        and said.partition(",")[0].partition(":")[0] in failure.traceback
    )
    assert multiply() == "numpy"


@every_kind
@pytest.mark.parametrize("place", ["SUPPORTS", "COST"])
def test_a_check_refuses(strange: Strange, place: str, raised: str, said: str) -> None:
    strange(**{place: f"raise {raised}"})
    assert multiply() == "numpy"
    (broken,) = (c for c in plan(GEMM, device="numpy").choice.candidates if c.refusal)
    assert (broken.implementation.name, broken.refusal) == ("strange", f"its check raised {said}")
    assert (
        "Traceback (most recent call last):\n" in broken.error
        and "strange_strange.py" in broken.error
    )


@every_kind
def test_another_is_built(strange: Strange, raised: str, said: str) -> None:
    strange(BUILD=f"raise {raised}")
    with pytest.warns(BrokenImplementation) as warned:
        assert multiply() == "numpy"
    assert str(warned[0].message).endswith(f"are broken. strange: its build raised {said}")
    try:
        plan(GEMM, device="numpy", implementation="strange")
    except Escaped as e:  # whoever asks for it is told whose it is
        assert str(e) == f"the build of 'strange', gemm on numpy:0 (cpu), raised {said}"
        assert type(e.__cause__) is SystemExit
    except Exception as e:
        assert type(e).__name__ in ("Mute", "OSError")


@every_kind
def test_a_backend_without_devices(
    strange: Strange, caplog: pytest.LogCaptureFixture, raised: str, said: str
) -> None:
    loaded = strange(DEVICES=f"raise {raised}")
    assert [str(d) for d in loaded.devices()] == [
        "numpy:0 (cpu)",
        "acme:0 (acme1)",
        "acme:1 (acme1)",
    ]
    assert "backend strange does not list its devices" in caplog.text
    assert multiply() == "strange"


def test_devices_are_listed_once_but_again_after_a_failure(strange: Strange) -> None:
    loaded = strange(DEVICES="if Runtime.listed == 1: sys.exit()\n        return (DEVICE,)")
    backend = loaded.backend("strange")
    with pytest.raises(Escaped):
        loaded.devices_of(backend)
    for _ in range(3):
        assert [str(d) for d in loaded.devices_of(backend)] == ["strange:0 (strange1)"]
    assert backend.runtime.listed == 2  # type: ignore[attr-defined]


@every_kind
def test_naming_a_broken_backend_raises(strange: Strange, raised: str, said: str) -> None:
    strange(DEVICES=f"raise {raised}")
    with pytest.raises(Exception) as caught:
        plan(GEMM, backend="strange")
    if caught.type is Escaped:
        assert str(caught.value) == f"listing the devices of backend strange raised {said}"
    else:
        assert caught.type.__name__ in ("Mute", "OSError")


@every_kind
def test_it_does_not_hide_an_array(strange: Strange, raised: str, said: str) -> None:
    strange(DEVICES="return ()", DESCRIBE=f"raise {raised}")
    from kernelseam_thirdvendor import AcmeArray

    a = np.ones((2, 3, 3), np.float32)
    assert np.array_equal(kernelseam.bmm(AcmeArray(a), AcmeArray(a)).host, a @ a)
    with pytest.raises(InvalidValue) as caught:
        kernelseam.bmm(object(), object())
    assert f"strange could not be asked: {said}" in str(caught.value).replace(
        "describe of backend strange raised ", ""
    )


@every_kind
@pytest.mark.parametrize(
    ("place", "stage"),
    [
        ("DOCTOR", "kernelseam_doctor"),
        ("DEVICES", "devices"),
        ("ARCHS", "archs"),
        ("COMPILER", "compiler"),
    ],
)
def test_doctor_tells(
    strange: Strange,
    command: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    stage: str,
    raised: str,
    said: str,
) -> None:
    reported = doctor(command, strange(**{place: f"raise {raised}"}), monkeypatch, "--no-check")
    (failure,) = reported["failures"]
    assert (failure["plugin"], failure["stage"], failure["message"]) == ("strange", stage, said)
    assert {p["plugin"] for p in reported["plugins"]} == {"reference", "strange", "thirdvendor"}
    assert f"strange failed at {stage}: " in command("doctor", "--no-check")[1]


@pytest.mark.parametrize("place", ["SUPPORTS", "BUILD"])
def test_doctor_tries_it_out(
    strange: Strange, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    loaded = strange(**{place: "sys.exit(0)", "DEVICES": "return ()"})
    reported = doctor(command, loaded, monkeypatch)
    (failure,) = reported["failures"]
    assert (failure["plugin"], failure["stage"]) == ("strange", place.lower())
    assert failure["message"].endswith("raised SystemExit: 0") or failure["message"].endswith(
        "SystemExit: 0"
    )
    states = {
        f["implementation"]: f["state"] for f in reported["examined"] if f["operation"] == "gemm"
    }
    assert states == {"numpy": "right", "strange": "broken", "acme-gemm": "right"}


def test_a_launch_that_exits_is_a_finding(
    strange: Strange, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = (
        "parts = super().build(problem, device); from dataclasses import replace; from types "
        "import SimpleNamespace; return PlanParts((SimpleNamespace(record=parts.steps[0].record, "
        "bind=lambda *_: lambda stream: sys.exit(0)),))"
    )
    reported = doctor(command, strange(BUILD=step, DEVICES="return ()"), monkeypatch)
    (failure,) = reported["failures"]
    assert (failure["plugin"], failure["stage"]) == ("strange", "call")
    assert failure["message"] == "strange of gemm on numpy:0 (cpu): SystemExit: 0"


# ---------------------------------------------------------------- what it returns


@pytest.mark.parametrize(
    ("place", "line", "stage", "message"),
    cases("plugins_contained", "values", globals()),
)
def test_a_field_of_a_wrong_kind(
    strange: Strange, place: str, line: str, stage: str, message: str
) -> None:
    failure = only_failure(strange(**{place: line}))
    assert (failure.stage, failure.message) == (stage, f"PluginError: {message}")
    assert multiply() == "numpy"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("return None", " must be a sequence of Device, got None"),
        ("return {0: 'x'}", " must be a sequence of Device, got {0: 'x'}"),
        ("return ['strange:0']", " must be a Device, got 'strange:0'"),
        ("return [Device('numpy', 0, 'cpu')]", ": Device.backend = 'numpy': must be 'strange'"),
        (
            "return [Device('strange', '0', 'a')]",
            ": Device.index = '0': must be an int of at least 0",
        ),
        (
            "return [Device('strange', 0, None)]",
            ": Device.arch = None: must be a non-empty str",
        ),
        ("return [Device('strange', 0, 'a', 7)]", ": Device.name = 7: must be a str"),
        ("return [Device('strange', 0, 'a', limits={})]", " must be a DeviceLimits, got {}"),
        (
            "return [Device('strange', 0, 'a', limits=DeviceLimits(bytes_per_second=0))]",
            ": DeviceLimits.bytes_per_second = 0: must be a number above 0",
        ),
        (
            (
                "return [Device('strange', 0, 'a', "
                "limits=DeviceLimits(operations_per_second={'float16': 'fast'}))]"
            ),
            (
                ": DeviceLimits.operations_per_second = {'float16': 'fast'}: must map names of "
                "dtypes to numbers above 0"
            ),
        ),
    ],
)
def test_what_are_no_devices(
    strange: Strange,
    command: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    text: str,
) -> None:
    loaded = strange(DEVICES=line)
    assert [d.backend for d in loaded.devices()] == ["numpy", "acme", "acme"]
    assert multiply() == "strange"  # on the host: it is the backend that is broken
    with pytest.raises(PluginError) as caught:
        plan(GEMM, backend="strange")
    message = str(caught.value)
    assert message.startswith("devices() of backend 'strange'" + text)
    (failure,) = doctor(command, loaded, monkeypatch, "--no-check")["failures"]
    assert (failure["stage"], failure["message"]) == ("devices", f"PluginError: {message}")


@pytest.mark.parametrize(
    ("place", "line", "message"),
    [
        (
            "SUPPORTS",
            "return True",
            "supports() of 'strange' must be None or a str with the reason, got True",
        ),
        ("COST", "return 1.0", "cost() of 'strange' must be a Cost, got 1.0"),
        (
            "COST",
            "return Cost(0, 0, 'fast')",
            "cost() of 'strange': Cost.seconds = 'fast': must be a number of at least 0",
        ),
        (
            "COST",
            "return Cost(0, 0, -1.0)",
            "cost() of 'strange': Cost.seconds = -1.0: must be a number of at least 0",
        ),
    ],
)
def test_what_is_no_answer(
    strange: Strange,
    command: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    line: str,
    message: str,
) -> None:
    loaded = strange(**{place: line})
    assert multiply() == "numpy"
    monkeypatch.setattr(plugins, "_plugins", loaded)
    rows = json.loads(command("explain", "gemm", "--json")[1])["implementations"]
    (row,) = (r for r in rows if r["implementation"] == "strange")
    assert (row["verdict"], row["reason"]) == (
        "refused",
        f"its check raised PluginError: {message}",
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("return None", "build() of 'strange' must be a PlanParts, got None"),
        ("return PlanParts(None)", "build() of 'strange': PlanParts.steps = None: must be a tuple"),
        (
            "return PlanParts((), -1)",
            f"{PARTS}.workspace_bytes = -1: must be an int from 0 to 2**63 - 1",
        ),
        (
            "return PlanParts((Step(),), 2**60)",
            f"{PARTS}.workspace_bytes = {2**60}: must fit into the {MEMORY} bytes of {HOST}",
        ),
        (
            "return PlanParts((Step(),), 16, 24)",
            f"{PARTS}.workspace_alignment = 24: must be a power of two, below 2**32",
        ),
        (
            "return PlanParts((Step(),), 16, 16, 999)",
            f"{PARTS}.zeroed_bytes = 999: must be at most workspace_bytes = 16",
        ),
        (
            "return PlanParts(())",
            "build() of 'strange': no step, so that nothing writes C",
        ),
        (
            "return PlanParts((7,))",
            "build() of 'strange': a step's record must be a LaunchRecord, got None",
        ),
    ],
)
def test_what_is_no_plan(strange: Strange, line: str, message: str) -> None:
    strange(BUILD=line)
    with pytest.warns(BrokenImplementation) as warned:
        assert multiply() == "numpy"
    assert str(warned[0].message).endswith(f"strange: its build raised PluginError: {message}")
    with pytest.raises(PluginError) as caught:
        plan(GEMM, device="numpy", implementation="strange")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("return None", "must return launch(stream), got None"),
        ("return 7", "must return launch(stream), got 7"),
        (
            "raise KeyError('A')",
            "raised KeyError: 'A'. Name another implementation, or leave that plugin out",
        ),
    ],
)
def test_a_step_that_cannot_be_bound(strange: Strange, line: str, message: str) -> None:
    strange(BUILD="return PlanParts((Step(),))", BIND=line)
    planned = plan(GEMM, device="numpy")
    assert planned.implementation == "strange"
    x = {"A": np.zeros((3, 4)), "B": np.zeros((4, 5)), "C": np.zeros((3, 5))}
    for bind in (lambda: planned.bind(**x), multiply):
        with pytest.raises(PluginError) as caught:
            bind()
        assert str(caught.value) == f"bind() of 'strange', step 'strange_step', {message}"


def test_a_step_that_refuses_keeps_its_words(strange: Strange) -> None:
    strange(
        BUILD="return PlanParts((Step(),))", BIND="raise InvalidValue('A', 1, 'is odd', 'Add one')"
    )
    with pytest.raises(InvalidValue, match=r"^A = 1: is odd\. Add one\.$"):
        multiply()


def test_invalid_archs_do_not_hide_others(
    strange: Strange, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = strange(ARCHS="return 'strange1'")
    (failure,) = doctor(command, loaded, monkeypatch, "--no-check")["failures"]
    assert (failure["plugin"], failure["stage"]) == ("strange", "archs")
    assert (
        failure["message"]
        == "PluginError: archs of backend 'strange' must be a tuple of str, got 'strange1'"
    )
    status, _, err = command("compile", "gemm", "--arch", "sm_1")
    assert status == 2 and "arch = sm_1: no installed plugin compiles" in err


def test_a_toolchain_that_exits(
    strange: Strange, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = strange(REGISTER="Toolchain.arch_row = Toolchain.compiler = lambda *_: sys.exit(0)")
    monkeypatch.setattr(plugins, "_plugins", loaded)
    assert command("compile", "gemm", "--arch", "strange1") == (
        1,
        "",
        "error: the toolchain of backend strange raised SystemExit: 0\n",
    )
    wanted = targets(loaded, "strange")
    assert {t.device.backend for t in wanted} == {"strange"} and not any(t.flushed for t in wanted)
    assert (
        dict(summary.facts(loaded, wanted))["compiler of strange"]
        == "none: its compiler() raised SystemExit: 0"
    )


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (
            "return {'a': Mute, 2: {'b': (DEVICE, None)}}",
            {"a": "<class", "2": {"b": ["strange:0 (strange1)", None]}},
        ),
        ("return [('a', 1)]", {"a": 1}),
    ],
)
def test_a_report_is_plain_data(strange: Strange, line: str, wanted: dict[str, Any]) -> None:
    reported = strange(DOCTOR=line).doctor()["strange"]
    reported["a"] = reported["a"][:6] if isinstance(reported["a"], str) else reported["a"]
    assert reported == wanted


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("return None", "TypeError: 'NoneType' object is not iterable"),
        ("x = {}; x['x'] = x; return x", "RecursionError: maximum recursion depth exceeded"),
        ("return {'a': Mute()}", "RuntimeError: not a word"),
    ],
)
def test_a_report_that_is_none(strange: Strange, line: str, message: str) -> None:
    failure = strange(DOCTOR=line).doctor()["strange"]
    assert isinstance(failure, Failure) and failure.message.startswith(message)


# ---------------------------------------------------------------- what surrounds it


def test_a_plugin_that_asks_for_the_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for itself."""
    monkeypatch.syspath_prepend(tmp_path)
    entry = strange_plugins.write(
        tmp_path, "asking", IMPORT="from kernelseam import plugins; plugins.plugins()"
    )
    monkeypatch.setattr(plugins, "_plugins", None)
    real = plugins.discover
    monkeypatch.setattr(plugins, "discover", lambda: real([entry]))
    (failure,) = plugins.plugins().failures
    assert failure.message == (
        "PluginError: a plugin asks for the plugins during discovery: it would wait for itself"
    )


@pytest.mark.parametrize("entry_points", [b"[kernelseam]\nnonsense\n", b"[kernelseam]\n\xff = a\n"])
def test_metadata_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry_points: bytes
) -> None:
    """Of a distribution that need not be a plugin at all."""
    damaged = tmp_path / "damaged-1.dist-info"
    damaged.mkdir()
    (damaged / "METADATA").write_text("Metadata-Version: 2.1\nName: damaged\nVersion: 1\n")
    (damaged / "entry_points.txt").write_bytes(entry_points)
    strange_plugins.write(tmp_path, "sound")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = discover(only="sound")
    assert set(loaded.loaded) == {"reference", "sound"}
    (failure,) = loaded.failures
    assert (failure.plugin, failure.stage) == (f"damaged in {tmp_path}", "metadata")
    assert failure.message.partition(":")[0] in ("TypeError", "UnicodeDecodeError")


NOISE = (
    "print('a banner'); os.write(1, b'of C\\n'); os.system('echo of a child'); import atexit; "
    "atexit.register(print, 'bye')"
)


@pytest.mark.parametrize(
    "arguments", [("doctor", "--no-check"), ("gemm", "--m", "8", "--n", "8", "--k", "8")]
)
def test_json_is_the_only_output(
    tmp_path: Path, python_command: list[str], arguments: tuple[str, ...]
) -> None:
    for i, place in enumerate(("IMPORT", "INFO", "DEVICES", "BUILD", "DOCTOR")):
        strange_plugins.write(
            tmp_path,
            f"loud{i}",
            **{place: f"{NOISE}; {strange_plugins.SOUND_LINES[place]}"},
            REGISTER=f"Gemm.name = 'loud{i}'; Toolchain.backend = 'loud{i}'; "
            f"registry.add_backend(Backend('loud{i}', Runtime())); return",
        )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(kernelseam.__file__).parents[1])]),
        "KERNELSEAM_BACKEND": "numpy",
        "KERNELSEAM_PLUGINS": ",".join(f"loud{i}" for i in range(5)),
    }
    done = subprocess.run(
        [*python_command, "-m", "kernelseam", *arguments, "--json"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)
    for line in ("a banner", "of C", "of a child", "bye"):
        assert line in done.stderr

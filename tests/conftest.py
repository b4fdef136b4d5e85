"""What all tests share: a cache of their own, and what must not be skipped.

KERNELSEAM_REQUIRE is a comma-separated list of what is installed for sure ("nvrtc", "hiprtc",
"gpu"). A test that is skipped for the lack of one of them — its reason begins with the name, as in
"hiprtc is missing: …" — fails instead.

A C library may be under a loader of its own (``tools/get-hiprtc.sh``): then the variable
KERNELSEAM_HIP_RUN names the program that starts others under it, and a child started from
``sys.executable`` alone would come up without it. Tests that start Python and need what this
process has take the command from the fixture ``python_command``, or fork.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from filelock import FileLock

# An example's time says how busy the machine is, not whether it is right. What is active already is
# hypothesis' own, which differs where CI is set.
hypothesis.settings.register_profile("kernelseam", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("kernelseam")

ROOT = Path(__file__).parents[1]
sys.path[:0] = [
    str(ROOT / folder)
    for folder in (
        "tests/plugins/thirdvendor",
        "tests/plugins/hostcpp",
        "tests/unit/helpers",
        "tests/host/helpers",
        "tests/gpu/helpers",
        "tests/crosscompile/helpers",
        "tools",
    )
]
sys.path.append(str(ROOT))  # the package ``benchmarks``

REQUIRED = tuple(
    name for name in re.split(r"[,\s]+", os.environ.get("KERNELSEAM_REQUIRE", "").lower()) if name
)

_cache = None
if "KERNELSEAM_CACHE_DIR" not in os.environ:  # before any test module is imported
    _cache = os.environ["KERNELSEAM_CACHE_DIR"] = tempfile.mkdtemp(prefix="kernelseam-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _cache is not None:
        shutil.rmtree(_cache, ignore_errors=True)


def pytest_report_header(config: pytest.Config) -> str:
    return (
        f"kernelseam: required: {', '.join(REQUIRED) or 'nothing'}; cache: "
        f"{os.environ['KERNELSEAM_CACHE_DIR']}"
    )


def forbidden(reason: str) -> str | None:
    """Which required thing a skip complains about, or None."""
    text = reason.removeprefix("Skipped: ").lower()
    return next((name for name in REQUIRED if re.match(rf"{re.escape(name)}\b", text)), None)


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if (
        report.outcome != "skipped"
        or hasattr(report, "wasxfail")
        or not isinstance(report.longrepr, tuple)
    ):
        return
    reason = report.longrepr[2]
    if name := forbidden(reason):
        report.outcome = "failed"
        report.longrepr = (
            f"{name} is required here (KERNELSEAM_REQUIRE), yet this was skipped: {reason}"
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What collection leaves, 16,000 tests and what they import, stays to the end: no garbage
    collection looks at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Of a run without the slow tests, no items are made of slow parameters, half of all: each
    process of the run collects anew."""
    if metafunc.config.option.markexpr != "not slow":
        return
    parametrize = metafunc.parametrize

    def fast(names: Any, values: Any, *more: Any, **options: Any) -> None:
        values = list(values)
        if options.get("ids") is None or callable(options["ids"]):
            values = [
                v for v in values if not any(m.name == "slow" for m in getattr(v, "marks", ()))
            ] or values
        parametrize(names, values, *more, **options)

    metafunc.parametrize = fast  # type: ignore[assignment]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("slow"):
            if not mark.args:
                raise pytest.UsageError(f"{item.nodeid}: say why: pytest.mark.slow(reason)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_skip(report)
    # A worker of ``pytest -n`` sends its reports as UTF-8: no lone surrogates in captured output.
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip(report)
    return report


def _python() -> list[str]:
    run = os.environ.get("KERNELSEAM_HIP_RUN")
    return [run, sys.executable] if run else [sys.executable]


@pytest.fixture(scope="session")
def python_command() -> list[str]:
    """The start of a command line that runs this Python under the loader that this process runs
    under."""
    return _python()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """``pytest -n``: workers start under the same loader, too."""
    for spec in specs:
        spec.python = spec.python or shlex.join(_python())


@pytest.fixture(scope="session")
def reported(python_command: list[str]) -> Callable[[str, Path, Mapping[str, str]], dict[str, Any]]:
    """``reported(script, folder, environment)``: what a script prints as JSON, run in the folder by
    a Python of its own."""

    def run(script: str, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
        done = subprocess.run(
            [*python_command, "-c", script],
            capture_output=True,
            text=True,
            env=environment,
            cwd=folder,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    return run


@pytest.fixture(scope="session")
def install(python_command: list[str]) -> Callable[[Path, Path], None]:
    """``install(distribution, target)``: from its folder into another by pip, as anyone would,
    without what it needs."""
    for tool in ("hatchling", "pip"):
        pytest.importorskip(
            tool, reason=f"{tool} is missing: it builds or installs the distributions of this test"
        )
    pip = [*python_command, "-m", "pip", "install", "--quiet", "--no-compile"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target"]

    def run(distribution: Path, target: Path) -> None:
        command = [*pip, *options, str(target), str(distribution)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=target, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


MadeOnce = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def made_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """``made_once(name, make)``: the folder ``name``, filled by ``make(folder)`` in one process of
    a run: the other workers of ``pytest -n`` wait for it."""
    base = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        base = base.parent

    def once(name: str, make: Callable[[Path], None]) -> Path:
        folder = base / f"once-{name}"
        with FileLock(base / f"once-{name}.lock"):
            if not (folder / ".complete").exists():
                folder.mkdir()
                make(folder)
                (folder / ".complete").touch()
        return folder

    return once

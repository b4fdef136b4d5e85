"""The host platform in tests: found beside them, and needed for all of them a C++ compiler."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernelseam import planning, plugins
from kernelseam.contract import LaunchConfig, SourceBundle
from kernelseam.errors import CompileError
from kernelseam.kernels.sources import shared_sources
from kernelseam_hostcpp import HostToolchain, compiler
from kernelseam_hostcpp.executable import BUILDS, SANITIZERS
from kernelseam_hostcpp.toolchain import kernel_of

Probe = Callable[..., None]
CORES = len(os.sched_getaffinity(0))


@pytest.fixture(scope="session", autouse=True)
def _compiler() -> None:
    try:
        compiler.version()
    except CompileError as e:
        pytest.skip(f"a C++ compiler is missing: {e.log}")


@pytest.fixture
def hostcpp(monkeypatch: pytest.MonkeyPatch) -> Iterator[plugins.Plugins]:
    """The reference and the host platform are all that the test sees."""
    loaded = plugins.discover([EntryPoint("hostcpp", "kernelseam_hostcpp", plugins.GROUP)])
    assert loaded.failures == ()
    monkeypatch.setattr(plugins, "_plugins", loaded)
    planning.forget()
    yield loaded
    planning.forget()


class Ahead:
    """What the selected tests of a function compile and run, begun while the tests before them are
    still at it, so that every core has work: ``ahead(node)`` is the result for a test, of ``work``
    over its parameters."""

    def __init__(
        self, pool: ThreadPoolExecutor, items: list[Any], work: Callable[..., Any], window: int
    ) -> None:
        self._pool, self._work, self._window = pool, work, window
        self._parameters = {i.nodeid: i.callspec.params for i in items}
        self._order = {name: at for at, name in enumerate(self._parameters)}
        self._begun: dict[str, Future[Any]] = {}

    def __call__(self, node: pytest.Item) -> Any:
        first = self._order[node.nodeid]
        for name in list(self._order)[first : first + self._window]:
            if name not in self._begun:
                self._begun[name] = self._pool.submit(self._work, **self._parameters[name])
        return self._begun[node.nodeid].result()


@pytest.fixture(scope="module")
def ahead(request: pytest.FixtureRequest) -> Iterator[Callable[..., Ahead]]:
    """``ahead("test_name", work)`` for the tests of that name in this module."""
    pool = ThreadPoolExecutor(CORES)

    def start(test: str, work: Callable[..., Any], window: int = CORES + 1) -> Ahead:
        mine = [
            i
            for i in request.session.items
            if i.path == request.path and getattr(i, "originalname", "") == test
        ]
        return Ahead(pool, mine, work, 1 if "PYTEST_XDIST_WORKER" in os.environ else window)

    yield start
    pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def has_sanitizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """``has_sanitizer("thread")`` skips the test where executables with these options cannot be
    made or started."""
    known: dict[str, str] = {}
    folder = tmp_path_factory.mktemp("sanitizers")

    def check(name: str) -> None:
        if name not in known:
            program = folder / name
            (folder / "empty.cpp").write_text("int main() { return 0; }\n", encoding="utf-8")
            line = [
                *compiler.command(),
                *SANITIZERS[name],
                str(folder / "empty.cpp"),
                "-o",
                str(program),
            ]
            done = subprocess.run(line, capture_output=True, text=True)
            if not done.returncode:
                done = subprocess.run([program], capture_output=True, text=True)
            known[name] = done.stderr[-300:] if done.returncode else ""
        if known[name]:
            pytest.skip(f"the {name} sanitizer is missing: {known[name]}")

    return check


@pytest.fixture
def probe() -> Probe:
    """``probe(text, threads, *arrays)`` runs the kernel ``probe`` of a text over arrays, in
    place."""

    def run(
        text: str,
        threads: int,
        *arrays: npt.NDArray[np.generic],
        grid: int = 1,
        shared: int = 0,
        through_registers: bool = False,
        contracted: bool = False,
        e4m3: int = 1,
    ) -> None:
        toolchain = HostToolchain()
        files = {n: t for n, t in shared_sources().items() if n.startswith("tile/")}
        files.update(toolchain.platform_files("host"))
        files["platform.h"] = files.pop("platform_host.h")
        files["probe.h"] = f'#include "tile/tile.h"\n{text}'
        options = (
            *toolchain.arch_row("host").options,
            *(BUILDS["contracted"] if contracted else ()),
        )
        source = SourceBundle(
            "probe",
            "probe.h",
            tuple(sorted(files.items())),
            (("KS_THROUGH_REGISTERS", str(int(through_registers))), ("KS_E4M3", str(e4m3))),
            options,
        )
        kernel = kernel_of(source)
        assert kernel.parameters == tuple((8 * i, 8) for i in range(len(arrays)))
        arguments = struct.pack(f"{len(arrays)}Q", *(x.ctypes.data for x in arrays))
        kernel.prepare(LaunchConfig((grid, 1, 1), (threads, 1, 1), shared), arguments)(0)

    return run

"""The binary cache on disks that are full or cannot be written: the binary is there all the
same."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
from fakecc import BUNDLE, Toolchain, again, quietly
from kernelseam import compilation
from kernelseam.compilation import CacheWarning
from kernelseam.errors import CompileError

FORK = multiprocessing.get_context("fork")


def test_a_read_only_folder(monkeypatch: pytest.MonkeyPatch, unprivileged: Path) -> None:
    toolchain = Toolchain(unprivileged / "notes")
    cache = unprivileged / "cache"
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(cache))
    good = quietly(toolchain)
    for folder in (cache / "binaries", cache):
        folder.chmod(0o500)
    assert quietly(toolchain) == good  # reading needs no writing
    with pytest.warns(CacheWarning, match="compiling without the binary cache.*Permission denied"):
        assert again(toolchain, BUNDLE, "arch2").path is None
    assert toolchain.runs == 2
    for folder in (cache, cache / "binaries"):
        folder.chmod(0o700)


def test_an_entry_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch, unprivileged: Path) -> None:
    toolchain = Toolchain(unprivileged / "notes")
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(unprivileged / "cache"))
    good = quietly(toolchain)
    assert good.path is not None
    good.path.chmod(0)
    assert [e.damage for e in compilation.entries()] == ["it cannot be read: Permission denied"]
    with pytest.warns(CacheWarning, match=r"compiled again.*is not loaded: .*Permission denied"):
        assert again(toolchain) == good
    assert quietly(toolchain) == good and toolchain.runs == 2


def test_a_read_only_disk(
    cache: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = quietly(toolchain)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(cache))

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert quietly(toolchain) == good  # reading needs no writing
    with pytest.warns(
        CacheWarning, match="compiling without the binary cache.*Read-only file system"
    ):
        assert again(toolchain, BUNDLE, "arch2").path is None
    assert toolchain.runs == 2


def test_a_disk_found_full_at_the_end(
    cache: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.warns(CacheWarning, match="twice is not kept.*No space left"):
            binary = again(toolchain)
    assert binary.path is None and binary.data
    # nothing half-written stays
    assert [p.suffix for p in (cache / "binaries").iterdir()] == [".lock"]
    assert quietly(toolchain).path is not None
    assert toolchain.runs == 2


def test_a_file_that_may_not_grow(cache: Path, toolchain: Toolchain) -> None:
    """The system itself cuts the write short, wherever it may be; nothing half-written stays, and
    work goes on."""

    def build_up_to(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        with pytest.warns(
            CacheWarning, match="twice is not kept: .* cannot be written.*File too large"
        ):
            binary = again(toolchain)
        assert binary.path is None and binary.data == whole.data

    whole = again(toolchain)
    assert whole.path is not None
    size = whole.path.stat().st_size
    whole.path.unlink()
    for limit in (200, len(whole.data), size - 1):
        process = FORK.Process(target=build_up_to, args=(limit,))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert [p.suffix for p in (cache / "binaries").iterdir()] == [".lock"]
    assert quietly(toolchain).path is not None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "none", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as e:
        pytest.skip(f"mounting a small file system is not possible here: {e}")
    if done.returncode:
        pytest.skip(f"mounting a small file system is not allowed here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, toolchain: Toolchain
) -> None:
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(small_disk / "cache"))
    good = quietly(toolchain)
    rest = small_disk / "rest"
    with pytest.raises(OSError, match="No space left"), rest.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert quietly(toolchain) == good and toolchain.runs == 1  # reading needs no room
    with pytest.warns(
        CacheWarning, match="twice is not kept: .* cannot be written.*No space left on device"
    ):
        binary = again(toolchain, BUNDLE, "arch2")
    assert binary.path is None and binary.data.startswith(b"arch2")
    assert good.path is not None and not list(good.path.parent.glob("*.tmp"))
    rest.unlink()
    assert quietly(toolchain, BUNDLE, "arch2").path is not None


def test_a_compilers_log_outlives_a_full_disk(
    cache: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither beside the cache nor in the folder for temporary files is there room for the
    source."""

    def fail() -> None:
        raise CompileError("twice", "arch1", "main.h:1: error: no such luck")

    def full(*args: Any, **more: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    toolchain.work = fail
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.warns(CacheWarning, match=r"the source of twice is not saved\. .*No space left"):  # noqa: SIM117
        with pytest.raises(
            CompileError,
            match=r"^twice did not compile for arch1\.\nmain\.h:1: error: no such luck$",
        ):
            again(toolchain)


def test_a_file_system_without_locks(
    cache: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: Any, **more: Any) -> Any:
        # as filelock 3 says it
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", missing)
    with pytest.warns(CacheWarning, match="compiling without the binary cache.*support flock"):
        assert again(toolchain).data
    assert toolchain.runs == 1

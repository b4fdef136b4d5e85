"""The binary cache: one compilation a key whatever happens, and nothing loaded that is damaged or not ours."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import pytest

from kernelseam import compilation
from kernelseam.compilation import CacheWarning, build, compiled, entry
from kernelseam.contract import SourceBundle
from kernelseam.errors import CompileError, InvalidValue

FORK = multiprocessing.get_context("fork")
BUNDLE = SourceBundle(
    "twice", "twice/main.h", (("platform.h", "// platform"), ("twice/main.h", "int twice;")), (("N", "2"),), ("-O3",)
)


class Toolchain:
    """A compiler whose binary is its input, and which notes each run in a file that processes share."""

    backend = "fake"

    def __init__(self, notes: Path, work: Callable[[], None] = lambda: None) -> None:
        self.notes, self.work, self.version = notes, work, "fakecc 1.0"

    def compiler(self) -> str:
        return self.version

    def compile(self, bundle: SourceBundle, arch: str) -> bytes:
        with self.notes.open("a") as notes:
            notes.write(f"{os.getpid()}\n")
        self.work()
        return (arch + bundle.text()).encode() * 100

    @property
    def runs(self) -> int:
        return len(self.notes.read_text().splitlines()) if self.notes.exists() else 0

    def __getattr__(self, name: str) -> Any:  # the rest of the protocol is not reached
        raise AttributeError(name)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(folder))
    compilation.forget()
    return folder


@pytest.fixture
def toolchain(tmp_path: Path) -> Toolchain:
    return Toolchain(tmp_path / "notes")


def again(toolchain: Toolchain, bundle: SourceBundle = BUNDLE, arch: str = "arch1") -> compilation.Binary:
    """As a new process would ask: with nothing remembered."""
    compilation.forget()
    return compiled(toolchain, bundle, arch)


def quietly(*args: Any) -> compilation.Binary:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return again(*args)


def test_second_process_reads_what_the_first_compiled(cache: Path, toolchain: Toolchain) -> None:
    first, second = quietly(toolchain), quietly(toolchain)
    assert toolchain.runs == 1
    assert first == second and first.data.startswith(b"arch1#define N 2\n")
    assert first.path == cache / "binaries" / f"{first.key}.bin"
    assert first.path.read_bytes().startswith(first.data)  # the payload first: binary tools read the file as it is


def test_a_process_remembers_its_binaries(cache: Path, toolchain: Toolchain) -> None:
    first = again(toolchain)
    assert first.path is not None
    first.path.unlink()
    assert compiled(toolchain, BUNDLE, "arch1") is first
    assert toolchain.runs == 1


def test_nothing_is_made_by_asking_for_the_folder(cache: Path) -> None:
    assert compilation.cache_folder() == cache and compilation.entries() == []
    assert compilation.clear() == compilation.Cleared(0, 0)
    assert not cache.exists()


def test_default_folder_is_the_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compilation.cache_folder().name == "kernelseam" and tmp_path in compilation.cache_folder().parents


def test_folders_and_files_are_private(cache: Path, toolchain: Toolchain) -> None:
    before = os.umask(0o000)
    try:
        binary = again(toolchain)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (cache, *cache.rglob("*"))}
    assert modes == {"cache": 0o700, "binaries": 0o700, f"{binary.key}.bin": 0o600, f"{binary.key}.lock": 0o600}


@pytest.mark.parametrize(
    "other",
    [
        replace(BUNDLE, name="thrice"),
        replace(BUNDLE, main="platform.h"),
        replace(BUNDLE, defines=(("N", "3"),)),
        replace(BUNDLE, options=("-O2",)),
        replace(BUNDLE, files=(("platform.h", "// platform"), ("twice/main.h", "int twice; "))),
        replace(BUNDLE, files=(("platform.h", "// another"), ("twice/main.h", "int twice;"))),
        replace(BUNDLE, files=(("platform.h.h", "// platform"), ("twice/main.h", "int twice;"))),
    ],
)
def test_key_covers_the_whole_bundle(cache: Path, toolchain: Toolchain, other: SourceBundle) -> None:
    assert again(toolchain, other).key != again(toolchain).key
    assert toolchain.runs == 2


def test_key_covers_arch_compiler_and_backend_but_not_the_order_of_files(cache: Path, toolchain: Toolchain) -> None:
    key = again(toolchain).key
    assert again(toolchain, replace(BUNDLE, files=BUNDLE.files[::-1])).key == key
    assert again(toolchain, BUNDLE, "arch2").key != key
    toolchain.version = "fakecc 1.1"
    assert again(toolchain).key != key
    toolchain.version, toolchain.backend = "fakecc 1.0", "other"
    assert again(toolchain).key != key
    assert toolchain.runs == 4


# ---------------------------------------------------------------- many at once


def _ask(toolchain: Toolchain, barrier: Any, answers: Any) -> None:
    barrier.wait()
    answers.put(compiled(toolchain, BUNDLE, "arch1"))


def test_eight_processes_on_a_cold_key_compile_once(cache: Path, toolchain: Toolchain) -> None:
    toolchain.work = lambda: time.sleep(0.3)
    barrier, answers = FORK.Barrier(8), FORK.Queue()
    processes = [FORK.Process(target=_ask, args=(toolchain, barrier, answers)) for _ in range(8)]
    for p in processes:
        p.start()
    found = [answers.get(timeout=60) for _ in processes]
    for p in processes:
        p.join(60)
    assert [p.exitcode for p in processes] == [0] * 8
    assert toolchain.runs == 1
    assert len({b.data for b in found}) == 1 and all(b.path is not None for b in found)


def test_eight_threads_on_a_cold_key_compile_once(cache: Path, toolchain: Toolchain) -> None:
    toolchain.work = lambda: time.sleep(0.1)
    found: list[compilation.Binary] = []
    threads = [threading.Thread(target=lambda: found.append(compiled(toolchain, BUNDLE, "arch1"))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert toolchain.runs == 1
    assert len(found) == 8 and len({id(b) for b in found}) == 1


def test_a_killed_build_leaves_no_lock_and_no_entry(cache: Path, toolchain: Toolchain) -> None:
    slow = Toolchain(toolchain.notes, lambda: time.sleep(600))
    process = FORK.Process(target=compiled, args=(slow, BUNDLE, "arch1"))
    process.start()
    deadline = time.monotonic() + 60
    while not slow.runs and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert compilation.entries() == []
    start = time.monotonic()
    binary = quietly(toolchain)
    assert time.monotonic() - start < 5
    assert toolchain.runs == 2 and binary.path is not None and binary.path.exists()


def test_a_write_cut_short_leaves_nothing_to_load_and_is_swept_up(cache: Path, toolchain: Toolchain) -> None:
    key = quietly(toolchain).key
    path = cache / "binaries" / f"{key}.bin"
    path.rename(path.with_name(f"{key}.abc.tmp"))  # as a process killed between write and rename leaves it
    quietly(toolchain)
    assert toolchain.runs == 2
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".bin", ".lock"]


def test_waiting_for_a_lock_ends(cache: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    key = again(toolchain).key
    path = cache / "binaries" / f"{key}.bin"
    path.unlink()
    monkeypatch.setattr(build, "LOCK_SECONDS", 0.1)
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with filelock.FileLock(path.with_suffix(".lock")):
            held.set()
            let_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        with pytest.warns(CacheWarning, match="compiling without the binary cache"):
            assert again(toolchain).path is None
    finally:
        let_go.set()
        thread.join()
    assert toolchain.runs == 2


# ---------------------------------------------------------------- entries that must not be loaded


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _cut_tail(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _replace_by_rubbish(path: Path) -> None:
    path.write_bytes(b"\x7fELF" + bytes(1000))


def _take_another_keys_entry(path: Path) -> None:
    path.write_bytes(entry.pack({"key": "0" * 64, "name": "twice"}, b"other code"))


@pytest.mark.parametrize("damage", [_truncate, _cut_tail, _empty, _replace_by_rubbish, _take_another_keys_entry])
def test_a_damaged_entry_is_compiled_again(cache: Path, toolchain: Toolchain, damage: Callable[[Path], None]) -> None:
    good = again(toolchain)
    assert good.path is not None
    damage(good.path)
    with pytest.warns(CacheWarning, match=r"compiled again.*(cut short|digest|another key)"):
        assert again(toolchain).data == good.data
    assert toolchain.runs == 2
    assert quietly(toolchain).data == good.data  # and it is whole again
    assert toolchain.runs == 2


def test_no_flipped_bit_goes_unseen(cache: Path, toolchain: Toolchain) -> None:
    good = again(toolchain)
    assert good.path is not None
    content = good.path.read_bytes()
    size = len(content)
    tail = 400  # header, length, digest and magic, and some of the payload
    for place in [*range(0, size - tail, 97), *range(size - tail, size)]:
        for bit in (0, 7):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            with pytest.raises(entry.Damaged):
                entry.unpack(bytes(flipped))
    good.path.write_bytes(content[:50] + bytes([content[50] ^ 4]) + content[51:])
    with pytest.warns(CacheWarning, match="digest"):
        assert again(toolchain).data == good.data
    assert toolchain.runs == 2


def test_a_linked_entry_is_not_loaded(cache: Path, toolchain: Toolchain, tmp_path: Path) -> None:
    good = again(toolchain)
    assert good.path is not None
    elsewhere = tmp_path / "elsewhere.bin"
    good.path.rename(elsewhere)
    good.path.symlink_to(elsewhere)
    with pytest.warns(CacheWarning, match="is a symbolic link"):
        assert again(toolchain).data == good.data
    assert toolchain.runs == 2
    assert not good.path.is_symlink() and elsewhere.exists()  # replaced by an entry of our own


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_an_entry_that_others_can_write_is_not_loaded(cache: Path, toolchain: Toolchain, mode: int) -> None:
    good = again(toolchain)
    assert good.path is not None
    good.path.chmod(mode)
    with pytest.warns(CacheWarning, match=f"can be written by others \\(mode {mode:04o}\\)"):
        again(toolchain)
    assert toolchain.runs == 2
    assert stat.S_IMODE(good.path.stat().st_mode) == 0o600


def test_an_entry_of_another_user_is_not_loaded(
    cache: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = again(toolchain)
    real = os.fstat

    def foreign(handle: int) -> os.stat_result:
        info = list(real(handle))
        info[stat.ST_UID] += 1
        return os.stat_result(info)

    monkeypatch.setattr(os, "fstat", foreign)
    with pytest.warns(CacheWarning, match=f"belongs to another user \\(uid {os.geteuid() + 1}\\)"):
        assert again(toolchain).data == good.data
    assert toolchain.runs == 2


# ---------------------------------------------------------------- folders that must not be used


@pytest.mark.parametrize("which", ["", "binaries"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_is_not_used(
    cache: Path, toolchain: Toolchain, which: str, mode: int
) -> None:
    good = again(toolchain)
    (cache / which).chmod(mode)
    with pytest.warns(CacheWarning, match=f"can be written by others \\(mode {mode:04o}\\).*chmod 700"):
        binary = again(toolchain)
    assert binary.data == good.data and binary.path is None and toolchain.runs == 2
    with pytest.raises(InvalidValue, match="can be written by others"):
        compilation.entries()
    with pytest.raises(InvalidValue, match="can be written by others"):
        compilation.clear()
    assert good.path is not None and good.path.exists()


def test_a_linked_folder_is_not_used(cache: Path, toolchain: Toolchain, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(CacheWarning, match="is a symbolic link"):
        assert again(toolchain).path is None
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_folder_of_another_user_is_not_used(
    cache: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(toolchain)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(CacheWarning, match="belongs to another user"):
        assert again(toolchain).path is None
    assert toolchain.runs == 2


def test_a_file_in_the_folders_place(cache: Path, toolchain: Toolchain) -> None:
    cache.write_text("")
    with pytest.warns(CacheWarning, match="is not a folder"):
        assert again(toolchain).path is None
    assert toolchain.runs == 1


# ---------------------------------------------------------------- folders that cannot be written


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


def test_a_read_only_disk(cache: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    good = quietly(toolchain)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(cache))

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert quietly(toolchain) == good  # reading needs no writing
    with pytest.warns(CacheWarning, match="compiling without the binary cache.*Read-only file system"):
        assert again(toolchain, BUNDLE, "arch2").path is None
    assert toolchain.runs == 2


def test_a_full_disk(cache: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.warns(CacheWarning, match="twice is not kept.*No space left"):
            binary = again(toolchain)
    assert binary.path is None and binary.data
    assert [p.suffix for p in (cache / "binaries").iterdir()] == [".lock"]  # nothing half-written stays
    assert quietly(toolchain).path is not None
    assert toolchain.runs == 2


# ---------------------------------------------------------------- failures, listing, clearing


def failing() -> None:
    raise CompileError("twice", "arch1", "main.h:1: error: no such luck")


def test_a_failed_compilation_keeps_its_source(cache: Path, toolchain: Toolchain) -> None:
    toolchain.work = failing
    with pytest.raises(CompileError, match=r"(?s)twice did not compile for arch1\. Source saved at .*luck") as caught:
        again(toolchain)
    assert caught.value.source is not None and caught.value.log == "main.h:1: error: no such luck"
    folder = Path(caught.value.source)
    assert folder.parent == cache / "failed"
    texts = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}
    assert texts.pop("compiler.log") == "twice for arch1, options -O3\n\nmain.h:1: error: no such luck\n"
    assert texts == {
        "platform.h": "// platform",
        "twice/main.h": "int twice;",
        "translation_unit.cpp": '#define N 2\n#include "twice/main.h"\n',
    }
    assert compilation.entries() == []
    toolchain.work = lambda: None
    assert quietly(toolchain).path is not None  # the lock was let go, and a failure is not remembered


def test_a_source_that_cannot_be_kept_in_the_cache_is_kept_elsewhere(cache: Path, toolchain: Toolchain) -> None:
    cache.write_text("")
    toolchain.work = failing
    with pytest.warns(CacheWarning), pytest.raises(CompileError) as caught:
        again(toolchain)
    folder = Path(caught.value.source or "")
    assert (folder / "platform.h").read_text() == "// platform"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.parent == Path(tempfile.gettempdir())


def test_a_source_stays_inside_its_folder(cache: Path, toolchain: Toolchain) -> None:
    toolchain.work = failing
    bundle = replace(BUNDLE, files=(("../../up.h", "up"), ("/tmp/root.h", "root"), *BUNDLE.files))
    with pytest.raises(CompileError) as caught:
        again(toolchain, bundle)
    folder = Path(caught.value.source or "")
    assert (folder / "up.h").read_text() == "up" and (folder / "tmp" / "root.h").read_text() == "root"


def test_listing_and_clearing(cache: Path, toolchain: Toolchain) -> None:
    old, new = again(toolchain, BUNDLE, "arch1"), again(toolchain, BUNDLE, "arch2")
    assert old.path is not None and new.path is not None
    os.utime(old.path, (time.time() - 3600,) * 2)
    broken = old.path.with_name("f" * 64 + ".bin")
    broken.write_bytes(b"")
    broken.chmod(0o600)
    os.utime(broken, (time.time() - 7200,) * 2)
    (cache / "mine.txt").write_text("not the cache's")
    found = compilation.entries()
    assert [(e.name, e.arch, e.backend, e.damage) for e in found] == [
        ("twice", "arch2", "fake", ""),
        ("twice", "arch1", "fake", ""),
        ("f" * 16, "?", "?", "it is cut short or not an entry"),
    ]
    assert 0 <= found[0].age < 60 and 3500 < found[1].age < 3700
    assert found[0].size == new.path.stat().st_size and found[0].path == new.path
    toolchain.work = failing
    with pytest.raises(CompileError):
        again(toolchain, BUNDLE, "arch3")
    total = sum(p.stat().st_size for p in cache.rglob("*") if p.is_file()) - len("not the cache's")
    assert compilation.clear() == compilation.Cleared(3, total)
    assert [p.name for p in cache.rglob("*") if p.is_file()] == ["mine.txt"]
    toolchain.work = lambda: None
    assert compiled(toolchain, BUNDLE, "arch1").path is not None  # cleared from memory as well

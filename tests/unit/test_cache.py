"""The binary cache: what its key covers, what it keeps, failures, listing and clearing."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fakecc import BUNDLE, Toolchain, again, quietly
from kernelseam import compilation
from kernelseam.compilation import CacheWarning, compiled, entry
from kernelseam.contract import SourceBundle
from kernelseam.errors import CompileError


def test_second_process_reads_what_the_first_compiled(cache: Path, toolchain: Toolchain) -> None:
    first, second = quietly(toolchain), quietly(toolchain)
    assert toolchain.runs == 1
    assert first == second and first.data.startswith(b"arch1#define N 2\n")
    assert first.path == cache / "binaries" / f"{first.key}.bin"
    # the payload first: binary tools read the file as it is
    assert first.path.read_bytes().startswith(first.data)


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
    assert (
        compilation.cache_folder().name == "kernelseam"
        and tmp_path in compilation.cache_folder().parents
    )


def test_folders_and_files_are_private(cache: Path, toolchain: Toolchain) -> None:
    before = os.umask(0o000)
    try:
        binary = again(toolchain)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (cache, *cache.rglob("*"))}
    assert modes == {
        "cache": 0o700,
        "binaries": 0o700,
        f"{binary.key}.bin": 0o600,
        f"{binary.key}.lock": 0o600,
    }


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
def test_key_covers_the_whole_bundle(
    cache: Path, toolchain: Toolchain, other: SourceBundle
) -> None:
    assert again(toolchain, other).key != again(toolchain).key
    assert toolchain.runs == 2


def test_key_covers_arch_compiler_and_backend_but_not_the_order_of_files(
    cache: Path, toolchain: Toolchain
) -> None:
    key = again(toolchain).key
    assert again(toolchain, replace(BUNDLE, files=BUNDLE.files[::-1])).key == key
    assert again(toolchain, BUNDLE, "arch2").key != key
    toolchain.version = "fakecc 1.1"
    assert again(toolchain).key != key
    toolchain.version, toolchain.backend = "fakecc 1.0", "other"
    assert again(toolchain).key != key
    assert toolchain.runs == 4


# ---------------------------------------------------------------- failures, listing, clearing


def failing() -> None:
    raise CompileError("twice", "arch1", "main.h:1: error: no such luck")


def test_a_failed_compilation_keeps_its_source(cache: Path, toolchain: Toolchain) -> None:
    toolchain.work = failing
    with pytest.raises(
        CompileError, match=r"(?s)twice did not compile for arch1\. Source saved at .*luck"
    ) as caught:
        again(toolchain)
    assert caught.value.source is not None and caught.value.log == "main.h:1: error: no such luck"
    folder = Path(caught.value.source)
    assert folder.parent == cache / "failed"
    texts = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}
    assert (
        texts.pop("compiler.log")
        == "twice for arch1, options -O3\n\nmain.h:1: error: no such luck\n"
    )
    assert texts == {
        "platform.h": "// platform",
        "twice/main.h": "int twice;",
        "translation_unit.cpp": '#define N 2\n#include "twice/main.h"\n',
    }
    assert compilation.entries() == []
    toolchain.work = lambda: None
    # the lock was let go, and a failure is not remembered
    assert quietly(toolchain).path is not None


def test_a_source_that_cannot_be_kept_in_the_cache_is_kept_elsewhere(
    cache: Path, toolchain: Toolchain
) -> None:
    cache.write_text("")
    toolchain.work = failing
    with pytest.warns(CacheWarning), pytest.raises(CompileError) as caught:
        again(toolchain)
    folder = Path(caught.value.source or "")
    assert (folder / "platform.h").read_text() == "// platform"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.parent == Path(
        tempfile.gettempdir()
    )


def test_a_source_stays_inside_its_folder(cache: Path, toolchain: Toolchain) -> None:
    toolchain.work = failing
    bundle = replace(BUNDLE, files=(("../../up.h", "up"), ("/tmp/root.h", "root"), *BUNDLE.files))
    with pytest.raises(CompileError) as caught:
        again(toolchain, bundle)
    folder = Path(caught.value.source or "")
    assert (folder / "up.h").read_text() == "up" and (
        folder / "tmp" / "root.h"
    ).read_text() == "root"


def test_listing_and_clearing(cache: Path, toolchain: Toolchain) -> None:
    old, new = again(toolchain, BUNDLE, "arch1"), again(toolchain, BUNDLE, "arch2")
    assert old.path is not None and new.path is not None
    os.utime(old.path, (time.time() - 3600,) * 2)
    broken = old.path.with_name("f" * 64 + ".bin")
    broken.write_bytes(b"")
    broken.chmod(0o600)
    os.utime(broken, (time.time() - 7200,) * 2)
    compilers = cache / entry.COMPILERS
    foreign = [cache / name for name in ("mine.txt", "mine.tmp", f"mine{entry.COMPILER}")]
    key = "0" * 64
    for folder in (cache, compilers, old.path.parent):
        foreign += [folder / f"{key}.tmp" / "mine", folder / f"{key}.bin" / "mine"]
        foreign += [folder / "mine.bin", folder / "mine.tmp"]
    foreign += [old.path.parent / f"{key}.lock" / "mine", cache / "failed" / "mine"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True, parents=True, mode=0o700)
        path.write_text("not the cache's")
        for aged in (path, path.parent):
            os.utime(aged, (time.time() - 3600,) * 2)
    compilers.chmod(0o700)
    entry.write(compilers / f"{key}{entry.COMPILER}", {"key": key}, b"a compiler's version")
    killed = compilers / f"{key}.killed{entry.TEMPORARY}"
    killed.write_text("half of it")
    os.utime(killed, (time.time() - 3600,) * 2)
    actual = [e for e in compilation.entries() if e.path.is_file()]
    assert [(e.name, e.arch, e.backend, e.damage) for e in actual] == [
        ("twice", "arch2", "fake", ""),
        ("twice", "arch1", "fake", ""),
        ("f" * 16, "?", "?", "it is cut short or not an entry"),
    ]
    assert 0 <= actual[0].age < 60 and 3500 < actual[1].age < 3700
    assert actual[0].size == new.path.stat().st_size and actual[0].path == new.path
    toolchain.work = failing
    with pytest.raises(CompileError):
        again(toolchain, BUNDLE, "arch3")
    own = {p for p in cache.rglob("*") if p.is_file()} - set(foreign)
    total = sum(p.stat().st_size for p in own)
    assert compilation.clear() == compilation.Cleared(3, total)
    assert {p for p in cache.rglob("*") if p.is_file()} == set(foreign)
    toolchain.work = lambda: None
    assert compiled(toolchain, BUNDLE, "arch1").path is not None  # cleared from memory as well

"""Listing and clearing the cache."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kernelseam.compilation import build, entry
from kernelseam.compilation.folder import Untrusted, cache_folder, private
from kernelseam.frozen import dataclass


@dataclass(frozen=True)
class CacheEntry:
    """A binary in the cache. ``size`` in bytes, ``age`` in seconds; ``damage`` says why it would
    not be loaded."""

    name: str
    arch: str
    backend: str
    size: int
    age: float
    path: Path
    damage: str = ""


@dataclass(frozen=True)
class Cleared:
    """The number of removed binaries, and the bytes of all removed files."""

    binaries: int
    bytes: int


_OF_BUILDS = (entry.TEMPORARY, build.LOCK)
"""Files that a build has while it runs, and leaves where it is killed."""


@contextmanager
def _unless_building(path: Path) -> Iterator[bool]:
    """Hold a key's lock; False where a build holds it."""
    import filelock

    lock = filelock.FileLock(path, timeout=0, mode=0o600)
    try:
        lock.acquire()
    except filelock.Timeout:
        yield False
        return
    except NotImplementedError:  # a file system that knows no locks: no build writes there
        yield True
        return
    try:
        yield True
    finally:
        lock.release()


def _folder() -> Path | None:
    """The folder of binaries, if there is one; raises Untrusted."""
    folder = cache_folder() / build.BINARIES
    return folder if private(folder.parent, make=False) and private(folder, make=False) else None


def entries() -> list[CacheEntry]:
    """Every binary in the cache, newest first; empty where there is no cache. Raises Untrusted,
    OSError."""
    folder = _folder()
    listed: list[CacheEntry] = []
    for path in filter(entry.is_ours, folder.glob("*" + entry.SUFFIX) if folder else ()):
        header, damage = {"name": path.stem[:16]}, ""
        try:
            info = os.lstat(path)
            header, _ = entry.read_binary(path)
        except FileNotFoundError:  # cleared by another process meanwhile
            continue
        except entry.Damaged as e:
            damage = str(e)
        except Untrusted as e:
            damage = e.rule
        except OSError as e:
            damage = f"it cannot be read: {e.strerror}"
        name, arch, backend = (header.get(k, "?") for k in ("name", "arch", "backend"))
        listed.append(
            CacheEntry(
                name,
                arch,
                backend,
                info.st_size,
                max(0.0, time.time() - info.st_mtime),
                path,
                damage,
            )
        )
    return sorted(listed, key=lambda e: e.age)


def clear() -> Cleared:
    """Remove every binary, leftover and saved source of the cache and what is kept about compilers.

    Other programs' files stay, in the cache's folder and in those within, as does what a running
    build of any process writes. Raises Untrusted, OSError.
    """
    folder = _folder()
    binaries = size = 0
    paths = tuple(filter(entry.is_ours, folder.iterdir())) if folder else ()
    for path in paths:
        if path.suffix == entry.SUFFIX and (removed := entry.remove(path)) is not None:
            size, binaries = size + removed, binaries + 1
    left = [p for p in paths if p.suffix in _OF_BUILDS and not p.is_dir()]
    for key in {p.name.partition(".")[0] for p in left}:
        lock = paths[0].with_name(key + build.LOCK)
        with _unless_building(lock) as idle:
            for path in paths[0].parent.glob(f"{key}.*{entry.TEMPORARY}") if idle else ():
                size += entry.remove(path) or 0
            size += (entry.remove(lock) or 0) if idle else 0
    failed = cache_folder() / build.FAILED
    if private(failed.parent, make=False) and private(failed, make=False):
        for saved in tuple(failed.glob(build.SAVED)):
            if saved.is_symlink() or not saved.is_dir():
                continue
            with suppress(FileNotFoundError):  # another process was faster
                size += sum(f.lstat().st_size for f in saved.rglob("*") if f.is_file())
                shutil.rmtree(saved)
    size += entry.clear(failed.with_name(entry.COMPILERS), entry.COMPILER)[1]
    build.forget()
    return Cleared(binaries, size)

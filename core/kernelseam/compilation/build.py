"""``compiled``: the binary of a bundle of sources from memory, from an installed bundle of
binaries, from the cache, or from the compiler."""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path, PurePosixPath

from kernelseam.compilation import ahead, bundled, entry
from kernelseam.compilation.folder import CacheWarning, Untrusted, cache_folder, private
from kernelseam.compilation.sources import identity
from kernelseam.contract import SourceBundle, Toolchain
from kernelseam.errors import CompileError, MissingBinary
from kernelseam.forking import new_lock
from kernelseam.frozen import dataclass

SCHEMA = 3
"""Part of every key: raised when the meaning of a key or of an entry changes."""

KEY = "KS_KEY"
"""The constant that holds a binary's key, as text: the device source puts it into the binary."""
BINARIES, FAILED = "binaries", "failed"
SAVED = "[0-9a-f]" * 16
"""Names of the folders of saved sources, which begin their keys."""
LOCK = ".lock"
LOCK_SECONDS = 600.0
"""How long to wait for another process's compilation before compiling here as well."""


@dataclass(frozen=True)
class Binary:
    """A compiled bundle. ``path`` is None where it is not kept in the cache: an installed bundle
    has it, or the cache could not be written."""

    data: bytes
    path: Path | None
    key: str


def binary_key(bundle: SourceBundle, arch: str, backend: str, compiler: str) -> str:
    """SHA-256, in hex, over everything that shapes the binary, the content of every file
    included."""
    parts = [SCHEMA, identity(bundle), arch, backend, compiler]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


_memo: dict[str, Binary] = {}
_memo_lock = new_lock()


def forget() -> None:
    """Drop the binaries that this process remembers, and look for installed bundles again."""
    with _memo_lock:
        _memo.clear()
    bundled.forget()


def compiled(toolchain: Toolchain, bundle: SourceBundle, arch: str) -> Binary:
    """The bundle's binary for the arch, from an installed bundle of binaries if one has it; else
    compiled at most once while the cache can be written.

    Of many threads and processes that ask at once, one compiles. Where the cache cannot be used, a
    CacheWarning says why and the binary is compiled for this process alone. Raises CompileError,
    with the place of the saved source; MissingBinary where KERNELSEAM_NO_JIT is set and no
    installed bundle has it.
    """
    if result := _bundled(toolchain, bundle, arch):
        return result
    if bundled.no_jit():
        raise MissingBinary(bundle.name, arch, bundled.installed_text())
    key = binary_key(bundle, arch, toolchain.backend, toolchain.compiler())
    with _memo_lock:
        known = _memo.get(key)
    return known or _kept(key, _from_cache(key, say=True) or _build(toolchain, bundle, arch, key))


def is_cached(toolchain: Toolchain, bundle: SourceBundle, arch: str) -> bool:
    """Whether ``compiled`` would find the bundle's binary without compiling."""
    if _bundled(toolchain, bundle, arch):
        return True
    if bundled.no_jit():
        return False
    key = binary_key(bundle, arch, toolchain.backend, toolchain.compiler())
    with _memo_lock:
        if key in _memo:
            return True
    result = _from_cache(key, say=False)
    return result is not None and _kept(key, result) is not None


def _bundled(toolchain: Toolchain, bundle: SourceBundle, arch: str) -> Binary | None:
    """The binary that an installed bundle has; its compiler need not be here."""
    result = bundled.find(bundle, arch, toolchain.backend)
    return None if result is None else _kept(result.key, Binary(result.data, None, result.key))


def _kept(key: str, binary: Binary) -> Binary:
    with _memo_lock:
        return _memo.setdefault(key, binary)


_said: ContextVar[list[str] | None] = ContextVar("kernelseam_cache_warnings", default=None)


@contextmanager
def collect_warnings(said: list[str]) -> Iterator[None]:
    """Within the block, this thread's warnings go to a list."""
    token = _said.set(said)
    try:
        yield
    finally:
        _said.reset(token)


def _path(key: str) -> Path:
    return cache_folder() / BINARIES / (key + entry.SUFFIX)


def _warn(message: str) -> None:
    if (said := _said.get()) is not None:
        said.append(message)
    else:
        warnings.warn(message, CacheWarning, stacklevel=4)


def _from_cache(key: str, *, say: bool) -> Binary | None:
    """The entry if it is there, whole and trusted; ``say`` why one that is there is not loaded."""
    path = _path(key)
    try:
        if not (private(path.parent.parent, make=False) and private(path.parent, make=False)):
            return None
    except (OSError, Untrusted):  # said when the folder is wanted for writing
        return None
    try:
        _, payload = entry.read_binary(path)
    except FileNotFoundError:
        return None
    except (OSError, entry.Damaged, Untrusted) as e:
        if say:
            _warn(f"a binary is compiled again, its cache entry {path} is not loaded: {e}")
        return None
    return Binary(payload, path, key)


def _build(toolchain: Toolchain, bundle: SourceBundle, arch: str, key: str) -> Binary:
    with _locked(key) as writable:
        if writable and (result := _from_cache(key, say=False)):  # another process was faster
            return result
        ahead.begin()
        try:
            data = _compile(toolchain, bundle, arch, key)
        except CompileError as e:
            raise CompileError(e.kernel, e.arch, e.log, _save_source(bundle, e, key)) from e
        path = _path(key)
        if writable:
            header = {"key": key, "name": bundle.name, "arch": arch, "backend": toolchain.backend}
            try:
                # of a build that was killed
                for leftover in path.parent.glob(f"{key}.*{entry.TEMPORARY}"):
                    leftover.unlink(missing_ok=True)
                entry.write(path, header, data)
                return Binary(data, path, key)
            except OSError as e:
                _warn(
                    f"the binary of {bundle.name} is not kept: {path.parent} cannot be written. {e}"
                )
        return Binary(data, None, key)


def _compile(toolchain: Toolchain, bundle: SourceBundle, arch: str, key: str) -> bytes:
    """The bundle's binary, which carries its key: what does not was made from something else.
    Raises CompileError."""
    data = toolchain.compile(replace(bundle, defines=(*bundle.defines, (KEY, f'"{key}"'))), arch)
    if not entry.carries(data, key):
        raise CompileError(
            bundle.name,
            arch,
            f"the binary that came back does not carry its key, the text of {KEY}: it was made "
            "from "
            "something else, or its sources do not keep that constant (KS_CONSTANT of the "
            "platform header)",
        )
    return data


@contextmanager
def _locked(key: str) -> Iterator[bool]:
    """Hold the key's lock, which ends with the process however that ends; False where there is no
    usable folder."""
    import filelock

    path = _path(key)
    try:
        private(path.parent.parent, make=True)
        private(path.parent, make=True)
        lock = filelock.FileLock(path.with_suffix(LOCK), timeout=LOCK_SECONDS, mode=0o600)
        lock.acquire()
    # the second: a file system that knows no locks
    except (OSError, NotImplementedError, Untrusted) as e:
        _warn(f"compiling without the binary cache. {e}")
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _save_source(bundle: SourceBundle, error: CompileError, key: str) -> str | None:
    """Write what the compiler was given, and what it said, beside the cache or else into a
    temporary folder; where.

    None where neither can be written: the compiler's log must reach the caller all the same.
    """
    folder = cache_folder() / FAILED / key[:16]
    try:
        for place in (folder.parent.parent, folder.parent, folder):
            private(place, make=True)
        _write_source(folder, bundle, error)
        return str(folder)
    except (OSError, Untrusted):
        pass
    try:
        folder = Path(tempfile.mkdtemp(prefix="kernelseam-"))
        _write_source(folder, bundle, error)
        return str(folder)
    except OSError as e:
        _warn(f"the source of {bundle.name} is not saved. {e}")
        return None


def _write_source(folder: Path, bundle: SourceBundle, error: CompileError) -> None:
    said = (
        f"{bundle.name} for {error.arch}, options "
        f"{' '.join(bundle.options) or 'none'}\n\n{error.log}\n"
    )
    for name, text in (
        *bundle.files,
        ("translation_unit.cpp", bundle.text()),
        ("compiler.log", said),
    ):
        inside = [part for part in PurePosixPath(name).parts if part not in ("..", "/")]
        target = folder.joinpath(*inside)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

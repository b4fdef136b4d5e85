"""Tuned choices on disk: one file per class, device, driver, compiler and version, in the binary
cache's folder.

Files are cache entries: written atomically, checked by digest, owned by the user. A file that is
damaged, untrusted or of another key is not used, with a CacheWarning; the cost model then chooses.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from kernelseam._version import __version__
from kernelseam.compilation import entry
from kernelseam.compilation.folder import CacheWarning, Untrusted, cache_folder, private
from kernelseam.contract import ABSENT, EMULATED, Device, Problem
from kernelseam.errors import KernelSeamError
from kernelseam.frozen import dataclass
from kernelseam.json_schema import SchemaError, decoded, parsed
from kernelseam.plugins import plugins
from kernelseam.tuned.classes import batch_invariant, problem_class

SCHEMA = 1
"""Part of every key: raised when the meaning of a class or of a file changes."""
FOLDER, SUFFIX = "tuned", ".tuned"
_ABSENT_SECONDS = 1.0
"""That a folder which was not there is not looked for again, but by this process's own tuning: the
look takes 50 to 80 µs of a class's first call (H200's host, gVisor)."""
_absent: dict[Path, float] = {}
"""Cache folders without one, until when."""


@dataclass(frozen=True)
class Timed:
    """The time of one implementation or variant."""

    implementation: str
    variant: str
    seconds: float


@dataclass(frozen=True)
class Tuned:
    """The choice for a class, and all measured times, the shortest first."""

    implementation: str
    variant: str
    problem: str
    """The measured problem, as text."""
    times: tuple[Timed, ...]

    def seconds_of(self, implementation: str) -> float | None:
        """The shortest time of an implementation's variants; None where it was not measured."""
        return min(
            (t.seconds for t in self.times if t.implementation == implementation), default=None
        )


def tuned_choice(problem: Problem, device: Device) -> Tuned | None:
    """The stored choice for the problem's class on this device; None where there is none or it must
    not be used."""
    if batch_invariant(problem) or device.evidence in (ABSENT, EMULATED):
        return None
    folder = _folder(make=False)
    return None if folder is None else _read(folder, problem, device)


def keep(problem: Problem, device: Device, choice: Tuned) -> Path:
    """Store a class's choice, replacing an earlier one. Raises OSError, Untrusted."""
    folder = _folder(make=True)
    assert folder is not None
    key = choice_key(problem, device)
    header = {
        "key": key,
        "name": problem_class(problem),
        "device": str(device),
        "backend": device.backend,
    }
    path = folder / (key + SUFFIX)
    entry.write(path, header, json.dumps(asdict(choice)).encode())
    return path


def clear() -> int:
    """Remove all tuned choices and return their number. What another process may just be writing
    stays. Raises OSError, Untrusted."""
    removed, _ = entry.clear(cache_folder() / FOLDER, SUFFIX)
    return removed


def choice_key(problem: Problem, device: Device) -> str:
    """The file's key: SHA-256 over the class and everything that times depend on."""
    parts = [
        SCHEMA,
        problem_class(problem),
        device.backend,
        device.name,
        device.arch,
        sorted(environment(device).items()),
        __version__,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def environment(device: Device) -> dict[str, str]:
    """Versions that times on a device depend on: its compiler and, where its runtime reports them,
    driver and libraries."""
    backend, versions = plugins().backend(device.backend), dict[str, str]()
    with suppress(KernelSeamError):  # cached binaries run without a compiler
        versions["compiler"] = backend.toolchain.compiler() if backend.toolchain is not None else ""
    if (runtime_versions := getattr(backend.runtime, "versions", None)) is not None:
        versions.update(runtime_versions())
    return versions


def _folder(*, make: bool) -> Path | None:
    cache = cache_folder()
    if make:
        _absent.clear()
    elif time.monotonic() < _absent.get(cache, 0.0):
        return None
    root = cache / FOLDER
    order = (root.parent, root) if make else (root, root.parent)  # what mostly is not there first
    try:
        exists = private(order[0], make=make) and private(order[1], make=make)
    except (OSError, Untrusted) as e:
        if make:
            raise
        _warn(root, e)
        return None
    if not exists:
        _absent.clear()
        _absent[cache] = time.monotonic() + _ABSENT_SECONDS
    return root if exists else None


def _read(folder: Path, problem: Problem, device: Device) -> Tuned | None:
    key = choice_key(problem, device)
    path = folder / (key + SUFFIX)
    try:
        return _parsed(entry.read(path)[1])
    except FileNotFoundError:
        return None
    except (OSError, entry.Damaged, Untrusted) as e:
        _warn(path, e)
        return None


def _parsed(payload: bytes) -> Tuned:
    """Raises Damaged where the content is invalid despite a correct digest."""
    try:
        result: Tuned = decoded(Tuned, parsed(payload), "choice")
        for i, timed in enumerate(result.times):
            if not 0 <= timed.seconds < math.inf:
                raise SchemaError(f"choice.times[{i}].seconds", timed.seconds, "must be a time")
    except ValueError as e:
        raise entry.Damaged(f"it is no tuned choice ({e})") from e
    return result


def _warn(path: Path, error: Exception) -> None:
    reason = error.rule if isinstance(error, Untrusted) else error
    warnings.warn(f"a tuned choice is not used, {path}: {reason}", CacheWarning, stacklevel=5)

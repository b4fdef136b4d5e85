"""Tuned choices on disk: one file a class, device, driver, compiler and version, in the binary
cache's folder.

Files are entries of the cache: written whole, checked by digest, the user's own. One that is
damaged, someone else's or of another place is not used, with a CacheWarning, and the model chooses.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernelseam._version import __version__
from kernelseam.compilation import entry
from kernelseam.compilation.folder import CacheWarning, Untrusted, cache_folder, private
from kernelseam.contract import EMULATED, Device, Problem
from kernelseam.errors import KernelSeamError
from kernelseam.plugins import plugins
from kernelseam.tuned.classes import batch_invariant, problem_class

SCHEMA = 1
"""Part of every key: raised when the meaning of a class or of a file changes."""
FOLDER, SUFFIX = "tuned", ".tuned"


@dataclass(frozen=True)
class Timed:
    """One way's time."""

    implementation: str
    variant: str
    seconds: float


@dataclass(frozen=True)
class Tuned:
    """What was chosen for a class, and every time that led to it, the shortest first."""

    implementation: str
    variant: str
    problem: str
    """That was measured, in words."""
    times: tuple[Timed, ...]

    def seconds_of(self, implementation: str) -> float | None:
        """The shortest time of an implementation's ways, if it was measured."""
        return min(
            (t.seconds for t in self.times if t.implementation == implementation), default=None
        )


def tuned_choice(problem: Problem, device: Device) -> Tuned | None:
    """What was kept for the problem's class on this device; None where nothing was, or where it
    must not be used."""
    if batch_invariant(problem) or device.evidence == EMULATED:
        return None
    folder = _folder(make=False)
    return None if folder is None else _read(folder, problem, device)


def keep(problem: Problem, device: Device, choice: Tuned) -> Path:
    """Write a class's choice, in place of an earlier one. Raises OSError, Untrusted."""
    folder = _folder(make=True)
    assert folder is not None
    key = place(problem, device)
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
    """Remove every tuned choice; how many there were. Raises OSError, Untrusted."""
    root = cache_folder() / FOLDER
    if not (private(root.parent, make=False) and private(root, make=False)):
        return 0
    gone = 0
    for path in root.iterdir():
        if path.suffix in (SUFFIX, entry.TEMPORARY):
            path.unlink(missing_ok=True)
            gone += path.suffix == SUFFIX
    return gone


def place(problem: Problem, device: Device) -> str:
    """The key: SHA-256 over the class and over what times depend on."""
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
    """What times on a device depend on beside it: its compiler and, where its runtime tells them,
    driver and libraries."""
    backend, found = plugins().backend(device.backend), dict[str, str]()
    with suppress(KernelSeamError):  # what is in the cache runs without a compiler
        found["compiler"] = backend.toolchain.compiler() if backend.toolchain is not None else ""
    if (ask := getattr(backend.runtime, "versions", None)) is not None:
        found.update(ask())
    return found


def _folder(*, make: bool) -> Path | None:
    root = cache_folder() / FOLDER
    try:
        there = private(root.parent, make=make) and private(root, make=make)
    except (OSError, Untrusted) as e:
        if make:
            raise
        _warn(root, e)
        return None
    return root if there else None


def _read(folder: Path, problem: Problem, device: Device) -> Tuned | None:
    key = place(problem, device)
    path = folder / (key + SUFFIX)
    try:
        return _parsed(entry.read(path)[1])
    except FileNotFoundError:
        return None
    except (OSError, entry.Damaged, Untrusted) as e:
        _warn(path, e)
        return None


def _parsed(payload: bytes) -> Tuned:
    """Raises Damaged where the digest is right and the content is not."""
    try:
        found: dict[str, Any] = json.loads(payload)
        times = tuple(
            Timed(str(t["implementation"]), str(t["variant"]), float(t["seconds"]))
            for t in found["times"]
        )
        return Tuned(
            str(found["implementation"]), str(found["variant"]), str(found["problem"]), times
        )
    except (ValueError, KeyError, TypeError) as e:
        raise entry.Damaged(f"it is no tuned choice ({e})") from e


def _warn(path: Path, error: Exception) -> None:
    reason = error.rule if isinstance(error, Untrusted) else error
    warnings.warn(f"a tuned choice is not used, {path}: {reason}", CacheWarning, stacklevel=5)

"""Binaries that installed bundles bring: found by what was compiled, whatever compiler did it, so
that none is needed here.

A bundle is a wheel of ``kernelseam compile --bundle``: a package with ``index.json`` and one entry
a binary, which an entry point of the group ``kernelseam.binaries`` names. It is trusted as any
installed package is.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from kernelseam import installed
from kernelseam.compilation import entry
from kernelseam.compilation.folder import CacheWarning
from kernelseam.compilation.sources import identity
from kernelseam.contract import SourceBundle
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass
from kernelseam.json_schema import parsed

GROUP = "kernelseam.binaries"
INDEX = "index.json"
FORMAT = 2
"""Of the index, and part of every source key: raised when the meaning of either changes."""
NO_JIT = "KERNELSEAM_NO_JIT"


@dataclass(frozen=True)
class InstalledBundle:
    """A bundle as it lies there. ``problem`` says why it is not used."""

    name: str
    version: str
    binaries: int = 0
    archs: tuple[str, ...] = ()
    core_version: str = ""
    """The version of kernelseam whose sources were compiled."""
    problem: str = ""

    def __str__(self) -> str:
        what = self.problem or (
            f"{self.binaries} binaries for {', '.join(self.archs) or 'no arch'}, "
            f"of kernelseam {self.core_version}"
        )
        return f"{self.name} {self.version} ({what})"


@dataclass(frozen=True)
class BundledBinary:
    """A binary of a bundle, with the key that it was compiled under."""

    data: bytes
    key: str


def no_jit() -> bool:
    """Whether KERNELSEAM_NO_JIT is set: bundles' binaries alone are used. Raises InvalidValue for
    what is neither 0 nor 1."""
    value = os.environ.get(NO_JIT, "")
    if value not in ("", "0", "1"):
        raise InvalidValue(
            NO_JIT, value, "must be 0 or 1", "Set it to 1 to use installed bundles alone"
        )
    return value == "1"


def source_key(bundle: SourceBundle, arch: str, backend: str) -> str:
    """SHA-256, in hex, over everything that is given to the compiler: a binary's key but for the
    compiler."""
    parts = [FORMAT, identity(bundle), arch, backend]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def find(bundle: SourceBundle, arch: str, backend: str) -> BundledBinary | None:
    """The binary of these sources from an installed bundle; None where none has it.

    One that is damaged is passed over, with a CacheWarning.
    """
    binaries = _installed()[1]
    if not binaries:
        return None
    result = binaries.get(source_key(bundle, arch, backend))
    if result is None:
        return None
    place, key = result
    try:
        header, payload = entry.unpack(place.read_bytes())
        if header["key"] != key or not entry.carries(payload, key):
            raise entry.Damaged("it belongs to another key")
    except (OSError, entry.Damaged) as e:
        warnings.warn(f"a bundle's binary is not used, {place}: {e}", CacheWarning, stacklevel=3)
        return None
    return BundledBinary(payload, key)


def installed_bundles() -> tuple[InstalledBundle, ...]:
    """Every installed bundle, by name."""
    return _installed()[0]


def installed_text() -> str:
    """The same, for messages."""
    return "; ".join(map(str, installed_bundles())) or "none"


def forget() -> None:
    """Look for bundles again at the next use."""
    _installed.cache_clear()
    installed.forget()


Places = Mapping[str, tuple[Traversable, str]]


@cache
def _installed() -> tuple[tuple[InstalledBundle, ...], Places]:
    """The bundles; and by source key a binary's place and key. Of two, the first by name counts."""
    bundles: list[InstalledBundle] = []
    places: dict[str, tuple[Traversable, str]] = {}
    for point in sorted(installed.entry_points(GROUP), key=lambda p: (p.name, p.value)):
        name, version = (point.dist.name, point.dist.version) if point.dist else (point.name, "?")
        try:
            folder = resources.files(point.value)
            index = parsed((folder / INDEX).read_text(encoding="utf-8"))
            if index["format"] != FORMAT:
                raise ValueError(f"its format is {index['format']}, this version reads {FORMAT}")
            result = {b["source"]: (folder / b["file"], str(b["key"])) for b in index["binaries"]}
            archs = tuple(sorted({str(b["arch"]) for b in index["binaries"]}))
            bundle = InstalledBundle(name, version, len(result), archs, str(index["kernelseam"]))
        except Exception as e:  # whatever is wrong with it, the others serve
            problem = f"not used: {type(e).__name__}: {e}"
            bundles.append(InstalledBundle(name, version, problem=problem))
            warnings.warn(f"the bundle {bundles[-1]}", CacheWarning, stacklevel=4)
            continue
        bundles.append(bundle)
        places = {**result, **places}
    return tuple(bundles), places

"""Writes a wheel: binaries, their index, the list of problems that they compute, and the entry
point by which they are found.

The format is that of PEP 427; the same binaries make the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from kernelseam._version import __version__
from kernelseam.bundling.collecting import Collected
from kernelseam.compilation import bundled, entry
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass

TAG = "py3-none-any"
VERSION = "0"
"""Where the file's name has none."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[0-9][A-Za-z0-9.+!_]*")
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class WheelName:
    """The name and the version of a bundle's distribution, and where its wheel is written."""

    distribution: str
    version: str
    folder: Path

    @classmethod
    def of(cls, path: Path) -> WheelName:
        """From the path that was asked for: NAME.whl, NAME-VERSION.whl, or
        NAME-VERSION-py3-none-any.whl.

        pip installs wheels of the last form alone, so that is what is written. Raises
        InvalidValue.
        """
        remedy = f"Name it NAME.whl or NAME-VERSION-{TAG}.whl"
        if path.suffix != ".whl":
            raise InvalidValue("--bundle", path, "must end in .whl", remedy)
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise InvalidValue("--bundle", path, "must be a file in a folder that there is", remedy)
        name = path.name.removesuffix(".whl").removesuffix(f"-{TAG}")
        version, front, last = VERSION, *name.rpartition("-")[::2]
        if front and _VERSION.fullmatch(last):
            name, version = front, last
        name = re.sub(r"[-_.]+", "_", name)
        if not (_NAME.fullmatch(name) and _VERSION.fullmatch(version)):
            raise InvalidValue("--bundle", path, "has no name and version that pip takes", remedy)
        return cls(name, version, path.parent)

    @property
    def path(self) -> Path:
        """Where the wheel is written."""
        return self.folder / f"{self.distribution}-{self.version}-{TAG}.whl"

    @property
    def package(self) -> str:
        """The package that is installed."""
        return f"kernelseam_bundle_{self.distribution.lower()}"


def write_wheel(
    name: WheelName,
    collected: Sequence[Collected],
    compilers: Mapping[str, str],
    problems: Sequence[str] = (),
) -> Path:
    """Write the wheel, whole or not at all; where. For people who read it: ``compilers`` by
    backend, in the index, and ``problems``, in contents.txt. Raises OSError."""
    files: dict[str, bytes] = {
        "__init__.py": b'"""Binaries for kernelseam: see index.json."""\n',
    }
    binaries = []
    for c in sorted(collected, key=lambda c: (c.arch, c.source.name, c.binary.key)):
        header = {
            "key": c.binary.key,
            "name": c.source.name,
            "arch": c.arch,
            "backend": c.backend,
        }
        file = f"{c.binary.key}{entry.SUFFIX}"
        files[file] = entry.pack(header, c.binary.data)
        source = bundled.source_key(c.source, c.arch, c.backend)
        binaries.append({**header, "source": source, "file": file})
    index = {
        "format": bundled.FORMAT,
        "kernelseam": __version__,
        "compilers": dict(compilers),
        "binaries": binaries,
    }
    if problems:
        files["contents.txt"] = "".join(f"{p}\n" for p in problems).encode()
    files[bundled.INDEX] = json.dumps(index, indent=1).encode() + b"\n"
    path = name.path
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        _write(temporary, name, {f"{name.package}/{n}": content for n, content in files.items()})
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def _write(path: Path, name: WheelName, files: Mapping[str, bytes]) -> None:
    info = f"{name.distribution}-{name.version}.dist-info"
    described = {
        **files,
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name.distribution}\nVersion: {name.version}\n"
            "Summary: Binaries for kernelseam\n"
            f"Requires-Dist: kernelseam=={__version__}\n"
        ).encode(),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: kernelseam {__version__}\n"
            f"Root-Is-Purelib: true\nTag: {TAG}\n"
        ).encode(),
        f"{info}/entry_points.txt": (
            f"[{bundled.GROUP}]\n{name.distribution} = {name.package}\n"
        ).encode(),
    }
    record = "".join(
        f"{file},sha256={_digest(content)},{len(content)}\n" for file, content in described.items()
    )
    record += f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, content in {**described, f"{info}/RECORD": record.encode()}.items():
            member = zipfile.ZipInfo(file, _DATE)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = 0o100644 << 16
            wheel.writestr(member, content)


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()

"""The file of one cached binary: the payload first, so that binary tools can read the file as it
is, then a header and a digest.

The binary itself contains its key, so an entry with another key's binary is detected.

Layout: payload, JSON header, header length (u64, little-endian), SHA-256 of all before it, magic.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from kernelseam.compilation.folder import VARIABLE, Untrusted, private, reason_for_distrust
from kernelseam.json_schema import decoded, parsed

MAGIC = b"KSEAMB01"
SUFFIX, TEMPORARY, COMPILER = ".bin", ".tmp", ".compiler"
"""Of a binary; of what is being written; of what a plugin keeps about its compiler."""
COMPILERS = "compilers"
"""The folder of the last: the cache's folder itself may be another program's as well."""
_KEY = re.compile(r"[0-9a-f]{64}\.")
_DIGEST = hashlib.sha256().digest_size
_TAIL = 8 + _DIGEST + len(MAGIC)


class Damaged(Exception):
    """An entry whose content is damaged."""


def carries(binary: bytes, key: str) -> bool:
    """Whether a binary was compiled under this key, which is a constant in it (KS_KEY)."""
    return key.encode() in binary


def pack(header: Mapping[str, str], payload: bytes) -> bytes:
    """The content of an entry's file."""
    text = json.dumps(dict(header), sort_keys=True).encode()
    body = payload + text + struct.pack("<Q", len(text))
    return body + hashlib.sha256(body).digest() + MAGIC


def unpack(content: bytes) -> tuple[dict[str, str], bytes]:
    """Header and payload; raises Damaged."""
    if len(content) < _TAIL or content[-len(MAGIC) :] != MAGIC:
        raise Damaged("it is cut short or not an entry")
    body = content[: -_DIGEST - len(MAGIC)]
    if hashlib.sha256(body).digest() != content[len(body) : len(body) + _DIGEST]:
        raise Damaged("its digest does not match")
    (length,) = struct.unpack("<Q", body[-8:])
    text = body[max(len(body) - 8 - length, 0) : -8]
    try:
        header: dict[str, str] = decoded(dict[str, str], parsed(text), "header")
        header["key"]  # noqa: B018
    except (ValueError, KeyError) as e:
        raise Damaged(f"its header cannot be read ({e})") from e
    return header, body[: -8 - length]


def read(path: Path) -> tuple[dict[str, str], bytes]:
    """Header and payload of a file that only its owner can write and whose name is its key.

    Raises FileNotFoundError, Untrusted, Damaged, or another OSError.
    """
    remedy = f"It is compiled again; remove the file, or set {VARIABLE}"
    if path.is_symlink():
        raise Untrusted("cache entry", path, "is a symbolic link", remedy)
    # If the entry is a pipe, opening it must not wait for a writer.
    flags = (
        os.O_RDONLY
        | getattr(os, "O_NOFOLLOW", 0)
        | getattr(os, "O_NONBLOCK", 0)
        | getattr(os, "O_BINARY", 0)
    )
    handle = os.open(path, flags)
    try:
        info = os.fstat(handle)  # of the opened file: the name may refer to another one by now
        reason = reason_for_distrust(info)
        if reason is None and not stat.S_ISREG(info.st_mode):
            reason = "is not a file"
        if reason:
            raise Untrusted("cache entry", path, reason, remedy)
        with os.fdopen(handle, "rb", closefd=False) as file:
            header, payload = unpack(file.read())
    finally:
        os.close(handle)
    if header["key"] != path.stem:
        raise Damaged("it belongs to another key")
    return header, payload


def read_binary(path: Path) -> tuple[dict[str, str], bytes]:
    """The same for a binary, which must contain its key as well."""
    header, payload = read(path)
    if not carries(payload, path.stem):
        raise Damaged("its binary was compiled under another key")
    return header, payload


def is_recent(temporary: Path) -> bool:
    """Whether a process may still be writing a temporary file, which takes less than a second.
    Raises OSError."""
    return time.time() - os.lstat(temporary).st_mtime < 60


def is_ours(path: Path) -> bool:
    """Whether a file's name begins with a key, as all do that are written here."""
    return _KEY.match(path.name) is not None


def remove(path: Path) -> int | None:
    """Remove a file; its size in bytes, None for a folder or where it is gone already. Raises
    OSError."""
    try:
        info = os.lstat(path)
        if stat.S_ISDIR(info.st_mode):
            return None
        path.unlink()
    except FileNotFoundError:  # another process was faster
        return None
    return info.st_size


def clear(folder: Path, suffix: str) -> tuple[int, int]:
    """Remove a folder's entries of this suffix, and what killed processes left there; the number of
    entries and the bytes of all. Raises Untrusted, OSError."""
    if not (private(folder.parent, make=False) and private(folder, make=False)):
        return 0, 0
    entries = size = 0
    for path in filter(is_ours, tuple(folder.iterdir())):
        try:
            if path.suffix != suffix and (path.suffix != TEMPORARY or is_recent(path)):
                continue
        except FileNotFoundError:  # written meanwhile
            continue
        if (removed := remove(path)) is not None:
            entries, size = entries + (path.suffix == suffix), size + removed
    return entries, size


def write(path: Path, header: Mapping[str, str], payload: bytes) -> None:
    """Write atomically, with mode 0600. Raises OSError."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem + ".", suffix=TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(pack(header, payload))
            file.flush()
            os.fsync(handle)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    if os.name == "posix":  # the new name, too, must survive a power cut
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

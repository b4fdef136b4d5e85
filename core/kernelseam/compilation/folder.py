"""Where the cache lies, and whether its owner alone can write there.

A binary runs with the caller's rights, so whatever another user could have put in place is never loaded.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kernelseam.errors import InvalidValue

VARIABLE = "KERNELSEAM_CACHE_DIR"


class CacheWarning(UserWarning):
    """The cache cannot be used as it is; work goes on without it."""


class Untrusted(InvalidValue):
    """A cache folder or entry that someone else could have written."""


def cache_folder() -> Path:
    """The cache's folder: KERNELSEAM_CACHE_DIR, else the user's cache folder of the platform. Makes nothing."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("kernelseam", appauthor=False))


def distrust(info: os.stat_result) -> str | None:
    """Why a folder or file is not trusted, or None."""
    if stat.S_ISLNK(info.st_mode):
        return "is a symbolic link"
    if os.name != "posix":  # owners and modes mean nothing there
        return None
    if info.st_uid != os.geteuid():
        return f"belongs to another user (uid {info.st_uid})"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
    return None


def private(folder: Path, *, make: bool) -> bool:
    """Whether the folder is there, made with mode 0700 if missing and ``make``.

    Raises Untrusted for a folder that is a link, another user's, or writable by others; OSError where it cannot be
    made.
    """
    try:
        info = os.lstat(folder)
    except FileNotFoundError:
        if not make:
            return False
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(folder)
    reason = distrust(info)
    if reason:
        remedy = f"Remove it, take the rights of others away (chmod 700), or set {VARIABLE}"
        raise Untrusted("cache folder", folder, reason, remedy)
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    return True

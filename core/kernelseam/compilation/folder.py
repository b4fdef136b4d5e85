"""The cache's folder, and whether only its owner can write to it.

A binary runs with the caller's rights, so a file that another user could have written is never
loaded.
"""

from __future__ import annotations

import os
import stat
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path

from kernelseam.errors import InvalidValue

VARIABLE = "KERNELSEAM_CACHE_DIR"


class CacheWarning(UserWarning):
    """The cache cannot be used; work goes on without it."""


class Untrusted(InvalidValue):
    """A cache folder or entry that someone else could have written."""


def cache_folder() -> Path:
    """The cache's folder: KERNELSEAM_CACHE_DIR, else the user's cache folder of the platform.
    Creates nothing.

    Where there is neither (no home, "~" of an unknown user), a temporary folder of this user's, and
    a CacheWarning.
    """
    given = os.environ.get(VARIABLE)
    try:
        if given:
            return _given(given) if os.path.isabs(given) else Path(given).expanduser().absolute()
        folder = _of_platform(*map(os.environ.get, ("XDG_CACHE_HOME", "HOME")))
        if folder.is_absolute():  # else its "~" cannot be expanded
            return folder
        problem = "this user has no home folder"
    except (RuntimeError, OSError) as e:  # no such home; no current folder
        problem = (
            f"{VARIABLE} = {given} means no folder ({e})"
            if given
            else f"this user has no home folder ({e})"
        )
    temporary = _temporary()
    message = f"{problem}: binaries are kept in {temporary}. Set {VARIABLE} to a folder of yours"
    # with this stack level, so that it is shown once
    warnings.warn(message, CacheWarning, stacklevel=1)
    return temporary


_given = lru_cache(8)(Path)
"""Of an absolute path: the folder is asked for with each class."""


@lru_cache(8)
def _of_platform(*environment: str | None) -> Path:
    """That of the variables that a process may change."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("kernelseam", appauthor=False))


def _temporary() -> Path:
    """The same in every process of the user; `private` refuses it where another user created it."""
    try:
        place = tempfile.gettempdir()
    except FileNotFoundError:  # no folder can be written: reported when this one is needed
        place = os.path.join(os.sep, "tmp")
    return Path(place) / (f"kernelseam-{os.geteuid()}" if os.name == "posix" else "kernelseam")


def reason_for_distrust(info: os.stat_result) -> str | None:
    """Why a folder or file is not trusted, or None."""
    if stat.S_ISLNK(info.st_mode):
        return "is a symbolic link"
    if os.name != "posix":  # owners and modes have no meaning there
        return None
    if info.st_uid != os.geteuid():
        return f"belongs to another user (uid {info.st_uid})"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
    return None


def private(folder: Path, *, make: bool) -> bool:
    """Whether the folder exists; if it is missing and ``make``, it is created with mode 0700.

    Raises Untrusted for a folder that is a link, another user's, or writable by others; OSError
    where it cannot be created.
    """
    try:
        info = os.lstat(folder)
    except FileNotFoundError:
        if not make:
            return False
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(folder)
    reason = reason_for_distrust(info)
    if reason:
        remedy = f"Remove it, take the rights of others away (chmod 700), or set {VARIABLE}"
        raise Untrusted("cache folder", folder, reason, remedy)
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    return True

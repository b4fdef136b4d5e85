"""Where the cache lies, and whether its owner alone can write there.

A binary runs with the caller's rights, so whatever another user could have put in place is never
loaded.
"""

from __future__ import annotations

import os
import stat
import tempfile
import warnings
from pathlib import Path

from kernelseam.errors import InvalidValue

VARIABLE = "KERNELSEAM_CACHE_DIR"


class CacheWarning(UserWarning):
    """The cache cannot be used as it is; work goes on without it."""


class Untrusted(InvalidValue):
    """A cache folder or entry that someone else could have written."""


def cache_folder() -> Path:
    """The cache's folder: KERNELSEAM_CACHE_DIR, else the user's cache folder of the platform. Makes
    nothing.

    Where there is neither (no home, "~" of nobody), a folder for temporary files that is this
    user's, and a CacheWarning.
    """
    given = os.environ.get(VARIABLE)
    try:
        if given:
            return Path(given).expanduser().absolute()
        import platformdirs

        folder = Path(platformdirs.user_cache_dir("kernelseam", appauthor=False))
        if folder.is_absolute():  # else its "~" stands for nothing
            return folder
        problem = "this user has no home folder"
    except (RuntimeError, OSError) as e:  # nobody's home; no current folder
        problem = (
            f"{VARIABLE} = {given} means no folder ({e})"
            if given
            else f"this user has no home folder ({e})"
        )
    temporary = _temporary()
    message = f"{problem}: binaries are kept in {temporary}. Set {VARIABLE} to a folder of yours"
    warnings.warn(message, CacheWarning, stacklevel=1)  # of this line, so that it is said once
    return temporary


def _temporary() -> Path:
    """The same in every process of the user's; `private` refuses it where another user has made
    it."""
    try:
        place = tempfile.gettempdir()
    except FileNotFoundError:  # no folder can be written: to be told when this one is wanted
        place = os.path.join(os.sep, "tmp")
    return Path(place) / (f"kernelseam-{os.geteuid()}" if os.name == "posix" else "kernelseam")


def reason_for_distrust(info: os.stat_result) -> str | None:
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

    Raises Untrusted for a folder that is a link, another user's, or writable by others; OSError
    where it cannot be made.
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

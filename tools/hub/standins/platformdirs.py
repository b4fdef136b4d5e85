"""platformdirs, as much of it as the binary cache asks for."""

from __future__ import annotations

import os
import sys


def user_cache_dir(appname: str, appauthor: bool = False) -> str:
    """The user's cache folder for an application. ``appauthor`` has a meaning on Windows alone."""
    if sys.platform == "darwin":
        place = "~/Library/Caches"
    else:
        place = os.environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache"
    return os.path.join(os.path.expanduser(place), appname)

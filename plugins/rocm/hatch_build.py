"""The build stops, and says why, where the link to the device sources did not survive."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LINK, SOURCES = "kernelseam_rocm/kernels", "../../../hip_kernels"


class DeviceSources(BuildHookInterface):
    """A check before the distribution is made."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raises SystemExit where the folder of device sources is none."""
        link = Path(self.root) / LINK
        if link.is_dir() and any(link.glob("*.h")):
            return
        here = "a file" if link.is_file() else "a folder without them" if link.is_dir() else "none"
        sources = os.path.relpath(os.path.join(self.root, os.path.dirname(LINK), SOURCES))
        place = os.path.relpath(link)
        raise SystemExit(
            f"{place} must be the folder of device sources, and is {here}: it is a symbolic link "
            f"to {SOURCES}, which a zip of the sources and Git on Windows without symbolic links "
            f"do not keep. Put a copy in its place, `rm -rf {place} && cp -r {sources} {place}`, "
            "or clone anew with `git clone -c core.symlinks=true`."
        )

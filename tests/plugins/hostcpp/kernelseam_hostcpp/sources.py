"""The platform's headers, and those that a launch is made with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources


@cache
def sources() -> Mapping[str, str]:
    """Include name → text of every header of the platform."""
    folder = resources.files("kernelseam_hostcpp") / "kernels"
    texts = {f.name: f.read_text("utf-8") for f in folder.iterdir() if f.name.endswith(".h")}
    return {n if n.startswith("platform") else f"host/{n}": texts[n] for n in sorted(texts)}


@cache
def digest() -> str:
    """Of them all: a part of the compiler's version, for entry.h is in every binary and in no
    bundle."""
    return hashlib.sha256(json.dumps(sources()).encode()).hexdigest()[:16]

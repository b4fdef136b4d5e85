"""From a source bundle to a binary, through a cache that survives crashes, full disks and many
processes."""

from typing import TYPE_CHECKING

from kernelseam.lazy import imported_at_use

if TYPE_CHECKING:
    from kernelseam.compilation.build import Binary, collect_warnings, compiled, forget, is_cached
    from kernelseam.compilation.bundled import installed_bundles, no_jit
    from kernelseam.compilation.folder import CacheWarning, Untrusted, cache_folder
    from kernelseam.compilation.listing import CacheEntry, Cleared, clear, entries
    from kernelseam.compilation.together import compiled_together

__all__ = [
    "Binary",
    "CacheEntry",
    "CacheWarning",
    "Cleared",
    "Untrusted",
    "cache_folder",
    "clear",
    "collect_warnings",
    "compiled",
    "compiled_together",
    "entries",
    "forget",
    "installed_bundles",
    "is_cached",
    "no_jit",
]

_NAMES = {
    ".build": "Binary collect_warnings compiled forget is_cached",
    ".bundled": "installed_bundles no_jit",
    ".folder": "CacheWarning Untrusted cache_folder",
    ".listing": "CacheEntry Cleared clear entries",
    ".together": "compiled_together",
}
__getattr__, __dir__ = imported_at_use(globals(), _NAMES)

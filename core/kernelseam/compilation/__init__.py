"""From a source bundle to a binary, through a cache that survives crashes, full disks and many
processes."""

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

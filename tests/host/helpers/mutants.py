"""Bugs planted in the device sources, and the parity case that kills each: what the tests are
worth.

Every one is bound to a few words of a source. Where that source is changed so that the words are
gone, its lines have to be changed too, such that it plants the same bug in what stands there now;
never deleted because it no longer fits. One or two of a kind and kernel are enough.

Those of the host's files are killed on the host. Those of NVIDIA's headers and of Hopper's kernels
(phases, slots, fences, descriptors, tile orders) no processor but theirs shows:
benchmarks/platform_mutants.py runs them on a GPU, each in a process that is ended where it hangs,
on its case first: a case of the matrix, or of fast_cases.py, where blocks meet several tiles. Of
these the report says what finds a bug without a GPU, if anything does: "order: " and a rule of
tests/crosscompile/test_order.py over the PTX; "log", the assembler's, which serialises the
products; "words", tests/host/test_sm90_device_functions.py, which runs the plain C++ on the host.
"""

from __future__ import annotations

from mutant import ORDER, mutants

HOST_FILES = ("numbers", "attention", "order", "products", "unfused", "decode", "cache")
SM90_FILES = ("gemm", "attention", "gradients", "latent", "scores")

MUTANTS = mutants(*(f"host/mutants/{name}.txt" for name in HOST_FILES))
"""Of the shared kernels and of the host's platform header."""
FAR_MUTANTS = mutants("host/mutants/offsets.txt")
"""Offsets of 32 bits; ``case`` is a name of large_offsets.CASES."""
NVIDIA = mutants("gpu/mutants/nvidia.txt")
SM90 = mutants(*(f"gpu/mutants/sm90_{name}.txt" for name in SM90_FILES))

FOUND = "tests/crosscompile/test_order.py finds it"
LUCK = {
    **{m.name: FOUND for m in SM90 if m.reported == "log" or m.reported.startswith(ORDER)},
    "last-part-too-long": "results are right, as TMA reads zeros behind K",
    "gradients-semaphore-not-waited": "tiles mostly come in order",
}
"""Why a GPU may show nothing: nearly always, what these leave out is over by then."""

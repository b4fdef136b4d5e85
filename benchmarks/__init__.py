"""Ours beside the peers: ``python -m benchmarks run`` from the repository's root. Scripts have one
question each: ``python -m benchmarks.first_call --help``."""

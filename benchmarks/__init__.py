"""Ours beside the peers: ``python -m benchmarks run`` from the repository's root. Scripts have one
question each: ``python -m benchmarks.first_call --help``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tools"))  # the compile matrix

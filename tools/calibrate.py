"""How large the constants of ``tolerances`` must be: ``python tools/calibrate.py``.

Random problems go through the reference and through the tile model (probabilities rounded to 16
bits, exponentials off by up to 2 units in the last place, as hardware's are). For each, the
smallest sufficient constant is computed; the largest of each kind is printed next to the constant
in use, with the largest error over tolerance. An error over 1 is a false alarm: false alarms are
counted, and any makes the exit status 1.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import numpy as np
from calibration import samples
from kernelseam.oracle import tolerances


def main(argv: list[str] | None = None) -> int:
    """Print the table; returns 1 if there was a false alarm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=1000, help="of each operation")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    seed = arguments.seed
    rng = np.random.default_rng(seed)
    others, gradients, sums, projections, guarded, precisions, stored, queries = (
        np.random.default_rng((seed, i)) for i in range(1, 9)
    )
    by_name: dict[str, list[samples.Sample]] = defaultdict(list)
    for _ in range(arguments.problems):
        for sample in (
            *samples.attention_samples(rng),
            *samples.variant_samples(others),
            *samples.gradient_samples(gradients),
            *samples.gemm_samples(rng),
            *samples.sum_samples(sums),
            *samples.projection_samples(projections),
            *samples.guarded_samples(guarded),
            *samples.precision_samples(precisions),
            *samples.stored_samples(stored),
            *samples.query_samples(queries),
        ):
            by_name[sample.kind].append(sample)
    print(f"{'':48}{'problems':>9}{'constant needed':>17}{'in force':>10}{'error/tolerance':>17}")
    for kind in sorted(by_name):
        force = (
            tolerances.ATTENTION_CONSTANT
            if kind.startswith("attention")
            else tolerances.GEMM_CONSTANT
        )
        s = by_name[kind]
        print(
            f"{kind:48}{len(s):9}{max(x.needed for x in s):17.2f}{force:10.0f}"
            f"{max(x.ratio for x in s):17.3f}"
        )
    everything = [x for s in by_name.values() for x in s]
    alarms = sum(x.ratio > 1 for x in everything)
    print(
        f"{10 * arguments.problems} problems, {len(everything)} comparisons, {alarms} false alarms"
    )
    return int(alarms > 0)


if __name__ == "__main__":
    raise SystemExit(main())

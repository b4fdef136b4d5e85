"""The oracle: what operations mean, in float64; how far a right result may be from it; verdicts.

It stands below the functions on arrays and the parity matrix: ``bind(check=True)`` asks it, too.
"""

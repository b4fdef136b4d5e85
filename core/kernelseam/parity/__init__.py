"""The parity matrix: cases, each held against the oracle on every implementation; its report."""

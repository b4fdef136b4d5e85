"""The parity matrix: cases, each compared with the oracle on every implementation; its report."""

"""What calibrates the tolerances: random problems, and models of tile kernels and their faults."""

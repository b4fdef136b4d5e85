"""NVIDIA GPUs for kernelseam. Importing this imports nothing of the vendor's."""

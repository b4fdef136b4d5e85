"""AMD GPUs for kernelseam."""

"""Scripts for those who work on kernelseam."""

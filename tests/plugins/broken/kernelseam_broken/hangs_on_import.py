"""Does not come back from its import."""

from kernelseam_broken.good import hang

hang()

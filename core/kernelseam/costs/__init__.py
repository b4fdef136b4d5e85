"""What a problem should take before anybody has measured it: a roofline for whoever knows nothing,
and a model whose coefficients are rows of an arch's table."""

from kernelseam.costs.model import Work, predicted
from kernelseam.costs.roofline import roofline

__all__ = ["Work", "predicted", "roofline"]

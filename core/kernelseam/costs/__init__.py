"""Predicted times: a roofline from a device's peaks, and a cost model with coefficients of the
arch."""

from kernelseam.costs.model import Work, predicted
from kernelseam.costs.roofline import roofline

__all__ = ["Work", "predicted", "roofline"]

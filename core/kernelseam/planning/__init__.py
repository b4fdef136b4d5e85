"""Plans and calls: a problem made ready for one device, then bound to memory, then launched.

``planner`` chooses and remembers, ``binding`` is the one way from a plan to launches over memory,
``calls`` has what a caller holds.
"""

from kernelseam.planning.calls import Call, Plan
from kernelseam.planning.planner import forget, plan

__all__ = ["Call", "Plan", "forget", "plan"]

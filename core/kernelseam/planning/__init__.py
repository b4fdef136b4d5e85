"""Plans and calls: a problem is planned for one device, bound to memory, then launched.

``planner`` chooses an implementation and caches its launches, ``binding`` binds a plan to memory,
``calls`` has the public classes ``Plan`` and ``Call``.
"""

from kernelseam.planning.calls import Call, Plan
from kernelseam.planning.planner import forget, plan

__all__ = ["Call", "Plan", "forget", "plan"]

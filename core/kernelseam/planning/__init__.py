"""Plans and calls: a problem is planned for one device, bound to memory, then launched.

``planner`` chooses an implementation and caches its launches, ``calls`` has the public classes
``Plan``, which binds to memory, and ``Call``.
"""

from kernelseam.planning.calls import Call, Plan
from kernelseam.planning.planner import forget, plan

__all__ = ["Call", "Plan", "forget", "plan"]

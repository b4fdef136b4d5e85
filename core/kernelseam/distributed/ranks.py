"""Which processes take part: a group of torch.distributed, or a dimension of a DeviceMesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass


@dataclass(frozen=True, eq=False)
class Axis:
    """Processes in a row, of which this is one: all of a group, or some of it."""

    group: Any
    members: tuple[int, ...]
    """Their ranks in the group."""
    index: int
    """This process's place among them."""

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def whole(self) -> bool:
        """Whether they are the whole group, in its order."""
        return self.members == tuple(range(dist.get_world_size(self.group)))

    def peer(self, index: int) -> int:
        """The global rank of the member at a place, counted round."""
        return int(dist.get_global_rank(self.group, self.members[index % self.size]))

    def split(self, inner: int) -> tuple[Axis, Axis]:
        """(outer, inner): neighbours in blocks of ``inner``, and those at the same place of every
        block."""
        block, place = divmod(self.index, inner)
        blocks = self.size // inner
        return (
            Axis(self.group, tuple(self.members[i * inner + place] for i in range(blocks)), block),
            Axis(self.group, self.members[block * inner : (block + 1) * inner], place),
        )


def axes_of(group: Any) -> tuple[Axis, tuple[Axis, Axis] | None]:
    """All ranks of a group, and (ring, heads) of a DeviceMesh of two dimensions. Raises as
    ``axis_of``."""
    if not (isinstance(group, DeviceMesh) and group.ndim == 2):
        return axis_of(group), None
    _check_order(group, "group")
    if group.mesh_dim_names is None:
        raise InvalidValue(
            "group",
            "a DeviceMesh without names",
            "must name its two dimensions, so that torch makes a group of all its ranks",
            'Make it with mesh_dim_names=("ring", "heads")',
        )
    ring, heads = _axis(group, "group", 0), _axis(group, "group", 1)
    return _axis(group._flatten(), "group"), (ring, heads)


def axis_of(group: Any, field: str = "group") -> Axis:
    """The processes of a ProcessGroup or of a one-dimensional DeviceMesh.

    Raises InvalidValue where torch.distributed is not initialised, for what is no group, for a
    group that was destroyed or that this process is not part of, and for a mesh that lists its
    ranks in another order than by number.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InvalidValue(
                field,
                f"a DeviceMesh of {group.ndim} dimensions",
                "must have one dimension (two with method='mesh': ring, heads)",
                "Name the one that the sequence is sharded over: mesh['…']",
            )
        _check_order(group, field)
    return _axis(group, field)


def _axis(group: Any, field: str, dim: int | None = None) -> Axis:
    """``dim``: of a mesh of several."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidValue(
            field,
            "not initialised",
            "torch.distributed has no process group yet",
            "Call torch.distributed.init_process_group() in every process, started by torchrun",
        )
    if not isinstance(group, dist.ProcessGroup | DeviceMesh):
        raise InvalidValue(
            field,
            type(group).__name__,
            "must be a ProcessGroup that this process is part of, or a dimension of a DeviceMesh",
            "Pass torch.distributed.group.WORLD, what new_group() gave, or mesh['…']",
        )
    known = current_group(group, dim)
    if known is None:
        raise InvalidValue(
            field,
            "a group that was destroyed",
            "must be a group that torch.distributed has",
            "Make the group or the mesh again",
        )
    return Axis(known, tuple(range(dist.get_world_size(known))), dist.get_rank(known))


def current_group(group: Any, dim: int | None = None) -> Any:
    """The ProcessGroup that a group or a dimension of a mesh, its only one where ``dim`` is None,
    stands for now; None where torch has it no more, or for what is neither. Equal meshes may stand
    for different groups."""
    try:
        found = group.get_group(dim) if isinstance(group, DeviceMesh) else group
        if isinstance(found, dist.ProcessGroup):
            dist.get_rank(found)
            return found
    except (RuntimeError, ValueError):
        pass
    return None


def _check_order(mesh: DeviceMesh, field: str) -> None:
    """Refuse a mesh that this process is not part of, and one that lists its ranks in another order
    than by number: torch's groups number their ranks by the latter, and shards lie by it."""
    if mesh.get_coordinate() is None:
        raise InvalidValue(
            field,
            f"a DeviceMesh of the ranks {mesh.mesh.flatten().tolist()}",
            f"must have this process, rank {dist.get_rank()}",
            "Call this on the mesh's ranks alone",
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise InvalidValue(
            field,
            f"the DeviceMesh {mesh.mesh.tolist()}",
            "must list its ranks in ascending order: shards lie on ranks by their number",
            f"Make the mesh of {torch.tensor(sorted(ranks)).view_as(mesh.mesh).tolist()}",
        )

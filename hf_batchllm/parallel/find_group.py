"""The group of processes that have a model together, by the model."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import nn

from .group import Group
from .rank_watch import RankWatch

_NO_LIMIT = timedelta(days=365)  # to wait for a rank that is busy: one that is gone is heard of
_known: dict[Any, RankWatch] = {}  # by the group of the devices


def group_of(model: nn.Module) -> Group | None:
    """None where this process alone has ``model``. Otherwise each of them must ask."""
    mesh, size = getattr(model, "_device_mesh", None), getattr(model, "_tp_size", None) or 1
    if mesh is None or size == 1 or mesh.size() != size:  # a mesh of another kind is refused by name elsewhere
        return None
    devices = (mesh["tp"] if mesh.mesh_dim_names else mesh).get_group()
    if devices not in _known:
        _known[devices] = _joined(devices)
    backend = devices._get_backend(next(model.parameters()).device)
    return Group(_known[devices], devices, backend._get_sequence_number_for_group)


def _joined(devices: Any) -> RankWatch:
    import torch.distributed as dist

    members = dist.get_process_group_ranks(devices)
    hosts = dist.new_group(members, backend="gloo", use_local_synchronization=True, timeout=_NO_LIMIT)
    rank, size = dist.get_rank(hosts), dist.get_world_size(hosts)

    def exchange(mine: Any) -> list[Any]:
        found: list[Any] = [None] * size
        dist.all_gather_object(found, mine, group=hosts)
        return found

    def release() -> None:
        if torch.cuda.is_available() and dist.get_backend(devices) != "gloo":
            for each in [*watch.all_reduces]:
                each.end()
            devices._get_backend(torch.device("cuda")).abort()

    watch = RankWatch(rank, size, exchange, release)
    return watch

"""The ranks that have a model together, by the model; and the groups over which their hosts talk."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import nn

from ..rank_watch import RankWatch
from ..tensor_ranks import TensorRanks

_NO_LIMIT = timedelta(days=365)  # to wait for a rank that is busy: one that is gone is heard of
# Of the model's group, by its members: a group over which hosts talk. The model's is held, so no other has its id.
_hosts_of: dict[tuple[int, ...], tuple[Any, Any, RankWatch]] = {}


def ranks_of(model: nn.Module) -> TensorRanks:
    """Those that have ``model`` together. Where there are several, each of them must ask."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) == 1:
        return TensorRanks()
    import torch.distributed as dist

    devices = (mesh["tp"] if mesh.mesh_dim_names else mesh).get_group()
    members = tuple(dist.get_process_group_ranks(devices))
    made = _hosts_of.get(members)
    if made is None or made[0] is not devices:
        if made is not None:
            made[2].leave()
        hosts = dist.new_group(list(members), backend="gloo", use_local_synchronization=True, timeout=_NO_LIMIT)
        made = _hosts_of[members] = devices, hosts, _watched(devices, hosts)
    backend = devices._get_backend(next(model.parameters()).device)
    return TensorRanks(made[1], devices, made[2], backend._get_sequence_number_for_group)


def _watched(devices: Any, hosts: Any) -> RankWatch:
    import torch.distributed as dist

    def exchange(mine: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(hosts)
        dist.all_gather_object(found, mine, group=hosts)
        return found

    def release() -> None:
        if torch.cuda.is_available() and dist.get_backend(devices) != "gloo":
            from ..peer_sums import end_sums_of

            end_sums_of(devices)
            devices._get_backend(torch.device("cuda")).abort()

    return RankWatch(dist.get_rank(hosts), dist.get_world_size(hosts), exchange, release)

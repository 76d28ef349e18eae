"""Makes what touches a model's device: the memory, the KV storage, runners, seats and graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..config import BatchConfig
from ..model.attention.kv_storage import KVStorage
from ..model.device_memory import DeviceMemory, device_memory
from ..model.inspection.architecture import Architecture
from ..model.model_in_use import ModelInUse
from ..model.runner import ModelRunner
from ..notices import Notices
from ..patches.fusion import Fusion
from ..sampling.device_logprobs import DeviceLogProbs
from .computed_with import ComputedWith
from .device_loop.decode_graphs import DecodeGraphs, graphs_for
from .device_loop.decode_rows import Advance, Pick
from .device_loop.seats import Seats


class Devices:
    """The device of a model that this process alone runs."""

    def close(self) -> None:
        """No call will follow."""

    def model_in_use(
        self, model: nn.Module, architecture: Architecture, config: BatchConfig, fusion: Fusion, notices: Notices
    ) -> ModelInUse:
        """The model for the length of a call."""
        return ModelInUse(model, architecture, config, fusion, notices)

    def memory(self, device: torch.device) -> DeviceMemory:
        return device_memory(device)

    def storage(self, num_pages: int, page_size: int, num_slots: int = 0) -> KVStorage:
        return KVStorage(num_pages, page_size, num_slots)

    def computed_with(self, model: nn.Module, architecture: Architecture) -> ComputedWith:
        return ComputedWith(model, architecture)

    def seats(self, stop_tokens: Sequence[frozenset[int]], device: torch.device, keep_tokens: bool = True) -> Seats:
        return Seats.of(stop_tokens, device, keep_tokens)

    def graphs(
        self,
        config: BatchConfig,
        runner: ModelRunner,
        seats: Seats,
        pick: Pick | None,
        advance: Advance | None,
        most_times: int,
        notices: Notices,
        noting: DeviceLogProbs | None,
    ) -> DecodeGraphs | None:
        """None where the backend cannot keep the state of decode rows on the device."""
        return graphs_for(config, runner, seats, pick, advance, most_times, notices, noting)

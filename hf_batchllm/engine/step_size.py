"""How much the device is given at a time: so much that it is still at work when the host comes with more."""

from __future__ import annotations

import torch
from torch import nn

# A CPU's matrix products are as efficient as they get from some hundred rows on, while larger activations leave its
# caches.
_CPU_TOKENS = 512
# On a GPU they are from some thousand rows on. Of a small model they end before the host has launched the next step,
# layer by layer, which takes it 20 to 40 ms whatever the size: so steps are larger, up to where nothing more is gained.
_TOKENS, _MOST_TOKENS = 8192, 32768
_STEP_SECONDS, _OPERATIONS_PER_SECOND = 0.05, 6e14
_PLENTY = 8  # times the weights' memory must be to be had, for larger steps than usual
# Decode rows run so often in a row that the host, which takes a millisecond or two to prepare a burst, keeps ahead:
# each run takes at least as long as reading the weights, at so many bytes a second.
_BURST_SECONDS, _BYTES_PER_SECOND, _MOST_TIMES = 0.016, 3e12, 16


def tokens_in_a_step(model: nn.Module, device: torch.device, free: int) -> int:
    """The most tokens that a step runs over. ``free``: bytes of memory for the KV cache and for steps."""
    if device.type == "cpu":
        return _CPU_TOKENS
    weights = list(model.parameters())
    if device.type != "cuda" or free < _PLENTY * sum(weight.nbytes for weight in weights):
        return _TOKENS
    operations = 2 * sum(weight.numel() for weight in weights)  # of a token
    wanted = _STEP_SECONDS * _OPERATIONS_PER_SECOND / max(operations, 1)
    tokens = _TOKENS
    while tokens < min(wanted, _MOST_TOKENS):
        tokens *= 2
    return tokens


def times_in_a_row(model: nn.Module) -> int:
    """The same for each call, so that sums come in the same order."""
    least = sum(weight.nbytes for weight in model.parameters()) / _BYTES_PER_SECOND
    return min(_MOST_TIMES, max(2, round(_BURST_SECONDS / least))) if least else _MOST_TIMES

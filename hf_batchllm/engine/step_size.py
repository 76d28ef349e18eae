"""The size of steps and bursts: enough work to keep the device busy until the host comes with more."""

from __future__ import annotations

import torch
from torch import nn

from ..kernels.cards import card_on
from ..patches.sharded_modules import local

# A CPU's matrix products reach full efficiency at some hundred rows; larger activations leave its caches.
_CPU_TOKENS = 512
# On a GPU, matrix products reach full efficiency at some thousand rows. The host takes 20 to 40 ms to launch a step,
# whatever its size. A small model's step would end sooner, so its steps are larger, as far as that gains anything.
_TOKENS, _MOST_TOKENS = 8192, 32768
_STEP_SECONDS = 0.05
_PLENTY = 8  # times the memory of the weights must be free for larger steps than usual
# The host takes a millisecond or two to prepare a burst. A burst is long enough for it to stay ahead: each run takes at
# least the time of reading the weights.
_BURST_SECONDS, _MOST_TIMES = 0.016, 16
_GATHER_ROWS = {"cpu": 128}  # a CPU's decode steps get cheaper by the row up to about a hundred rows


def tokens_in_a_step(model: nn.Module, device: torch.device, free: int) -> int:
    """The most tokens of a step. ``free``: bytes of memory for the KV cache and for steps."""
    if device.type == "cpu":
        return _CPU_TOKENS
    weights = [local(weight) for weight in model.parameters()]
    if device.type != "cuda" or free < _PLENTY * sum(weight.nbytes for weight in weights):
        return _TOKENS
    operations = 2 * sum(weight.numel() for weight in weights)  # of a token
    wanted = _STEP_SECONDS * card_on(device).operations / max(operations, 1)
    tokens = _TOKENS
    while tokens < min(wanted, _MOST_TOKENS):
        tokens *= 2
    return tokens


def times_in_a_row(model: nn.Module, device: torch.device) -> int:
    """Runs of a burst. The same in each call, so that sums are taken in the same order."""
    least = sum(local(weight).nbytes for weight in model.parameters()) / card_on(device).bytes
    return min(_MOST_TIMES, max(2, round(_BURST_SECONDS / least))) if least else _MOST_TIMES


def gather_rows(device: torch.device) -> int:
    """How many decode rows a scheduler gathers before it runs them."""
    return _GATHER_ROWS.get(device.type, 0)

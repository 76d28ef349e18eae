"""The model without an engine: its parts timed alone, at the row counts of a run's steps.

The parts are the matrix products of the prompt tokens, the model's own layers without attention for decode rows, and
the LM head for the sampled rows. The engine's overhead comes on top: attention, norms and activations of the prompt
tokens, scheduling, sampling and results.

A mixture of experts has matrices that are no linear layers, and a row meets few of them. There, whole layers are timed
for prompt tokens as well. These are the model's own code, and random tokens choose the experts. The engine has kernels
for such layers, so a run may take less time than the model alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..patches.attention_interface import ATTENTION_NAME, AttentionCall, attention_context
from ..patches.attention_swap import AttentionSwap
from .matrices import matrices_of
from .recording_scheduler import StepSize
from .timing import timed

_REPEATS = 3


@dataclass(frozen=True)
class ModelAlone:
    """Seconds of each part over a whole run."""

    prefill: float
    decode: float
    head: float
    products_only: bool  # whether ``prefill`` is the matrix products alone, and not whole layers

    @property
    def total(self) -> float:
        return self.prefill + self.decode + self.head


class _NoAttention:
    takes_masks = True
    calls = 0

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return call.v.new_zeros(*call.q.shape[:2], call.v.shape[-1])


@torch.no_grad()
def time_model_alone(model: PreTrainedModel, sizes: Sequence[StepSize]) -> ModelAlone:
    head = model.get_output_embeddings()
    matrices = matrices_of(model)
    products, products_only = matrices.linear, matrices.in_linear_layers_alone
    swap = AttentionSwap(model)
    vocabulary = model.config.get_text_config().vocab_size

    def multiply(rows: int) -> Callable[[], None]:
        inputs = {
            width: torch.randn(rows, width, device=model.device, dtype=model.dtype)
            for width in {_width(module) for module in products}
        }

        def run() -> None:
            for module in products:
                module(inputs[_width(module)])

        return run

    def layers(rows: int) -> Callable[[], None]:
        ids = torch.randint(0, vocabulary, (1, rows), generator=torch.Generator().manual_seed(0)).to(model.device)
        positions = torch.zeros_like(ids)

        def run() -> None:
            with swap.applied(ATTENTION_NAME), attention_context(_NoAttention()):
                model.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False)

        return run

    def last(rows: int) -> Callable[[], None]:
        hidden = torch.randn(rows, _width(head), device=model.device, dtype=model.dtype)
        return lambda: head(hidden)

    def seconds(counts: Counter[int], part: Callable[[int], Callable[[], None]]) -> float:
        return sum(count * _median(model.device, part(rows)) for rows, count in counts.items() if rows)

    mixed = Counter(size.rows + size.chunk_tokens for size in sizes if size.chunk_tokens)
    decode = Counter(size.rows for size in sizes if not size.chunk_tokens)
    return ModelAlone(
        prefill=seconds(mixed, multiply if products_only else layers),
        decode=seconds(decode, layers),
        head=seconds(Counter(size.samples for size in sizes), last),
        products_only=products_only,
    )


def _median(device: torch.device, work: Callable[[], None]) -> float:
    work()
    times = sorted(timed(device, work)[0] for _ in range(_REPEATS))
    return times[_REPEATS // 2]


def _width(module: nn.Module) -> int:
    assert isinstance(module, nn.Linear | Conv1D)
    return int(module.weight.shape[0] if isinstance(module, Conv1D) else module.in_features)

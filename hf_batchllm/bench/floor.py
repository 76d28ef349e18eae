"""The floor: the least time that a run can take, from what it must compute and read and from two rates of the machine.

Computed at the rate of large matrix products: the products of all prompt tokens that differ, of all decode rows and of
the LM head, and the prompts' attention. Read at the rate of a large copy: the K and V of each decode step, a shared
prefix once for its group. Reading the weights costs nothing where decode rows run in one step with prompts. If nothing
is shared, prompts come first and decode steps run alone: each then takes at least as long as reading the weights.

Not part of the floor, but shown beside it: what the small operations of a layer read and write even when fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..model.architecture import inspect_model
from .machine_rates import Rates
from .workload import PromptGroup

# Values that pass through memory for each token and layer, as multiples of a width. Twice a layer a norm reads a
# sublayer's output and the residual and writes both the sum and its norm; rope reads q, k and v and writes them (k and
# v to the cache); an activation reads gate and up and writes one.
_NORMS, _ROPE, _GATED_MLP, _PLAIN_MLP = 8, 2, 3, 2


class NoFloorError(ValueError):
    """The floor's arithmetic does not hold for this model."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that the floor needs."""

    hidden: int
    heads: int
    head_dim: int
    vocabulary: int
    linear_weights: int  # of all layers, without embedding and LM head
    kv_bytes: int  # of a token, over all layers that read them
    windows: tuple[int | None, ...]  # [layers]  keys that each layer sees; None: all
    query_key_value: int  # values of a token's q, k and v in a layer
    mlp_width: int
    gated: bool
    value_bytes: int = 2

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def step_bytes(self) -> int:
        """Weights that a step of decode rows reads, however few rows it has."""
        return (self.linear_weights + self.head_weights) * self.value_bytes

    @property
    def elementwise_bytes(self) -> int:
        """Bytes that a token's small operations read and write, over all layers."""
        mlp = (_GATED_MLP if self.gated else _PLAIN_MLP) * self.mlp_width
        values = _NORMS * self.hidden + _ROPE * self.query_key_value + mlp
        return values * self.layers * self.value_bytes

    @classmethod
    def of(cls, model: PreTrainedModel) -> Shape:
        config = model.config.get_text_config(decoder=True)
        head = model.get_output_embeddings()
        linear = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D) and module is not head]
        known = {id(module.weight) for module in [*linear, head]}
        known |= {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        if any(id(weight) not in known for weight in model.parameters() if weight.ndim > 1):
            raise NoFloorError("not every token meets all of its matrices (a mixture of experts)")
        architecture = inspect_model(model)
        values = sum(shape.kv_values for shape in architecture.attention)  # each layer reads them, shared or not
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        inner = getattr(config, "n_inner", None) or 4 * config.hidden_size
        return cls(
            hidden=config.hidden_size,
            heads=heads,
            head_dim=head_dim,
            vocabulary=head.weight.shape[0],
            linear_weights=sum(module.weight.numel() for module in linear),
            kv_bytes=values * model.dtype.itemsize,
            windows=_windows(config, architecture.layers),
            query_key_value=heads * head_dim + values // architecture.layers,
            mlp_width=getattr(config, "intermediate_size", None) or inner,
            gated=any("gate" in name.rpartition(".")[2] for name, _ in model.named_modules()),
            value_bytes=model.dtype.itemsize,
        )


@dataclass(frozen=True)
class Needs:
    """What a run must compute and read."""

    prompt_tokens: int  # that differ
    decode_tokens: int
    operations: float  # of products and of the prompts' attention
    kv_bytes: float  # that decode steps read, each shared prefix once for its group
    waiting: float  # seconds by which reading the weights exceeds the products of decode steps
    elementwise_bytes: float


@dataclass(frozen=True)
class Floor:
    needs: Needs
    rates: Rates
    alone: bool  # whether decode steps run without prompts

    @property
    def products(self) -> float:
        return self.needs.operations / self.rates.operations

    @property
    def keys(self) -> float:
        return self.needs.kv_bytes / self.rates.copy

    @property
    def weights(self) -> float:
        return self.needs.waiting if self.alone else 0.0

    @property
    def seconds(self) -> float:
        return self.products + self.keys + self.weights

    @property
    def elementwise(self) -> float:
        return self.needs.elementwise_bytes / self.rates.copy


def floor_of(shape: Shape, groups: Sequence[PromptGroup], rates: Rates) -> Floor:
    return Floor(_needs(shape, groups, rates), rates, alone=not any(group.shared for group in groups))


def _needs(shape: Shape, groups: Sequence[PromptGroup], rates: Rates) -> Needs:
    linear, head = 2 * shape.linear_weights, 2 * shape.head_weights  # operations of a token
    per_pair = 4 * shape.heads * shape.head_dim
    layer_bytes = shape.kv_bytes / shape.layers
    prompt_tokens = samples = 0
    attention = kv = 0.0
    for group in groups:
        own, new = np.asarray(group.own, dtype=float), np.asarray(group.new, dtype=float)
        prompt_tokens += group.shared + int(own.sum())
        samples += len(own)
        steps = new - 1  # the first token comes with the prompt
        for window, layers in _counted(shape.windows):
            pairs = _seen(group.shared, 0, window) + sum(_seen(count, group.shared, window) for count in own)
            attention += layers * per_pair * pairs
            keys = sum(_seen(s, o, window) + s / 2 for s, o in zip(steps, own, strict=True))
            # The prefix is read while any member runs, as far back as the member with the fewest own tokens sees.
            longest, least = steps.max(), own.min()
            keys += _seen(longest, group.shared + least, window) - _seen(longest, least, window)
            kv += layers * layer_bytes * keys
    counts = np.concatenate([np.asarray(group.new) for group in groups]) - 1
    rows = np.array([(counts > step).sum() for step in range(counts.max(initial=0))])  # [steps]
    decode_tokens = int(counts.sum())
    operations = linear * prompt_tokens + attention + head * samples + (linear + head) * decode_tokens
    short = shape.step_bytes / rates.copy - rows * (linear + head) / rates.operations
    return Needs(
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        operations=operations,
        kv_bytes=kv,
        waiting=float(np.maximum(short, 0).sum()),
        elementwise_bytes=float(shape.elementwise_bytes) * (prompt_tokens + decode_tokens),
    )


def _seen(queries: float, before: float, window: int | None) -> float:
    """Keys seen by all of ``queries`` consecutive queries together, after ``before`` older tokens."""
    if window is None or before + queries <= window:
        return queries * before + queries * queries / 2
    growing = max(window - before, 0)
    return growing * before + growing * growing / 2 + (queries - growing) * window


def _counted(windows: Sequence[int | None]) -> list[tuple[int | None, int]]:
    return [(window, windows.count(window)) for window in dict.fromkeys(windows)]


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return (window if getattr(config, "use_sliding_window", True) else None,) * layers

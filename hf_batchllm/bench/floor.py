"""The floor: the least time that a run can take, from what it must compute and read and from two rates of the machine.

Computed at the rate of large matrix products: the products of all prompt tokens that differ, of all decode rows and
of the LM head, and the prompts' attention. Read at the rate of a large copy: the K and V of each decode step, a
shared prefix once for its group. Layers that carry a state read and write it for each decode token, and where a
prompt ends. Reading the weights costs nothing where decode rows run in one step with prompts. If nothing is shared,
prompts come first and decode steps run alone: each then takes at least as long as reading the weights. Prompts take
at least as long as reading the weights once, and a run with shared prefixes at least as long as reading them once for
the prompts and once for each further token of the longest answer.

A mixture of experts differs in two ways. A token is multiplied by the matrices that all tokens meet (attention, router,
shared experts, dense layers) and by those of the few experts that are chosen for it. And a step reads the weights that
all tokens meet and those of each expert that is met by one of its rows at least. With a share p of all tokens choosing
an expert, r rows all pass it by with probability (1 - p)^r; so the step meets as many experts as 1 - (1 - p)^r adds up
to over a layer's experts. The shares are counted layer by layer over tokens of the run (``routing_shares.py``). Tokens
of one answer resemble each other more than those of several answers, so a step meets a few experts more than that: the
floor is too low rather than too high. Where nothing can be counted, each expert gets as many tokens as any other.

Not part of the floor, but shown beside it: what the small operations of a layer read and write even when fused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..model.architecture import inspect_model
from ..model.state_layers import ATTENDING, BOTH
from .machine_rates import Rates
from .matrices import Matrices, Mixture, NoFloorError, matrices_of
from .workload import PromptGroup

# Values that pass through memory for each token and layer, as multiples of a width. Twice a layer a norm reads a
# sublayer's output and the residual and writes both the sum and its norm; rope reads q, k and v and writes them (k and
# v to the cache); an activation reads gate and up and writes one.
_NORMS, _ROPE, _GATED_MLP, _PLAIN_MLP = 8, 2, 3, 2


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that the floor needs."""

    hidden: int
    heads: int
    head_dim: int
    vocabulary: int
    linear_weights: int  # of all layers, without embedding, LM head and experts
    kv_bytes: int  # of a token, over all layers that read them
    windows: tuple[int | None, ...]  # [layers]  keys that each layer sees; None: all
    query_key_value: int  # values of a token's q, k and v in a layer
    mlp_width: int
    gated: bool
    value_bytes: int = 2
    mixtures: tuple[Mixture, ...] = ()  # of the layers that have one
    routed_tokens: int = 0  # of the run, over which their shares were counted; 0: all experts are taken to be alike
    state_bytes: int = 0  # that a sequence carries from token to token, in layers that do
    layers_in_all: int = 0  # those that attend and those that do not; 0: all attend

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def met_weights(self) -> int:
        """Weights of all layers by which a token is multiplied."""
        return self.linear_weights + sum(mixture.top * mixture.weights for mixture in self.mixtures)

    def step_bytes(self, rows: np.ndarray) -> np.ndarray:  # [steps] -> [steps]
        """Weights that a step of so many rows reads, on average; without experts the number does not matter."""
        whole = np.full(len(rows), float(self.linear_weights + self.head_weights))
        counted = Counter(self.mixtures).items()
        return (whole + sum(n * each.weights * each.met(rows) for each, n in counted)) * self.value_bytes

    def experts_met(self, rows: np.ndarray) -> float:
        """Of a layer by a step, on average over layers and steps."""
        if not self.mixtures or not len(rows):
            return 0.0
        met = sum(n * each.met(rows).mean() for each, n in Counter(self.mixtures).items())
        return float(met / len(self.mixtures))

    @property
    def elementwise_bytes(self) -> int:
        """Bytes that a token's small operations read and write, over all layers.

        An expert's activation is part of its products. The sum of a token's experts reads each result and writes one.
        """
        gated = _GATED_MLP if self.gated else _PLAIN_MLP
        layers = self.layers_in_all or self.layers
        values = _NORMS * self.hidden * layers + _ROPE * self.query_key_value * self.layers
        values += gated * self.mlp_width * (layers - len(self.mixtures))
        values += sum((each.top + 1) * self.hidden + gated * each.shared_width for each in self.mixtures)
        return values * self.value_bytes

    @classmethod
    def of(cls, model: PreTrainedModel, matrices: Matrices | None = None) -> Shape:
        config = model.config.get_text_config(decoder=True)
        head = model.get_output_embeddings()
        matrices = matrices or matrices_of(model)
        if matrices.why_not_known:
            raise NoFloorError(matrices.why_not_known)
        architecture = inspect_model(model)
        if not architecture.attention:
            raise NoFloorError("it has no layer that attends")
        values = sum(shape.kv_values for shape in architecture.attention)  # each layer reads them, shared or not
        heads = architecture.attention[0].heads
        # Of queries and values, which may differ, and over layers, which may differ as well.
        widths = sum(shape.heads * (shape.qk_dim + shape.v_dim) for shape in architecture.attention)
        head_dim = widths // (2 * heads * architecture.layers)
        inner = getattr(config, "n_inner", None) or 4 * config.hidden_size
        return cls(
            hidden=config.hidden_size,
            heads=heads,
            head_dim=head_dim,
            vocabulary=head.weight.shape[0],
            linear_weights=sum(_numbers(module) for module in matrices.linear) + matrices.routers,
            kv_bytes=values * model.dtype.itemsize,
            windows=_windows(config, architecture.layers),
            query_key_value=heads * head_dim + values // architecture.layers,
            mlp_width=getattr(config, "intermediate_size", None) or inner,
            gated=any("gate" in name.rpartition(".")[2] for name, _ in model.named_modules()),
            value_bytes=model.dtype.itemsize,
            mixtures=tuple(mixture for _, mixture in matrices.mixtures),
            state_bytes=architecture.slot_bytes,
            layers_in_all=config.num_hidden_layers if architecture.states else 0,
        )


@dataclass(frozen=True)
class Needs:
    """What a run must compute and read."""

    prompt_tokens: int  # that differ
    decode_tokens: int
    operations: float  # of products and of the prompts' attention
    kv_bytes: float  # that decode steps read, each shared prefix once for its group; and states, read and written
    waiting: float  # seconds by which reading the weights exceeds the products
    elementwise_bytes: float
    experts_met: float = 0.0  # of a layer by a decode step, on average


@dataclass(frozen=True)
class Floor:
    needs: Needs
    rates: Rates
    alone: bool  # whether decode steps run without prompts
    experts: int = 0  # of a layer
    routed_tokens: int = 0  # over which the share of each was counted

    @property
    def products(self) -> float:
        return self.needs.operations / self.rates.operations

    @property
    def keys(self) -> float:
        return self.needs.kv_bytes / self.rates.copy

    @property
    def weights(self) -> float:
        return self.needs.waiting

    @property
    def seconds(self) -> float:
        return self.products + self.keys + self.weights

    @property
    def elementwise(self) -> float:
        return self.needs.elementwise_bytes / self.rates.copy


def floor_of(shape: Shape, groups: Sequence[PromptGroup], rates: Rates) -> Floor:
    alone = not any(group.shared for group in groups)
    most = max((mixture.experts for mixture in shape.mixtures), default=0)
    return Floor(_needs(shape, groups, rates, alone), rates, alone, most, shape.routed_tokens)


def _needs(shape: Shape, groups: Sequence[PromptGroup], rates: Rates, alone: bool) -> Needs:
    linear, head = 2 * shape.met_weights, 2 * shape.head_weights  # operations of a token
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
    # A state is read and written for each token by itself; and left where a prompt ends, and read where one goes on.
    left_and_read = sum(2 * len(group.new) + 1 if group.shared else len(group.new) for group in groups)
    counts = np.concatenate([np.asarray(group.new) for group in groups]) - 1
    rows = np.array([(counts > step).sum() for step in range(counts.max(initial=0))])  # [steps]
    decode_tokens = int(counts.sum())
    kv += shape.state_bytes * (2 * decode_tokens + left_and_read)
    of_prompts = linear * prompt_tokens + attention + head * samples
    operations = of_prompts + (linear + head) * decode_tokens
    # The fewest steps: all prompts in one, then one for each further token of the longest answer.
    reads = shape.step_bytes(np.array([prompt_tokens, *rows])) / rates.copy
    computes = np.array([of_prompts, *rows * (linear + head)]) / rates.operations
    short = reads - computes if alone else (reads.sum() - computes.sum())[None]
    return Needs(
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        operations=operations,
        kv_bytes=kv,
        waiting=float(np.maximum(short, 0).sum()),
        elementwise_bytes=float(shape.elementwise_bytes) * (prompt_tokens + decode_tokens),
        experts_met=shape.experts_met(rows),
    )


def _seen(queries: float, before: float, window: int | None) -> float:
    """Keys seen by all of ``queries`` consecutive queries together, after ``before`` older tokens."""
    if window is None or before + queries <= window:
        return queries * before + queries * queries / 2
    growing = max(window - before, 0)
    return growing * before + growing * growing / 2 + (queries - growing) * window


def _numbers(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.numel()


def _counted(windows: Sequence[int | None]) -> list[tuple[int | None, int]]:
    return [(window, windows.count(window)) for window in dict.fromkeys(windows)]


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        attend = [kind for kind in kinds if kind in ATTENDING | BOTH]
        return tuple(window if kind == "sliding_attention" else None for kind in attend)
    return (window if getattr(config, "use_sliding_window", True) else None,) * layers

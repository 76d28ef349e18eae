"""Which matrices of a model every token meets, and which only some tokens do: those of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..patches.fusable_experts import mixtures as mixtures_in
from ..patches.state_functions import mixers

_TOP = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")  # how configs call it
_INTO_HIDDEN = ("down_proj", "output_linear")  # the last matrix of a shared expert


class NoFloorError(ValueError):
    """The floor's arithmetic does not hold for this model."""


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer."""

    experts: int
    top: int  # experts that a token meets
    weights: int  # of the matrices of one expert
    shared_width: int = 0  # values between the matrices of an expert that all tokens meet
    shares: tuple[float, ...] = ()  # [experts]  of the tokens that meet each; empty: all alike

    def met(self, rows: np.ndarray) -> np.ndarray:  # [steps] -> [steps]
        """How many experts steps of so many rows meet, on average: all but those that every row passes by."""
        shares = np.array(self.shares or (self.top / self.experts,) * self.experts)
        sizes, which = np.unique(rows, return_inverse=True)
        passed_by = np.power(1 - np.minimum(shares, 1)[None], sizes[:, None])  # [sizes, experts]
        return np.asarray((1 - passed_by).sum(1)[which])

    def with_counts(self, counts: np.ndarray, tokens: int) -> Mixture:  # [experts]
        return replace(self, shares=tuple((counts / tokens).tolist()))


@dataclass
class Matrices:
    linear: list[nn.Module] = field(default_factory=list)  # those that each token meets, without the LM head
    routers: int = 0  # weights of routers that are no linear layers
    mixtures: list[tuple[nn.Module, Mixture]] = field(default_factory=list)  # the module that is called for experts
    why_not_known: str = ""  # why some of them cannot be told

    @property
    def in_linear_layers_alone(self) -> bool:
        return not self.mixtures and not self.why_not_known


def matrices_of(model: PreTrainedModel) -> Matrices:
    head = model.get_output_embeddings()
    found = Matrices()
    rarely = {id(each) for module in _lists_of_experts(model) for each in module.modules()}
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head and id(module) not in rarely:
            found.linear.append(module)
    known = {id(module.weight) for module in [*found.linear, head]}
    # A short convolution multiplies each value of a token a few times: next to nothing beside the products.
    known |= {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.Conv1d)}
    # So does a selective scan with its rates, one for each value of a state.
    known |= {id(module.A_log) for _, module, _ in mixers(model) if hasattr(module, "A_log")}
    for each in mixtures_in(model):
        matrices = [parameter for parameter in each.module.parameters() if parameter.ndim == 3]
        top = _top(model, each.routers)
        if not matrices or top is None:
            continue
        experts = len(matrices[0])
        known |= {id(parameter) for parameter in each.module.parameters()}
        beside = [child for child in each.parent.children() if child is not each.module]
        for parameter in (parameter for child in beside for parameter in child.parameters()):
            # A router's own matrix; or its biases as a matrix of one row.
            if parameter.ndim == 2 and id(parameter) not in known and len(parameter) in (experts, 1):
                known.add(id(parameter))
                found.routers += parameter.numel() if len(parameter) == experts else 0
        weights = sum(parameter.numel() for parameter in matrices) // experts
        shared = sum(_inner_width(child) for child in beside if not _is_mlp_of_the_layer(each.parent))
        found.mixtures.append((each.module, Mixture(experts, top, weights, shared)))
    if any(id(weight) not in known for weight in model.parameters() if weight.ndim > 1):
        found.why_not_known = (
            "not every token meets all of its matrices, and which ones it meets cannot be told: a mixture of experts "
            "that is not held as transformers holds it, or matrices that are no linear layers"
        )
    return found


def _lists_of_experts(model: nn.Module) -> Iterator[nn.Module]:
    """Experts that are modules of their own, as in code from outside transformers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and "expert" in name.rpartition(".")[2]:
            yield module


def _top(model: PreTrainedModel, routers: list[tuple[str, nn.Module, Any]]) -> int | None:
    for _, router, known in routers:
        return int(known.rule(router).top)
    config = model.config.get_text_config(decoder=True)
    found = (getattr(config, name, None) for name in _TOP)
    return next((top for top in found if isinstance(top, int)), None)


def _is_mlp_of_the_layer(parent: nn.Module) -> bool:
    """Whether experts stand beside attention, and so beside the layer's own MLP."""
    return any("attn" in name for name, _ in parent.named_children())


def _inner_width(module: nn.Module) -> int:
    inner = (each for name, each in module.named_modules() if name.rpartition(".")[2] in _INTO_HIDDEN)
    return sum(each.in_features for each in inner if isinstance(each, nn.Linear))

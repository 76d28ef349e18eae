"""Mixtures of experts of known shapes, as modules of transformers, with tokens for them; the floor of their work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_batchllm.bench.shapes import SHAPES, has_experts, is_hybrid
from hf_batchllm.kernels.experts_torch import Gating
from hf_batchllm.patches.fusable_experts import Experts, mixtures
from hf_batchllm.patches.fused_experts import ExpertKernels, Handed, experts_forward, router_forward
from hf_batchllm.patches.routers import Router

from .attention_batches import floor_ms

NAMES = tuple(name for name in SHAPES if has_experts(name) and not is_hybrid(name))
LAYER_BYTES = 4e9  # of experts of all layers: far more than a cache holds, even where a step meets few of them
_FEW_WORDS = {"vocab_size": 256}
VALUE_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class ExpertShape:
    """The sizes of a layer's experts."""

    experts: int
    top: int
    hidden: int
    inter: int

    @classmethod
    def of(cls, name: str) -> ExpertShape:
        fields = SHAPES[name]
        return cls(
            experts=fields["num_experts"] if "num_experts" in fields else fields["num_local_experts"],
            top=fields["num_experts_per_tok"],
            hidden=fields["hidden_size"],
            inter=fields.get("moe_intermediate_size", fields["intermediate_size"]),
        )

    @property
    def up_weights(self) -> int:
        """Of gate and up of one expert; down has half as many."""
        return 2 * self.inter * self.hidden

    @property
    def layers(self) -> int:
        """As many as a graph goes over, so that weights come from memory."""
        return max(2, round(LAYER_BYTES / (VALUE_BYTES * self.experts * 1.5 * self.up_weights)))

    def floors(self, tokens: int, met: float, copy: float, matmul: float) -> tuple[float, float]:
        """Milliseconds of the products of gate and up, and of those of down: weights that are met, at a copy's rate, or
        all pairs of a token and an expert, at the rate of dense products; what takes longer."""

        def floor(weights: float) -> float:
            return floor_ms(VALUE_BYTES * met * weights, 2 * tokens * self.top * weights, copy, matmul)

        return floor(self.up_weights), floor(self.up_weights / 2)


@dataclass
class Layer:
    """One layer's experts and their router, with the inputs of a step."""

    found: Experts
    router: nn.Module
    known: Router
    x: torch.Tensor  # [tokens, hidden]
    indices: torch.Tensor  # [tokens, top]
    shares: torch.Tensor  # [tokens, top]

    @property
    def met(self) -> int:
        return len(self.indices.unique())

    @property
    def gating(self) -> Gating:
        return self.found.gating(self.found.module)

    def weight(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[experts, out, in], and its biases."""
        experts = self.found.module
        weight = getattr(experts, name)
        return weight.transpose(1, 2) if experts.is_transposed else weight, getattr(experts, f"{name}_bias", None)

    def theirs(self) -> torch.Tensor:
        """transformers' own code."""
        _, shares, indices = self.router(self.x)
        made: torch.Tensor = self.found.module(self.x, indices, shares)
        return made

    def ours(self, kernels: ExpertKernels) -> torch.Tensor:
        handed = Handed()
        _, shares, indices = router_forward(self.router, self.known, kernels, handed)(self.x)
        made: torch.Tensor = experts_forward(self.found, kernels, handed)(self.x, indices, shares)
        return made


def experts_of(name: str, count: int, device: str, dtype: torch.dtype, **less: Any) -> list[Experts]:
    """The experts of ``count`` layers with random weights. ``less``: other values for fields of the shape."""
    fields = SHAPES[name] | _FEW_WORDS | {"num_hidden_layers": count} | less
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=dtype).eval()
    found = list(mixtures(model))
    for each in found:
        if each.why_not or not each.routers:
            raise SystemExit(f"{name}: {each.why_not or 'its router has no kernel'}")
    return found


@torch.no_grad()
def with_tokens(found: Iterable[Experts], tokens: int, alike: float = 0.0) -> list[Layer]:
    """Random tokens for each layer. ``alike``: how far they all lie in one direction, which favours some experts."""
    layers = []
    for each in found:
        _, router, known = each.routers[0]
        weight = each.module.down_proj
        hidden = router.weight.shape[1]
        assert isinstance(hidden, int)
        x = torch.randn(tokens, hidden, dtype=weight.dtype, device=weight.device)
        x += alike * torch.randn(hidden, dtype=weight.dtype, device=weight.device)
        _, shares, indices = router(x)
        layers.append(Layer(each, router, known, x, indices, shares))
    return layers

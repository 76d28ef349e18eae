"""How the routers of transformers' mixtures of experts choose, as a table.

A row says which class it is for, and how that class goes from hidden states to logits, experts and shares. What a
router holds as attributes is read in each step: it is its user's to change.
``tests/test_patches_experts.py`` compares each row with the class's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from transformers.utils.import_utils import is_torch_greater_or_equal

from ..kernels.reference.routing_torch import Rule

Of = Callable[..., Any]  # of a router, and of what is passed to it beside hidden states


def _product(router: Any, states: torch.Tensor) -> torch.Tensor:  # [tokens, hidden] -> [tokens, experts]
    return functional.linear(states, router.weight)


def _product_in_float32(router: Any, states: torch.Tensor) -> torch.Tensor:
    return functional.linear(states.float(), router.weight.float())


def _none(router: Any, *given: Any) -> None:
    return None


def _of_logits(states: torch.Tensor, logits: torch.Tensor) -> torch.dtype:
    return logits.dtype


def _of_states(states: torch.Tensor, logits: torch.Tensor) -> torch.dtype:
    return states.dtype


def _float32(states: torch.Tensor, logits: torch.Tensor) -> torch.dtype:
    return torch.float32


def _bias_of_itself(router: Any) -> torch.Tensor:
    bias: torch.Tensor = router.e_score_correction_bias
    return bias


@dataclass(frozen=True)
class Router:
    folder: str  # in transformers
    name: str  # of its class
    rule: Callable[[Any], Rule]
    logits: Of = _product
    dtype: Of = _of_logits  # of the shares
    bias: Of = _none
    scales: Of = _none
    inner: tuple[str, ...] = ()  # names of modules that are read and not called
    gives: str = "logits"  # what it returns first; or "probabilities"
    indices_first: Callable[[Any], bool] = lambda router: False  # whether it returns indices, shares, logits instead
    fits: Callable[[Any], bool] = lambda router: True  # otherwise, as it is set up, its own code runs

    @property
    def home(self) -> str:
        return f"transformers.models.{self.folder}.modeling_{self.folder}"


def _cohere_fits(router: Any) -> bool:
    """Cohere's sums sigmoids in the logits' type: a kernel that sums in float32 would round elsewhere."""
    rounded = router.weight.dtype != torch.float32
    how = router.expert_selection_fn
    return how == "softmax" or (how == "sigmoid" and not (router.norm_topk_prob and rounded))


def _softmax(router: Any) -> Rule:
    return Rule(router.top_k, share="normalised" if router.norm_topk_prob else "scores")


def _softmax_of_some_groups(router: Any) -> Rule:
    groups: dict[str, Any] = {} if router.topk_method == "greedy" else _groups(router, 1)
    return Rule(router.top_k, share="scores", factor=router.routed_scaling_factor, **groups)


def _sigmoid_of_some_groups(router: Any) -> Rule:
    share = "normalised" if router.norm_topk_prob else "scores"
    factor = router.routed_scaling_factor
    return Rule(router.top_k, "sigmoid", share=share, added_to_sum=1e-20, factor=factor, **_groups(router, 2))


def _softmax_of_the_chosen(router: Any) -> Rule:
    return Rule(router.top_k, "logits", share="softmax")


def _sigmoid_of_the_chosen(router: Any) -> Rule:
    return Rule(router.top_k, "logits", share="normalised sigmoid" if router.norm_topk_prob else "sigmoid")


def _cohere(router: Any) -> Rule:
    return (_softmax_of_the_chosen if router.expert_selection_fn == "softmax" else _sigmoid_of_the_chosen)(router)


def _groups(router: Any, best: int) -> dict[str, Any]:
    return {"groups": router.num_group, "top_groups": router.topk_group, "group_best": best}


def _grouped_sigmoid(folder: str, name: str) -> Router:
    """DeepSeek's since its third version."""
    return Router(folder, name, _sigmoid_of_some_groups, _product_in_float32, _float32, bias=_bias_of_itself)


def _granite(folder: str, name: str) -> Router:
    return Router(
        folder,
        name,
        _softmax_of_the_chosen,
        logits=lambda router, states: _product(router, states).float(),
        dtype=_of_states,
        indices_first=_returns_indices_first,
    )


def _returns_indices_first(router: nn.Module) -> bool:
    """The order is another one in older versions of transformers: it is seen in a run without numbers."""
    empty = {name: parameter.to("meta") for name, parameter in router.named_parameters()}
    states = torch.empty(1, empty["weight"].shape[1], dtype=empty["weight"].dtype, device="meta")
    first: torch.Tensor = functional_call(router, empty, (states,))[0]
    return not first.is_floating_point()


def _ernie(folder: str, name: str) -> Router:
    return Router(
        folder,
        name,
        lambda router: Rule(router.top_k, least_sum=router.norm_min),
        logits=_product_in_float32,
        dtype=_of_states,
        bias=lambda router: router.moe_statics.e_score_correction_bias.view(-1),
        inner=("moe_statics",),
    )


def _capped_product(router: Any, states: torch.Tensor) -> torch.Tensor:
    """Laguna's."""
    logits, cap = _product(router, states).float(), router.router_logit_softcapping
    return torch.tanh(logits / cap) * cap if cap > 0.0 else logits


def _product_given_in_float32(router: Any, states: torch.Tensor) -> torch.Tensor:
    """Kolibri's: on a GPU it is a product of the weight's type, of which nothing is rounded."""
    plain = states.is_cuda and states.dtype == router.weight.dtype and not torch.is_grad_enabled()
    if plain and is_torch_greater_or_equal("2.8.0"):
        return torch.mm(states, router.weight.t(), out_dtype=torch.float32)
    return _product_in_float32(router, states)


ROUTERS = (
    Router("qwen2_moe", "Qwen2MoeTopKRouter", _softmax),
    Router("qwen3_moe", "Qwen3MoeTopKRouter", _softmax),
    Router("qwen3_vl_moe", "Qwen3VLMoeTextTopKRouter", lambda router: Rule(router.top_k)),
    Router("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextTopKRouter", _softmax),
    Router("qwen3_next", "Qwen3NextTopKRouter", _softmax),
    Router("qwen3_5_moe", "Qwen3_5MoeTopKRouter", lambda router: Rule(router.top_k)),
    Router("olmoe", "OlmoeTopKRouter", _softmax),
    Router("flex_olmo", "FlexOlmoTopKRouter", _softmax),
    Router("mixtral", "MixtralTopKRouter", lambda router: Rule(router.top_k), dtype=_float32),
    Router(
        "gpt_oss",
        "GptOssTopKRouter",
        _softmax_of_the_chosen,
        logits=lambda router, states: functional.linear(states, router.weight, router.bias),
    ),
    _granite("granitemoe", "GraniteMoeTopKRouter"),
    _granite("granitemoeshared", "GraniteMoeSharedTopKRouter"),
    _granite("granitemoe_swa", "GraniteMoeSWATopKRouter"),
    _granite("granitemoehybrid", "GraniteMoeHybridTopKRouter"),
    Router(
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        _softmax_of_some_groups,
        _product_in_float32,
        _float32,
        fits=lambda router: router.topk_method in ("greedy", "group_limited_greedy"),
    ),
    _grouped_sigmoid("deepseek_v3", "DeepseekV3TopkRouter"),
    _grouped_sigmoid("glm4_moe", "Glm4MoeTopkRouter"),
    _grouped_sigmoid("glm4_moe_lite", "Glm4MoeLiteTopkRouter"),
    _grouped_sigmoid("glm4v_moe", "Glm4vMoeTextTopkRouter"),
    _grouped_sigmoid("dots1", "Dots1TopkRouter"),
    _grouped_sigmoid("exaone_moe", "ExaoneMoeTopkRouter"),
    _grouped_sigmoid("mimo_v2_flash", "MiMoV2FlashTopkRouter"),
    _grouped_sigmoid("solar_open", "SolarOpenTopkRouter"),
    _grouped_sigmoid("nemotron_h", "NemotronHTopkRouter"),
    _grouped_sigmoid("kimi_linear", "KimiLinearTopkRouter"),
    _grouped_sigmoid("bailing_hybrid", "BailingHybridTopkRouter"),
    Router("cohere2_moe", "Cohere2MoeTopKRouter", _cohere, dtype=_of_states, fits=_cohere_fits),
    Router(
        "laguna",
        "LagunaTopKRouter",
        lambda router: Rule(router.top_k, "sigmoid"),
        _capped_product,
        _of_states,
        bias=_bias_of_itself,
    ),
    Router(
        "flint",
        "FlintTopKRouter",
        lambda router: Rule(router.top_k, "sigmoid", share="normalised" if router.norm_topk_prob else "scores"),
        _product_in_float32,
        _float32,
    ),
    Router(
        "kolibri1",
        "Kolibri1TopKRouter",
        _sigmoid_of_the_chosen,
        _product_given_in_float32,
        _float32,
        bias=_bias_of_itself,
    ),
    Router(
        "afmoe",
        "AfmoeTokenChoiceRouter",
        lambda router: Rule(router.top_k, "sigmoid", added_to_sum=1e-20, factor=router.route_scale),
        logits=lambda router, states: router.gate(states).float(),
        dtype=_float32,
        bias=lambda router, bias: bias,
    ),
    Router(
        "minimax_m2",
        "MiniMaxM2TopKRouter",
        lambda router: Rule(router.top_k, "sigmoid"),
        logits=lambda router, states: _product(router, states.to(router.weight.dtype)),
        dtype=_float32,
        bias=lambda router, bias: bias,
    ),
    _ernie("ernie4_5_moe", "Ernie4_5_MoeTopKRouter"),
    _ernie("ernie4_5_vl_moe", "Ernie4_5_VLMoeMoeTopKRouter"),
    Router(
        "gemma4",
        "Gemma4TextRouter",
        lambda router: Rule(router.config.top_k_experts),
        logits=lambda router, states: router.proj(router.norm(states) * router.scale * router.scalar_root_size),
        dtype=_float32,
        scales=lambda router: router.per_expert_scale,
        gives="probabilities",
    ),
)


def router_of(module: nn.Module) -> Router | None:
    cls = type(module)
    return next((each for each in ROUTERS if (each.home, each.name) == (cls.__module__, cls.__name__)), None)

"""What the tests of fused layers share: a CPU that fuses, and what a call's steps gave."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support_families import FAMILIES, random_prompts
from support_fingerprint import fingerprint
from support_image_text_families import FUSED_IMAGE_TEXT, IMAGE_TEXT
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_batchllm import BatchConfig, BatchGenerator, BatchResult
from hf_batchllm.kernels.reference import experts_torch, gated_ops_torch, layer_ops_torch, routing_torch
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.patches.fused_experts import ExpertKernels
from hf_batchllm.patches.fused_forwards import FusedKernels
from hf_batchllm.patches.fused_mixers import MixerKernels
from hf_batchllm.patches.fusion import FusedLayers, Fusion

# Each row of the table, by models of it.
WITH_EXPERTS = [
    *("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "olmoe", "deepseek_v2", "deepseek_v3"),
    *("exaone_moe", "granitemoe", "minimax_m2", "dots1", "ernie4_5_moe", "gemma4_moe", "flex_olmo"),
    *("glm4_moe_lite", "qwen3_5_moe", "qwen3_next", "granitemoehybrid"),
]
WITH_A_DENSE_LAYER = [
    *("exaone_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe"),
]
WITH_SHARED_EXPERTS = [*WITH_A_DENSE_LAYER, "qwen2_moe", "qwen3_5_moe", "qwen3_next"]
WITH_AN_MLP_IN_EACH_LAYER = ["gemma4_moe"]
WITH_ATTENTION_OF_THEIR_OWN = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"]
FUSED_FAMILIES = [
    *("llama", "llama3_rope", "mistral", "qwen2", "qwen2_window", "qwen3", "qwen3_window"),
    *("ministral", "cwm", "gemma", "gemma2", "gemma3", "phi3", "granite", "olmo2", "olmo3", "smollm3", "cohere2"),
    *("qwen3_5", "seed_oss", "exaone4", "glm", "glm4", "ernie4_5", "ministral3", "gemma4", "youtu"),
    *WITH_EXPERTS,
]
FAMILIES_OF_EXPERTS = [
    *("mixtral", "phimoe", "granitemoe", "granitemoeshared", "granitemoe_swa", "qwen2_moe", "qwen3_moe", "olmoe"),
    *("flex_olmo", "ernie4_5_moe", "glm4_moe", "minimax_m2", "afmoe", "dots1", "exaone_moe", "cohere2_moe", "laguna"),
    *("kolibri1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gpt_oss", "mimo_v2_flash", "flint", "gemma4_moe"),
]
WITH_GATED_NORMS = [
    *("mamba2", "bamba", "granitemoehybrid", "nemotron_h", "kimi_linear", "bailing_hybrid", "olmo_hybrid"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe"),
]
FORWARDS = 3 * 3 + 1  # of the tests' Llama: each layer, its attention, its MLP; and the last norm


def layers_of(family: str) -> int:
    return FAMILIES[family].config.get("num_hidden_layers", 3)


def forwards_of(family: str) -> int:
    layers = layers_of(family)
    mixtures = layers - (family in WITH_A_DENSE_LAYER) if family in WITH_EXPERTS else 0
    of_a_mixture = 3 if family in WITH_SHARED_EXPERTS else 2  # experts, their router, the MLP beside them
    of_a_mixture += family in WITH_AN_MLP_IN_EACH_LAYER
    of_each = 1 if family in WITH_ATTENTION_OF_THEIR_OWN else 2
    # A mixer stands in the place of attention, and is fused as a whole or by its norm.
    return layers * of_each + (layers - mixtures) + mixtures * of_a_mixture + 1


def said_of(family: str) -> str:
    """What a report says where all is fused that can be."""
    layers = layers_of(family)
    but = " but for their attention" if family in WITH_ATTENTION_OF_THEIR_OWN else ""
    return f"{layers} of {layers} layers{but}" + (", with their experts" if family in WITH_EXPERTS else "")


REFERENCES = FusedKernels(
    layer_ops_torch.add_rms_norm,
    layer_ops_torch.act_and_mul,
    ExpertKernels(
        routing_torch.choose,
        routing_torch.rows_of_experts,
        experts_torch.up_products,
        experts_torch.down_products,
        experts_torch.sum_of_shares,
        lambda pairs, experts, dtype: 16,
    ),
    MixerKernels(gated_ops_torch.decay_and_beta, gated_ops_torch.gated_norm),
)


class Fusing(list[int]):
    """How many forwards each step had put in place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def assert_nothing_changes(
        self,
        model: Any,
        prompts: list[list[int]] | None = None,
        dtype: torch.dtype = torch.float32,
        near: bool = False,
        exact: bool | None = None,
    ) -> list[torch.Tensor]:
        """Each step's logits are those of the model's own layers, which it returns."""
        before = len(self)
        own = logits_of_steps(self._monkeypatch, model, prompts, fuse=False)
        assert len(self) == before
        assert_same_logits(logits_of_steps(self._monkeypatch, model, prompts), own, dtype, near, exact)
        return own


@pytest.fixture
def fusing(monkeypatch: pytest.MonkeyPatch) -> Fusing:
    """Calls fuse on a CPU, with the kernels' references."""
    steps = Fusing(monkeypatch)
    begin = FusedLayers.step

    def noted_step(self: FusedLayers) -> Any:
        if self._before:
            steps.append(len(self._before))
        return begin(self)

    def fused_kernels(config: BatchConfig, device: torch.device) -> FusedKernels | None:
        return REFERENCES if config.fuse else None

    monkeypatch.setattr("hf_batchllm.model.model_in_use.fused_kernels", fused_kernels)
    monkeypatch.setattr(FusedLayers, "step", noted_step)
    return steps


class Adapter(nn.Module):
    """As PEFT wraps a projection."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.base_layer = base
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=generator) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, 2, generator=generator) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ self.down.t() @ self.up.t()


def new_model(family: str = "llama") -> Any:
    """One that a test may change."""
    return (IMAGE_TEXT if family in FUSED_IMAGE_TEXT else FAMILIES)[family]()


def without_addresses(model: Any) -> Any:
    """All that is to be seen of a model but where its weights lie: merged ones lie elsewhere."""
    modules, tensors, *rest = fingerprint(model)
    return modules, {name: (each[0], *each[2:]) for name, each in tensors.items()}, *rest


def some_prompts(count: int = 8, kind: str = "nested", seed: int = 4) -> list[list[int]]:
    return random_prompts(random.Random(seed), 97, kind, count)


def run(model: Any, prompts: list[list[int]] | None = None, new_tokens: int = 4, **config: Any) -> BatchResult:
    with BatchGenerator(model, page_size=16, min_shared_tokens=1, **config) as generator:
        return generator.generate(prompts or some_prompts(), max_new_tokens=new_tokens, progress=False)


def logits_of_steps(
    monkeypatch: pytest.MonkeyPatch, model: Any, prompts: list[list[int]] | None = None, **config: Any
) -> list[torch.Tensor]:
    """Of each step, [samples, vocabulary]."""
    seen: list[torch.Tensor] = []
    step = ModelRunner.step

    def noted_step(self: ModelRunner, batch: Any, *latest: Any) -> torch.Tensor:
        logits = step(self, batch, *latest)
        seen.append(logits.clone())
        return logits

    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "step", noted_step)
        run(model, prompts, **config)
    return seen


def assert_same_logits(
    ours: list[torch.Tensor],
    theirs: list[torch.Tensor],
    dtype: torch.dtype,
    near: bool = False,
    exact: bool | None = None,
) -> None:
    """Bit for bit where this CPU multiplies a merged matrix as it does its parts, or else as near as that allows.

    ``exact``: whether bit for bit, where no matrix is merged.

    ``near``: never bit for bit. Experts multiply other rows together than the model's own code does, and add up in an
    order of their own; the projections of a mixer are few rows, which a CPU multiplies otherwise by themselves.
    Where two tokens are nearly as good as each other, a row may then go on with another one.
    """
    parted = 0  # rows
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 48, generator=generator).to(dtype) for rows in (160, 37))
    apart = torch.cat([x @ part.t() for part in weight.split([96, 32, 32])], dim=1)
    exact = not near and torch.equal(x @ weight.t(), apart) if exact is None else exact
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        if exact or not their.numel():  # a step that ends no prompt
            assert torch.equal(our, their)
        else:
            size = 1e-4 if dtype == torch.float32 else 0.1
            far = (our - their).abs().amax(dim=1) > size * float(their.abs().max())
            assert int(far.sum()) <= parted, f"{(our - their).abs().max()} apart"
            parted += int(((our.argmax(dim=1) != their.argmax(dim=1)) & ~far).sum())


def reasons(model: Any) -> str:
    fusion = Fusion(model)
    fusion.look()
    return "\n".join(fusion.reasons)


class OwnLayer(LlamaDecoderLayer):
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return super().forward(hidden_states, **kwargs) * 0.9


class HalfParameter(torch.Tensor):
    """As quantised and sharded weights come."""


def a_layer(model: Any) -> Any:
    return model.model.layers[1]


def wrap(model: Any, name: str) -> None:
    *path, last = name.split(".")
    owner = a_layer(model).get_submodule(".".join(path))
    setattr(owner, last, Adapter(getattr(owner, last)))


def own_forward(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def as_class(module: nn.Module, cls: type) -> None:
    module.__class__ = cls

"""How a tiny random model is built: its config, and random weights that make it behave like a trained one."""

from __future__ import annotations

import operator
import zlib
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

_SERVED_NOW = ("gptj", "codegen") if Version(transformers.__version__) >= Version("5.24") else ()
# No special tokens: a generation runs to its full length unless the test asks for an EOS.
_BASE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

# Scores with a standard deviation of 2 or so, as queries and keys of trained models have: an attention that spreads
# evenly over fifty tokens averages them away. What attention says is then to be heard beside the MLP.
_LOUD = {
    **dict.fromkeys(("q_proj", "k_proj", "q_b_proj", "qkv", "query_key_value", "c_attn", "q_norm", "k_norm"), 1.5),
    **dict.fromkeys(("query_layernorm", "key_layernorm", "q_layernorm", "k_layernorm"), 1.5),
    **dict.fromkeys(("o_proj", "out_proj", "attention.dense", "self_attn.dense", "attn.c_proj"), 1.5),
}


@dataclass(frozen=True)
class Family:
    """A tiny model: a config, and how loud its random weights are. Calling it builds a new one."""

    name: str
    model_type: str
    config: dict[str, Any]
    embed: float = 0.5  # standard deviation of the embedding: the smaller, the more attention has to say
    head: float = 3.0  # gain of the LM head: how peaked the logits are
    implementation: str | None = None
    auto: Any = AutoModelForCausalLM
    why: str = ""  # for refused models: what about them cannot be run
    scale: dict[str, float] = field(default_factory=dict)  # further gains, by a part of the parameter's name

    def missing(self) -> str | None:
        """Why a test cannot have this one with the installed transformers, or None."""
        if self.why and self.name in _SERVED_NOW:
            return "it is served since transformers 5.24 (docs/models.md)"
        return None if self.model_type in CONFIG_MAPPING_NAMES else f"this transformers has no {self.model_type}"

    def __call__(self) -> PreTrainedModel:
        config = AutoConfig.for_model(self.model_type, **{**_BASE, **self.config})
        chosen = {"attn_implementation": self.implementation} if self.implementation else {}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # the CPU's alone
            model = self.auto.from_config(config, dtype=torch.float32, **chosen).eval()
        randomise(model, self)
        return model


def _noise(name: str, like: torch.Tensor, std: float) -> torch.Tensor:
    # One generator for each parameter: a parameter that only one version of transformers has does not move the rest.
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(like.shape, generator=generator) * std


def _is_embedding(model: PreTrainedModel, head: torch.nn.Module | None) -> bool:
    """Whether the LM head's weights are the embedding's. Some models have several heads, or name no embedding."""
    try:
        return head is not None and head.weight is model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        return False


@torch.no_grad()
def randomise(model: PreTrainedModel, family: Family) -> None:
    """Weights under which the output depends on all of the prompt, with every parameter away from 0 and 1."""
    head = model.get_output_embeddings()
    tied = _is_embedding(model, head)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}"
            if module is head and tied and name == "weight":
                continue  # the embedding's, and done
            gain = family.head if module is head else 1.0
            for part, factor in (_LOUD | family.scale).items():
                gain = gain * factor if part in full else gain
            noise = partial(_noise, f"{family.name}:{full}", parameter)
            if "sink" in name:
                parameter.copy_(noise(1.0))
            elif parameter.ndim == 1:
                # Norm weights, biases, router biases, activation parameters: around their initial value.
                parameter.add_(noise(0.25)).mul_(gain)
            elif isinstance(module, torch.nn.Embedding):
                parameter.copy_(noise(family.embed * gain))
            else:
                fan_in = parameter.shape[0 if type(module).__name__ == "Conv1D" else -1]
                parameter.copy_(noise(gain * fan_in**-0.5))
        for name, buffer in module.named_buffers(recurse=False):
            if "bias" in name and buffer.is_floating_point():  # DeepSeek's expert choice, kept out of training
                buffer.copy_(_noise(f"{family.name}:{path}.{name}", buffer, 0.1))


def family(name: str, model_type: str = "", /, *configs: dict[str, Any], **options: Any) -> tuple[str, Family]:
    return name, Family(name, model_type or name, reduce(operator.or_, configs, {}), **options)

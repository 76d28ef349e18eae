"""What a model's architecture asks of the engine, and whether the engine can give it.

The architecture is asked, not believed: a copy of it without weights (on PyTorch's meta device) is run over two tokens
with an attention function that takes notes. What bypasses that function, or hands it things that it cannot honour, is
refused by name before anything runs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .attention import ATTENTION_NAME, AttentionCall, attention_context
from .errors import UnsupportedModelError
from .patches.attention_swap import attention_configs, swapped_attention

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
# RoPE whose angles depend on the longest position in the batch: exact only while all stay below the trained length.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True)
class Architecture:
    """What the engine needs to know of a model."""

    name: str
    layers: int  # that attend
    kv_bytes_per_token: int  # over all layers
    vocab_size: int
    max_positions: int | None  # beyond which the model has no positions at all
    rope_limit: int | None  # beyond which a length-dependent RoPE would change what is computed
    device: torch.device


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(
            f"a transformers model with a language-model head is needed, not {type(model).__name__}"
        )
    return inner


def inspect_model(model: nn.Module) -> Architecture:
    """Look at ``model`` without running it. UnsupportedModelError names what is in the way, if anything is."""
    inner = base_model(model)
    name = type(inner).__name__
    device = _single_device(inner, name)
    _refuse_by_config(inner, name)
    calls = _attention_calls(inner)
    _refuse_by_calls(inner, name, calls)
    config = inner.config.get_text_config(decoder=True)
    embeddings = inner.get_input_embeddings()
    return Architecture(
        name=name,
        layers=len(calls),
        kv_bytes_per_token=sum(call.k.shape[1] * (call.k.shape[2] + call.v.shape[2]) for call in calls)
        * torch.empty(0, dtype=inner.dtype).element_size(),
        vocab_size=getattr(embeddings, "num_embeddings", None) or config.vocab_size,
        max_positions=_learned_positions(inner, config),
        rope_limit=_rope_limit(config),
        device=device,
    )


def _single_device(model: PreTrainedModel, name: str) -> torch.device:
    devices = {tensor.device for tensor in model.parameters()}
    placed = set(getattr(model, "hf_device_map", {}).values())
    if torch.device("meta") in devices or (placed & {"disk", "cpu"} and len(placed) > 1):
        raise UnsupportedModelError(
            f"{name} has weights that are not in memory (on the meta device, or off-loaded): load it whole first"
        )
    if len(devices) != 1:
        where = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModelError(f"{name} is spread over several devices ({where}): it must be on a single one")
    return devices.pop()


def _refuse_by_config(model: PreTrainedModel, name: str) -> None:
    config = model.config
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoder-only models are supported")
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{name} has no language-model head to generate with: load it as AutoModelForCausalLM"
        )
    text = config.get_text_config(decoder=True)
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYERS)
    if unknown:
        raise UnsupportedModelError(
            f"{name} has layers of a kind that is not supported: {', '.join(unknown)} "
            "(full and sliding-window attention are)"
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(f"{name} lets layers share the K and V of others; that is not supported")


def _refuse_by_calls(model: PreTrainedModel, name: str, calls: list[AttentionCall]) -> None:
    config = model.config.get_text_config(decoder=True)
    expected = getattr(config, "num_hidden_layers", None)
    if not calls:
        raise UnsupportedModelError(
            f"{name} does not call transformers' AttentionInterface: it brings an attention of its own, "
            "and that cannot be served"
        )
    if expected is not None and len(calls) != expected:
        raise UnsupportedModelError(
            f"{name} has {expected} layers of which {len(calls)} attend through transformers' AttentionInterface; "
            "hybrids and layers with an attention of their own are not supported"
        )
    if len({call.layer for call in calls}) != len(calls):
        raise UnsupportedModelError(f"{name} runs an attention layer several times in a pass; that is not supported")
    kinds = getattr(config, "layer_types", None) or [None] * len(calls)
    for kind, call in zip(kinds, calls, strict=True):
        if kind == "sliding_attention" and call.window is None:
            raise UnsupportedModelError(
                f"{name} keeps its sliding window in the attention mask alone; that is not supported"
            )
    window = getattr(config, "sliding_window", None)
    unused = getattr(config, "use_sliding_window", True) is False or any(kind == "full_attention" for kind in kinds)
    if window and not unused and all(call.window is None for call in calls):
        raise UnsupportedModelError(
            f"{name} has a sliding window that never reaches its attention; that is not supported"
        )


class _NoteTaker:
    """Notes each call and answers with a tensor of the right shape."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        return torch.zeros(*call.q.shape[:2], call.v.shape[2], dtype=call.q.dtype, device=call.q.device)


def _attention_calls(model: PreTrainedModel) -> list[AttentionCall]:
    """The calls of one pass, from a copy of the architecture without weights where that can be made and run."""
    try:
        # The copy's weights are never filled in, yet making them may draw random numbers: the caller's stay unmoved.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            skeleton = type(model)(copy.deepcopy(model.config)).to(model.dtype).eval()
        return _noted_pass(skeleton, torch.device("meta"))
    except UnsupportedModelError:
        raise
    except Exception:
        # Some architectures read a value on the way (which expert, how long); those run for real, over two tokens.
        try:
            return _noted_pass(model, next(model.parameters()).device)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be run with an attention function from outside: {error}"
            ) from error


@torch.no_grad()
def _noted_pass(model: PreTrainedModel, device: torch.device) -> list[AttentionCall]:
    notes = _NoteTaker()
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    positions = torch.arange(2, device=device)[None]
    with swapped_attention(attention_configs(model), ATTENTION_NAME), attention_context(notes):
        model(input_ids=ids, position_ids=positions, use_cache=False)
    return notes.calls


def _learned_positions(model: PreTrainedModel, config: PreTrainedConfig) -> int | None:
    """Rows of a table of learned positions, if the model has one: beyond it there is nothing to look up."""
    for name, module in model.named_modules():
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("wpe", "embed_positions") and isinstance(module, nn.Embedding):
            return module.num_embeddings - getattr(module, "offset", 0)
    return None


def _rope_limit(config: PreTrainedConfig) -> int | None:
    parameters: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = parameters.values() if all(isinstance(value, dict) for value in parameters.values()) else [parameters]
    limits = []
    for rope in each:
        if rope.get("rope_type", rope.get("type")) in _LENGTH_DEPENDENT_ROPE:
            trained = rope.get("original_max_position_embeddings")
            trained = trained or getattr(config, "original_max_position_embeddings", None)
            limits.append(trained or config.max_position_embeddings)
    return min(limits) if limits else None

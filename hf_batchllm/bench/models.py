"""What is measured: a model from a folder or the hub, or a well-known shape with random weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

_LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
_QWEN3_06B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
_TINY = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
SHAPES = {"llama-8b": _LLAMA_8B, "qwen3-0.6b": _QWEN3_06B, "tiny": _TINY}


def load_model(model: str | None, config: str | None, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """``model``: a folder or a name on the hub. ``config``: one of SHAPES or a config.json, with random weights."""
    if model is not None:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device)
    else:
        assert config is not None
        torch.manual_seed(0)
        with torch.device(device):  # made where it runs: eight billion weights are slow to draw on a CPU
            loaded = AutoModelForCausalLM.from_config(_config(config), dtype=dtype)
    loaded.eval()
    # Greedy, and no token ends a sequence: every contender makes exactly as many tokens.
    loaded.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return loaded


def end_at_random(model: PreTrainedModel, after: int) -> None:
    """Tokens are drawn, and one in ``after`` ends its answer: with random weights all are about as likely."""
    vocabulary = model.config.get_text_config().vocab_size
    ends = list(range(0, vocabulary, after))
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, temperature=1.0, eos_token_id=ends, pad_token_id=0
    )


def _config(name: str) -> Any:
    if name in SHAPES:
        fields = copy.deepcopy(SHAPES[name])
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    if not Path(name).exists():
        raise ValueError(f"--config {name!r} is neither one of {', '.join(SHAPES)} nor a file")
    return AutoConfig.from_pretrained(name)

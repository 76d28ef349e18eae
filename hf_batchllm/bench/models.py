"""The model that is measured: from a folder or the hub, or a well-known shape with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from .shapes import SHAPES


def load_model(model: str | None, config: str | None, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """``model``: a folder or a name on the hub. ``config``: one of SHAPES or a config.json, with random weights."""
    if model is not None:
        pretrained: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        loaded: PreTrainedModel = pretrained.to(device)
    else:
        assert config is not None
        torch.manual_seed(0)
        with torch.device(device):  # drawn on the device: on a CPU eight billion weights take long
            loaded = AutoModelForCausalLM.from_config(_config(config), dtype=dtype)
    loaded.eval()
    # Greedy, and no token ends a sequence: all contenders make the same number of tokens.
    loaded.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return loaded


def end_at_random(model: PreTrainedModel, after: int) -> None:
    """Makes ``model`` draw its tokens, of which one in ``after`` ends an answer.

    With random weights all tokens are about equally likely.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ends = list(range(0, vocabulary, after))
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, temperature=1.0, eos_token_id=ends, pad_token_id=0
    )


def _config(name: str) -> Any:
    if name in SHAPES:
        return AutoConfig.for_model(**SHAPES[name])
    if not Path(name).exists():
        raise ValueError(f"--config {name!r} is neither one of {', '.join(SHAPES)} nor a file")
    return AutoConfig.from_pretrained(name)

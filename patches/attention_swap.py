"""Point a model's attention at another implementation for a while, and leave no trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedConfig

# Where transformers keeps the name; the public property would also walk (and set) sub-configs on its own.
_FIELD = "_attn_implementation_internal"
_ABSENT = object()


def attention_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config that a layer of ``model`` may ask for its attention implementation, each once."""
    found: dict[int, PreTrainedConfig] = {}
    owners = (getattr(module, "config", None) for module in model.modules())
    waiting = [config for config in owners if isinstance(config, PreTrainedConfig)]
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            below = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
            waiting.extend(sub for sub in below if isinstance(sub, PreTrainedConfig))
    return list(found.values())


@contextmanager
def swapped_attention(configs: Sequence[PreTrainedConfig], name: str) -> Iterator[None]:
    """While the block runs, layers with these configs use the attention registered as ``name``; then what they used."""
    before = [config.__dict__.get(_FIELD, _ABSENT) for config in configs]
    try:
        for config in configs:
            config.__dict__[_FIELD] = name
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            if value is _ABSENT:
                config.__dict__.pop(_FIELD, None)
            else:
                config.__dict__[_FIELD] = value

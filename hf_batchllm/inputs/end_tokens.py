"""``stop_token_ids`` and ``ignore_eos``: what ends an answer, said in terms of the model's own EOS tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig

from ..errors import OptionValueError


def settle_end_tokens(config: GenerationConfig, given: GenerationConfig | None, fields: Mapping[str, Any]) -> None:
    """Put them into the ``eos_token_id`` of ``config``, which is the resolved one.

    ``given``: the call's config; ``fields``: the call's keyword arguments, which win over it.
    """

    def asked(name: str) -> Any:
        value = fields.get(name)
        return getattr(given, name, None) if value is None else value

    more, ignored = asked("stop_token_ids"), asked("ignore_eos")
    if not more and not ignored:
        return
    if ignored and fields.get("eos_token_id") is not None:
        raise OptionValueError("ignore_eos", "contradicts `eos_token_id`: keep one of them")
    own = None if ignored else config.eos_token_id
    if isinstance(own, torch.Tensor):
        own = own.tolist()
    listed = [] if own is None else list(own) if isinstance(own, list | tuple) else [own]
    config.eos_token_id = list(dict.fromkeys((*listed, *map(int, more or ())))) or None

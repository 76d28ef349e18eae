"""The arguments of a call that are not fields of a GenerationConfig."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, eq=False)
class CallArguments:
    """The arguments of a call that are not fields of a GenerationConfig; the same for all prompts of the call."""

    logits_processor: Any = None  # a list, or a factory of lists: see processors_and_criteria.py
    stopping_criteria: Any = None  # a list, or a factory of lists
    prefix_allowed_tokens_fn: Any = None
    negative_prompt_ids: Any = None
    negative_prompt_attention_mask: Any = None
    streamer: Any = None
    tokenizer: Any = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    assistant_model: Any = None


CALL_ARGUMENTS = tuple(each.name for each in fields(CallArguments))

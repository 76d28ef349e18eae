"""What a call takes beside the fields of a GenerationConfig."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, eq=False)
class Given:
    """What a call takes beside the fields of a GenerationConfig; the same for all of its prompts."""

    logits_processor: Any = None  # a list, or a factory of lists: see ``processing``
    stopping_criteria: Any = None  # a list, or a factory of lists
    prefix_allowed_tokens_fn: Any = None
    negative_prompt_ids: Any = None
    negative_prompt_attention_mask: Any = None
    streamer: Any = None
    tokenizer: Any = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


ARGUMENTS = tuple(each.name for each in fields(Given))

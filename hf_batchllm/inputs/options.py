"""The options of a prompt, resolved; and the processors that transformers makes of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, LogitsProcessorList

from .base_model import GenerativeModel
from .call_arguments import CallArguments
from .processors_and_criteria import shared_list


@dataclass(frozen=True, eq=False)
class Options:
    """The resolved options of a prompt, or of all prompts that share them."""

    config: GenerationConfig  # a copy, with all defaults filled in by transformers
    eos_token_ids: frozenset[int]
    pad_token_id: int | None  # the first EOS if none was set
    do_sample: bool
    num_return_sequences: int
    has_default_length: bool  # no length was given anywhere
    num_beams: int = 1
    scores_are_logits: bool = False  # no processor stands between the two
    arguments: CallArguments = field(default_factory=CallArguments)

    def max_new_tokens(self, prompt_tokens: int, max_positions: int | None) -> int:
        """How many tokens a prompt may grow by; 0 or less if it has ``max_length`` tokens already."""
        config = self.config
        if config.max_new_tokens is not None:
            return int(config.max_new_tokens)
        if self.has_default_length:
            new_tokens = int(config.max_length)  # generate's default: 20 new tokens
            return new_tokens if max_positions is None else min(new_tokens, max_positions - prompt_tokens)
        return int(config.max_length) - prompt_tokens


def make_processors(
    model: GenerativeModel,
    options: Options,
    prompt_tokens: int,
    max_new_tokens: int,
    *,
    arguments: CallArguments | None = None,
    prompt: torch.Tensor | None = None,  # [1, prompt_tokens]
) -> LogitsProcessorList:
    """transformers' processors and those of a shared list, in its order, for prompts of one length.

    ``arguments``: one sequence's share of the call's arguments; ``prompt``: its tokens, for the processors that look at
    them.
    """
    arguments = arguments or options.arguments
    prompt = torch.zeros(1, 1, dtype=torch.long, device="cpu") if prompt is None else prompt
    return model._get_logits_processor(
        generation_config=config_for_prompt(options, prompt_tokens, max_new_tokens),
        input_ids_seq_length=prompt_tokens,
        encoder_input_ids=prompt.to(model.device),
        prefix_allowed_tokens_fn=arguments.prefix_allowed_tokens_fn,
        logits_processor=LogitsProcessorList(shared_list(arguments.logits_processor)),
        device=model.device,
        model_kwargs={},
        negative_prompt_ids=arguments.negative_prompt_ids,
        negative_prompt_attention_mask=arguments.negative_prompt_attention_mask,
    )


def config_for_prompt(options: Options, prompt_tokens: int, max_new_tokens: int) -> GenerationConfig:
    """The config as ``generate`` would make it for one prompt: lengths count that prompt's own tokens."""
    config = copy.copy(options.config)
    config.max_length = prompt_tokens + max_new_tokens
    if config.min_new_tokens is not None:
        config.min_length = config.min_new_tokens + prompt_tokens
    return config

"""Options that exclude or need each other: samples and beams, sampling and temperature, beam search, guidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from ..errors import OptionValueError, UnsupportedOptionError
from ..notices import Notices
from .base_model import GenerativeModel
from .option_table import TABLE
from .option_values import ZERO_TEMPERATURE, out_of_range
from .options import Options

_NOT_WITH_BEAMS = {
    "logprobs": "a beam's tokens come from several candidates: score the results in a second call, with score()",
    "prompt_logprobs": "ask for it in a call without beams",
    "streamer": "the tokens are known only when the search ends, and `generate` refuses it, too",
}


def check_samples(fields: dict[str, Any], given: GenerationConfig | None, model: GenerativeModel) -> None:
    """``fields``: the call's keyword arguments; they win over the config, and it over the model's own."""

    def resolved(name: str) -> Any:
        values = (fields.get(name), getattr(given, name, None), getattr(model.generation_config, name, None))
        return next((value for value in values if value is not None), None)

    samples = resolved("num_return_sequences") or 1
    beams = resolved("num_beams") or 1
    if beams > 1 and samples > beams:
        why = f"is {samples:,}, and there are {beams:,} beams, each of which can give one answer: raise `num_beams`"
        raise OptionValueError("num_return_sequences", why)
    if samples > 1 and not resolved("do_sample") and beams == 1:
        why = f"is {samples}, and greedy decoding gives one sequence for each prompt: set `do_sample=True`"
        raise OptionValueError("num_return_sequences", why)


def check_sampling(config: GenerationConfig) -> None:
    if config.do_sample and config.temperature == 0:
        raise OptionValueError("temperature", ZERO_TEMPERATURE)
    if config.do_sample and config.top_k is not None and (why := out_of_range(TABLE["top_k"], config.top_k)):
        raise OptionValueError("top_k", why)


def check_beams(options: Sequence[Options]) -> None:
    """``options``: those of each prompt."""
    kinds = list(dict.fromkeys(options))
    searching = [each for each in kinds if each.num_beams > 1]
    if not searching:
        return
    if len(searching) < len(kinds):
        why = "is 1 for some prompts and more for others: pass the prompts with beams in a call of their own"
        raise UnsupportedOptionError("num_beams", why)
    for each in searching:
        if each.config.length_penalty is None:
            why = "is None, and a beam search needs a number: leave it out, or pass 1.0"
            raise OptionValueError("length_penalty", why)
        if each.config.guidance_scale not in (None, 1) and each.arguments.negative_prompt_ids is not None:
            why = "does not go with `num_beams`, in `generate` neither: leave it out"
            raise UnsupportedOptionError("negative_prompt_ids", why)
        for name, why in _NOT_WITH_BEAMS.items():
            if getattr(each.arguments, name) is not None:
                raise UnsupportedOptionError(name, f"does not go with `num_beams`: {why}")


def check_guidance(options: Sequence[Options], notices: Notices) -> None:
    """Refuse negative prompts that do not match the prompts, and warn of the price of guidance.

    ``options``: those of each prompt.
    """
    ids = options[0].arguments.negative_prompt_ids if options else None  # the same for all prompts
    if ids is not None and len(ids) != len(options):
        why = f"has {len(ids):,} rows and there are {len(options):,} prompts: it must have one for each"
        raise OptionValueError("negative_prompt_ids", why)
    if any(each.config.guidance_scale not in (None, 1) for each in options):
        notices(
            "guidance",
            "`guidance_scale` has transformers run the model once more for each new token, a sequence at a time and "
            "each with a KV cache of its own: it is slow, and `kv_memory` does not count that memory",
        )
    elif ids is not None:  # where some prompts are guided, the negative prompts of the others are ignored on purpose
        why = "`negative_prompt_ids` has no effect without `guidance_scale`: set it (to 1.5, say), or leave this out"
        notices("negative_prompt_ids", why)

"""Options that exclude each other: what does not go with a beam search, and what guidance needs."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import OptionValueError, UnsupportedOptionError
from ..notices import Notices
from .options import Options

_WITHOUT = {
    "logprobs": "tokens of a beam are looked back upon from several places: score what comes back in a second call",
    "prompt_logprobs": "ask for it in a call without beams",
    "streamer": "which token comes next is known only in the end, and `generate` has none either",
}


def check_beams(options: Sequence[Options], notices: Notices) -> None:
    """``options``: of each prompt."""
    kinds = list(dict.fromkeys(options))
    searching = [each for each in kinds if each.num_beams > 1]
    if not searching:
        return
    if len(searching) < len(kinds):
        why = "is 1 for some prompts and more for others: pass those with beams in a call of their own"
        raise UnsupportedOptionError("num_beams", why)
    for each in searching:
        if each.config.length_penalty is None:
            raise OptionValueError(
                "length_penalty", "is None, and a beam search needs a number: leave it out, or pass 1.0"
            )
        if each.config.guidance_scale not in (None, 1) and each.given.negative_prompt_ids is not None:
            why = "does not go with `num_beams`, in `generate` neither: leave it out"
            raise UnsupportedOptionError("negative_prompt_ids", why)
        for name, why in _WITHOUT.items():
            if getattr(each.given, name) is not None:
                raise UnsupportedOptionError(name, f"does not go with `num_beams`: {why}")


# -- guidance --------------------------------------------------------------------------------------------------


def check_guidance(options: Sequence[Options], notices: Notices) -> None:
    """Negative prompts beside the prompts, of which ``options`` has one each; and what guidance costs."""
    ids = options[0].given.negative_prompt_ids if options else None  # the same for all prompts
    if ids is not None and len(ids) != len(options):
        why = f"has {len(ids):,} rows and there are {len(options):,} prompts: it must have one for each"
        raise OptionValueError("negative_prompt_ids", why)
    if any(each.config.guidance_scale not in (None, 1) for each in options):
        notices(
            "guidance",
            "`guidance_scale` has transformers run the model once more for each new token, a sequence at a time and "
            "each with a KV cache of its own: it is slow, and `kv_memory` does not count that memory",
        )
    elif ids is not None:  # where some prompts are guided, the others' rows are there to be passed over
        why = "`negative_prompt_ids` has no effect without `guidance_scale`: set it (to 1.5, say), or leave this out"
        notices("negative_prompt_ids", why)

"""What goes with a beam search, and what does not."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import OptionValueError, UnsupportedOptionError
from .notices import Notices
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

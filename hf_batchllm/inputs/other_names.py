"""Names of options that other libraries use. Some are understood everywhere; for the others, what to do instead.

The same names mean the same in ``generate``, ``run_file``, in files and in the command. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..wording import is_bool, is_number, is_whole, shown
from .option_table import ALIASES, CALLED, TABLE
from .option_values import wrong_value

# Names of vLLM, OpenAI's client and transformers' pipelines that no option has: what to do instead. They are those that
# change answers, or stand in nearly every script that comes from there. Others get the nearest name of the table.
_NO_JSON = "is not an option here: pass `schema` (True for any JSON object), `regex`, `grammar` or `choice`"
_NO_PENALTY = "is not an option of transformers; see `repetition_penalty`"
_NO_DECODING = "is not an option here: each result holds `text`, `token_ids` and `prompt_token_ids` to decode otherwise"
FROM_ELSEWHERE = {
    **{name: f"is called `{ours}` here" for name, ours in CALLED.items()},
    "best_of": "is not an option here: ask for `n` answers with `logprobs=0`, and keep the one whose log-probabilities "
    "have the largest sum",
    "presence_penalty": _NO_PENALTY,
    "frequency_penalty": _NO_PENALTY,
    "response_format": _NO_JSON,
    "structured_outputs": _NO_JSON,
    "guided_decoding": _NO_JSON,
    "stream": "is not an option here: `gen.stream(prompts)` hands out each result when it is finished",
    "sampling_params": "is not an option here: pass each option as a keyword argument",
    "batch_size": "is not needed: the batch is as large as memory allows (see BatchConfig.max_batch_tokens)",
    "enable_thinking": "goes into `chat_template_kwargs`: chat_template_kwargs={'enable_thinking': ...}",
    "add_generation_prompt": "is not an option here: a chat gets the beginning of an answer, unless it is "
    "continued; see `continue_final_message`",
    "allowed_token_ids": "is not an option here: pass a `prefix_allowed_tokens_fn` that returns them",
    "return_full_text": _NO_DECODING,
    "skip_special_tokens": _NO_DECODING,
    "include_stop_str_in_output": "is not an option here: as in transformers, a `text` ends with the token that "
    "completed the stop string; text.split(stop)[0] is what comes before the string",
}

# Names from elsewhere -> the values that ask for nothing: what they say is what happens anyway.
_NOTHING_ASKED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("repeat_penalty", "best_of"), (1,)),
    **dict.fromkeys(("logit_bias", "bad_words", "stop", "stop_words", "stop_sequences"), ({}, [])),
    **dict.fromkeys(("use_beam_search", "stream", "echo", "return_full_text"), (False,)),
    **dict.fromkeys(("include_stop_str_in_output", "skip_special_tokens"), (True,)),
    "response_format": ({"type": "text"},),
}


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether a name from elsewhere has the value that changes nothing: ``presence_penalty=0``, or None."""
    if value is None:
        return name in FROM_ELSEWHERE or name in _NOTHING_ASKED
    return any(_equal(value, neutral) for neutral in _NOTHING_ASKED.get(name, ()))


Refusal = Callable[[str, str], Exception]  # (name, why) -> the error to raise


def by_our_names(given: Mapping[str, Any], refusal: Refusal) -> dict[str, Any]:
    """``given``, with aliases under their names in ``generate``, and ``logprobs`` as a number or None."""
    found: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, value in given.items():
        if asks_for_nothing(name, value):
            continue
        known = ALIASES.get(name, name)
        if known != name and value is None:
            continue  # says nothing; a None by the option's own name may have a meaning
        if known in written and found[known] is not None and not _same(found[known], value):
            raise refusal(name, f"contradicts `{written[known]}`: keep one of them")
        written[known], found[known] = name, value
    if isinstance(found.get("prompt_logprobs"), bool):
        found["prompt_logprobs"] = 0 if found["prompt_logprobs"] else None
    if "logprobs" in found or "top_logprobs" in found:
        found["logprobs"] = wanted_logprobs(found.get("logprobs"), found.pop("top_logprobs", None), refusal)
    return found


def wanted_logprobs(asked: Any, top: Any, refusal: Refusal) -> int | None:
    """How many of the most likely tokens are wanted: given as a number, or as OpenAI's flag and number."""
    if top is not None:
        if not is_whole(top) or top < 0:
            raise refusal("top_logprobs", f"must be a whole number of at least 0, not {shown(top)}")
        if asked is False or asked is None:
            if top == 0:
                return None
            raise refusal("top_logprobs", "needs `logprobs`: set it to true")
        if asked is not True and asked != top:
            raise refusal("top_logprobs", "contradicts `logprobs`: keep one of them")
        return int(top)
    if asked is None or asked is False:
        return None
    if asked is True:
        return 0
    if (why := wrong_value(TABLE["logprobs"], asked)) is not None:
        raise refusal("logprobs", why)
    return int(asked)


def _equal(value: Any, neutral: Any) -> bool:
    if isinstance(neutral, dict | list):
        return isinstance(value, type(neutral)) and value == neutral
    return is_number(value) and is_bool(value) == is_bool(neutral) and bool(value == neutral)


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)

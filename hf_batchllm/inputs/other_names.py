"""Names of options that other libraries use. Some are understood everywhere; for the others, what to do instead.

The same names mean the same in ``generate``, ``run_file``, in files and in the command. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..wording import is_bool, is_number, is_whole, shown

ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "stop": "stop_strings",
}
_PROGRESS = "is called `progress` here (True, False, or None for long lists only)"
_ENCODING = (
    "is not an option here: prompts are encoded with the tokenizer's defaults. Encode them yourself, and pass token ids"
)
_CUT = "is not an option here: `max_prompt_tokens` cuts long prompts, and `truncation_side` says where"
# Names from vLLM, the pipelines, peft's and TRL's helpers, and the OpenAI client: what to do instead.
FROM_ELSEWHERE = {
    **dict.fromkeys(
        ("max_gen_toks", "max_generated_tokens"),
        "is called `max_new_tokens` here",
    ),
    **dict.fromkeys(("min_gen_tokens",), "is called `min_new_tokens` here"),
    **dict.fromkeys(
        ("num_samples", "num_generations", "num_outputs"),
        "is called `num_return_sequences` here",
    ),
    "best_of": (
        "is not an option here: ask for `n` answers with `logprobs=0`, and keep the one whose log-probabilities have "
        "the largest sum"
    ),
    **dict.fromkeys(("stop_words", "stop_sequences", "stop_sequence"), "is called `stop_strings` here"),
    **dict.fromkeys(("sampling_params", "params"), "is not an option here: pass each option as a keyword argument"),
    **dict.fromkeys(("use_tqdm", "show_progress", "progress_bar", "verbose", "disable_tqdm"), _PROGRESS),
    **dict.fromkeys(
        ("random_seed", "sampling_seed", "generator", "rng"), "is called `seed` here, and is a whole number"
    ),
    **dict.fromkeys(
        ("presence_penalty", "frequency_penalty"), "is not an option of transformers; see `repetition_penalty`"
    ),
    **dict.fromkeys(("repeat_penalty", "rep_penalty", "rep_pen"), "is called `repetition_penalty` here"),
    **dict.fromkeys(("sample", "sampling"), "is called `do_sample` here"),
    "use_beam_search": "is not an option here: set `num_beams`",
    **dict.fromkeys(("beam_width", "beam_size"), "is called `num_beams` here"),
    **dict.fromkeys(
        ("return_logprob", "return_logprobs", "top_logprobs_num"),
        "is called `logprobs` here: the number of likeliest tokens beside the token itself, 0 for itself alone",
    ),
    "logprob_start_len": "is not an option here: `prompt_logprobs` asks for those of the whole prompt",
    "stream": "is not an option here: BatchGenerator.stream gives each result as soon as it is finished",
    "greedy": "is not an option here: pass `do_sample=False`",
    **dict.fromkeys(
        ("prompt", "text", "texts", "text_inputs", "messages", "conversations", "chats", "prompt_token_ids"),
        "is not an option here: the prompts are the first argument",
    ),
    **dict.fromkeys(
        ("batch_size", "max_num_seqs", "num_workers"),
        "is not needed: the batch is as large as memory allows (see BatchConfig.max_batch_tokens)",
    ),
    **dict.fromkeys(
        ("return_full_text", "return_text", "return_tensors", "echo"),
        "is not an option here: each result holds `text`, `token_ids` and `prompt_token_ids`",
    ),
    **dict.fromkeys(
        ("skip_special_tokens", "clean_up_tokenization_spaces"),
        "is not an option here: to decode in another way, use tokenizer.decode on `token_ids`",
    ),
    **dict.fromkeys(("padding", "add_special_tokens", "padding_side", "tokenizer_kwargs"), _ENCODING),
    **dict.fromkeys(("truncation", "max_prompt_length", "max_input_length", "max_model_len"), _CUT),
    "truncate_prompt_tokens": "is called `max_prompt_tokens` here",
    **dict.fromkeys(("tool", "functions", "tool_schemas"), "is called `tools` here, a list"),
    **{
        name: f"goes into `chat_template_kwargs`: chat_template_kwargs={{'{name}': ...}}"
        for name in ("enable_thinking", "thinking", "reasoning_effort", "documents", "chat_template", "xml_tools")
    },
    "template_kwargs": "is called `chat_template_kwargs` here",
    "add_generation_prompt": (
        "is not an option here: a chat gets the beginning of an answer, unless it is continued; "
        "see `continue_final_message`"
    ),
    "apply_chat_template": "is not an option here: chats get the tokenizer's template, and strings none",
    **dict.fromkeys(
        (
            "lora_request",
            "adapter_name",
            "adapter_names",
            "lora",
            "lora_name",
            "lora_path",
            "lora_adapter",
            "peft_adapter",
        ),
        "is called `adapter` here: the name of a PEFT adapter that the model has, or a list with one for each prompt",
    ),
    **dict.fromkeys(("guided_json", "json_schema"), "is called `schema` here"),
    "guided_regex": "is called `regex` here",
    **dict.fromkeys(("guided_grammar", "ebnf"), "is called `grammar` here"),
    "guided_choice": "is called `choice` here (and `score(prompts, choices=[...])` says how likely each choice is)",
    **dict.fromkeys(
        ("guided_decoding", "structured_outputs", "response_format"),
        "is not an option here: pass `schema` (True for any JSON object), `regex`, `grammar` or `choice`",
    ),
    "structural_tag": (
        "is not an option here: pass `grammar`, or `logits_processor=factory`, where factory(index, prompt_token_ids) "
        "makes the processors of one sequence (docs/constrained.md)"
    ),
    **dict.fromkeys(
        ("include_stop_str_in_output", "no_stop_trim"),
        "is not an option here: as in transformers, a `text` ends with the token that completed the stop string; "
        "text.split(stop)[0] is what comes before the string",
    ),
    "logits_processors": "is called `logits_processor` here: a list for all prompts, or a callable that makes one",
    "logit_bias": "is called `sequence_bias` here, and maps tuples of token ids to a bias",
    "bad_words": "is called `bad_words_ids` here, and takes token ids",
    "allowed_token_ids": "is not an option here: pass a `prefix_allowed_tokens_fn` that returns them",
    "timeout": "is called `max_time` here",
    **dict.fromkeys(
        ("device", "dtype", "torch_dtype"), "is not an option here: the model runs on its own device, in its own dtype"
    ),
    "model": "goes into BatchGenerator(model)",
    "config": "goes into BatchGenerator(model, config=...); options of generate go into `generation_config`",
}

# Names from elsewhere -> the values that ask for nothing: what they say is what happens anyway.
_NOTHING_ASKED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("repeat_penalty", "rep_penalty", "rep_pen", "best_of"), (1,)),
    **dict.fromkeys(("logit_bias", "bad_words", "stop", "stop_words", "stop_sequences"), ({}, [])),
    **dict.fromkeys(("use_beam_search", "stream", "echo", "return_full_text"), (False,)),
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim"), (True,)),
    "skip_special_tokens": (True,),
    "response_format": ({"type": "text"},),
}


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether a name from elsewhere has the value that changes nothing: ``presence_penalty=0``, or None."""
    if name not in _NOTHING_ASKED:
        return value is None and name in FROM_ELSEWHERE
    return value is None or any(_equal(value, neutral) for neutral in _NOTHING_ASKED[name])


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
    """How many likeliest tokens are wanted beside the chosen one; given as a number, or as OpenAI's flag and number."""
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
    if not is_whole(asked) or asked < 0:
        why = "must be a whole number of at least 0: how many of the likeliest tokens come besides the token itself"
        raise refusal("logprobs", f"{why}, not {shown(asked)}")
    return int(asked)


def _equal(value: Any, neutral: Any) -> bool:
    if isinstance(neutral, dict | list):
        return isinstance(value, type(neutral)) and value == neutral
    return is_number(value) and is_bool(value) == is_bool(neutral) and bool(value == neutral)


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)

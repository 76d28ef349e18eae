"""Requests of an OpenAI batch file: which ones can be served, and what they ask for. No model and no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...inputs.chats import chat_problem
from ...inputs.grammar_options import GRAMMAR_OPTIONS
from ...inputs.images.image_parts import is_image_part
from ...inputs.other_names import FROM_ELSEWHERE, asks_for_nothing
from ...wording import a_kind, is_number, shown
from .json_records import RecordError
from .openai_forms import FORM_FIELDS, FORMS, form_asked
from .setting_names import NAMES, nearest
from .settings import GenerationSettings, SettingError, read_settings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_ENDPOINTS = (CHAT, COMPLETIONS)
_ENVELOPE = ("custom_id", "method", "url", "body")
_MOST_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """What the form of the response depends on."""

    endpoint: str
    model: str | None
    token_logprobs: bool = False


# Fields that become settings -> the names of these settings.
_SETTINGS = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_completion_tokens",
    "min_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "length_penalty": "length_penalty",
    "n": "n",
    "stop": "stop",
    "seed": "seed",
    "truncate_prompt_tokens": "max_prompt_tokens",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
}
_OF_CHATS = ("tools", "chat_template_kwargs", "continue_final_message")  # settings, too, of requests with messages


def _only(*values: Any, hint: str = "leave it out") -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        if any(value == good and isinstance(value, bool) == isinstance(good, bool) for good in values):
            return None
        return f"is not supported: {hint}"

    return check


def _any_value(value: Any) -> None:
    """The field changes nothing about an answer."""


# Fields that must not change the answer: each has a check that says why a value is refused.
_WITHOUT_EFFECT: dict[str, Callable[[Any], str | None]] = {
    **dict.fromkeys(("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"), _any_value),
    **dict.fromkeys(("store", "parallel_tool_calls", "stream_options", "priority", "request_id"), _any_value),
    "presence_penalty": _only(0, hint="only 0 is; see `repetition_penalty`"),
    "frequency_penalty": _only(0, hint="only 0 is; see `repetition_penalty`"),
    "stream": _only(False, hint="results go to a file"),
    "functions": _only([], hint="pass `tools`"),
    "tool_choice": _only("none", "auto", hint="a model cannot be made to call a tool"),
    "function_call": _only("none", "auto", hint="a model cannot be made to call a function"),
    "modalities": _only(["text"], hint="answers are text"),
    "audio": _only(hint="answers are text"),
    "prediction": _only(),
    "reasoning_effort": _only("none"),
    "verbosity": _only(),
    "web_search_options": _only(),
    "best_of": _only(1, hint="all of `n` answers come back"),
    "echo": _only(False),
    "suffix": _only("", hint="models here continue a prompt at its end alone"),
    "use_beam_search": _only(False, hint="set --set num_beams=... for the whole file"),
    "include_stop_str_in_output": _only(False),
    "skip_special_tokens": _only(True),
    "spaces_between_special_tokens": _only(True),
    "add_generation_prompt": _only(True, False),  # see ``_of_chats``
    "add_special_tokens": _only(True, False),
    "chat_template": _only(hint="it is the tokenizer's; see --tokenizer"),
}
_KNOWN = {"model", "logprobs", "logit_bias", *FORM_FIELDS, *_SETTINGS, *_OF_CHATS, *_WITHOUT_EFFECT}


def in_openai_names(why: str) -> str:
    """A problem with settings, in the names that OpenAI's requests have for them."""
    for ours, theirs in (
        ("`num_return_sequences`", "`n`"),
        ("`sequence_bias`", "`logit_bias`"),
        ("`stop_strings`", "`stop`"),
        ("`max_prompt_tokens`", "`truncate_prompt_tokens`"),
        ("`do_sample=True`", "a `temperature` above 0"),
        ("`schema`", "`response_format`"),
        *((f"`{ours}`", f"`{theirs}`") for theirs, ours in FORMS.items()),
    ):
        why = why.replace(ours, theirs)
    return why


def read_request(record: Mapping[str, Any], images: bool = False) -> tuple[Any, GenerationSettings, OpenAIRequest]:
    """(the prompt, its settings, what the form of the response depends on)

    ``images``: whether messages may hold some.
    """
    _check_envelope(record)
    endpoint, body = record["url"], record["body"]
    source = "messages" if endpoint == CHAT else "prompt"
    for name, value in body.items():
        if name in (source, *_SETTINGS) or value is None:
            continue
        if name not in _KNOWN and asks_for_nothing(name, value):
            continue
        if name not in _KNOWN and not (name == "top_logprobs" and endpoint == CHAT):
            raise RecordError(_unknown(name, source, endpoint), name)
        if name in _OF_CHATS and endpoint != CHAT and value:
            raise RecordError(f"`{name}` goes with {CHAT}, whose requests have `messages`", name)
        why = _WITHOUT_EFFECT[name](value) if name in _WITHOUT_EFFECT else None
        if why is not None:
            raise RecordError(f"`{name}` {why}", name)
    prompt = prompt_of(record, images)
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise RecordError(f"`model` must be a string, not {shown(model)}", "model")
    settings = _settings(body, endpoint)
    return prompt, settings, OpenAIRequest(endpoint, model, settings.logprobs is not None)


def prompt_of(record: Mapping[str, Any], images: bool = False) -> Any:
    body = record.get("body")
    if not isinstance(body, Mapping):
        raise RecordError("has no `body`, which must hold the request", "body")
    if record.get("url") == CHAT:
        return _messages(body.get("messages"), images)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(is_number(each) for each in prompt):
        return prompt
    if isinstance(prompt, list) and len(prompt) > 1:
        raise RecordError(f"`prompt` holds {len(prompt):,} prompts: give each a line of its own", "prompt")
    if not isinstance(prompt, str):
        what = "is missing" if prompt is None else f"is {a_kind(prompt)}; it is a string, or token ids"
        raise RecordError(f"`prompt` {what}", "prompt")
    return prompt


def _check_envelope(record: Mapping[str, Any]) -> None:
    custom_id, url = record.get("custom_id"), record.get("url")
    if not isinstance(custom_id, str):
        what = "no `custom_id`" if custom_id is None else f"{shown(custom_id)} as its `custom_id`, which is a string"
        raise RecordError(f"has {what}", "custom_id")
    if record.get("method", "POST") != "POST":
        raise RecordError(f"has the method {shown(record['method'])}: it is POST", "method")
    if url not in _ENDPOINTS:
        what = "no `url`" if url is None else f"the url {shown(url)}"
        raise RecordError(f"has {what}: served are {' and '.join(_ENDPOINTS)}", "url")
    if not isinstance(record.get("body"), Mapping):
        raise RecordError("has no `body`, which must hold the request", "body")
    for name in record:
        if name not in _ENVELOPE:
            raise RecordError(f"has `{name}` beside {', '.join(_ENVELOPE)}: options go into `body`", name)


def _unknown(name: str, source: str, endpoint: str) -> str:
    if name in ("messages", "prompt"):
        return f"`{name}` does not go with {endpoint}, whose requests have `{source}`"
    if name == "top_logprobs":
        return f"`top_logprobs` does not go with {endpoint}: `logprobs` is the number there"
    if name in FROM_ELSEWHERE:
        ours = re.match(r"is called `(\w+)`", FROM_ELSEWHERE[name])
        more = ""
        if ours is not None and ours[1] in NAMES and ours[1] not in _KNOWN:
            more = f"; a request cannot have it: pass --set {ours[1]}=... for the whole file"
        return f"`{name}` {FROM_ELSEWHERE[name]}{more}"
    near = nearest(name)
    return f"`{name}` is not supported" + (f"; did you mean `{near}`?" if near else ": leave it out")


def _messages(messages: Any, images: bool) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        what = "are missing" if messages is None else "must be a list of messages"
        raise RecordError(f"`messages` {what}", "messages")
    found: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            why = f"`messages` has {a_kind(message)} at place {place}, where a message should be"
            raise RecordError(why, "messages")
        made = {name: value for name, value in message.items() if value is not None or name == "content"}
        for name in ("function_call", "audio"):
            if made.get(name):
                raise RecordError(f"message {place} holds `{name}`, which is not supported", "messages")
        if made.get("tool_calls"):
            made["tool_calls"] = _tool_calls(made["tool_calls"], place)
        if isinstance(made.get("content"), list):
            made["content"] = _content(made["content"], place, images)
        found.append(made)
    problem = chat_problem(found, images=images)
    if problem is not None:
        raise RecordError(f"`messages` {problem}", "messages")
    return found


def _tool_calls(calls: Any, place: int) -> list[Any]:
    """With their arguments as objects: OpenAI has them as JSON in a string, and chat templates write the JSON."""
    found = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise RecordError(f"message {place} holds `tool_calls` without a `function`", "messages")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                why = f"message {place} holds a call of a tool whose `arguments` are not JSON: {shown(arguments)}"
                raise RecordError(why, "messages") from None
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def _content(parts: list[Any], place: int, images: bool) -> str | list[Any]:
    """Text in one piece; with images, the parts."""
    found: list[Any] = []
    for part in parts:
        if images and is_image_part(part):
            found.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"a part of type {shown(kind)}" if isinstance(kind, str) else "a part that is no text"
            supported = "text and images are" if images else "text is"
            raise RecordError(f"message {place} holds {what}; only {supported} supported", "messages")
        found.append({"type": "text", "text": part["text"]})
    return found if any(map(is_image_part, found)) else "".join(part["text"] for part in found)


def _settings(body: Mapping[str, Any], endpoint: str) -> GenerationSettings:
    given = {ours: body[name] for name, ours in _SETTINGS.items() if body.get(name) is not None}
    if endpoint == CHAT:
        given |= _of_chats(body)
    if isinstance(given.get("seed"), int) and -(2**63) <= given["seed"] < 0:
        given["seed"] += 2**64  # OpenAI's seeds may be negative
    if given.get("top_k") == -1:
        given["top_k"] = 0  # vLLM's way to say all tokens
    if given.get("stop") == []:
        del given["stop"]
    _add_logprobs(given, body, endpoint)
    form, asked_by = form_asked(body)
    given |= form
    bias = body.get("logit_bias")
    if bias:
        given["sequence_bias"] = _bias(bias)
    try:
        settings = read_settings(given)
    except SettingError as error:
        if error.name in GRAMMAR_OPTIONS:
            raise RecordError(str(error).replace(f"`{error.name}`", f"`{asked_by}`"), asked_by) from None
        raise RecordError(in_openai_names(str(error)), error.name) from None
    # OpenAI's temperature is 1 by default, so these ask for sampling.
    draws = next((name for name in ("n", "top_p", "top_k", "min_p") if given.get(name) not in (None, 0, 1)), None)
    return replace(settings, implies_sampling=draws)


def _of_chats(body: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: body[name] for name in _OF_CHATS if body.get(name) not in (None, [], {})}
    if body.get("tool_choice") == "none":  # a model that sees no tool calls none
        given.pop("tools", None)
    begins, continued = body.get("add_generation_prompt"), body.get("continue_final_message")
    if begins and continued:
        why = "contradicts `continue_final_message`: keep one of them"
        raise RecordError(f"`add_generation_prompt` {why}", "add_generation_prompt")
    if begins is False and not continued:
        why = "is false, and nothing is continued: leave it out, or set `continue_final_message`"
        raise RecordError(f"`add_generation_prompt` {why}", "add_generation_prompt")
    if begins and continued is None:
        given["continue_final_message"] = False
    return given


def _add_logprobs(given: dict[str, Any], body: Mapping[str, Any], endpoint: str) -> None:
    asked, top = body.get("logprobs"), body.get("top_logprobs")
    if endpoint == COMPLETIONS:
        if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int)):
            raise RecordError(f"`logprobs` must be a whole number with {endpoint}, not {shown(asked)}", "logprobs")
    else:
        if asked is not None and not isinstance(asked, bool):
            raise RecordError(f"`logprobs` must be true or false with {endpoint}, not {shown(asked)}", "logprobs")
        if top is not None:
            given["top_logprobs"] = top
    if asked is not None:
        given["logprobs"] = asked
    most = top if endpoint == CHAT else asked
    if isinstance(most, int) and most > _MOST_TOP_LOGPROBS:
        name = "top_logprobs" if endpoint == CHAT else "logprobs"
        raise RecordError(f"`{name}` is {most}: at most {_MOST_TOP_LOGPROBS} are returned", name)


def _bias(bias: Any) -> list[list[Any]]:
    """``logit_bias`` -> ``sequence_bias`` as JSON has it."""
    if not isinstance(bias, Mapping):
        raise RecordError(f"`logit_bias` must map token ids to numbers, and is {a_kind(bias)}", "logit_bias")
    found: list[list[Any]] = []
    for token, value in bias.items():
        if not str(token).isdecimal() or isinstance(value, bool) or not isinstance(value, int | float):
            raise RecordError(f"`logit_bias` maps {shown(token)} to {shown(value)}: token ids to numbers", "logit_bias")
        if not -100 <= value <= 100:
            raise RecordError(f"`logit_bias` has {value:g} for token {token}: from -100 to 100", "logit_bias")
        found.append([[int(token)], float(value)])
    return found

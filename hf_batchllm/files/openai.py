"""Requests of an OpenAI batch file: which ones can be served, and what they ask for. No model and no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..inputs.chats import chat_problem
from ..inputs.grammar_options import GRAMMAR_OPTIONS
from ..inputs.images.image_parts import is_image_part
from ..inputs.other_names import FROM_ELSEWHERE, asks_for_nothing
from ..wording import a_kind, is_number, shown
from .json_lines import RecordError
from .settings import NAMES, GenerationSettings, SettingError, nearest, read_settings

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


# Fields that are settings of the same meaning.
_SETTINGS = (
    *("max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "length_penalty", "n", "stop", "seed", "stop_token_ids", "ignore_eos"),
    "truncate_prompt_tokens",
)
_OF_CHATS = ("tools", "chat_template_kwargs", "continue_final_message")  # settings, too, of requests with messages
_IGNORED = (  # they change nothing about an answer
    *("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "store", "parallel_tool_calls"),
    *("stream_options", "priority", "request_id"),
)
# Other fields must ask for nothing. ``asks_for_nothing`` knows the values that do, but for these fields.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("add_special_tokens", "add_generation_prompt"), (True, False)),  # see ``_of_chats``
    "include_stop_str_in_output": (False,),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "functions": ([],),
    "suffix": ("",),
}
_HINTS = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), "only 0 is; see `repetition_penalty`"),
    **dict.fromkeys(("tool_choice", "function_call"), "a model cannot be made to call a tool"),
    "stream": "results go to a file",
    "functions": "pass `tools`",
    "audio": "answers are text",
    "best_of": "all of `n` answers come back",
    "use_beam_search": "set --set num_beams=... for the whole file",
    "chat_template": "it is the tokenizer's; see --tokenizer",
}
# The form of an answer, in names of vLLM -> ours.
_FORMS = {"guided_json": "schema", "guided_regex": "regex", "guided_grammar": "grammar", "guided_choice": "choice"}
_IN_OUTPUTS = {"json": "schema", "json_object": "schema", "regex": "regex", "grammar": "grammar", "choice": "choice"}
_FORM_FIELDS = ("response_format", "structured_outputs", *_FORMS)
_KNOWN = {"model", "logprobs", "logit_bias", *_FORM_FIELDS, *_SETTINGS, *_OF_CHATS, *_IGNORED}
_THEIR_NAMES = {
    "`num_return_sequences`": "`n`",
    "`sequence_bias`": "`logit_bias`",
    "`stop_strings`": "`stop`",
    "`max_prompt_tokens`": "`truncate_prompt_tokens`",
    "`do_sample=True`": "a `temperature` above 0",
    "`schema`": "`response_format`",
    **{f"`{ours}`": f"`{theirs}`" for theirs, ours in _FORMS.items() if ours != "schema"},
}


def in_openai_names(why: str) -> str:
    """A problem with settings, in the names that OpenAI's requests have for them."""
    for ours, theirs in _THEIR_NAMES.items():
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
        if name in (source, *_SETTINGS, *_IGNORED) or value is None:
            continue
        if name not in _KNOWN and not (name == "top_logprobs" and endpoint == CHAT):
            good = [each for each in _NEUTRAL.get(name, ()) if type(each) is type(value)]
            if not (value in good if name in _NEUTRAL else asks_for_nothing(name, value)):
                raise RecordError(_unknown(name, source, endpoint), name)
        elif name in _OF_CHATS and endpoint != CHAT and value:
            raise RecordError(f"`{name}` goes with {CHAT}, whose requests have `messages`", name)
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
    if name in _HINTS:
        return f"`{name}` is not supported: {_HINTS[name]}"
    if name in FROM_ELSEWHERE:
        ours = re.match(r"is called `(\w+)`", FROM_ELSEWHERE[name])
        more = ""
        if ours is not None and ours[1] in NAMES and ours[1] not in _KNOWN:
            more = f"; a request cannot have it: pass --set {ours[1]}=... for the whole file"
        return f"`{name}` {FROM_ELSEWHERE[name]}{more}"
    near = nearest(name)
    if near == name:
        return f"`{name}` is not supported in a request: pass --set {name}=... for the whole file"
    return f"`{name}` is not supported" + (f"; did you mean `{near}`?" if near else ": leave it out")


# -- messages ----------------------------------------------------------------------------------------------------------


def _messages(messages: Any, images: bool) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        what = "are missing" if messages is None else "must be a list of messages"
        raise RecordError(f"`messages` {what}", "messages")
    found = [_message(message, f"message {place}", images) for place, message in enumerate(messages)]
    problem = chat_problem(found, images=images)
    if problem is not None:
        raise RecordError(f"`messages` {problem}", "messages")
    return found


def _message(message: Any, which: str, images: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RecordError(f"{which} of `messages` is {a_kind(message)}, and no message", "messages")
    made = {name: value for name, value in message.items() if value is not None or name == "content"}
    for name in ("function_call", "audio"):
        if made.get(name):
            raise RecordError(f"{which} holds `{name}`, which is not supported", "messages")
    if made.get("tool_calls"):
        made["tool_calls"] = _tool_calls(made["tool_calls"], which)
    if isinstance(made.get("content"), list):
        made["content"] = _content(made["content"], which, images)
    return made


def _tool_calls(calls: Any, which: str) -> list[Any]:
    """With their arguments as objects: OpenAI has them as JSON in a string, and chat templates write the JSON."""
    found = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise RecordError(f"{which} holds `tool_calls` without a `function`", "messages")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                why = f"{which} holds a call of a tool whose `arguments` are not JSON: {shown(arguments)}"
                raise RecordError(why, "messages") from None
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def _content(parts: list[Any], which: str, images: bool) -> str | list[Any]:
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
            raise RecordError(f"{which} holds {what}; only {supported} supported", "messages")
        found.append({"type": "text", "text": part["text"]})
    return found if any(map(is_image_part, found)) else "".join(part["text"] for part in found)


# -- settings ----------------------------------------------------------------------------------------------------------


def _settings(body: Mapping[str, Any], endpoint: str) -> GenerationSettings:
    given = {name: body[name] for name in _SETTINGS if body.get(name) is not None}
    if "truncate_prompt_tokens" in given:
        given["max_prompt_tokens"] = given.pop("truncate_prompt_tokens")
    if endpoint == CHAT:
        given |= _of_chats(body)
    if isinstance(given.get("seed"), int) and -(2**63) <= given["seed"] < 0:
        given["seed"] += 2**64  # OpenAI's seeds may be negative
    if given.get("top_k") == -1:
        given["top_k"] = 0  # vLLM's way to say all tokens
    if given.get("stop") == []:
        del given["stop"]
    given |= _logprobs(body, endpoint)
    form, asked_by = _form(body)
    given |= form
    if body.get("logit_bias"):
        given["sequence_bias"] = _bias(body["logit_bias"])
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
    name = "add_generation_prompt"
    begins, continued = body.get(name), body.get("continue_final_message")
    if begins and continued:
        raise RecordError(f"`{name}` contradicts `continue_final_message`: keep one of them", name)
    if begins is False and not continued:
        why = "is false, and nothing is continued: leave it out, or set `continue_final_message`"
        raise RecordError(f"`{name}` {why}", name)
    return given | ({"continue_final_message": False} if begins and continued is None else {})


def _logprobs(body: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
    chat, asked, top = endpoint == CHAT, body.get("logprobs"), body.get("top_logprobs")
    if asked is not None and (not isinstance(asked, int) or isinstance(asked, bool) != chat):
        what = "true or false" if chat else "a whole number"
        raise RecordError(f"`logprobs` must be {what} with {endpoint}, not {shown(asked)}", "logprobs")
    name, most = ("top_logprobs", top) if chat else ("logprobs", asked)
    if isinstance(most, int) and most > _MOST_TOP_LOGPROBS:
        raise RecordError(f"`{name}` is {most}: at most {_MOST_TOP_LOGPROBS} are returned", name)
    given = {"logprobs": asked, "top_logprobs": top if chat else None}
    return {name: value for name, value in given.items() if value is not None}


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


def _form(body: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The form that the answer is to have, as a setting, and the field that asks for it."""
    found: dict[str, dict[str, Any]] = {
        name: {ours: body[name]} for name, ours in _FORMS.items() if body.get(name) is not None
    }
    if body.get("response_format") is not None and (schema := _schema(body["response_format"])) is not None:
        found = {"response_format": {"schema": schema}, **found}
    name = "structured_outputs"
    if body.get(name) is not None:
        outputs = body[name]
        if not isinstance(outputs, Mapping):
            raise RecordError(f"`{name}` must be an object, not {shown(outputs)}", name)
        given = {key: value for key, value in outputs.items() if value is not None and value is not False}
        if len(given) > 1 or not given.keys() <= _IN_OUTPUTS.keys():
            raise RecordError(f"`{name}` must have one of {', '.join(_IN_OUTPUTS)}, and has {', '.join(given)}", name)
        if given:
            found[name] = {_IN_OUTPUTS[key]: value for key, value in given.items()}
    if len(found) > 1:
        first, second = list(found)[:2]
        raise RecordError(f"`{second}` contradicts `{first}`: an answer has one form, so keep one of them", second)
    return next(((form, name) for name, form in found.items()), ({}, None))


def _schema(asked: Any) -> Any:
    """What ``response_format`` asks for, as a setting; None for plain text."""
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if kind in ("text", "json_object"):
        return True if kind == "json_object" else None
    named = asked.get("json_schema") if kind == "json_schema" else None
    why = ""
    if kind != "json_schema":
        why = f"is of type {shown(asked if kind is None else kind)}: it is text, json_object or json_schema"
    elif not isinstance(named, Mapping):
        why = "has no `json_schema`, an object that holds the `schema`"
    elif not isinstance(named.get("strict"), bool | None):
        why = f"has a `strict` that is {shown(named['strict'])}: it is true or false"
    elif not isinstance(named.get("schema"), Mapping):
        why = "has no `schema` in its `json_schema`, or none that is an object"
    if why or named is None:
        raise RecordError(f"`response_format` {why}", "response_format")
    return named["schema"]

"""Requests of an OpenAI batch file: which ones can be served, and what they ask for. No model and no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..inputs.chats import chat_problem
from ..inputs.images.image_parts import is_image_part
from ..inputs.option_table import ALIASES, CALLED, GRAMMAR_OPTIONS, TABLE
from ..inputs.other_names import FROM_ELSEWHERE, asks_for_nothing
from ..inputs.prompt_options import FOR_CHATS
from ..wording import a_kind, is_number, shown
from .json_lines import RecordError, wrong
from .settings import NAMES, GenerationSettings, SettingError, mistaken_name, nearest, read_settings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_SOURCES = {CHAT: "messages", COMPLETIONS: "prompt"}  # the field that is the prompt
_ENVELOPE = ("custom_id", "method", "url", "body")
_MOST_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """What the form of the response depends on."""

    endpoint: str
    model: str | None
    token_logprobs: bool = False


# Fields that are settings of the same meaning.
_SETTINGS = (*ALIASES, *(name for name, row in TABLE.items() if row.in_requests), "truncate_prompt_tokens")
_OF_CHATS = FOR_CHATS  # settings, too, of requests with messages
_IGNORED = (  # they change nothing about an answer
    *("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "store", "parallel_tool_calls"),
    *("stream_options", "priority", "request_id"),
)
# Other fields must ask for nothing. ``asks_for_nothing`` knows the values that do, but for these fields.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "spaces_between_special_tokens": (True,),
    **dict.fromkeys(("add_special_tokens", "add_generation_prompt"), (True, False)),  # see ``_of_chats``
    "include_stop_str_in_output": (False,),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "functions": ([],),
    "suffix": ("",),
}
_HINTS = {
    **dict.fromkeys(("tool_choice", "function_call"), "a model cannot be made to call a tool"),
    "stream": "results go to a file",
    "functions": "pass `tools`",
    "audio": "answers are text",
    "chat_template": "it is the tokenizer's; see --tokenizer",
}
# The form of an answer, in names of vLLM -> ours.
_FORMS = {theirs: ours for theirs, ours in CALLED.items() if ours in GRAMMAR_OPTIONS}
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
    for name, value in body.items():
        if name in (_SOURCES[endpoint], *_SETTINGS, *_IGNORED) or value is None:
            continue
        if name not in _KNOWN and not (name == "top_logprobs" and endpoint == CHAT):
            good = [each for each in _NEUTRAL.get(name, ()) if type(each) is type(value)]
            if not (value in good if name in _NEUTRAL else asks_for_nothing(name, value)):
                raise wrong(name, _why_unknown(name, endpoint))
        elif name in _OF_CHATS and endpoint != CHAT and value:
            raise wrong(name, f"goes with {CHAT}, whose requests have `messages`")
    prompt = prompt_of(record, images)
    model = body.get("model")
    if not isinstance(model, str | None):
        raise wrong("model", f"must be a string, not {shown(model)}")
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
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(map(is_number, prompt))):
        return prompt
    if isinstance(prompt, list) and len(prompt) > 1:
        raise wrong("prompt", f"holds {len(prompt):,} prompts: give each a line of its own")
    raise wrong("prompt", "is missing" if prompt is None else f"is {a_kind(prompt)}; it is a string, or token ids")


def _check_envelope(record: Mapping[str, Any]) -> None:
    def has(name: str, what: str) -> str:
        return f"has {f'no `{name}`' if record.get(name) is None else f'{what} {shown(record[name])}'}"

    if not isinstance(record.get("custom_id"), str):
        raise RecordError(f"{has('custom_id', 'the `custom_id`')}: it is a string", "custom_id")
    if record.get("method", "POST") != "POST":
        raise RecordError(f"has the method {shown(record['method'])}: it is POST", "method")
    if record.get("url") not in _SOURCES:
        raise RecordError(f"{has('url', 'the url')}: served are {' and '.join(_SOURCES)}", "url")
    if not isinstance(record.get("body"), Mapping):
        raise RecordError("has no `body`, which must hold the request", "body")
    for name in record:
        if name not in _ENVELOPE:
            raise RecordError(f"has `{name}` beside {', '.join(_ENVELOPE)}: options go into `body`", name)


def _why_unknown(name: str, endpoint: str) -> str:
    if name in _SOURCES.values():
        return f"does not go with {endpoint}, whose requests have `{_SOURCES[endpoint]}`"
    if name == "top_logprobs":
        return f"does not go with {endpoint}: `logprobs` is the number there"
    if name in _HINTS:
        return f"is not supported: {_HINTS[name]}"
    if why := FROM_ELSEWHERE.get(name):
        ours = CALLED.get(name)
        needs_set = ours in NAMES and ours not in _KNOWN
        return f"{why}; a request cannot have it: pass --set {ours}=... for the whole file" if needs_set else why
    if name in NAMES and (why := mistaken_name(name)):
        return why
    near = nearest(name)
    if near == name:
        return f"is not supported in a request: pass --set {name}=... for the whole file"
    return "is not supported" + (f"; did you mean `{near}`?" if near else ": leave it out")


# -- messages ----------------------------------------------------------------------------------------------------------


def _messages(messages: Any, images: bool) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "are missing" if messages is None else "must be a list of messages")
    found = [_message(message, f"message {place}", images) for place, message in enumerate(messages)]
    if problem := chat_problem(found, images=images):
        raise wrong("messages", problem)
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
        is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text and not (images and is_image_part(part)):
            kind = part.get("type") if isinstance(part, Mapping) else None
            what = f"a part of type {shown(kind)}" if isinstance(kind, str) else "a part that is no text"
            supported = "text and images are" if images else "text is"
            raise RecordError(f"{which} holds {what}; only {supported} supported", "messages")
        found.append({"type": "text", "text": part["text"]} if is_text else part)
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
    form, asked_by = _form(body)
    given |= _logprobs(body, endpoint) | form
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
        raise wrong(name, "contradicts `continue_final_message`: keep one of them")
    if begins is False and not continued:
        raise wrong(name, "is false, and nothing is continued: leave it out, or set `continue_final_message`")
    return given | ({"continue_final_message": False} if begins and continued is None else {})


def _logprobs(body: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
    chat, asked, top = endpoint == CHAT, body.get("logprobs"), body.get("top_logprobs")
    if asked is not None and (not isinstance(asked, int) or isinstance(asked, bool) != chat):
        what = "true or false" if chat else "a whole number"
        raise wrong("logprobs", f"must be {what} with {endpoint}, not {shown(asked)}")
    name, most = ("top_logprobs", top) if chat else ("logprobs", asked)
    if isinstance(most, int) and most > _MOST_TOP_LOGPROBS:
        raise wrong(name, f"is {most}: at most {_MOST_TOP_LOGPROBS} are returned")
    given = {"logprobs": asked, "top_logprobs": top if chat else None}
    return {name: value for name, value in given.items() if value is not None}


def _bias(bias: Any) -> list[list[Any]]:
    """``logit_bias`` -> ``sequence_bias`` as JSON has it."""
    if not isinstance(bias, Mapping):
        raise wrong("logit_bias", f"must map token ids to numbers, and is {a_kind(bias)}")
    found: list[list[Any]] = []
    for token, value in bias.items():
        if not str(token).isdecimal() or isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong("logit_bias", f"maps {shown(token)} to {shown(value)}: token ids to numbers")
        if not -100 <= value <= 100:
            raise wrong("logit_bias", f"has {value:g} for token {token}: from -100 to 100")
        found.append([[int(token)], float(value)])
    return found


def _form(body: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The form that the answer is to have, as a setting, and the field that asks for it."""
    found = {name: {ours: body[name]} for name, ours in _FORMS.items() if body.get(name) is not None}
    if body.get("response_format") is not None and (schema := _schema(body["response_format"])) is not None:
        found = {"response_format": {"schema": schema}, **found}
    name = "structured_outputs"
    if (outputs := body.get(name)) is not None:
        if not isinstance(outputs, Mapping):
            raise wrong(name, f"must be an object, not {shown(outputs)}")
        given = {key: value for key, value in outputs.items() if value is not None and value is not False}
        if len(given) > 1 or not given.keys() <= _IN_OUTPUTS.keys():
            raise wrong(name, f"must have one of {', '.join(_IN_OUTPUTS)}, and has {', '.join(given)}")
        if given:
            found[name] = {_IN_OUTPUTS[key]: value for key, value in given.items()}
    if len(found) > 1:
        first, second = list(found)[:2]
        raise wrong(second, f"contradicts `{first}`: an answer has one form, so keep one of them")
    return next(((form, name) for name, form in found.items()), ({}, None))


def _schema(asked: Any) -> Any:
    """What ``response_format`` asks for, as a setting; None for plain text."""
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if kind in ("text", "json_object"):
        return True if kind == "json_object" else None
    if kind != "json_schema":
        what = shown(asked if kind is None else kind)
        raise wrong("response_format", f"is of type {what}: it is text, json_object or json_schema")
    named = asked.get(kind)
    if not isinstance(named, Mapping):
        raise wrong("response_format", "has no `json_schema`, an object that holds the `schema`")
    if not isinstance(named.get("strict"), bool | None):
        raise wrong("response_format", f"has a `strict` that is {shown(named['strict'])}: it is true or false")
    if not isinstance(named.get("schema"), Mapping):
        raise wrong("response_format", "has no `schema` in its `json_schema`, or none that is an object")
    return named["schema"]

"""Results in the form that OpenAI's batch files have.

A refused request gets a response with status 400, whose body holds the error. The ``error`` beside the response is
null: OpenAI uses it for requests without any response, as in a batch that expired. So programs that read such files
look at the status first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from .openai_requests import CHAT, OpenAIRequest
from .prompt_records import BadPromptRecord, PromptRecord
from .token_texts import TokenTexts, finite, likeliest

if TYPE_CHECKING:
    from ...results.generations import Generation


def response(
    record: PromptRecord, key: str, generations: Sequence[Generation], tokens: TokenTexts, model: str, created: int
) -> dict[str, Any]:
    request = record.request
    assert request is not None
    chat = request.endpoint == CHAT
    prompt, new = len(generations[0].prompt_token_ids), sum(len(each.token_ids) for each in generations)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{record.number}-{key}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model or request.model or "",
        "choices": [_choice(record, request, place, each, tokens) for place, each in enumerate(generations)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new},
    }
    return _enveloped(record, key, 200, body)


def error_response(record: PromptRecord | BadPromptRecord, key: str, why: str) -> dict[str, Any]:
    param = record.param if isinstance(record, BadPromptRecord) else None
    error = {"message": why, "type": "invalid_request_error", "param": param, "code": None}
    return _enveloped(record, key, 400, {"error": error})


def _enveloped(record: PromptRecord | BadPromptRecord, key: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"batch_req_{record.number}_{key}",
        "custom_id": record.id,
        "response": {"status_code": status, "request_id": f"req_{record.number}_{key}", "body": body},
        "error": None,
    }


def _choice(
    record: PromptRecord, request: OpenAIRequest, place: int, generation: Generation, tokens: TokenTexts
) -> dict[str, Any]:
    whole = generation.text or ""
    text = _before_stop(whole, record.settings.options.get("stop_strings") or ())
    stopped = generation.finish_reason == "stop" or len(text) < len(whole)
    logprobs = None
    if request.token_logprobs and generation.logprobs is not None:
        kept = _kept_tokens(generation, text, whole, tokens)
        logprobs = (_chat_logprobs if request.endpoint == CHAT else _completion_logprobs)(
            generation, kept, record.settings.logprobs or 0, tokens
        )
    message = {"role": "assistant", "content": text, "refusal": None}
    content = {"message": message} if request.endpoint == CHAT else {"text": text}
    return {"index": place, **content, "logprobs": logprobs, "finish_reason": "stop" if stopped else "length"}


def _before_stop(text: str, stops: Sequence[str]) -> str:
    """The first stop string in a text is the one that ended it: generation ends as soon as one is complete."""
    places = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(places)] if places else text


def _kept_tokens(generation: Generation, text: str, whole: str, tokens: TokenTexts) -> int:
    """How many tokens begin within the text. The tokens of a stop string and the EOS do not."""
    ids = generation.token_ids
    count = len(ids)
    while count and ids[count - 1] in tokens.special:
        count -= 1
    if len(text) < len(whole):
        begins = [0, *accumulate(len(tokens.text(token)) for token in ids[:count])]
        count = sum(begin < len(text) for begin in begins[:-1])
    return count


def _chat_logprobs(generation: Generation, kept: int, wanted: int, tokens: TokenTexts) -> dict[str, Any]:
    assert generation.logprobs is not None

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": tokens.text(token), "logprob": finite(logprob), "bytes": tokens.byte_values(token)}

    content = []
    for token, logprobs in zip(generation.token_ids[:kept], generation.logprobs, strict=False):
        top = [one(each, value) for each, value in likeliest(logprobs, wanted)]
        content.append({**one(token, logprobs[token]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _completion_logprobs(generation: Generation, kept: int, wanted: int, tokens: TokenTexts) -> dict[str, Any]:
    assert generation.logprobs is not None
    ids, logprobs = generation.token_ids[:kept], generation.logprobs[:kept]
    texts = [tokens.text(token) for token in ids]
    top = [
        {tokens.text(each): finite(value) for each, value in likeliest(each_token, wanted)} for each_token in logprobs
    ]
    return {
        "tokens": texts,
        "token_logprobs": [finite(each_token[token]) for token, each_token in zip(ids, logprobs, strict=True)],
        "top_logprobs": top if wanted else None,
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
    }

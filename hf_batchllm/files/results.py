"""A record's result -> its line of the output: a plain one, or a response as in OpenAI's batch files.

A refused request gets a response with status 400, whose body holds the error. The ``error`` beside the response is
null: OpenAI uses it for requests without any response. So programs that read such files look at the status first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from .json_lines import as_line
from .openai import CHAT, OpenAIRequest, in_openai_names
from .records import OPENAI, BadPromptRecord, PromptRecord

if TYPE_CHECKING:
    from ..results.generations import Generation

_OURS = frozenset(  # a kept field of such a name gets "input_" before it
    (
        *("index", "id", "text", "finish_reason", "prompt_tokens", "new_tokens", "samples", "token_ids", "logprobs"),
        *("adapter", "score", "warning", "error", "key"),
    )
)
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have
_SPACE = "\u2581"  # SentencePiece writes spaces like this


class ResultWriter:
    """Results -> lines of JSON, without the newline.

    tokens: for log-probabilities. model, created: stand in OpenAI's responses; ``created`` is the time at which the
    whole run began, so that a run that was interrupted writes the same lines. note: is called, once, if requests name
    another model.
    """

    def __init__(
        self,
        dialect: str,
        *,
        tokens: TokenTexts | None = None,
        token_ids: bool = False,
        model: str = "",
        created: int = 0,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.dialect = dialect
        self._tokens = tokens or TokenTexts(None)
        self._samples = SampleFields(self._tokens, token_ids)
        self._model, self._created = model, created
        self._note = note

    def result(
        self, record: PromptRecord, key: str, generations: Sequence[Generation], warning: str | None = None
    ) -> bytes:
        """``generations``: all samples of the record, in their order. OpenAI's form has no place for a ``warning``."""
        why = next((each.error for each in generations if each.error is not None), None)
        if why is not None:
            why = f"the prompt {in_openai_names(why) if self.dialect == OPENAI else why}"
            return self.error(record.bad(why), key)
        prompt_tokens = len(generations[0].prompt_token_ids)
        if record.request is not None:
            return as_line(self._response(record, record.request, key, generations, prompt_tokens))
        samples = [self._samples.of(each, record.settings.logprobs) for each in generations]
        tokens: dict[str, Any] = {"prompt_tokens": prompt_tokens}
        if generations[0].adapter is not None:
            tokens["adapter"] = generations[0].adapter
        if len(samples) == 1:
            first = {name: samples[0].pop(name) for name in ("text", "finish_reason")}
            found = {**first, **tokens, **samples[0]}
        else:
            found = {**tokens, "samples": samples}
        return self._line(record, key, found | ({} if warning is None else {"warning": warning}))

    def error(self, record: BadPromptRecord, key: str) -> bytes:
        if self.dialect != OPENAI:
            return self._line(record, key, {"error": str(record)})
        error = {"message": str(record), "type": "invalid_request_error", "param": record.param, "code": None}
        return as_line(_enveloped(record, key, 400, {"error": error}))

    def _line(self, record: PromptRecord | BadPromptRecord, key: str, found: Mapping[str, Any]) -> bytes:
        named = {"id": record.id} if record.has_id else {}
        kept = {f"input_{name}" if name in _OURS else name: value for name, value in record.kept.items()}
        return as_line({"index": record.number, **named, **found, **kept, "key": key})

    def _response(
        self, record: PromptRecord, request: OpenAIRequest, key: str, generations: Sequence[Generation], prompt: int
    ) -> dict[str, Any]:
        if self._note is not None and request.model not in (None, self._model):
            self._note(f"requests name the model {request.model!r}; all of them are answered by {self._model!r}")
            self._note = None
        chat, new = request.endpoint == CHAT, sum(len(each.token_ids) for each in generations)
        body = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{record.number}-{key}",
            "object": "chat.completion" if chat else "text_completion",
            "created": self._created,
            "model": self._model or request.model or "",
            "choices": [self._choice(record, request, place, each) for place, each in enumerate(generations)],
            "usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new},
        }
        return _enveloped(record, key, 200, body)

    def _choice(
        self, record: PromptRecord, request: OpenAIRequest, place: int, generation: Generation
    ) -> dict[str, Any]:
        whole = generation.text or ""
        # The first stop string in a text is the one that ended it: generation ends as soon as one is complete.
        stops = [whole.find(stop) for stop in record.settings.options.get("stop_strings") or ()]
        text = whole[: min((at for at in stops if at >= 0), default=len(whole))]
        stopped = generation.finish_reason == "stop" or len(text) < len(whole)
        logprobs = None
        if request.token_logprobs and generation.logprobs is not None:
            form = _chat_logprobs if request.endpoint == CHAT else _completion_logprobs
            kept = self._kept_tokens(generation, text, whole)
            steps = list(zip(generation.token_ids[:kept], generation.logprobs, strict=False))
            logprobs = form(steps, record.settings.logprobs or 0, self._tokens)
        message = {"role": "assistant", "content": text, "refusal": None}
        content = {"message": message} if request.endpoint == CHAT else {"text": text}
        return {"index": place, **content, "logprobs": logprobs, "finish_reason": "stop" if stopped else "length"}

    def _kept_tokens(self, generation: Generation, text: str, whole: str) -> int:
        """How many tokens begin within the text. The tokens of a stop string and the EOS do not."""
        ids = generation.token_ids
        count = len(ids)
        while count and ids[count - 1] in self._tokens.special:
            count -= 1
        if len(text) < len(whole):
            ends = accumulate(len(self._tokens.text(token)) for token in ids[:count])
            count = sum(begin < len(text) for begin in [0, *ends][:count])
        return count


def _enveloped(record: PromptRecord | BadPromptRecord, key: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"batch_req_{record.number}_{key}",
        "custom_id": record.id,
        "response": {"status_code": status, "request_id": f"req_{record.number}_{key}", "body": body},
        "error": None,
    }


Step = tuple[int, Mapping[int, float]]  # the token that was chosen; log-probabilities of it and of the most likely


def _chat_logprobs(steps: Sequence[Step], wanted: int, tokens: TokenTexts) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": tokens.text(token), "logprob": finite(logprob), "bytes": tokens.byte_values(token)}

    content = []
    for token, logprobs in steps:
        top = [one(each, value) for each, value in top_logprobs(logprobs, wanted)]
        content.append({**one(token, logprobs[token]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _completion_logprobs(steps: Sequence[Step], wanted: int, tokens: TokenTexts) -> dict[str, Any]:
    texts = [tokens.text(token) for token, _ in steps]
    top = [{tokens.text(each): finite(value) for each, value in top_logprobs(known, wanted)} for _, known in steps]
    return {
        "tokens": texts,
        "token_logprobs": [finite(logprobs[token]) for token, logprobs in steps],
        "top_logprobs": top if wanted else None,
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
    }


class SampleFields:
    """The fields of a sample: in a line of its own, or in the list ``samples``."""

    def __init__(self, tokens: TokenTexts, token_ids: bool) -> None:
        self._tokens = tokens
        self._token_ids = token_ids

    def of(self, generation: Generation, logprobs: int | None) -> dict[str, Any]:
        """``logprobs``: how many of the most likely tokens are wanted; None for no log-probabilities."""
        made: dict[str, Any] = {
            "text": generation.text,
            "finish_reason": generation.finish_reason,
            "new_tokens": len(generation.token_ids),
        }
        if generation.score is not None:
            made["score"] = generation.score
        if self._token_ids:
            made["token_ids"] = generation.token_ids
        if logprobs is not None and generation.logprobs is not None:
            steps = zip(generation.token_ids, generation.logprobs, strict=True)
            made["logprobs"] = [self._token_logprobs(token, values, logprobs) for token, values in steps]
        return made

    def _token_logprobs(self, token: int, logprobs: Mapping[int, float], wanted: int) -> dict[str, Any]:
        entry = self._logprob(token, logprobs[token])
        if wanted:
            entry["top"] = [self._logprob(each, value) for each, value in top_logprobs(logprobs, wanted)]
        return entry

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token, "token": self._tokens.text(token), "logprob": finite(logprob)}


def top_logprobs(logprobs: Mapping[int, float], wanted: int) -> list[tuple[int, float]]:
    """At one position, as many as this record asked for: another record of the same call may have asked for more."""
    return sorted(logprobs.items(), key=lambda pair: -pair[1])[:wanted]


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB


class TokenTexts:
    """Single tokens as text and as bytes. Without a tokenizer, tokens are named by their ids."""

    def __init__(self, tokenizer: Any) -> None:
        inner = getattr(tokenizer, "tokenizer", None)  # a processor holds one
        self._tokenizer = tokenizer if inner is None or not hasattr(inner, "convert_ids_to_tokens") else inner
        self._text_and_bytes = cache(self._decode)

    def text(self, token: int) -> str:
        return self._text_and_bytes(token)[0]

    def byte_values(self, token: int) -> list[int] | None:
        """None if the tokenizer does not tell."""
        known = self._text_and_bytes(token)[1]
        return None if known is None else list(known)

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that are not part of a text."""
        return frozenset(getattr(self._tokenizer, "all_special_ids", None) or ())

    def _decode(self, token: int) -> tuple[str, bytes | None]:
        if self._tokenizer is None:
            return f"token_id:{token}", None
        text = self._tokenizer.decode([token])
        piece = getattr(self._tokenizer, "convert_ids_to_tokens", lambda token: "")(token)
        piece = piece if isinstance(piece, str) else ""  # the token as the vocabulary writes it
        if piece.startswith(_SPACE) and not text.startswith(" "):
            text = f" {text}"  # a decoder drops the space at the beginning of a text
        if "\ufffd" not in text:
            return text, text.encode("utf-8", "surrogatepass")
        if byte := _BYTE.fullmatch(piece):  # a part of a character
            return text, bytes([int(byte[1], 16)])
        known = _bytes_of_letters()
        return text, bytes(map(known.__getitem__, piece)) if piece and known.keys() >= set(piece) else None


@cache
def _bytes_of_letters() -> dict[str, int]:
    """Byte-level BPE writes each byte as a letter."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}

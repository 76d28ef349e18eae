"""A record's result -> its line of the output. (``openai_responses`` has OpenAI's form.)"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .openai_requests import in_openai_names
from .openai_responses import error_response, response
from .prompt_records import OPENAI, BadPromptRecord, PromptRecord
from .token_texts import TokenTexts, finite, likeliest

if TYPE_CHECKING:
    from ...results.generations import Generation


_OURS = ("index", "id", "text", "finish_reason", "prompt_tokens", "new_tokens", "samples", "token_ids", "logprobs")
_TAKEN = frozenset(
    (*_OURS, "adapter", "score", "warning", "error", "key")
)  # a kept field of such a name gets "input_" before it


class SampleFields:
    """The fields of a sample: in a line of its own, or in the list ``samples``."""

    def __init__(self, tokens: TokenTexts, token_ids: bool) -> None:
        self._tokens = tokens
        self._token_ids = token_ids

    def of(self, generation: Generation, logprobs: int | None) -> dict[str, Any]:
        """``logprobs``: how many of the likeliest tokens are wanted; None for no log-probabilities."""
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
            made["logprobs"] = [
                self._token_logprobs(token, values, logprobs)
                for token, values in zip(generation.token_ids, generation.logprobs, strict=True)
            ]
        return made

    def _token_logprobs(self, token: int, logprobs: Mapping[int, float], wanted: int) -> dict[str, Any]:
        entry = self._logprob(token, logprobs[token])
        if wanted:
            entry["top"] = [self._logprob(each, value) for each, value in likeliest(logprobs, wanted)]
        return entry

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token, "token": self._tokens.text(token), "logprob": finite(logprob)}


class ResultWriter:
    """Results -> lines of JSON, without the newline.

    ``tokens``: for log-probabilities. ``model`` and ``created`` stand in OpenAI's responses; ``created`` is the time at
    which the whole run began, so that a run that was interrupted writes the same lines. ``where`` names a record's
    place to a person, as for a RecordReader. ``note`` is called, once, if requests name another model.
    """

    def __init__(
        self,
        dialect: str,
        *,
        tokens: TokenTexts | None = None,
        token_ids: bool = False,
        model: str = "",
        created: int = 0,
        where: Callable[[int], str] | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.dialect = dialect
        self._tokens = tokens or TokenTexts(None)
        self._samples = SampleFields(self._tokens, token_ids)
        self._model = model
        self._created = created
        self._where = where
        self._note = note

    def result(
        self, record: PromptRecord, key: str, generations: Sequence[Generation], warning: str | None = None
    ) -> bytes:
        """``generations``: all samples of the record, in their order. OpenAI's form has no place for a ``warning``."""
        why = next((each.error for each in generations if each.error is not None), None)
        if why is not None:
            return self.error(record, key, f"the prompt {in_openai_names(why) if self.dialect == OPENAI else why}")
        if self.dialect == OPENAI:
            self._compare_model(record)
            return as_line(response(record, key, generations, self._tokens, self._model, self._created))
        line: dict[str, Any] = {"index": record.number, **_id(record)}
        samples = [self._samples.of(each, record.settings.logprobs) for each in generations]
        tokens: dict[str, Any] = {"prompt_tokens": len(generations[0].prompt_token_ids)}
        if generations[0].adapter is not None:
            tokens["adapter"] = generations[0].adapter
        if len(samples) == 1:
            beside = {name: value for name, value in samples[0].items() if name not in ("text", "finish_reason")}
            line |= {"text": samples[0]["text"], "finish_reason": samples[0]["finish_reason"], **tokens, **beside}
        else:
            line |= {**tokens, "samples": samples}
        if warning is not None:
            line["warning"] = warning
        return as_line({**line, **_kept(record), "key": key})

    def error(self, record: PromptRecord | BadPromptRecord, key: str, why: str | None = None) -> bytes:
        """``why``: a reason that only the model showed; a BadPromptRecord has its own."""
        place = "" if self._where is None else f"{self._where(record.number)}: "
        message = str(record) if why is None else f"{place}{why}"
        if self.dialect == OPENAI:
            return as_line(error_response(record, key, message))
        return as_line({"index": record.number, **_id(record), "error": message, **_kept(record), "key": key})

    def _compare_model(self, record: PromptRecord) -> None:
        asked = None if record.request is None else record.request.model
        if self._note is not None and asked is not None and asked != self._model:
            self._note(f"requests name the model {asked!r}; all of them are answered by {self._model!r}")
            self._note = None


def as_line(line: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
    except ValueError:  # infinity, from 1e999 in a kept field or a score: not in JSON
        text = json.dumps(_finite(line), ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a character (a lone surrogate) in a kept field
        return json.dumps(json.loads(text)).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _id(record: PromptRecord | BadPromptRecord) -> dict[str, Any]:
    return {"id": record.id} if record.has_id else {}


def _kept(record: PromptRecord | BadPromptRecord) -> dict[str, Any]:
    return {f"input_{name}" if name in _TAKEN else name: value for name, value in record.kept.items()}

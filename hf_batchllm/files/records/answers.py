"""What becomes of a record: its line of the output, plain. (``openai_answers`` has OpenAI's form.)"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .openai_answers import answer, refusal
from .records import OPENAI, BadPromptRecord, PromptRecord
from .token_texts import TokenTexts, finite, likeliest

if TYPE_CHECKING:
    from ...results.generations import Generation


_OURS = ("index", "id", "text", "finish_reason", "prompt_tokens", "new_tokens", "samples", "token_ids", "logprobs")
_TAKEN = frozenset((*_OURS, "score", "error", "key"))


class Writer:
    """Results -> lines of JSON, without the newline.

    ``tokens``: for log-probabilities. ``model`` and ``created`` stand in OpenAI's answers; the time is to be that of
    the whole run, so that a run that was interrupted gives what another gives. ``where`` names a record's place to a
    person, as for a Reader. ``note``: is told, once, of requests that name another model.
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
        self._token_ids = token_ids
        self._model = model
        self._created = created
        self._where = where
        self._note = note

    def result(self, item: PromptRecord, key: str, generations: Sequence[Generation]) -> bytes:
        """``generations``: all samples of the record, in their order."""
        why = next((each.error for each in generations if each.error is not None), None)
        if why is not None:
            return self.error(item, key, f"the prompt {why}")
        if self.dialect == OPENAI:
            self._compare_model(item)
            return as_line(answer(item, key, generations, self._tokens, self._model, self._created))
        record = {"index": item.number, **_id(item)}
        made = [self._sample(item, each) for each in generations]
        tokens = {"prompt_tokens": len(generations[0].prompt_token_ids)}
        if len(made) == 1:
            beside = {name: value for name, value in made[0].items() if name not in ("text", "finish_reason")}
            record |= {"text": made[0]["text"], "finish_reason": made[0]["finish_reason"], **tokens, **beside}
        else:
            record |= {**tokens, "samples": made}
        return as_line({**record, **_kept(item), "key": key})

    def error(self, item: PromptRecord | BadPromptRecord, key: str, why: str | None = None) -> bytes:
        """``why``: of what was found out only by the model; a BadItem says it itself."""
        place = "" if self._where is None else f"{self._where(item.number)}: "
        said = str(item) if why is None else f"{place}{why}"
        if self.dialect == OPENAI:
            return as_line(refusal(item, key, said))
        return as_line({"index": item.number, **_id(item), "error": said, **_kept(item), "key": key})

    def _compare_model(self, item: PromptRecord) -> None:
        asked = None if item.request is None else item.request.model
        if self._note is not None and asked is not None and asked != self._model:
            self._note(f"requests name the model {asked!r}; all of them are answered by {self._model!r}")
            self._note = None

    def _sample(self, item: PromptRecord, generation: Generation) -> dict[str, Any]:
        made: dict[str, Any] = {
            "text": generation.text,
            "finish_reason": generation.finish_reason,
            "new_tokens": len(generation.token_ids),
        }
        if generation.score is not None:
            made["score"] = generation.score
        if self._token_ids:
            made["token_ids"] = generation.token_ids
        wanted = item.settings.logprobs
        if wanted is not None and generation.logprobs is not None:
            made["logprobs"] = [
                self._told(token, found, wanted)
                for token, found in zip(generation.token_ids, generation.logprobs, strict=True)
            ]
        return made

    def _told(self, token: int, found: Mapping[int, float], wanted: int) -> dict[str, Any]:
        told: dict[str, Any] = self._one(token, found[token])
        if wanted:
            told["top"] = [self._one(each, value) for each, value in likeliest(found, wanted)]
        return told

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token, "token": self._tokens.text(token), "logprob": finite(logprob)}


def as_line(record: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except ValueError:  # 1e999 in what was kept, or a score: in no JSON
        text = json.dumps(_finite(record), ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a character (a lone surrogate) in what was kept
        return json.dumps(json.loads(text)).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _id(item: PromptRecord | BadPromptRecord) -> dict[str, Any]:
    return {"id": item.id} if item.has_id else {}


def _kept(item: PromptRecord | BadPromptRecord) -> dict[str, Any]:
    return {f"input_{name}" if name in _TAKEN else name: value for name, value in item.kept.items()}

"""The requests of ``generate_until``, as the harness's ``hf`` model understands them, all run at once."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.models.utils_hf import stop_sequences_criteria
from transformers import GenerationConfig, StoppingCriteriaList

from ..errors import OptionValueError, UnsupportedOptionError
from ..generator import BatchGenerator
from ..inputs.base_model import base_model
from ..inputs.unknown_options import unknown_option

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM


_FIELDS = frozenset(vars(GenerationConfig()))
_HARNESS_NAMES = ("max_gen_toks", "until")


@dataclass(frozen=True)
class AnswerSettings:
    """What the harness wants of an answer; many requests share one, as a rule."""

    config: GenerationConfig  # without the strings that end an answer
    until: list[str]  # these strings
    strings: list[str]  # those of them that the engine has to look for
    ends: frozenset[int]  # tokens that end an answer, besides the strings
    searches: bool  # with beams: in ``hf``, a string in the best one ends the whole search
    room: int  # tokens left for a context

    @classmethod
    def of(cls, lm: HFLM, gen_kwargs: dict[str, Any]) -> AnswerSettings:
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, lm.max_gen_toks))
        eos = None if lm.eot_token_id is None else lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(kwargs.pop("until"), eos=eos)
        new_tokens = kwargs.pop("max_gen_toks")
        room = lm.max_length - new_tokens
        if room <= 0:
            why = f"is {new_tokens:,}, and max_length {lm.max_length:,}: there is no room for a context"
            raise OptionValueError("max_gen_toks", why)
        if not kwargs["do_sample"] and kwargs.get("temperature", 0.0) == 0.0:
            kwargs.pop("temperature", None)
        else:
            kwargs.setdefault("temperature", 0.0)
        inner = base_model(lm.model)
        for name in kwargs:
            if name not in _FIELDS:
                raise _unknown(name, inner)
        if (kwargs.get("num_return_sequences") or 1) > 1:
            raise UnsupportedOptionError("num_return_sequences", "is more than 1: use the `repeats` of a task")
        if kwargs.get("max_length") is None:
            # With `hf`, a length in the model's own generation_config wins over the task's.
            kwargs["max_new_tokens"] = getattr(inner.generation_config, "max_new_tokens", None) or new_tokens
        if "" in until:  # the empty string is found in the first token
            kwargs["max_new_tokens"] = 1
        config = GenerationConfig(**{"pad_token_id": lm.tokenizer.pad_token_id, **kwargs})
        eos_ids = config.eos_token_id if config.eos_token_id is not None else inner.generation_config.eos_token_id
        ends = frozenset([] if eos_ids is None else [eos_ids] if isinstance(eos_ids, int) else eos_ids)
        strings = [each for each in until if each and (each != eos or lm.eot_token_id not in ends)]
        searches = (config.num_beams or inner.generation_config.num_beams or 1) > 1
        return cls(config, until, strings, ends, searches, room)


@dataclass(frozen=True)
class AnswerRequest:
    """One request of ``generate_until``."""

    lm: HFLM
    ids: list[int]
    settings: AnswerSettings

    @classmethod
    def of(cls, lm: HFLM, context: str, settings: AnswerSettings) -> AnswerRequest:
        ids, _ = lm.tok_batch_encode([context], left_truncate_len=settings.room, truncation=lm.truncation)
        return cls(lm, ids[0].tolist(), settings)

    def criteria(self, prompt_tokens: int) -> StoppingCriteriaList:
        """The criteria that ``hf`` makes, for this request alone."""
        criteria: StoppingCriteriaList = stop_sequences_criteria(
            self.lm.tokenizer, self.settings.until, prompt_tokens, 1
        )
        return criteria

    def ended_by_its_context(self, token_ids: list[int]) -> bool:
        """Whether the string that ended an answer begins in the context, where ``hf`` does not look.

        ``token_ids``: an answer that was ended by a token or a string.
        """
        if token_ids[-1] in self.settings.ends:
            return False
        no_scores = torch.empty(1, 0, dtype=torch.float32, device="cpu")  # the harness's criteria look at tokens alone
        ids = torch.tensor([token_ids], dtype=torch.long, device="cpu")
        return not bool(self.criteria(0)(ids, no_scores).all())

    def text(self, token_ids: list[int]) -> str:
        end = self.lm.think_end_token
        is_token = isinstance(end, int)
        if is_token and end in token_ids:
            token_ids = token_ids[len(token_ids) - token_ids[::-1].index(end) :]
        text = self.lm.tok_decode(token_ids)
        if is_token:
            text = text.lstrip()
        answer: str = postprocess_generated_text(text, self.settings.until, None if is_token else end)
        return answer


def _unknown(name: str, model: Any) -> UnsupportedOptionError:
    """The harness has names of its own for a length and for stop strings."""
    near = difflib.get_close_matches(name, [*_HARNESS_NAMES, *_FIELDS], n=1)
    if near and near[0] in _HARNESS_NAMES:
        return UnsupportedOptionError(name, f"is not a setting of an answer; did you mean `{near[0]}`?")
    return unknown_option(name, model)


def answer_requests(lm: HFLM, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[AnswerRequest]:
    """A request for each pair of a context and the harness's ``gen_kwargs``."""
    known: dict[str, AnswerSettings] = {}
    made: list[AnswerRequest] = []
    for context, gen_kwargs in requests:
        key = repr(gen_kwargs)
        if key not in known:
            known[key] = AnswerSettings.of(lm, gen_kwargs)
        made.append(AnswerRequest.of(lm, context, known[key]))
    return made


def run_requests(
    generator: BatchGenerator, requests: Sequence[AnswerRequest], adapter: Any, progress: bool
) -> Iterator[tuple[int, list[int]]]:
    """The place of each request and the tokens of its answer, as they finish.

    The engine finds strings fast, and finds those that begin in the prompt, too. An answer that such a string ended is
    computed once more, with the harness's own criteria, which are called for each token. Beams need them, too.
    """
    options = {"adapter": adapter, "progress": progress}
    beams = [place for place, each in enumerate(requests) if each.settings.searches]
    plain = [place for place, each in enumerate(requests) if not each.settings.searches]
    again: list[int] = []
    if plain:
        configs = [_config_with_strings(requests[place].settings) for place in plain]
        for each in generator.stream([requests[place].ids for place in plain], configs, **options):
            place = plain[each.index]
            if each.finish_reason == "stop" and requests[place].ended_by_its_context(each.token_ids):
                again.append(place)
            else:
                yield place, each.token_ids
    for places in filter(None, (again, beams)):  # beams do not go into a call with answers without
        some = [requests[place] for place in places]

        def criteria(index: int, prompt_token_ids: list[int], some: list[AnswerRequest] = some) -> list[Any]:
            return list(some[index].criteria(len(prompt_token_ids)))

        configs = [each.settings.config for each in some]
        for each in generator.stream([each.ids for each in some], configs, stopping_criteria=criteria, **options):
            yield places[each.index], each.token_ids


def _config_with_strings(settings: AnswerSettings) -> GenerationConfig:
    if not settings.strings:
        return settings.config
    config = copy.copy(settings.config)
    config.stop_strings = settings.strings
    return config

"""The harness's ``hf`` model, with all requests of a call computed at once.

What comes before and after the model is its own: loading, chat templates, tokens, where contexts are cut, windows.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel

from ..config import BatchConfig
from ..errors import ConfigError, GenerationInterrupted, PromptError, UnsupportedModelError
from ..generator import BatchGenerator
from ..results.scores import Score
from .answers import all_asked, answers
from .registration import NAME

_log = logging.getLogger(__name__)

_FIELDS = [field.name for field in dataclasses.fields(BatchConfig)]
_KINDS_OF_MODEL = ("default", "causal", "seq2seq")  # what `backend` is to the harness; the others are a BatchConfig's
_OF_THE_HARNESS = inspect.signature(HFLM.__init__).parameters
_PRECISE = (None, "float32", torch.float32)

Tokens = tuple[tuple[str, str] | None, list[int], list[int]]  # what was asked for, a context, a continuation


@register_model(NAME)
class BatchLM(HFLM):
    """What ``hf`` is and gives, one request at a time, but all of them run at once.

    It takes the arguments of ``hf``; ``pretrained`` may be a model object. ``batch_size``, ``max_batch_size`` and
    ``logits_cache`` have no effect. Beside them, the fields of a BatchConfig (``kv_memory=20GiB``), or one as
    ``batch_config``. ``backend`` is the harness's if it says a kind of model, else BatchConfig's.

    Log-probabilities are computed in float32, as ``hf`` does with ``softmax_dtype=float32``. With ``num_beams``, a
    string to stop at ends the beam that it is in; ``hf`` ends the search.
    """

    def __init__(self, pretrained: str | PreTrainedModel, **given: Any) -> None:
        ours = {name: given.pop(name) for name in _FIELDS if name in given and not _is_a_kind_of_model(name, given)}
        config = BatchConfig.of(given.pop("batch_config", None), ours, "batch_config")
        _refuse(pretrained, given)
        super().__init__(pretrained, **given)
        if str(self.batch_size_per_gpu) != "1":
            _log.warning("batch_size has no effect: the batch is as large as memory allows (kv_memory)")
        self._generator = BatchGenerator(self.model, self.tokenizer, config)

    def close(self) -> None:
        """Give back what is kept between calls. This cannot be used afterwards; its model can."""
        self._generator.close()

    @property
    def generator(self) -> BatchGenerator:
        """What the requests run on. Its ``last_report`` says how the last call went."""
        return self._generator

    @property
    def batch_size(self) -> int:
        """Requests that the harness hands on at a time: all of them."""
        return sys.maxsize

    def _get_backend(self, config: Any, backend: Any = "default", trust_remote_code: bool | None = False) -> None:
        super()._get_backend(config, backend, trust_remote_code)
        if self.backend != "causal":
            kind = getattr(config, "model_type", None) or "this"
            raise UnsupportedModelError(f"{kind} is an encoder-decoder, which is not supported: use --model hf")

    # -- likelihoods -------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Tokens], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if not requests:
            return []
        self._check(requests)
        rooms = [self.max_length + 1 - len(after) for _, _, after in requests]  # the last token is not run
        contexts = [context[-room:] for (_, context, _), room in zip(requests, rooms, strict=True)]
        if cut := sum(len(context) > room for (_, context, _), room in zip(requests, rooms, strict=True)):
            _log.warning("%d of %d contexts do not fit into max_length, and lose tokens from the left", cut, len(rooms))
        continuations = [after for _, _, after in requests]
        found: list[tuple[float, bool]] = []
        try:
            with self._precision():
                scores = self._generator.score(contexts, continuations, progress=self._shows(disable_tqdm))
        except GenerationInterrupted as interrupt:
            for score in interrupt.result:  # what has been computed need not be computed again
                self._remember(requests[score.index], score)
            raise
        for request, score in zip(requests, scores, strict=True):
            found.append(self._remember(request, score))
        return found

    def _check(self, requests: Sequence[Tokens]) -> None:
        problems: dict[int, str] = {}
        for place, (asked, _, after) in enumerate(requests):
            if not after:
                problems[place] = f"has a continuation that makes no tokens: {asked!r:.200}"
            elif len(after) > self.max_length:
                problems[place] = f"has a continuation of {len(after):,} tokens, and max_length is {self.max_length:,}"
        if problems:
            raise PromptError(problems, "request")

    def _remember(self, request: Tokens, score: Score) -> tuple[float, bool]:
        answer = score.logprob, score.is_greedy
        asked = request[0]
        if asked is not None:  # windows of a long text are remembered as a whole
            self.cache_hook.add_partial("loglikelihood", asked, answer)
        return answer

    # -- answers -----------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        asked = all_asked(self, [request.args for request in requests])
        texts = [""] * len(asked)
        if not asked:
            return texts
        with self._precision():
            for place, token_ids in answers(self._generator, asked, self._shows(disable_tqdm)):
                texts[place] = asked[place].text(token_ids)
                self.cache_hook.add_partial("generate_until", requests[place].args, texts[place])
        return texts

    # -- both --------------------------------------------------------------------------------------------------

    def _shows(self, disable_tqdm: bool) -> bool:
        return not disable_tqdm and self.rank == 0

    @contextmanager
    def _precision(self) -> Iterator[None]:
        dtype = self.mixed_precision_dtype
        with torch.autocast(device_type=self.device.type, dtype=dtype, enabled=dtype is not None):
            yield


def _is_a_kind_of_model(name: str, given: dict[str, Any]) -> bool:
    return name == "backend" and given[name] in _KINDS_OF_MODEL


def _refuse(pretrained: Any, given: dict[str, Any]) -> None:
    """What would be ignored, or could not run."""
    if given.get("softmax_dtype") not in _PRECISE:
        raise ConfigError("`softmax_dtype` must be float32, in which log-probabilities are computed here")
    if given.get("tp_plan") is not None:
        raise UnsupportedModelError("`tp_plan` spreads a model over devices, which is not supported: use --model hf")
    if not isinstance(pretrained, str):
        for name in given:  # of a model that is loaded they would be arguments of `from_pretrained`
            if name not in _OF_THE_HARNESS:
                BatchConfig.of(None, {name: given[name]})

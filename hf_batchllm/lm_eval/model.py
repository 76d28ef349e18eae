"""The harness's ``hf`` model, with all requests of a call computed at once.

The steps around the model are those of ``hf``: loading, chat templates, tokenizing, cutting contexts, windows.
"""

from __future__ import annotations

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
from ..engine.unfinished import part_of
from ..errors import ConfigError, PromptError, UnsupportedModelError
from ..generator import BatchGenerator
from ..inputs.adapters import AS_IT_IS, adapter_of_each
from ..results.scores import Score
from .answers import answer_requests, run_requests
from .arguments import FIELDS, of_the_harness, refuse_what_is_ignored
from .registration import NAME

_log = logging.getLogger(__name__)

TokenizedPair = tuple[tuple[str, str] | None, list[int], list[int]]  # the request's texts, a context, a continuation


@register_model(NAME)
class BatchLM(HFLM):
    """The harness's ``hf`` model with its results, each request as if it ran alone, and all of them computed at once.

    It takes the arguments of ``hf``; ``pretrained`` may be a model object. ``batch_size``, ``max_batch_size`` and
    ``logits_cache`` have no effect. It also takes the fields of a BatchConfig (``kv_memory=20GiB``), or a
    BatchConfig as ``batch_config``. A ``backend`` that names a kind of model is the harness's, any other BatchConfig's.
    ``adapter`` is the name of one of the PEFT adapters of a model object, or None for the model without any.

    Log-probabilities are computed in float32, as ``hf`` does with ``softmax_dtype=float32``.
    """

    def __init__(self, pretrained: str | PreTrainedModel, **given: Any) -> None:
        ours = {name: given.pop(name) for name in FIELDS if name in given and not of_the_harness(name, given[name])}
        config = BatchConfig.of(given.pop("batch_config", None), ours, "batch_config")
        self._adapter = given.pop("adapter", AS_IT_IS)
        refuse_what_is_ignored(pretrained, given)
        self._check_adapter(pretrained)
        if isinstance(pretrained, str) and "device" not in given and not torch.cuda.is_available():
            given["device"] = "cpu"  # the harness's default is CUDA, and its loading of `peft` then fails
        super().__init__(pretrained, **given)
        if str(self.batch_size_per_gpu) != "1":
            _log.warning("batch_size has no effect: the batch is as large as memory allows (kv_memory)")
        self._generator = BatchGenerator(self.model, self.tokenizer, config)

    def _check_adapter(self, pretrained: str | PreTrainedModel) -> None:
        if self._adapter is AS_IT_IS:
            return
        if isinstance(pretrained, str):
            raise ConfigError("`adapter` chooses among the adapters of a model object: name a PEFT folder as `peft`")
        adapter_of_each(pretrained, self._adapter, 1)

    def close(self) -> None:
        """Free the memory that is kept between calls. This object cannot be used afterwards; its model can."""
        self._generator.close()

    @property
    def generator(self) -> BatchGenerator:
        """The generator that runs the requests. Its ``last_report`` says how the last call went."""
        return self._generator

    @property
    def batch_size(self) -> int:
        """How many requests the harness hands over at a time: all of them."""
        return sys.maxsize

    def _get_backend(self, config: Any, backend: Any = "default", trust_remote_code: bool | None = False) -> None:
        super()._get_backend(config, backend, trust_remote_code)
        if self.backend != "causal":
            kind = getattr(config, "model_type", None) or "this"
            raise UnsupportedModelError(f"{kind} is an encoder-decoder, which is not supported: use --model hf")

    # -- likelihoods -------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenizedPair], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if not requests:
            return []
        self._check(requests)
        rooms = [self.max_length + 1 - len(after) for _, _, after in requests]  # the last token is never run
        contexts = [context[-room:] for (_, context, _), room in zip(requests, rooms, strict=True)]
        if cut := sum(len(context) > room for (_, context, _), room in zip(requests, rooms, strict=True)):
            _log.warning("%d of %d contexts do not fit into max_length, and are cut from the left", cut, len(rooms))
        continuations = [after for _, _, after in requests]
        found: list[tuple[float, bool]] = []
        try:
            with self._precision():
                scores = self._generator.score(
                    contexts,
                    continuations,
                    adapter=self._adapter,
                    progress=self._shows_progress(disable_tqdm),
                )
        except BaseException as error:
            for score in part_of(error) or ():
                if isinstance(score, Score):  # finished scores go into the harness's cache
                    self._remember(requests[score.index], score)
            raise
        for request, score in zip(requests, scores, strict=True):
            found.append(self._remember(request, score))
        return found

    def _check(self, requests: Sequence[TokenizedPair]) -> None:
        problems: dict[int, str] = {}
        for place, (texts, _, after) in enumerate(requests):
            if not after:
                problems[place] = f"has a continuation without tokens: {texts!r:.200}"
            elif len(after) > self.max_length:
                problems[place] = f"has a continuation of {len(after):,} tokens, and max_length is {self.max_length:,}"
        if problems:
            raise PromptError(problems, "request")

    def _remember(self, request: TokenizedPair, score: Score) -> tuple[float, bool]:
        answer = score.logprob, score.is_greedy
        texts = request[0]
        if texts is not None:  # None: a window of a long text, which the harness remembers as a whole
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answer

    # -- answers -----------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        tokenized = answer_requests(self, [request.args for request in requests])
        texts = [""] * len(tokenized)
        if not tokenized:
            return texts
        with self._precision():
            progress = self._shows_progress(disable_tqdm)
            for place, token_ids in run_requests(self._generator, tokenized, self._adapter, progress):
                texts[place] = tokenized[place].text(token_ids)
                self.cache_hook.add_partial("generate_until", requests[place].args, texts[place])
        return texts

    # -- both --------------------------------------------------------------------------------------------------

    def _shows_progress(self, disable_tqdm: bool) -> bool:
        return not disable_tqdm and self.rank == 0

    @contextmanager
    def _precision(self) -> Iterator[None]:
        dtype = self.mixed_precision_dtype
        with torch.autocast(device_type=self.device.type, dtype=dtype, enabled=dtype is not None):
            yield
